"""Two prefill and two decode servers of a trained model behind `vllm-router`, and what they take of the machine."""

import json
import os
import re
import shutil
from pathlib import Path

import cards
import tokenizers
import transformers
from http_pair import Pair

PREFILL, DECODE = ("prefill", "prefill2"), ("decode", "decode2")
SERVERS = (*PREFILL, *DECODE)
BLOCKS = 400
#: Seconds that a killed side may keep the other's blocks.
LEASE = 30
SERVE = [
    *("--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "512"),
    *("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", "32", "--shutdown-timeout", "20"),
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
]


def served(model, folder):
    """The model with a tokenizer, which trained models have none of: a word for each token."""
    cards.checked(model)
    made = folder / model.name
    shutil.copytree(model, made)
    count = json.loads((model / "config.json").read_text())["vocab_size"]
    words = {word(token): token for token in range(count)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab=words, unk_token=word(0)))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=word(0)).save_pretrained(made)
    return made


def word(token):
    return f"t{token}"


def text(prompt):
    return " ".join(word(token) for token in prompt)


class Fleet(Pair):
    names = (*SERVERS, "router")

    def __init__(self, model, folder):
        extra = {"lease_seconds": LEASE, "audit": "all", "drain_signal": "SIGUSR2"}
        super().__init__(served(model, folder), folder, SERVE, {"kv_load_failure_policy": "recompute"}, extra)

    def command(self, who):
        role = who.rstrip("2")
        words = super().command(role)
        if who == "router":
            words += ["--prefill", self.url("prefill2"), "--decode", self.url("decode2")]
            # A server that does not answer is out at once, and back at once when it does.
            return words + ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
        return [re.sub(rf"\b{self.ports[role]}\b", str(self.ports[who]), one) for one in words]

    def drain(self, who):
        """By a signal, as an operator's last word before it is ended."""
        process = re.findall(r"so does SIGUSR2 to process (\d+)", self.log(who).read_text(errors="replace"))[-1]
        os.kill(int(process), 12)

    def taken(self, who):
        """Of a server and its children: memory (MiB), threads, open files."""
        processes = _with_children(self.processes[who].pid)
        memory = threads = files = 0
        for process in processes:
            try:
                for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
                    # Its own: what it shares with whom it was forked from is not counted again for each.
                    if line.startswith(("Private_Dirty", "Private_Clean")):
                        memory += int(line.split()[1]) / 1024
                threads += len(os.listdir(f"/proc/{process}/task"))
                files += len(os.listdir(f"/proc/{process}/fd"))
            except OSError:
                continue
        return {"memory": round(memory, 1), "threads": threads, "files": files}


def _with_children(process):
    found, left = [], [process]
    while left:
        one = left.pop()
        found.append(one)
        try:
            for task in os.listdir(f"/proc/{one}/task"):
                left += map(int, Path(f"/proc/{one}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found
