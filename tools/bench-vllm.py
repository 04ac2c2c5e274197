"""Times how long a handover keeps D from its first token, side by side with vLLM's own connector.

    tools/bench-vllm.sh [--model NAME] [--rounds N] [--starts N] [--lengths N,N,…]
                        [--contenders NAME,NAME,…] [--against NAME] [--concurrent N] [--chunk N] [--json]

A pair of real vLLM engines (TP 1, on the GPU if there is one) per contender, all alive at once. In every
round each pair gets one request of each length, or `--concurrent` of them at once, in random order. The
clock runs from the moment P has finished the prompt until D's first token: what a user waits for beyond prefill. Ratios are
of medians over the same rounds; below 1 kvferry is faster. The first request of a pair, which includes
the handshake, is counted apart. A second table has the whole time to the first token, prefill included.

Requests go to P, and to D when P has answered. With `+push` behind a transport's name they go to both
at once, as `vllm-router` sends them, and D reads while P computes. With `@40` behind that, the link between
the two, which is this machine's loopback, carries 40 MB/s meanwhile; all runs in a network of its own then,
which wants root. Ratios are to the contender that `--against` names.

The contender `again` is one engine that has answered the same prompt before and holds all of it but the last
block: D's own first step, which no way to hand over avoids.

Whoever is asked the same prompt must answer with the same first token: every D, and P, too, unless it computes
states and so stops a token before the end.

Each engine steps as vLLM's own loop does: it blocks when idle, and sleeps a millisecond after a step
that ran nothing while a request waits.
"""

import argparse
import collections
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "engines"))

import environment  # noqa: E402

environment.forked(os.environ)
# Of the rival alone.
os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
# The rival serves states in this order only.
os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"

import transformers  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.config import KVTransferConfig  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

RIVAL = "NixlConnector"
TRANSPORTS = ("nixl", "tcp", "cuda" if current_platform.is_cuda() else "local")
AGAIN = "again"
CONTENDERS = [f"{transport}{way}" for transport in TRANSPORTS for way in ("", "+push")] + [RIVAL]
#: Seconds to wait for an engine.
PATIENCE = 300
#: CLONE_NEWNET of the kernel; `os` has it from Python 3.12 on.
NEW_NETWORK = 0x40000000
#: Tokens of a block.
BLOCK = 32

# Enough memory a token for its transfer to show: 64 KiB of keys and values.
COMMON = dict(
    vocab_size=512, hidden_size=256, num_attention_heads=8, num_key_value_heads=8, head_dim=128
)
MODELS = {
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON, num_hidden_layers=8, intermediate_size=256, architectures=["Qwen3ForCausalLM"]
    ),
    # As much memory, in as many layers as most models have.
    "qwen3-deep": lambda: transformers.Qwen3Config(
        **COMMON | {"num_attention_heads": 2, "num_key_value_heads": 2},
        num_hidden_layers=32,
        intermediate_size=256,
        architectures=["Qwen3ForCausalLM"],
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **COMMON,
        num_hidden_layers=12,
        intermediate_size=256,
        layers_block_type=["mamba", "attention", "mlp"] * 4,
        mamba_num_heads=16,
        mamba_head_dim=32,
        n_groups=2,
        ssm_state_size=128,
        conv_kernel=4,
        architectures=["NemotronHForCausalLM"],
    ),
    # For a GPU: 144 KiB a token in bfloat16, as an 8B has, and a fifth of its weights.
    "qwen3-wide": lambda: transformers.Qwen3Config(
        **COMMON | {"hidden_size": 2048},
        num_hidden_layers=36,
        intermediate_size=6144,
        max_position_embeddings=65536,
        architectures=["Qwen3ForCausalLM"],
    ),
}


def hybrid(model):
    """Whether it has states."""
    return "nemotron" in model


class Tokens:
    """First tokens by prompt."""

    def __init__(self):
        self.made, self.differ = {}, collections.Counter()

    def note(self, contender, prompt, token):
        self.differ[contender] += self.made.setdefault(tuple(prompt), token) != token


