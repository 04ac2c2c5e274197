"""Every kernel that stores a cache on a GPU, asked where it writes: one small engine after the other.

    python gpu_asking.py [NAME…]
    python gpu_asking.py --cost [NAME…]   how much later an engine's first answer comes because it was asked

An engine does not start where a kernel disagrees with the description. Ends with 0 if all were asked and
agree. What cannot run on this machine (a library that is missing, an older card) is said and left out.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time

from asked import answers, remember
from patches import environment
from serving import Server
from tiny import save_model

#: The rest of the GPU is somebody else's.
SMALL = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
HALF = {"dtype": "bfloat16"}
GDN = {**HALF, "gdn_prefill_backend": "triton"}


def with_backend(name, **options):
    return {**HALF, "attention_config": {"backend": name}, **options}


#: By name: the model, how its engine runs, and the back ends that must have been asked.
ENGINES = {
    "flash": ("qwen3", with_backend("FLASH_ATTN"), {"FLASH_ATTN"}),
    "flash fp8": ("qwen3", with_backend("FLASH_ATTN", kv_cache_dtype="fp8"), {"FLASH_ATTN"}),
    "triton": ("qwen3", with_backend("TRITON_ATTN"), {"TRITON_ATTN"}),
    "triton float32": ("qwen3", {**with_backend("TRITON_ATTN"), "dtype": "float32"}, {"TRITON_ATTN"}),
    "triton fp8": ("qwen3", with_backend("TRITON_ATTN", kv_cache_dtype="fp8"), {"TRITON_ATTN"}),
    "flex": ("qwen3", with_backend("FLEX_ATTENTION"), {"FLEX_ATTENTION"}),
    "flashinfer": ("qwen3", with_backend("FLASHINFER"), {"FLASHINFER"}),
    "flashmla": ("deepseek", with_backend("FLASHMLA", block_size=64), {"FLASHMLA"}),
    "flash mla": ("deepseek", with_backend("FLASH_ATTN_MLA"), {"FLASH_ATTN_MLA"}),
    "triton mla": ("deepseek", with_backend("TRITON_MLA"), {"TRITON_MLA"}),
    "flashmla fp8": (
        "deepseek",
        with_backend("FLASHMLA", block_size=64, kv_cache_dtype="fp8"),
        {"FLASHMLA"},
    ),
    "mamba2": ("nemotron_h", with_backend("TRITON_ATTN"), {"TRITON_ATTN", "MAMBA2_ATTN"}),
    "delta net": (
        "qwen3_5",
        {**with_backend("TRITON_ATTN"), **GDN},
        {"TRITON_ATTN", "GDN_ATTN"},
    ),
    "kimi": ("kimi_linear", with_backend("FLASHMLA"), {"FLASHMLA", "GDN_ATTN"}),
    "short convolution": ("lfm2", with_backend("TRITON_ATTN"), {"TRITON_ATTN", "SHORT_CONV_ATTN"}),
}
#: What vLLM says where a back end cannot run on a machine at all.
CANNOT = ("is not valid for this configuration", "ModuleNotFoundError", "is not available", "No module")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--models", type=pathlib.Path, help="a folder that keeps the models")
    parser.add_argument("--cost", action="store_true", help="only measure what asking adds to a start")
    parser.add_argument("--rounds", type=int, default=4, help="starts of each kind for --cost")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if name not in ENGINES]
    if unknown:
        parser.error(f"no engine '{unknown[0]}': there are {', '.join(ENGINES)}")
    right = True
    with models(asked.models) as folder:
        if asked.cost:
            for name in asked.names or ["triton", "mamba2", "delta net"]:
                cost(folder, name, asked.rounds)
            return 0
        for name in asked.names or list(ENGINES):
            kind, options, wanted = ENGINES[name]
            right &= check(folder, name, (kind, {**SMALL, **options}, wanted))
    # The last: engines cannot be forked from a process that has used the card.
    right &= index()
    return 0 if right else 1


@contextlib.contextmanager
def models(kept=None):
    with tempfile.TemporaryDirectory() as folder:
        yield kept or pathlib.Path(folder)


def check(folder, name, engine):
    """Starts an engine, and says what its kernels were asked."""
    kind, options, wanted = engine
    path = folder / kind
    if not path.exists():
        save_model(kind, path)
    server = None
    try:
        prepare = [*options.get("prepare", ()), remember]
        server = Server(path, "kv_both", **options | {"prepare": prepare})
        asked, not_asked, seconds = server.call(answers)
    except AssertionError as error:
        last = str(error).strip().splitlines()[-1][:600]
        cannot = any(words in str(error) for words in CANNOT)
        print(f"{name}: {'not on this machine' if cannot else 'WRONG'}: {last}", flush=True)
        return cannot
    finally:
        if server is not None:
            server.close()
    said = f"asked {' and '.join(sorted(asked)) or 'nothing'}"
    for backend, why in sorted(not_asked.items()):
        said += f"; not {backend}: {why}"
    if asked != wanted:
        print(f"{name}: WRONG: {said} instead of {' and '.join(sorted(wanted))}", flush=True)
        return False
    print(f"{name}: {said} in {seconds:.2f} s", flush=True)
    return True


def cost(folder, name, rounds):
    """Seconds from an engine's start to its first answer, asked and not asked, in turns. Nothing that Triton
    compiled before is there: what an engine is asked with, it compiles then, and has later."""
    kind, options, _ = ENGINES[name]
    path = folder / kind
    if not path.exists():
        save_model(kind, path)
    times = {True: [], False: []}
    for turn in range(2 * rounds):
        ask = turn % 2 == 0
        with tempfile.TemporaryDirectory() as compiled:
            prepare = [*options.get("prepare", ()), environment(TRITON_CACHE_DIR=compiled)]
            prepare += [] if ask else [ask_nothing]
            begin = time.monotonic()
            server = Server(path, "kv_producer", **SMALL | options | {"prepare": prepare})
            try:
                server.generate(list(range(1, 200)), 4)
                times[ask].append(time.monotonic() - begin)
            finally:
                server.close()
    asked, not_asked = (statistics.median(times[ask]) for ask in (True, False))
    listed = ["/".join(f"{seconds:.2f}" for seconds in sorted(times[ask])) for ask in (True, False)]
    print(
        f"{name}: the first answer after {asked:.2f} s asked ({listed[0]}), {not_asked:.2f} s not asked "
        f"({listed[1]}): {asked - not_asked:+.2f} s",
        flush=True,
    )


def ask_nothing():
    from kvferry.vllm.kernels.asking import Asking

    Asking.answer = lambda *args: None


def index():
    """The sparse indexer's kernel, without an engine: no model that has one is small."""
    import torch

    if not torch.cuda.is_available():
        return True
    from kvferry.vllm.kernels import writers as kernels, probe

    tokens, size = 64, 128
    tensor = torch.zeros(3, 1, tokens, size + 4, dtype=torch.uint8, device="cuda")
    at = {
        "indexer": torch.arange(tokens)[:, None] * size + torch.arange(size),
        "indexer.scale": tokens * size + torch.arange(tokens)[:, None] * 4,
    }
    described = {
        "indexer": probe.Places(("token", "dim"), at["indexer"].numpy(), 1),
        "indexer.scale": probe.Places(("token", "scale"), at["indexer.scale"].numpy(), 4),
    }
    try:
        kernel = kernels.indexer(
            _IndexerLayer(), None, None, torch.bfloat16, {name: where.shape for name, where in at.items()}
        )
        wrong = probe.ask(kernel, tensor).differs(described)
    except Exception as error:
        print(f"indexer: WRONG: {type(error).__name__}: {error}", flush=True)
        return False
    print(f"indexer: {'asked' if wrong is None else f'WRONG: {wrong}'}", flush=True)
    return wrong is None


class _IndexerLayer:
    def bind_kv_cache(self, cache):
        self.kv_cache = cache.squeeze(1)


if __name__ == "__main__":
    sys.exit(main())
