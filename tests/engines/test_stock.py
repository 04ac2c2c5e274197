"""D has kvferry, and P runs vLLM's stock NixlConnector: the same tokens as one engine alone, P's blocks freed, and
what cannot be read refused by name.

As in `test_pairs.py`, engines of a family are started once. Only what every run needs is not marked `more`.
"""

import random

import pytest
from exact import LENGTHS, check, hand_over, nothing_left, prompts
from families import CHANNELS_FIRST, LATENT, MORE, RANKS, cases
from heard import everything_said, forget_lines, listen, said
from life.inside import abort, begin, pump, steps
from serving import idle

#: P frees nothing by itself while a test runs: only what D tells it counts.
STOCK = {"stock": True, "extra": {"kv_lease_duration": 600}}
NIXL = {"transport": "nixl", "nixl_connector_lease_seconds": 600.0}
FERRY = {"extra": NIXL}

#: By family: the model, its engines by name, and the pairs of them.
FAMILIES = {
    "qwen3": (
        "qwen3",
        {
            "stock": {"block_size": 32, **STOCK},
            "stock, larger blocks": {"block_size": 96, **STOCK},
            "stock, two ranks": {"block_size": 64, **RANKS, **STOCK},
            "one": {"block_size": 32, **FERRY},
            "larger blocks": {"block_size": 96, **FERRY},
            "two ranks": {"block_size": 64, **RANKS, **FERRY},
        },
        [
            ("stock", "one"),
            pytest.param("stock", "larger blocks", marks=MORE),
            pytest.param("stock, larger blocks", "one", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "one", marks=MORE),
        ],
    ),
    # The stock connector serves states with their channels first only.
    "nemotron-h": (
        "nemotron_h",
        {
            "stock": {"prepare": [CHANNELS_FIRST], **STOCK},
            "stock, two ranks": {"prepare": [CHANNELS_FIRST], **RANKS, **STOCK},
            "stock, larger blocks": {"prepare": [CHANNELS_FIRST], "block_size": 256, **STOCK},
            "one": FERRY,
            "two ranks": {**FERRY, **RANKS},
        },
        [
            pytest.param("stock", "one", marks=MORE),
            pytest.param("stock, larger blocks", "one", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "one", marks=MORE),
        ],
    ),
    # Prompts are longer than the window, of 48 tokens.
    "gemma3": (
        "gemma3",
        {
            "stock": {"block_size": 32, **STOCK},
            "stock, two ranks": {"block_size": 64, **RANKS, **STOCK},
            "larger blocks": {"block_size": 64, **FERRY},
            "two ranks": {"block_size": 32, **RANKS, **FERRY},
        },
        [
            pytest.param("stock", "larger blocks", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "larger blocks", marks=MORE),
        ],
    ),
    # Other than the stock connector on both sides, which moves wrong bytes here.
    "falcon-h1, one group": (
        "falcon_h1",
        {
            "stock": {"prepare": [CHANNELS_FIRST], **STOCK},
            "stock, two ranks": {"prepare": [CHANNELS_FIRST], **RANKS, **STOCK},
            "one": FERRY,
            "two ranks": {**FERRY, **RANKS},
        },
        [
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "one", marks=MORE),
        ],
    ),
    "deepseek": (
        "deepseek",
        {
            "stock": {"block_size": 32, **LATENT, **STOCK},
            "stock, two ranks": {"block_size": 64, **RANKS, **LATENT, **STOCK},
            "larger blocks": {"block_size": 96, **LATENT, **FERRY},
            "two ranks": {"block_size": 64, **RANKS, **LATENT, **FERRY},
        },
        [
            pytest.param("stock", "larger blocks", marks=MORE),
            pytest.param("stock", "two ranks", marks=MORE),
            pytest.param("stock, two ranks", "larger blocks", marks=MORE),
        ],
    ),
}


@pytest.mark.parametrize(("family", "p", "d"), list(cases(FAMILIES)))
def test_tokens_are_those_of_one_engine_alone(fleet, family, p, d):
    kind, engines, _ = FAMILIES[family]
    prefill, decode = fleet(kind, engines, p), fleet(kind, engines, d)
    check(prefill, decode, LENGTHS, seed=f"stock {family}: {p} to {d}")


@pytest.mark.more
def test_a_window_that_p_has_left_behind(serve):
    """P keeps its windows for the token after the prompt, and D computes the prompt's last one again. Where that
    one looks at a block that P has freed, D computes all of it."""
    narrow = {"block_size": 32, "hf_overrides": {"sliding_window": 8}}
    prefill = serve("gemma3", "kv_producer", **STOCK, **narrow)
    decode = serve("gemma3", "kv_consumer", **FERRY, **narrow)
    decode.call(listen)
    check(prefill, decode, (38, 40, 70, 72), seed="windows")
    assert not decode.call(said, "has given up a block of a window", 0.1)
    for prompt in prompts(random.Random(24), [39, 71]):
        assert hand_over(prefill, decode, prompt) == decode.generate(prompt)[0]
        assert decode.call(said, "has given up a block of a window")
        decode.call(forget_lines)
    nothing_left(prefill, decode)


