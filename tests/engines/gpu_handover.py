"""Two vLLM engines on one GPU, one prefills and one decodes: what `tools/check-gpu-vllm.sh` runs.

Tiny random models, in float32 and without the roundings of TF32 where there are kernels for it, so that
equal means equal. Before every handover all of D's cache is overwritten with NaN: the right tokens can then
only come from what was moved, and from zeroes where D's blocks have room for more. Every load is audited: the
cards' digests of what D has and of what P holds must agree. Once more with kernels that write late: P's whole
step waits on the GPU, a draft model behind it once more, and D's NaN come long after it was told to load.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

os.environ["TRITON_F32_DEFAULT"] = "ieee"

import torch  # noqa: E402
from environment import REMOTE_DECODE  # noqa: E402
from exact import prompts, unbound  # noqa: E402
from life.inside import counter, take_at_once  # noqa: E402
from life.pushed import push  # noqa: E402
from patches import environment, split_prompts  # noqa: E402
from serving import Server  # noqa: E402
from tiny import save_model  # noqa: E402

from kvferry.vllm.worker.side import WorkerSide  # noqa: E402

#: A window so short that each of its tokens counts.
WINDOW = {"hf_overrides": {"sliding_window": 8}}
#: Where there are no kernels for float32.
HALF = {"dtype": "bfloat16", "prepare": [split_prompts]}
DELTA = {**HALF, "gdn_prefill_backend": "triton"}
CHANNELS_FIRST = {"prepare": [environment(VLLM_SSM_CONV_STATE_LAYOUT="DS")]}
GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
GUESSES = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
#: A model that guesses, with a cache of its own, which it fills after the step: the model itself, so that every guess
#: is right whose cache is. `main` knows where it is.
DRAFT_MODEL = {
    "speculative_config": {"method": "draft_model", "model": "itself", "num_speculative_tokens": 3},
}


def attention(backend, **options):
    return {**options, "attention_config": {"backend": backend}}


def quantised(kind, backend, mode, *blocks):
    how = attention(backend, **HALF, kv_cache_dtype=mode)
    p, d = ({**how, "block_size": size} for size in blocks) if blocks else (how, how)
    return kind, p, d


#: Beside us, vLLM's own connector keeps what was computed in host memory, and P has prompts back from there.
OFFLOAD = {
    "block_size": 32,
    "multi": (
        [],
        [
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
            }
        ],
    ),
}

#: Requests go to both engines at once, and P computes them in several steps.
PUSH = {"max_num_batched_tokens": 64, "extra": {"push": "always"}}

#: P has vLLM's own connector. It frees nothing by itself meanwhile: only what D tells it counts.
STOCK = {"stock": True, "extra": {"kv_lease_duration": 600}}
FROM_STOCK = {"extra": {"transport": "nixl", "nixl_connector_lease_seconds": 600.0}}

#: By name: the model, options of P and of D.
PAIRS = {
    "qwen3": ("qwen3", {"block_size": 32}, {"block_size": 96}),
    "qwen3-flash": (
        "qwen3",
        attention("FLASH_ATTN", **HALF, block_size=32),
        attention("FLASH_ATTN", **HALF, block_size=64),
    ),
    "qwen3-graphs": ("qwen3", {"block_size": 32}, {"block_size": 64, **GRAPHS}),
    "qwen3-async": (
        "qwen3",
        {"block_size": 32, "async_scheduling": True},
        {"block_size": 64, "async_scheduling": True, **GRAPHS},
    ),
    "qwen3-drafts": ("qwen3", {"block_size": 32, **GUESSES}, {"block_size": 64, **GUESSES}),
    "qwen3-draft-model": (
        "qwen3",
        {"block_size": 32, "async_scheduling": True, **DRAFT_MODEL},
        {"block_size": 64, "async_scheduling": True, **DRAFT_MODEL},
    ),
    "qwen3-offload": ("qwen3", OFFLOAD, OFFLOAD),
    "qwen3-push": ("qwen3", {"block_size": 32, **PUSH}, {"block_size": 64}),
    "nemotron_h-push": ("nemotron_h", PUSH, {}),
    "qwen3-fp8-flash": quantised("qwen3", "FLASH_ATTN", "fp8", 32, 64),
    "qwen3-fp8": quantised("qwen3", "TRITON_ATTN", "fp8", 32, 64),
    "qwen3-fp8-per-token": quantised("qwen3", "TRITON_ATTN", "fp8_per_token_head", 32, 64),
    "qwen3-int8-per-token": quantised("qwen3", "TRITON_ATTN", "int8_per_token_head", 32, 64),
    # Two engines of vLLM 0.32 with blocks of other sizes have other answers, whoever computes; and so do two
    # with blocks of 32.
    "qwen3-int4-per-token": quantised("qwen3", "TRITON_ATTN", "int4_per_token_head", 64, 64),
    # Of others vLLM leaves the outermost layers as they are, which is all that a tiny one has.
    "nemotron_h-turboquant": quantised("nemotron_h", "TURBOQUANT", "turboquant_k8v4"),
    "deepseek-fp8-triton": quantised("deepseek", "TRITON_MLA", "fp8", 32, 64),
    "deepseek-fp8-flashmla": quantised("deepseek", "FLASHMLA", "fp8", 64, 128),
    "gemma3": ("gemma3", {"block_size": 64, **WINDOW}, {"block_size": 32, **WINDOW}),
    "nemotron_h": ("nemotron_h", {}, {}),
    "nemotron_h-sd-ds": ("nemotron_h", {}, CHANNELS_FIRST),
    "nemotron_h-ds-sd": ("nemotron_h", CHANNELS_FIRST, {}),
    "falcon_h1": ("falcon_h1", {}, {}),
    "qwen3_5": ("qwen3_5", DELTA, DELTA),
    "deepseek-triton": (
        "deepseek",
        attention("TRITON_MLA", **HALF, block_size=32),
        attention("TRITON_MLA", **HALF, block_size=64),
    ),
    "deepseek-flashmla": (
        "deepseek",
        attention("FLASHMLA", **HALF, block_size=64),
        attention("FLASHMLA", **HALF, block_size=128),
    ),
    "deepseek-flash": (
        "deepseek",
        attention("FLASH_ATTN_MLA", **HALF, block_size=32),
        attention("FLASH_ATTN_MLA", **HALF, block_size=64),
    ),
    "kimi_linear": (
        "kimi_linear",
        attention("FLASH_ATTN_MLA", **HALF),
        attention("FLASH_ATTN_MLA", **HALF),
    ),
    "qwen3-stock": ("qwen3", {"block_size": 32, **STOCK}, {"block_size": 96, **FROM_STOCK}),
    "qwen3-flash-stock": (
        "qwen3",
        attention("FLASH_ATTN", **HALF, block_size=64, **STOCK),
        attention("FLASH_ATTN", **HALF, block_size=32, **FROM_STOCK),
    ),
    "deepseek-stock": (
        "deepseek",
        attention("FLASHMLA", **HALF, block_size=64, **STOCK),
        attention("FLASHMLA", **HALF, block_size=128, **FROM_STOCK),
    ),
    # The stock connector serves states with their channels first only.
    "nemotron_h-stock": ("nemotron_h", {**CHANNELS_FIRST, **STOCK}, FROM_STOCK),
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
#: As in `PAIRS`: what checks nothing.
RATES = {
    "wide": ("qwen3", WIDE, WIDE),
    "wide-stock": ("qwen3", {**WIDE, **STOCK}, {**WIDE, **FROM_STOCK}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*PAIRS, *RATES]
    parser.add_argument("pairs", nargs="*", metavar="PAIR", help=f"of {', '.join(names)}")
    parser.add_argument("--transport", help="instead of what the connector chooses by itself")
    parser.add_argument("--kernel", help="the copy kernel, compiled beforehand (see docs/transports.md)")
    parser.add_argument("--models", type=pathlib.Path, help="a folder that keeps the models")
    jobs = os.environ.get("KVFERRY_GPU_JOBS", "1")
    parser.add_argument("--jobs", type=int, default=jobs, help="how many pairs run side by side")
    asked = parser.parse_args()
    unknown = [pair for pair in asked.pairs if pair not in names]
    if unknown:
        parser.error(f"no pair '{unknown[0]}': there are {', '.join(names)}")
    if asked.jobs < 1:
        parser.error(f"--jobs is {asked.jobs}: it is 1 or more")
    if not torch.cuda.is_available():
        print("NOT CHECKED: torch finds no GPU here that it can use", file=sys.stderr)
        return 1
    pairs = asked.pairs or list(PAIRS)
    with tempfile.TemporaryDirectory() as folder:
        asked.models = asked.models or pathlib.Path(folder)
        wrong = one_by_one(pairs, asked) if asked.jobs == 1 else side_by_side(pairs, asked)
    if wrong:
        print(f"WRONG: {', '.join(wrong)}", flush=True)
    return 1 if wrong else 0


def side_by_side(pairs, asked):
    """The same in a process for each pair, of which several run at a time; what each says comes when it has ended."""
    options = {"--transport": asked.transport, "--kernel": asked.kernel}
    options = [word for option in options.items() if option[1] for word in option]

    def run(pair):
        # Models are made by whoever is first: each pair has a folder of its own.
        folder = asked.models / pair
        command = [sys.executable, __file__, pair, "--jobs", "1", *options, "--models", str(folder)]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        lines = [line for line in ended.stdout.splitlines(True) if line.startswith((f"{pair}:", f"{pair},"))]
        if ended.returncode and not any("WRONG" in line for line in lines):
            lines.append(f"{pair}: WRONG: its process ended with {ended.returncode}\n")
        print("".join(lines), end="", flush=True)
        return ended.returncode

    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        return [pair for pair, code in zip(pairs, pool.map(run, pairs), strict=True) if code]


def one_by_one(pairs, asked):
    """Runs pairs of engines; returns those that were wrong."""
    wrong = []
    extra = {"transport": asked.transport} if asked.transport else {}
    kernel = {"gpu_kernel_file": asked.kernel} if asked.kernel else {}
    for pair in pairs:
        kind, p, d = (PAIRS | RATES)[pair]
        path = asked.models / kind
        servers = []
        try:
            if not path.exists():
                save_model(kind, path, latent_head=128)
            for role, own in (("kv_producer", p), ("kv_consumer", d)):
                own = with_draft(own, path)
                # Another's connector cannot say what it holds.
                audit = {"audit": "off" if pair in RATES or "stock" in p else "all"}
                # What is tiny takes no time, and is read ahead all the same.
                ahead = {"advanced": {"min_read_ahead_seconds": 0.0} | kernel}
                ours = ahead | own.get("extra", {}) | audit | extra
                changed = {
                    "prepare": [watch, *own.get("prepare", ())],
                    "extra": own["extra"] if "stock" in own else ours,
                }
                servers.append(Server(path, role, **COMMON | own | changed))
            if pair in RATES:
                measure(pair, *servers)
            elif "stock" in p:
                check_stock(pair, *servers)
            else:
                check(pair, *servers, pushes="push" in p.get("extra", {}))
        # One that does not even start must not hide the others.
        except Exception as error:
            wrong.append(pair)
            # Each line says whose it is: pairs side by side are told apart by that.
            for line in str(error).splitlines() or [repr(error)]:
                print(f"{pair}: WRONG: {line}", flush=True)
        finally:
            for server in servers:
                server.close()
    return wrong


def with_draft(options, model):
    """Options of an engine; where the model guesses for itself, with its folder, and late."""
    if options.get("speculative_config", {}).get("model") != "itself":
        return options
    guesses = {**options["speculative_config"], "model": str(model)}
    return {**options, "speculative_config": guesses, "prepare": [draft_late]}


class Alone:
    """What engines answer to prompts by themselves. With some of vLLM's kernels one and the same engine does not always
    give the same answer: right is whatever D gave before anything was moved, and whatever P gives when it is asked
    again. D is not asked again: what it was handed may still be there, in a connector beside ours."""

    #: How often an engine is asked for an answer that it has not given yet. Of those of vLLM's int4 kernels, some come
    #: once in thirty times.
    TRIES = 200

    def __init__(self, prefill, decode, asked):
        self.prefill = prefill
        self.answers = [prefill.generate(prompt)[0] for prompt in asked]
        self.known = {tuple(prompt): [answer] for prompt, answer in zip(asked, self.answers, strict=True)}
        # Where the two do not agree, a transfer between them cannot be judged by their answers.
        for prompt, answer in zip(asked, self.answers, strict=True):
            assert self.gives(decode, prompt, answer), f"D alone has other tokens after {len(prompt)}"

    def give(self, prompt, answer):
        return answer in self.known[tuple(prompt)] or self.gives(self.prefill, prompt, answer)

    def gives(self, engine, prompt, answer):
        for _ in range(self.TRIES):
            made = engine.generate(prompt)[0]
            if made not in self.known[tuple(prompt)]:
                self.known[tuple(prompt)].append(made)
            if made == answer:
                return True
        return False

    def all_give(self, asked, answers):
        return all(self.give(prompt, answer) for prompt, answer in zip(asked, answers, strict=True))

    def words(self):
        several = sum(len(known) > 1 for known in self.known.values())
        return f" (alone, vLLM has several answers to {several} of {len(self.known)} prompts)" if several else ""


def check(model, prefill, decode, pushes=False):
    draw = random.Random(model)
    asked = prompts(draw, LENGTHS)
    alone = Alone(prefill, decode, asked)
    for prompt in asked:
        assert alone.give(prompt, hand_over(prefill, decode, prompt)), f"other tokens after {len(prompt)}"
    # Kernels that write late: those of P's step, and the NaN on D.
    guessed = [rounds_of_guesses(decode, decode.generate, prompt) for prompt in asked]
    prefill.call(slow_down, True)
    for prompt, rounds in zip(asked, guessed, strict=True):
        prefill.call(poison, 0)
        late = functools.partial(hand_over, prefill, decode, spoil=poison_late)
        assert alone.give(prompt, late(prompt)), f"other tokens after {len(prompt)}, with kernels that write late"
        prefill.call(poison, 0)
        again = rounds_of_guesses(decode, late, prompt)
        assert again <= rounds + 1, f"{again} rounds of guesses after {len(prompt)} instead of {rounds}"
    if pushes:
        follow(prefill, decode, asked, alone)
    prefill.call(slow_down, False)
    control(draw, prefill, decode, prompt, alone)
    note = alone.words() + at_once(prefill, decode, asked, alone)
    loads = all_done(prefill, decode, 3 * len(LENGTHS) + 1)
    audits = decode.call(audited)
    assert audits == {"matched": len(loads), "mismatch": 0, "unable": 0}, f"audits: {audits}"
    say(model, note, loads, "all audited", prompt)


def check_stock(model, prefill, decode):
    """The same where P has vLLM's own connector, as far as that can be asked: its memory is not seen from here."""
    layouts = prefill.call(layout), decode.call(layout)
    assert layouts[0] == layouts[1], f"P's cache is in the layout {layouts[0]}, and D's in {layouts[1]}"
    draw = random.Random(model)
    asked = prompts(draw, LENGTHS)
    alone = Alone(prefill, decode, asked)
    for spoil, when in ((poison, ""), (poison_late, ", with kernels that write late")):
        for prompt in asked:
            made = hand_over(prefill, decode, prompt, spoil=spoil)
            assert alone.give(prompt, made), f"other tokens after {len(prompt)}{when}"
    control(draw, prefill, decode, prompt, alone)
    note = alone.words() + at_once(prefill, decode, asked, alone)
    loads = all_done(prefill, decode, 2 * len(LENGTHS) + 1)
    say(model, note, loads, "of vLLM's own connector", prompt)


