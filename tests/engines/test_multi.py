"""FerryConnector beside other connectors in vLLM's MultiConnector, with statistics on.

The other is vLLM's OffloadingConnector, first in the list: what it has kept is used before anything is
fetched. On a CPU its copying is ours (`offload`), and everything else is vLLM's.
"""

import random
import time

import offload
import prometheus_client
import pytest
from environment import REMOTE_DECODE
from exact import check, hand_over, nothing_left, prompts
from life.test_held import let_states_be_cached
from offload import OFFLOAD

MORE = pytest.mark.more
#: What must have been counted for each request, by engine.
PREFILL = (("leases_granted_total", {}), ("leases_confirmed_total", {}))
DECODE = (("loads_total", {"outcome": "done"}), ("load_seconds_count", {}))
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
#: vLLM offloads states only where prefixes are cached.
STATES = {"prefix": True, "prepare": [let_states_be_cached]}
BESIDE = {"multi": ([OFFLOAD], []), "disable_log_stats": False}
BEHIND = {"multi": ([], [OFFLOAD]), "disable_log_stats": False}


def one_kind(**options):
    return {"prefill": options, "decode": options}


#: By name: the model and its two engines.
PAIRS = {
    "attention": ("qwen3", one_kind(block_size=32, **BESIDE)),
    "hybrid": ("nemotron_h", one_kind(**STATES, **BESIDE)),
    "windows": ("gemma3", one_kind(block_size=32, **BESIDE)),
    "behind": ("qwen3", one_kind(block_size=32, **BEHIND)),
    "two stages": ("nemotron_h", one_kind(**STATES, **STAGES, **BESIDE)),
}
engines = pytest.fixture(scope="module")(lambda fleet: lambda name: _engines(fleet, name))


def _engines(fleet, name):
    kind, pair = PAIRS[name]
    return fleet(kind, pair, "prefill"), fleet(kind, pair, "decode")


def test_a_pair_hands_over_and_is_counted(engines):
    prefill, decode = engines("attention")
    asked = prompts(random.Random(16), [33, 100])
    for prompt in asked:
        moved = hand_over(prefill, decode, prompt)
        decode.call(forget)
        assert moved == decode.generate(prompt)[0]
    for engine, names in ((prefill, PREFILL), (decode, DECODE)):
        assert engine.call(counted, names, len(asked)) == [len(asked)] * len(names)
    nothing_left(prefill, decode)


def test_what_the_other_has_kept_is_used_first(engines):
    prefill, decode = engines("attention")
    (prompt,) = prompts(random.Random(17), [150])
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    before = decode.call(moved)
    alone, _ = decode.generate(prompt, params=params)
    decode.idle()
    first = decode.call(moved)
    assert first["loads"] == before["loads"] + 1 and first["load"] == before["load"]
    assert first["store"] > before["store"]
    # The same prompt again: P is told at once that nobody will read it.
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    assert decode.generate(prompt, params=params)[0] == alone
    again = decode.call(moved)
    assert again["loads"] == first["loads"] and again["load"] > first["load"]
    nothing_left(prefill, decode)


def test_requests_that_are_aborted_leave_nothing(engines):
    prefill, decode = engines("attention")
    draw = random.Random(18)
    for wait in (0, 1, 3):
        prompt, after = prompts(draw, [200, 70])
        params, again = prefill.prefill([prompt, after])
        decode.call(begin_and_abort, prompt, params, wait)
        kept = decode.generate(after, params=again)[0]
        decode.call(forget)
        assert decode.generate(after)[0] == kept
        nothing_left(prefill, decode)


@pytest.mark.parametrize(
    "name", ["hybrid", *(pytest.param(one, marks=MORE) for one in ("windows", "behind", "two stages"))]
)
def test_tokens_are_those_of_one_engine_alone(engines, name):
    prefill, decode = engines(name)
    check(Forgetful(prefill), Forgetful(decode), seed=name)