@pytest.mark.more
def test_requests_that_end_early_and_those_that_wait(serve):
    """Whatever becomes of a request on D, P hears of it; and while it waits, P keeps its blocks."""
    usual = {"block_size": 32}
    prefill = serve("qwen3", "kv_producer", stock=True, extra={"kv_lease_duration": 9}, **usual)
    options = NIXL | {"nixl_connector_lease_seconds": 9.0}
    decode = serve("qwen3", "kv_consumer", extra=options, prefix=True, **usual)
    draw = random.Random(21)
    first, second, third, fourth = prompts(draw, [100, 300, 200, 70])
    # Given up before P has been asked anything, and before it is scheduled.
    (params,) = prefill.prefill([first])
    decode.call(begin, "r", first, 12, params)
    decode.call(abort, "r")
    _freed_soon(prefill)
    # Given up while it loads, sooner or later.
    for wait in (0, 1, 5):
        (params,) = prefill.prefill([second])
        decode.call(begin, "r", second, 12, params)
        decode.call(steps, wait)
        decode.call(abort, "r")
        assert decode.idle() == 0
        _freed_soon(prefill)
    # It waits for longer than P would keep its blocks without a word.
    (params,) = prefill.prefill([third])
    decode.call(begin, "r", third, 12, params)
    assert prefill.call(idle, 14) > 0
    ((tokens, _, _),) = decode.call(pump).values()
    _freed_soon(prefill)
    decode.call(forget_prefixes)
    assert tokens == decode.generate(third)[0]
    # All of it is here already: P need not keep it.
    alone, _ = decode.generate(fourth + fourth[:26])
    (params,) = prefill.prefill([fourth + fourth[:26]])
    assert decode.generate(fourth + fourth[:26], params=params)[0] == alone
    _freed_soon(prefill)
    # The same blocks again: they are gone, and that is known.
    assert decode.generate(first, params=params)[0] == decode.generate(first)[0]
    assert decode.call(counted)["loads_unconfirmed"] > 0
    nothing_left(prefill, decode)


@pytest.mark.parametrize("policy", ["recompute", pytest.param("fail", marks=MORE)])
@pytest.mark.more
def test_a_stock_engine_that_is_gone(serve, policy):
    prefill = serve("qwen3", "kv_producer", block_size=32, **STOCK)
    options = NIXL | {"handshake_timeout_seconds": 2.0}
    decode = serve("qwen3", "kv_consumer", block_size=32, failure=policy, extra=options)
    decode.call(listen)
    (prompt,) = prompts(random.Random(22), [200])
    alone = decode.generate(prompt)[0]
    known, killed, later = prefill.prefill([prompt] * 3)
    assert decode.generate(prompt, params=known)[0] == alone
    prefill.kill()
    for params in (killed, later):
        tokens, _ = decode.generate(prompt, params=params)
        assert tokens == (alone if policy == "recompute" else [])
        assert decode.idle() == 0
    assert decode.call(said, "has not answered at nixl://127.0.0.1")


def _version(number):
    def change():
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

        metadata.NIXL_CONNECTOR_VERSION = number

    return change


#: By what is wrong: P, D, and what D must say of it.
REFUSED = {
    "the format": (
        ("qwen3", {}),
        ("qwen3", {"dtype": "bfloat16", "extra": NIXL}),
        ["another compatibility hash", "torch.float32", "torch.bfloat16 here"],
    ),
    "the model": (
        ("qwen3", {}),
        ("gemma3", {"extra": NIXL}),
        ["'remote_block_ids' has 1 tables", "into 2"],
    ),
    "the model's name": (
        ("qwen3", {}),
        ("twin of qwen3", {"extra": NIXL}),
        ["another compatibility hash", "the model's name", "twin of qwen3"],
    ),
    "the version": (
        ("qwen3", {"prepare": [_version(13)]}),
        ("qwen3", {"extra": NIXL}),
        ["another compatibility hash", "that of its connector (14 here)"],
    ),
    "the transport": (
        ("qwen3", {}),
        ("qwen3", {"extra": NIXL | {"transport": "tcp"}}),
        ["by the transport nixl", "is tcp"],
    ),
    "nobody has asked for it": (
        ("qwen3", {"extra": {"kv_lease_duration": 3}}),
        ("qwen3", {"extra": {"transport": "nixl"}}),
        ["runs vLLM's stock NixlConnector", "'nixl_connector_lease_seconds'"],
    ),
    "the format of a state": (
        ("nemotron_h", {"prepare": [CHANNELS_FIRST], "mamba_ssm_cache_dtype": "float16"}),
        ("nemotron_h", {"extra": NIXL, "mamba_ssm_cache_dtype": "float32"}),
        ["its states take", "--mamba-ssm-cache-dtype"],
    ),
}


@pytest.mark.parametrize("wrong", [pytest.param(wrong, marks=MORE) for wrong in REFUSED])
def test_what_cannot_be_read_is_refused_by_name(serve, folder, wrong):
    (kind, p), (other, d), words = REFUSED[wrong]
    prefill = serve(kind, "kv_producer", **STOCK | p)
    if other == "twin of qwen3" and not (folder / other).exists():
        (folder / other).symlink_to(folder / "qwen3")
    decode = serve(other, "kv_consumer", failure="recompute", **d)
    decode.call(listen)
    (prompt,) = prompts(random.Random(23), [70])
    alone, _ = decode.generate(prompt)
    assert hand_over(prefill, decode, prompt) == alone
    for word in words:
        assert decode.call(said, word), decode.call(everything_said)
    nothing_left(prefill, decode)


def _freed_soon(prefill):
    """By a word from D: P by itself would do it after eight minutes, for which nobody waits here."""
    assert prefill.idle() == 0


# In the engine's process.


def counted(engine):
    return engine.llm_engine.engine_core.engine_core.scheduler.connector.scheduler.stock.counts


def forget_prefixes(engine):
    return engine.llm_engine.reset_prefix_cache()
