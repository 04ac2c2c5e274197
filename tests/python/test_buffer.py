"""Caches that no transport reaches: through a buffer in host memory, byte for byte, and in the right order.

The device is a stand-in: its memory is the pools that vLLM lays out, and nothing reads or writes it here but the
copying function that an engine gives to its connector.
"""

import random
from types import SimpleNamespace

import kvferry
import pytest
import torch
from kept import Topology as T
from kvferry.vllm import buffer
from kvferry.vllm.buffer import HostBuffer, Saves
from kvferry.vllm.messages import Orders
from kvferry.vllm.worker.side import WorkerSide
from moving import request
from pools import poison
from test_geometry import engine


def copy(source, destination, there, here, direction):
    """As vLLM's platforms do it: whole blocks, by their number in each tensor."""
    assert direction in ("h2d", "d2h") and source.keys() == destination.keys()
    for layer, tensor in source.items():
        destination[layer][here] = tensor[there]


def buffered(side):
    """The buffers of an engine's ranks, which are what the manifests describe now."""
    made = []
    for rank in side.ranks:
        beside = HostBuffer(rank.config, rank.kv_caches, pinned=False)
        beside.copy = copy
        for storage in beside.storages:
            storage.fill_(0xA5)
        rank.manifest = kvferry.vllm.manifest(
            side.config, rank.config, rank.kv_caches, **rank.facts, elsewhere=beside.addresses
        )
        made.append(beside)
    return made


@pytest.mark.parametrize(
    "model, p, d",
    [
        ("gqa", T(tp=2), T(tp=1, block=32)),
        ("sliding", T(), T(tp=2)),
        ("mla", T(tp=2, block=64), T()),
        ("mamba2", T(tp=2), T(tp=1)),
        ("several kinds", T(), T(tp=2)),
    ],
)
@pytest.mark.parametrize("sides", ["both", "P", "D"])
def test_every_byte_goes_through_the_buffer(model, p, d, sides):
    moved = request(engine("prefill", model, p), engine("decode", model, d), 50, random.Random(model))
    source, target = moved.source, moved.target
    there = buffered(source) if sides != "D" else []
    here = buffered(target) if sides != "P" else []
    for beside in there:
        beside.save(moved.tables)
    if there:
        # Nobody looks at the device.
        poison(source, 3)
    plans, _ = moved.move()
    moved.zero(plans)
    if here:
        assert all(torch.equal(one.memory, kept) for one, kept in zip(target.ranks, moved.before))
    for beside in here:
        beside.load(moved.own)
    moved.check(zeroed=True)


class OnDevice(torch.Tensor):
    """A tensor that says that it lies on a GPU."""

    device = torch.device("cuda", 1)


@pytest.mark.parametrize("model", ["gqa", "sliding", "mla, indexer", "mamba2", "several kinds"])
@pytest.mark.parametrize("pinned", [("P",), ("D",), ("P", "D")], ids="".join)
def test_a_cache_in_pinned_host_memory_is_a_region_like_others(model, pinned):
    """It needs no buffer beside it. The other side's may lie on a GPU, or not."""
    p, d = engine("prefill", model, T(tp=2)), engine("decode", model, T(block=32))
    moved = request(p, d, 50, random.Random(model))
    for side, name in ((p, "P"), (d, "D")):
        for rank in side.ranks:
            caches = rank.kv_caches
            if name not in pinned:
                caches = {layer: cache.as_subclass(OnDevice) for layer, cache in caches.items()}
            rank.manifest = kvferry.vllm.manifest(side.config, rank.config, caches, **rank.facts)
            (region,) = rank.manifest.to_dict()["regions"]
            assert region["place"] == ("host" if name in pinned else {"gpu": 1})
            assert (region["base"], region["bytes"]) == (rank.memory.data_ptr(), len(rank.memory))
    plans, _ = moved.move()
    moved.zero(plans)
    moved.check(zeroed=True)


def test_whoever_has_no_way_to_copy_is_told():
    (rank,) = engine("prefill", "gqa", T()).ranks
    with pytest.raises(RuntimeError, match="vLLM has not said how to copy blocks"):
        HostBuffer(rank.config, rank.kv_caches, pinned=False).save([[1]])


