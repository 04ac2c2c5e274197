"""What P says of a step that it computes: what is not written is never said to be."""

import dataclasses
import threading
from types import SimpleNamespace

import pytest
from kvferry import AgentError
from kvferry.vllm.worker import written
from kvferry.vllm.connector import FerryConnector
from kvferry.vllm.messages import Orders
from kvferry.vllm.scheduler.prefill import Growing, Prefill
from kvferry.vllm.worker.written import Written, is_known, keepers_of_states
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.request import RequestStatus

#: The last two layers keep one state: each a copy of its own.
KEEPERS = {"layers.0/k": {"a"}, "layers.0/v": {"a"}, "layers.1/k": {"b"}, "layers.2/k": {"c", "d"}}


class Agent:
    """Notes what it is told."""

    #: Whether anybody listens to it.
    listeners = True

    def __init__(self):
        self.heard, self.news = [], threading.Condition()

    def is_heard(self, step):
        return self.listeners

    def __getattr__(self, name):
        def call(*args, **options):
            with self.news:
                self.heard.append((name, *args, *options.values()))
                self.news.notify()

        return call

    def take(self, count):
        """All that it has been told, once it is so much."""
        with self.news:
            assert self.news.wait_for(lambda: len(self.heard) >= count, 60), self.heard
            heard, self.heard = self.heard, []
        return heard


class Stream:
    """Of a GPU that does its work when the test says so."""

    def __init__(self):
        self.marks = []

    def mark(self):
        passed = threading.Event()
        self.marks.append(passed)
        return SimpleNamespace(query=passed.is_set, synchronize=lambda: passed.wait(60))

    def go_on(self):
        self.marks.pop(0).set()


def test_in_host_memory_a_layer_is_written_when_vllm_is_through_with_it():
    agent = Agent()
    # Who comes late finds it said: that costs nothing here.
    agent.listeners = False
    steps = Written(KEEPERS, agent)
    steps.begin(3)
    steps.layer("a")
    steps.layer("an encoder's")
    steps.layer("c")
    assert agent.take(2) == [("begin_step", 3), ("wrote", 3, ["layers.0/k", "layers.0/v"])]
    steps.layer("d")
    assert agent.take(1) == [("wrote", 3, ["layers.2/k"])], "both of those that keep it are"
    steps.end()
    assert agent.take(1) == [("end_step", 3)]
    # What came by in an earlier step says nothing of this one.
    steps.begin(4)
    steps.layer("d")
    assert agent.take(1) == [("begin_step", 4)]


def test_nothing_is_said_of_steps_that_d_does_not_know():
    agent = Agent()
    steps = Written(KEEPERS, agent, lambda: pytest.fail("the stream is marked"))
    steps.layer("a")
    steps.begin(0)
    steps.layer("a")
    steps.end()
    assert agent.heard == []


def test_on_a_gpu_a_layer_is_written_when_the_stream_has_passed_it():
    agent, stream = Agent(), Stream()
    steps = Written(KEEPERS, agent, stream.mark)
    steps.begin(3)
    steps.layer("a")
    steps.layer("b")
    steps.end()
    # The next one is launched meanwhile. That it has begun would say that this one is over.
    steps.begin(4)
    for word in [
        ("begin_step", 3),
        ("wrote", 3, ["layers.0/k", "layers.0/v"]),
        ("wrote", 3, ["layers.1/k"]),
        ("end_step", 3),
        ("begin_step", 4),
    ]:
        assert agent.heard == []
        stream.go_on()
        assert agent.take(1) == [word]
    assert stream.marks == []
    steps.close()