def control(draw, prefill, decode, prompt, alone):
    """Only P's state can give P's answer to another prompt with the same last token."""
    other = prompts(draw, [len(prompt) - 1])[0] + prompt[-1:]
    assert prefill.generate(other)[0] not in alone.known[tuple(prompt)], "the control's own answer is no other"
    with unbound(prefill, decode):
        assert alone.give(prompt, hand_over(prefill, decode, prompt, other)), "D did not use P's state"


def all_done(prefill, decode, handed):
    """D's loads for so many prompts that were handed over. Of one token, some models have nothing to load."""
    assert (prefill.idle(), decode.idle()) == (0, 0), "blocks are left behind"
    loads = decode.call(seen)
    failed = [load for load in loads if load["outcome"] != "done"]
    assert not failed, f"loads that were not done: {failed}"
    assert len(loads) > handed - 4, f"{len(loads)} loads for {handed} prompts"
    return loads


def say(model, note, loads, what, prompt):
    print(
        f"{model}: every token right{note}, {len(loads)} loads on {loads[-1]['device']}, {what}, the last "
        f"of {len(prompt)} tokens: {words(loads[-1])}",
        flush=True,
    )


def at_once(prefill, decode, asked, alone):
    """All prompts at once, where an engine alone has the same answers to them so: not all kernels do."""
    decode.call(poison, 0)
    try:
        made = [tokens for tokens, _ in decode.generate_all(asked)]
    except AssertionError as error:
        raise AssertionError(f"D alone cannot answer all prompts at once: {error}") from error
    if made != alone.answers:
        return ", one by one (at once D alone has other tokens, too)"
    params = prefill.prefill(asked)
    decode.call(poison)
    made = decode.generate_all(asked, params=params)
    assert alone.all_give(asked, [tokens for tokens, _ in made]), "other tokens when all are asked at once"
    return ""