class Engine:
    """An engine in a process of its own, forked from this one."""

    def __init__(self, contender, role, model, arguments):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=_serve, args=(theirs, contender, role, model, arguments), daemon=True
        )
        self.process.start()
        theirs.close()

    def ready(self):
        """What a router tells D about this engine, if it is one of ours."""
        return self.answer()

    def ask(self, name, prompt, params):
        self.pipe.send((name, prompt, params))

    def rest(self):
        """Waits until it has nothing left to do."""
        self.pipe.send(())
        self.answer()

    def answer(self):
        """For a request: its name, when it had its token, which, and what goes to the router."""
        if not self.pipe.poll(PATIENCE):
            raise TimeoutError(f"no answer within {PATIENCE} s")
        answer = self.pipe.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.pipe.send(None)
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(pipe, contender, role, model, arguments):
    try:
        _loop(pipe, _engine(contender, role, model, arguments))
    except BaseException:
        pipe.send(traceback.format_exc())
    os._exit(0)


def _engine(contender, role, model, arguments):
    how = None
    if contender == RIVAL:
        port = 5600 if role == "kv_producer" else 5700
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port + os.getpid() % 90)
        how = dict(kv_connector=RIVAL, kv_buffer_device="cuda" if current_platform.is_cuda() else "cpu")
    elif contender != AGAIN:
        transport, _, push = contender.partition("+")
        how = dict(
            kv_connector="FerryConnector",
            kv_connector_extra_config={"transport": transport, "push": "always" if push else "never"},
        )
    longest, count, states = max(arguments.lengths), arguments.concurrent, hybrid(arguments.model)
    each = longest // BLOCK + 2
    if current_platform.is_cuda():
        # Many engines share a card, and none may measure what is free while others start.
        device = dict(dtype="bfloat16", gpu_memory_utilization=0.05, kv_cache_memory_bytes=8 << 30)
    else:
        device = dict(dtype="float32")
    return LLM(
        model=str(model),
        **device,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=longest + 64,
        max_num_seqs=max(4, count),
        disable_log_stats=True,
        enable_prefix_caching=contender == AGAIN,
        num_gpu_blocks_override=max(48, 8 * count) if states else (count + 1) * each + 16,
        **({} if states else {"block_size": BLOCK}),
        **({"max_num_batched_tokens": arguments.chunk} if arguments.chunk else {}),
        **({"kv_transfer_config": KVTransferConfig(kv_role=role, **how)} if how else {}),
    )


def _where(core):
    """What a router tells D about P when it sends a request to both at once."""
    scheduler = getattr(core.scheduler.connector, "_scheduler", None)
    if scheduler is None:
        return None
    host, _, port = scheduler.agent.address.rpartition(":")
    return {
        "do_remote_prefill": True,
        "remote_engine_id": scheduler.agent.status()["engine"],
        "remote_host": host,
        "remote_port": int(port),
        "remote_request_id": "any",
    }


def _loop(pipe, engine):
    core = engine.llm_engine.engine_core.engine_core
    pipe.send(_where(core))
    resting = False
    while True:
        if resting and not core.scheduler.has_requests():
            pipe.send(())
            resting = False
        while not core.scheduler.has_requests() or pipe.poll():
            question = pipe.recv()
            if question is None:
                return
            if not question:
                resting = True
                break
            name, prompt, params = question
            sampling = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                detokenize=False,
                extra_args={"kv_transfer_params": params} if params else None,
            )
            engine.llm_engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        if not core.scheduler.has_requests():
            continue
        outputs, executed = core.step_fn()
        for output in (one for all_ in (outputs or {}).values() for one in all_.outputs):
            if not output.new_token_ids:
                raise RuntimeError(f"the request ended without a token: {output.finish_reason}")
            # The clock of the machine: the same for all.
            name = output.request_id.rpartition("-")[0]
            (token,) = output.new_token_ids
            pipe.send((name, time.monotonic(), token, output.kv_transfer_params))
            engine.llm_engine.output_processor.abort_requests([output.request_id], internal=True)
        core.post_step(executed)
        if not executed and core.scheduler.has_requests():
            time.sleep(0.001)


class Link:
    """This machine's loopback, in a network of its own where a contender wants it slower than it is."""

    def __init__(self, contenders):
        self.rate = None
        if not any("@" in contender for contender in contenders):
            return
        if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
            sys.exit(f"a network of its own, for a link of a given rate: {os.strerror(ctypes.get_errno())}")
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        # No more on its way than fits into a switch: what is said must not wait behind it for long.
        for buffer in ("tcp_rmem", "tcp_wmem"):
            Path(f"/proc/sys/net/ipv4/{buffer}").write_text("4096 131072 262144")

    def carry(self, rate):
        """So many MB/s from now on, or as many as it can."""
        if rate == self.rate:
            return
        if rate is None:
            change = ["del", "dev", "lo", "root"]
        else:
            limit = ["rate", f"{rate * 8}mbit", "burst", "128kb", "latency", "200ms"]
            change = ["replace", "dev", "lo", "root", "tbf", *limit]
        subprocess.run(["tc", "qdisc", *change], check=True)
        self.rate = rate