def test_what_nobody_waits_for_is_said_with_the_next():
    """It costs the engine's thread and the GPU nothing then."""
    agent, stream = Agent(), Stream()
    steps = Written(KEEPERS, agent, stream.mark)
    agent.listeners = False
    steps.begin(3)
    steps.layer("a")
    assert len(stream.marks) == 1
    agent.listeners = True
    steps.layer("b")
    agent.listeners = False
    steps.layer("c")
    steps.layer("d")
    steps.end()
    assert len(stream.marks) == 3
    for word in [
        ("begin_step", 3),
        ("wrote", 3, ["layers.0/k", "layers.0/v", "layers.1/k"]),
        ("end_step", 3),
    ]:
        stream.go_on()
        assert agent.take(1) == [word]
    # What was not said of one step is not said of the next.
    agent.listeners = True
    steps.begin(4)
    steps.layer("b")
    stream.go_on()
    stream.go_on()
    assert agent.take(2) == [("begin_step", 4), ("wrote", 4, ["layers.1/k"])]
    steps.close()


def test_a_step_from_a_graph_is_written_when_it_is_over():
    """vLLM does not come by then."""
    agent, stream = Agent(), Stream()
    steps = Written(KEEPERS, agent, stream.mark)
    steps.begin(3)
    steps.end()
    stream.go_on()
    assert agent.take(1) == [("begin_step", 3)]
    stream.go_on()
    assert agent.take(1) == [("end_step", 3)]
    steps.close()


@pytest.mark.parametrize(
    "known, change",
    [
        (True, {}),
        (True, {"device": "cuda"}),
        (False, {"device": "cuda", "buffer": "cpu"}),
        (False, {"speculative": object()}),
        (False, {"ubatching": True}),
        (False, {"host": True}),
    ],
)
def test_where_a_layer_may_be_written_later_nothing_is_said(known, change):
    facts = {"device": "cpu", "buffer": "cuda", "speculative": None, "ubatching": False, "host": False} | change
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=facts["device"]),
        kv_transfer_config=SimpleNamespace(kv_buffer_device=facts["buffer"]),
        parallel_config=SimpleNamespace(use_ubatching=facts["ubatching"]),
        speculative_config=facts["speculative"],
    )
    groups = [SimpleNamespace(host_resident=False), SimpleNamespace(host_resident=facts["host"])]
    assert is_known(config, SimpleNamespace(kv_cache_groups=groups)) == known


def test_vllm_has_what_is_asked_for():
    """A name that it does not have would be a fact that is never true."""
    assert isinstance(ParallelConfig.use_ubatching, property)
    assert "host_resident" in {field.name for field in dataclasses.fields(KVCacheGroupSpec)}
    # Its graphs stay as they are.
    assert not FerryConnector.requires_piecewise_for_cudagraph({})


def test_layers_that_keep_a_state(monkeypatch):
    """Of several kinds with one number, those of the state's own group; and all that keep the same."""
    groups = {("3.attn", "9.attn"): ["layers.3/k", "layers.3/v"], ("3.mamba",): ["layers.3/ssm"]}
    names = {"3.attn": "layers.3", "9.attn": "layers.3", "3.mamba": "layers.3", "alone": "layers.4"}
    monkeypatch.setattr(written, "names_of_layers", lambda config, groups: names)
    pieces = [{"pieces": [{"state": state} for state in states]} for states in groups.values()]
    manifest = SimpleNamespace(to_dict=lambda: {"groups": pieces})
    cache = [SimpleNamespace(layer_names=[*layers], enable_kv_transfer=True) for layers in groups]
    cache.insert(1, SimpleNamespace(layer_names=["alone"], enable_kv_transfer=False))
    assert keepers_of_states(None, SimpleNamespace(kv_cache_groups=cache), manifest) == {
        "layers.3/k": {"3.attn", "9.attn"},
        "layers.3/v": {"3.attn", "9.attn"},
        "layers.3/ssm": {"3.mamba"},
    }