def follow(prefill, decode, asked, alone):
    """D reads what P's steps have written, layer by layer, while they compute; not before the card has."""
    decode.call(poison)
    decode.call(take_at_once, True)
    for prompt in asked:
        assert alone.all_give([prompt], push(prefill, decode, [prompt])), f"other tokens after {len(prompt)}, pushed"
    assert alone.all_give(asked, push(prefill, decode, asked)), "other tokens when all are pushed at once"
    # Without a card nothing slows P down, and a step may be over before D asks: life/test_layers.py holds it.
    ahead = decode.call(counter, "kvferry_read_ahead_bytes_total")
    assert ahead or not prefill.call(has_card), "nothing was read ahead"
    decode.call(take_at_once, False)


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


def hand_over(prefill, decode, prompt, other=None, spoil=None):
    with unbound(prefill, decode) if other is not None else contextlib.nullcontext():
        _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
        decode.call(spoil or poison)
        return decode.generate(other or prompt, params=params)[0]


def rounds_of_guesses(decode, generate, prompt):
    """How often D's draft model, where it has one, guesses for an answer: for every token if its cache is wrong."""
    before = decode.call(drafted)
    generate(prompt)
    return decode.call(drafted) - before


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
SLOW = False
DRAFTED = 0
#: Cycles of the GPU: a tenth of a second or more.
LATE = 200_000_000