class Pair:
    def __init__(self, contender, model, arguments, tokens):
        self.tokens, self.p_ends_early = tokens, hybrid(arguments.model)
        self.contender = contender.partition("@")[0]
        self.pushes = self.contender.endswith("+push")
        self.prefill = Engine(self.contender, "kv_producer", model, arguments)
        self.decode = Engine(self.contender, "kv_consumer", model, arguments)
        self.where, self.asked = None, 0

    def ready(self):
        self.where, _ = [engine.ready() for engine in (self.prefill, self.decode)]
        self._signal(signal.SIGSTOP)

    def first_tokens(self, prompts):
        """For each prompt, all asked at once: seconds from P's end to D's first token, and from asking."""
        self._signal(signal.SIGCONT)
        began, ended, firsts = {}, {}, {}
        by_name = {}
        for prompt in prompts:
            self.asked += 1
            name = f"r{self.asked}"
            by_name[name], began[name] = prompt, time.monotonic()
            self.prefill.ask(name, prompt, dict(environment.REMOTE_DECODE))
            if self.pushes:
                self.decode.ask(name, prompt, dict(self.where))
        engines = {engine.pipe: engine for engine in (self.prefill, self.decode)}
        while len(firsts) < len(prompts) or len(ended) < len(prompts):
            ready = wait(list(engines), PATIENCE)
            if not ready:
                raise TimeoutError(f"{self.contender}: no answer within {PATIENCE} s")
            for pipe in ready:
                name, at, token, params = engines[pipe].answer()
                if pipe is self.decode.pipe or not self.p_ends_early:
                    self.tokens.note(self.contender, by_name[name], token)
                if pipe is self.decode.pipe:
                    firsts[name] = at
                    continue
                assert params, f"{self.contender}: P hands nothing over"
                ended[name] = at
                if not self.pushes:
                    self.decode.ask(name, by_name[name], params)
        for engine in (self.prefill, self.decode):
            engine.rest()
        self._signal(signal.SIGSTOP)
        return [(firsts[name] - ended[name], firsts[name] - began[name]) for name in by_name]

    def _signal(self, number):
        # NIXL's progress thread, as the rival sets it up, keeps a core busy even when idle. It does
        # so in its own turns only.
        if self.contender == RIVAL:
            for engine in (self.prefill, self.decode):
                os.kill(engine.process.pid, number)

    def close(self):
        self._signal(signal.SIGCONT)
        self.decode.close()
        self.prefill.close()


class Again:
    """One engine, asked everything twice."""

    def __init__(self, model, arguments, tokens):
        self.tokens = tokens
        self.engine = Engine(AGAIN, None, model, arguments)

    def ready(self):
        self.engine.ready()

    def first_tokens(self, prompts):
        """For each prompt: seconds from asking for the second time to the first token, twice."""
        by_name = {f"r{at}": prompt for at, prompt in enumerate(prompts)}
        for _ in range(2):
            began, firsts = {}, {}
            for name, prompt in by_name.items():
                began[name] = time.monotonic()
                self.engine.ask(name, prompt, None)
            while len(firsts) < len(prompts):
                name, at, token, _ = self.engine.answer()
                firsts[name] = at
                self.tokens.note(AGAIN, by_name[name], token)
            self.engine.rest()
        return [(firsts[name] - began[name],) * 2 for name in by_name]

    def close(self):
        self.engine.close()


def measure(arguments, model, draw):
    """By contender and length: seconds of each round, after P's end and in all. The length 0 stands for a
    pair's first request; of several at once the median counts. And how many first tokens differ."""
    measured = {contender: {} for contender in arguments.contenders}
    tokens = Tokens()
    link = Link(arguments.contenders)

    def ask(pairs, contender, length, prompts, count):
        rate = contender.partition("@")[2]
        link.carry(int(rate) if rate else None)
        seconds = pairs[contender].first_tokens(prompts)
        if count:
            middle = tuple(statistics.median(one) for one in zip(*seconds))
            measured[contender].setdefault(length, []).append(middle)

    def in_turn():
        return draw.sample(arguments.contenders, len(arguments.contenders))

    def prompts(length, count):
        return [[draw.randrange(1, 500) for _ in range(length)] for _ in range(count)]

    for start in range(arguments.starts):
        pairs = {
            contender: Again(model, arguments, tokens)
            if contender == AGAIN
            else Pair(contender, model, arguments, tokens)
            for contender in arguments.contenders
        }
        try:
            for pair in pairs.values():
                pair.ready()
            for contender in in_turn():
                ask(pairs, contender, 0, prompts(arguments.lengths[0], 1), True)
                for length in arguments.lengths:
                    ask(pairs, contender, length, prompts(length, arguments.concurrent), False)
            for _ in range(start, arguments.rounds, arguments.starts):
                for length in arguments.lengths:
                    asked = prompts(length, arguments.concurrent)
                    for contender in in_turn():
                        ask(pairs, contender, length, asked, True)
        finally:
            for pair in pairs.values():
                pair.close()
    return measured, +tokens.differ