def prefill(prompt, by_layer=True):
    """P with one prompt, in blocks of 10 tokens, before its first step."""
    groups = SimpleNamespace(grown=lambda manager, name, tokens: [[*range(-(-tokens // 10))]])
    side = Prefill(Agent(), None, groups, None, True, by_layer)
    request = SimpleNamespace(
        num_prompt_tokens=prompt,
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_preemptions=0,
        status=RequestStatus.RUNNING,
    )
    side.growing["r"] = Growing(request, 0)
    return side, request


def schedule(side, request, tokens):
    """A turn of vLLM's scheduler: the step's number, and what the agent was told."""
    step = side.advance({"r": tokens} if tokens else {})
    request.num_computed_tokens += tokens
    request.num_in_flight_tokens += tokens
    return step, side.agent.take(0)


def test_d_is_told_of_steps_in_flight():
    side, request = prefill(25)
    assert schedule(side, request, 10) == (1, [("advance", "r", 0, [[0]], [(1, 10)])])
    # The next one is scheduled ahead.
    told = ("advance", "r", 0, [[0, 1]], [(1, 10), (2, 20)])
    assert schedule(side, request, 10) == (2, [told])
    request.num_in_flight_tokens -= 10
    # Another request's: this one is in none of it.
    assert schedule(side, request, 0) == (0, [("advance", "r", 10, [[0, 1]], [(2, 20)])])
    assert schedule(side, request, 0) == (0, [])
    request.num_in_flight_tokens -= 10
    assert schedule(side, request, 5) == (3, [("advance", "r", 20, [[0, 1, 2]], [(3, 25)])])
    # What comes behind the prompt is not named.
    assert schedule(side, request, 1) == (0, [])


def test_a_request_that_is_preempted_starts_over():
    side, request = prefill(25)
    schedule(side, request, 10)
    request.num_preemptions, request.num_computed_tokens = 1, 0
    request.status = RequestStatus.PREEMPTED
    assert schedule(side, request, 0) == (0, [("restart", "r")])
    request.status = RequestStatus.RUNNING
    # The answer to the first step is still to come.
    assert schedule(side, request, 10) == (2, [("advance", "r", 0, [[0]], [(2, 10)])])


def test_a_step_that_goes_back_starts_over():
    side, request = prefill(25)
    schedule(side, request, 10)
    request.num_in_flight_tokens = 0
    schedule(side, request, 10)
    # What it had loaded was not there.
    request.num_computed_tokens = request.num_in_flight_tokens = 0
    told = [("restart", "r"), ("advance", "r", 0, [[0]], [(3, 10)])]
    assert schedule(side, request, 10) == (3, told)


def test_where_workers_say_nothing_no_step_is_named():
    side, request = prefill(25, by_layer=False)
    assert schedule(side, request, 10) == (0, [])
    request.num_in_flight_tokens = 0
    assert schedule(side, request, 10) == (0, [("advance", "r", 10, [[0]], [])])


@pytest.mark.parametrize("kind, told", [("given_up", []), ("changed", [("revoke", "r")])])
def test_what_p_says_no_more_of_is_not_read(kind, told):
    """P would not even say that it starts over. What D has given up is over already."""
    side, request = prefill(25)

    def advance(*args, **options):
        raise AgentError("no", kind=kind)

    side.agent.advance = advance
    assert schedule(side, request, 10) == (0, told)
    assert side.growing == {}


def test_a_step_writes_what_it_computes_and_zeroes_and_copies():
    def writes(tokens=0, **output):
        output = {"num_scheduled_tokens": {}, "new_block_ids_to_zero": None} | output
        output = SimpleNamespace(total_num_scheduled_tokens=tokens, **output)
        connector = SimpleNamespace(scheduler=SimpleNamespace(orders=lambda _: Orders()))
        return FerryConnector.build_connector_meta(connector, output).writes

    assert writes(3) and writes(new_block_ids_to_zero=[7]) and writes(kv_cache_block_copies=["some"])
    # Not every vLLM speaks of copies.
    assert not writes() and not writes(new_block_ids_to_zero=[], kv_cache_block_copies=[])