@pytest.mark.parametrize(
    "wanted, device, made",
    [("cpu", "xpu", True), ("cpu", "cpu", False), ("cuda", "cuda", False), ("xpu", "xpu", False)],
)
def test_when_there_is_a_buffer(wanted, device, made):
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_buffer_device=wanted),
        device_config=SimpleNamespace(device_type=device),
    )
    assert buffer.is_wanted(config) == made


def test_blocks_that_were_held_already_stay():
    """The buffer holds something else in their place."""
    assert buffer.landing([[7, 8, 9], [4]], [64, 0], [32, 16]) == [[9], [4]]


def test_what_a_step_has_written_is_saved_before_it_ends(monkeypatch):
    """And what was read is on the device before the engine hears of it."""
    happened = []
    (rank,) = engine("decode", "gqa", T()).ranks
    config = SimpleNamespace(
        speculative_config=None, parallel_config=SimpleNamespace(data_parallel_size=1)
    )
    worker = WorkerSide(config, rank.config, None)
    worker.buffer = HostBuffer(rank.config, rank.kv_caches, pinned=False)
    worker.storages = worker.buffer.storages
    worker.copy_with(lambda a, b, there, here, way: happened.append((way, sorted(set(here)))))

    class Agent:
        done = []

        def load(self, **load):
            happened.append(("read", load["request"]))

        def zero(self, ending):
            happened.append(("zero", ending.request))

        def endings(self, timeout):
            done, self.done = self.done, []
            return done

    worker.agent = Agent()
    monkeypatch.setattr("kvferry.vllm.metrics.ended", lambda ending: {})
    worker.obey(Orders(loads=[{"request": "r", "ticket": {}}], lands={"r": [[5, 6]]}))
    worker.written(Orders(saves=[[[2, 3]]]))
    assert happened == [("read", "r"), ("d2h", [2, 3])]
    assert worker.results().finished_recving == set()
    worker.agent.done = [
        SimpleNamespace(request="r", outcome="done", seconds={"wire": 0.0}, quarantined=False)
    ]
    happened.clear()
    assert worker.results().finished_recving == {"r"}
    assert happened == [("zero", "r"), ("h2d", [5, 6])]
    assert not worker.lands


def test_which_blocks_a_step_writes():
    """The first time all of them, because some may have been found in P's own cache; then those that the step
    writes to; and all again when the request is started over."""
    side = engine("prefill", "mamba2", T())
    (rank,) = side.ranks
    groups = range(len(rank.config.kv_cache_groups))
    held = {"ids": tuple([1, 2, 3, 4] for _ in groups)}
    managers = [SimpleNamespace(block_size=side.block_tokens(group) or 16) for group in groups]
    manager = SimpleNamespace(
        get_block_ids=lambda name: held["ids"],
        coordinator=SimpleNamespace(single_type_managers=managers),
    )
    request = SimpleNamespace(request_id="r", num_preemptions=0, num_computed_tokens=0)
    saves = Saves(rank.config)
    size = next(it.block_size for it, group in zip(managers, groups) if side.block_tokens(group))

    def step(tokens):
        (tables,) = saves.of_step({"r": request}, {"r": tokens, "other": 5}, manager)
        request.num_computed_tokens += tokens
        return [
            table for table, group in zip(tables, groups) if side.block_tokens(group) is not None
        ][0], [table for table, group in zip(tables, groups) if side.block_tokens(group) is None][0]

    assert step(2 * size + 1) == ([1, 2, 3, 4], [1, 2, 3, 4])
    assert step(3) == ([3, 4], [1, 2, 3, 4])
    assert step(size) == ([3, 4], [1, 2, 3, 4])
    assert step(1) == ([4], [1, 2, 3, 4])
    request.num_preemptions, request.num_computed_tokens = 1, 0
    assert step(5)[0] == [1, 2, 3, 4]
    assert saves.of_step({}, {"r": 1}, manager) == []