def spread(seconds):
    """The median and its quartiles, in milliseconds."""
    if len(seconds) < 2:
        return (seconds[0] * 1e3,) * 3
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low * 1e3, middle * 1e3, high * 1e3


def ratio(ours, rivals, draw):
    """The ratio of medians, and where it lies in 95 % of resampled rounds."""
    seen = []
    for _ in range(400):
        rounds = draw.choices(range(len(ours)), k=len(ours))
        pick = [statistics.median(side[at] for at in rounds) for side in (ours, rivals)]
        seen.append(pick[0] / pick[1])
    seen.sort()
    return statistics.median(ours) / statistics.median(rivals), seen[10], seen[389]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--starts", type=int, default=3, help="how often the engines start anew")
    parser.add_argument("--lengths", default="100,512,1000,2048", help="tokens of the prompts")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--against", default=RIVAL, help="the contender that ratios are to")
    parser.add_argument("--concurrent", type=int, default=1, help="requests of a round")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="every time measured, in seconds")
    arguments = parser.parse_args()
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    arguments.contenders = arguments.contenders.split(",")
    for contender in arguments.contenders:
        if wrong := wrong_with(contender, arguments.model):
            parser.error(f"--contenders: '{contender}': {wrong}")
    if arguments.against not in arguments.contenders:
        parser.error(f"{arguments.against} is not among the contenders: name one of them with --against")
    draw = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / arguments.model
        MODELS[arguments.model]().save_pretrained(model)
        measured, differ = measure(arguments, model, draw)
    if arguments.json:
        print(json.dumps(measured))
    if differ:
        sys.exit(f"first tokens that others do not make of the same prompt: {dict(differ)}")
    if arguments.json:
        return
    print("All make the same first token of the same prompt.")
    at_once = f", {arguments.concurrent} at once" if arguments.concurrent > 1 else ""
    for which, what in enumerate(("P's end to D's first token", "request to first token")):
        print(f"{arguments.model}{at_once}: {what}, ms: median (quartiles)")
        table(arguments, measured, which, draw)


def wrong_with(contender, model):
    """Why there is no such contender, said before engines start for it; None where there is."""
    name, at, rate = contender.partition("@")
    there = [*CONTENDERS, AGAIN]
    if name not in there:
        return f"there are {', '.join(there)}, and {name or 'nothing'} is none of them"
    if name == AGAIN and hybrid(model):
        return f"vLLM's kernels for CPUs cannot go on from a state, and {model} has some"
    if not at:
        return None
    if name.partition("+")[0] != "tcp":
        return "only tcp goes over the link whose rate is given behind '@'"
    if not rate.isdecimal() or int(rate) == 0:
        return f"'{rate}' is not a rate in MB/s: a whole number above 0, as in {name}@140"
    missing = [command for command in ("ip", "tc") if shutil.which(command) is None]
    return f"a link of a given rate needs {' and '.join(missing)} (iproute2)" if missing else None


def table(arguments, measured, which, draw):
    def of(contender, length):
        return [seconds[which] for seconds in measured[contender][length]]

    ours = [contender for contender in arguments.contenders if contender != arguments.against]
    titles = ["prompt", *(title for name in ours for title in (name, "ratio")), arguments.against]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for length in [0, *arguments.lengths]:
        cells = [f"{length} tokens" if length else f"first, {arguments.lengths[0]} tokens"]
        for contender in (*ours, arguments.against):
            low, middle, high = spread(of(contender, length))
            cells.append(f"{middle:.1f} ({low:.1f}–{high:.1f})")
            if contender != arguments.against:
                value, least, most = ratio(of(contender, length), of(arguments.against, length), draw)
                cells.append(f"**{value:.2f}** ({least:.2f}–{most:.2f})")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