def watch():
    register, results, obey = WorkerSide.register, WorkerSide.results, WorkerSide.obey

    def obey_slowly(self, orders):
        if SLOW and not orders.idle and torch.cuda.is_available():
            # Before what the step computes, in its stream.
            torch.cuda._sleep(LATE)
        obey(self, orders)

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
    WorkerSide.obey = obey_slowly


def draft_late():
    """What a draft model computes waits on the GPU for longer still, behind the token from which P's scheduler learns
    that a prompt is complete."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    def late(propose):
        def proposed(self, *args, **more):
            global DRAFTED
            DRAFTED += 1
            if SLOW and torch.cuda.is_available():
                torch.cuda._sleep(10 * LATE)
            return propose(self, *args, **more)

        return proposed

    for kind in (SpecDecodeBaseProposer, StandaloneARSpeculator):
        kind.propose = late(kind.propose)


def drafted(engine):
    """How often a draft model has guessed."""
    return DRAFTED


def poison(engine, byte=0xFF):
    for storage in SIDES[0].storages:
        storage.fill_(byte)
    if torch.accelerator.is_available():
        # What is loaded is not ordered with the stream: it must not be overwritten when it is there.
        torch.accelerator.synchronize()


def poison_late(engine):
    """The same, but it comes late: what is loaded meanwhile has to wait for it."""
    if not torch.cuda.is_available():
        return poison(engine)
    torch.cuda._sleep(LATE)
    for storage in SIDES[0].storages:
        storage.fill_(0xFF)
    # As at the end of a step.
    SIDES[0]._mark_writes()


def layout(engine):
    return engine.llm_engine.vllm_config.cache_config.kv_cache_layout


def has_card(engine):
    # Not where engines are forked from: none of them could use it after that.
    return torch.cuda.is_available()


def slow_down(engine, slow):
    global SLOW
    SLOW = slow


def seen(engine):
    return LOADS


def audited(engine):
    """How many audits ended how."""
    found = re.findall(r'kvferry_audits_total{.*result="(\w+)".*} (\d+)', SIDES[0].agent.metrics())
    return {outcome: int(count) for outcome, count in found}


if __name__ == "__main__":
    sys.exit(main())