@MORE
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_dead_prefill_engine(serve, policy):
    prefill = serve("qwen3", "kv_producer", block_size=32, extra={"lease_seconds": 6}, **BESIDE)
    decode = serve("qwen3", "kv_consumer", block_size=32, failure=policy, extra={"handshake_timeout_seconds": 10}, **BESIDE)
    first, prompt = prompts(random.Random(19), [40, 150])
    assert hand_over(prefill, decode, first)
    (params,) = prefill.prefill([prompt])
    prefill.kill()
    made, _ = decode.generate(prompt, params=params)
    decode.call(forget)
    alone, _ = decode.generate(prompt)
    assert made == (alone if policy == "recompute" else [])
    assert decode.idle() == 0


#: A connector that knows nothing of groups, and one that hands over as ours does.
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
OURS = {"kv_connector": "FerryConnector", "kv_role": "kv_both"}
RIVAL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (([], [RIVAL]), "FerryConnector and NixlConnector are in one MultiConnector"),
        pytest.param(([OURS], []), "FerryConnector is in the MultiConnector more than once", marks=MORE),
    ],
)
def test_two_that_claim_a_request_are_refused_by_name(serve, others, words):
    with pytest.raises(AssertionError, match=words):
        serve("qwen3", "kv_both", multi=others)


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("qwen3", marks=MORE)])
def test_beside_a_connector_that_knows_no_groups(serve, tmp_path, capfd, kind):
    """vLLM's example keeps prompts in files. With it, vLLM keeps windows in full, and finishes requests
    by another hook."""
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    options = {"multi": ([], [EXAMPLE | extra]), "block_size": 32, "disable_log_stats": False}
    prefill, decode = (serve(kind, role, **options) for role in ("kv_producer", "kv_consumer"))
    check(prefill, decode, lengths=(33, 100), seed="example")
    said = "".join(capfd.readouterr())
    assert "because of ExampleConnector beside FerryConnector, which knows no groups of layers" in said


@MORE
def test_states_beside_it_are_refused_by_vllm(serve):
    with pytest.raises(AssertionError, match="Failed to promote local KV cache specs"):
        serve("nemotron_h", "kv_both", multi=([EXAMPLE], []))


class Forgetful:
    """An engine whose other connector keeps nothing from one request to the next."""

    def __init__(self, engine):
        self.engine = engine

    def generate(self, *args, **options):
        self.engine.call(forget)
        return self.engine.generate(*args, **options)

    def idle(self):
        return self.engine.idle()

    def call(self, *args):
        return self.engine.call(*args)


# In the engine's process.


def forget(engine):
    """What the offloading connector has kept, and vLLM itself; the scheduler's half decides."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    engine.llm_engine.reset_prefix_cache()
    assert scheduler.connector.reset_cache() is not None


def moved(engine):
    """Bytes by the other connector, and loads by ours."""
    return {**offload.MOVED, "loads": counted(engine, DECODE[:1], 0)[0]}


def begin_and_abort(engine, prompt, params, steps):
    from serving import sampled

    engine.llm_engine.add_request("r", {"prompt_token_ids": prompt}, sampled(12, params))
    for _ in range(steps):
        engine.llm_engine.step()
        time.sleep(0.001)
    engine.llm_engine.abort_request(["r"])


def counted(engine, names, wanted, seconds=30):
    """What Prometheus sees, as soon as it is what is wanted; it hears of it with the steps of requests."""
    deadline = time.monotonic() + seconds
    while True:
        engine.generate({"prompt_token_ids": [1]}, use_tqdm=False)
        seen = [value(name, labels) for name, labels in names]
        if all(one >= wanted for one in seen) or time.monotonic() > deadline:
            return seen


def value(name, labels):
    return sum(
        sample.value
        for metric in prometheus_client.REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"vllm:kvferry_{name}" and labels.items() <= sample.labels.items()
    )
