"""Two vLLM engines on one GPU, one prefills and one decodes: what `tools/check-gpu-vllm.sh` runs.

Tiny random models, in float32 and without the roundings of TF32 where there are kernels for it, so that
equal means equal. Before every handover all of D's cache is overwritten with NaN: the right tokens can then
only come from what was moved, and from zeroes where D's blocks have room for more.
"""

import argparse
import os
import pathlib
import random
import sys
import tempfile
import time

os.environ["TRITON_F32_DEFAULT"] = "ieee"

import torch  # noqa: E402
from environment import REMOTE_DECODE  # noqa: E402
from exact import prompts  # noqa: E402
from patches import split_prompts  # noqa: E402
from serving import Server  # noqa: E402
from tiny import save_model  # noqa: E402

from kvferry.vllm.worker import WorkerSide  # noqa: E402

#: A window so short that each of its tokens counts.
WINDOW = {"hf_overrides": {"sliding_window": 8}}
#: Gated delta nets have no kernels for float32.
HALF = {"dtype": "bfloat16", "gdn_prefill_backend": "triton", "prepare": [split_prompts]}
#: Options of P and of D.
PAIRS = {
    "qwen3": ({"block_size": 32}, {"block_size": 96}),
    "gemma3": ({"block_size": 64, **WINDOW}, {"block_size": 32, **WINDOW}),
    "nemotron_h": ({}, {}),
    "falcon_h1": ({}, {}),
    "qwen3_5": (HALF, HALF),
}
LENGTHS = (1, 2, 31, 33, 71, 200, 450)
COMMON = {
    "attention_config": {"backend": "TRITON_ATTN"},
    # The rest of the GPU is somebody else's.
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 8 << 30,
}
#: For the rate: the memory that a model of 8B would fill, and numbers that do not matter.
WIDE = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "hf_overrides": {
        "num_hidden_layers": 36,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 16384,
    },
    "max_model_len": 16384,
    "max_num_batched_tokens": 16384,
    "blocks": 2048,
    "block_size": 16,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*PAIRS, "wide"]
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(names)}")
    asked = parser.parse_args()
    unknown = [model for model in asked.models if model not in names]
    if unknown:
        parser.error(f"no model '{unknown[0]}': there are {', '.join(names)}")
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for model in asked.models or list(PAIRS):
            kind = "qwen3" if model == "wide" else model
            path = pathlib.Path(folder) / kind
            if not path.exists():
                save_model(kind, path)
            servers = []
            try:
                p, d = (WIDE, WIDE) if model == "wide" else PAIRS[model]
                for role, own in (("kv_producer", p), ("kv_consumer", d)):
                    prepare = [watch, *own.get("prepare", ())]
                    servers.append(Server(path, role, **COMMON | own | {"prepare": prepare}))
                (measure if model == "wide" else check)(model, *servers)
            except AssertionError as error:
                wrong += 1
                print(f"{model}: WRONG: {error}", flush=True)
            finally:
                for server in servers:
                    server.close()
    return 1 if wrong else 0


def check(model, prefill, decode):
    draw = random.Random(model)
    asked = prompts(draw, LENGTHS)
    answers = [prefill.generate(prompt)[0] for prompt in asked]
    for prompt, alone in zip(asked, answers, strict=True):
        assert hand_over(prefill, decode, prompt) == alone, f"other tokens after {len(prompt)}"
    params = prefill.prefill(asked)
    decode.call(poison)
    made = decode.generate_all(asked, params=params)
    assert [tokens for tokens, _ in made] == answers, "other tokens when all are asked at once"
    # The control: only P's state can give P's answer to another prompt with the same last token.
    other = prompts(draw, [len(prompt) - 1])[0] + prompt[-1:]
    assert prefill.generate(other)[0] != alone, "the control's own answer is no other"
    assert hand_over(prefill, decode, prompt, other) == alone, "D did not use P's state"
    assert (prefill.idle(), decode.idle()) == (0, 0), "blocks are left behind"
    loads = decode.call(seen)
    failed = [load for load in loads if load["outcome"] != "done"]
    assert not failed, f"loads that were not done: {failed}"
    assert len(loads) > 2 * len(LENGTHS) - 2, f"{len(loads)} loads for {2 * len(LENGTHS) + 1} prompts"
    print(
        f"{model}: every token right, {len(loads)} loads on {loads[-1]['device']}, the last of "
        f"{len(prompt)} tokens: {words(loads[-1])}",
        flush=True,
    )


def measure(model, prefill, decode):
    for length in (1000, 4000, 16000) * 3:
        (prompt,) = prompts(random.Random(length), [length])
        times = []
        for params in (None, prefill.generate(prompt, 1, dict(REMOTE_DECODE))[1]):
            begin = time.monotonic()
            decode.generate(prompt, 1, params)
            times.append(time.monotonic() - begin)
        alone, moved = (f"{seconds * 1e3:.1f} ms" for seconds in times)
        print(
            f"{model}, {length} tokens: the first token on D after {moved}, with its own prefill after "
            f"{alone}; {words(decode.call(seen)[-1])}",
            flush=True,
        )


def hand_over(prefill, decode, prompt, other=None):
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    decode.call(poison)
    return decode.generate(other or prompt, params=params)[0]


def words(load):
    spent = load["seconds"]
    rate = load["bytes"] / (spent["wire"] + spent["post"]) / 1e9
    phases = ", ".join(f"{name} {seconds * 1e3:.2f}" for name, seconds in spent.items())
    return (
        f"{load['bytes'] / (1 << 20):.2f} MiB in {load['copies']} copies, {rate:.1f} GB/s "
        f"({phases} ms)"
    )


# In an engine's process.

SIDES, LOADS = [], []


def watch():
    register, results = WorkerSide.register, WorkerSide.results

    def register_seen(self, kv_caches):
        SIDES.append(self)
        register(self, kv_caches)

    def results_seen(self):
        before = len(self.ended)
        made = results(self)
        device = str(self.storages[0].device)
        LOADS.extend({**load, "device": device} for load in self.ended[before:])
        return made

    WorkerSide.register, WorkerSide.results = register_seen, results_seen


def poison(engine):
    for storage in SIDES[0].storages:
        storage.fill_(0xFF)
    if torch.accelerator.is_available():
        # What is loaded is not ordered with the stream: it must not be overwritten when it is there.
        torch.accelerator.synchronize()


def seen(engine):
    return LOADS


if __name__ == "__main__":
    sys.exit(main())
