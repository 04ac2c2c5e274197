"""The package's own surface: what goes in, what comes out, and what is refused."""

import ctypes
import pickle
import threading

import kvferry
import numpy as np
import pytest
from handmade import HEADS, draft


def rank(*args, **facts):
    return kvferry.Manifest(draft(*args, **facts))


def test_manifests_round_trip():
    manifest = rank("prefill", (0, 4), 4, 0x1000)
    assert manifest == kvferry.Manifest.from_json(manifest.to_json())
    assert manifest == kvferry.Manifest.from_bytes(manifest.to_bytes())
    assert manifest == kvferry.Manifest(manifest.to_dict())
    assert manifest == pickle.loads(pickle.dumps(manifest))
    assert manifest != rank("decode", (0, 4), 4, 0x1000)
    assert (manifest.engine, manifest.rank, manifest.label) == ("prefill", 0, "tp0")
    assert manifest.identity == {"model": "example"}
    assert repr(manifest) == "<kvferry.Manifest prefill tp0: 1 groups, 1 pieces>"


def test_a_draft_that_makes_no_sense_is_refused_by_name():
    wrong = draft("prefill", (0, 4), 4, 0x1000)
    wrong["groups"][0]["pieces"][0]["bounds"] = [[2, 5]]
    with pytest.raises(kvferry.ManifestError, match="layers.0/kv.*2..5 of axis 'head'") as caught:
        kvferry.Manifest(wrong)
    assert caught.value.kind == "box_outside_state"
    wrong = draft("prefill", (0, 4), 4, 0x1000) | {"colour": "red"}
    with pytest.raises(kvferry.ManifestError, match="unknown field `colour`") as caught:
        kvferry.Manifest(wrong)
    assert caught.value.kind == "decode"


@pytest.mark.parametrize("data", [b"", b"KVFM", b"\x00" * 100, b"KVFM\x02\x00" + b"\xff" * 50])
def test_bytes_that_are_no_manifest(data):
    with pytest.raises(kvferry.ManifestError):
        kvferry.Manifest.from_bytes(data)


def test_json_that_is_no_manifest():
    for text in ("", "{}", "[]", '{"kvferry_manifest": 7}'):
        with pytest.raises(kvferry.ManifestError):
            kvferry.Manifest.from_json(text)


def test_copies_on_real_memory():
    # Prefill holds all heads in blocks of 4 tokens; two decode ranks two heads each, in blocks of 16.
    source = np.arange(10 * 4 * HEADS, dtype=np.uint64)
    prefill = rank("prefill", (0, 4), 4, source.ctypes.data)
    tokens = 6
    for heads in ((0, 2), (2, 4)):
        target = np.full(10 * 16 * 2, 999, dtype=np.uint64)
        decode = rank("decode", heads, 16, target.ctypes.data)
        plan = kvferry.compile(decode, [prefill])
        request = dict(tokens=tokens, source_blocks=[[7, 2]], destination_blocks=[[3]])
        (copies,) = plan.copies(**request)
        assert copies.dtype == np.uint64 and copies.shape == (6, 3)
        for start, end, length in copies.tolist():
            ctypes.memmove(end, start, length)
        expected = np.full(10 * 16 * 2, 999, dtype=np.uint64)
        for token in range(tokens):
            block = [7, 2][token // 4]
            for i, head in enumerate(range(*heads)):
                expected[(3 * 16 + token) * 2 + i] = (block * 4 + token % 4) * HEADS + head
        assert (target == expected).all()
        rest = plan.rest(**request)
        assert rest.tolist() == [[target.ctypes.data + (3 * 16 + 6) * 16, 10 * 16]]
        (summary,) = plan.summary(**request)
        assert (summary.bytes, summary.copies) == (6 * 16, 6)
        assert (summary.shortest, summary.longest, summary.mean) == (16, 16, 16.0)


def test_cached_prefixes_clipped_tables_and_arrays():
    prefill, decode = rank("p", (0, 4), 4, 0x1000), rank("d", (0, 4), 4, 0x9000)
    plan = kvferry.compile(decode, [prefill])
    assert plan.sources == 1 and plan.reads(0) and not plan.reads(1)
    assert repr(plan) == "<kvferry.Plan reading 1 of 1 source ranks>"
    row, block = 32, 128
    whole = plan.copies(tokens=8, source_blocks=[[5, 6]], destination_blocks=[[1, 2]])
    assert whole[0].tolist() == [[0x1000 + 5 * block, 0x9000 + block, 2 * block]]
    part = plan.copies(
        tokens=8,
        cached=[5],
        source_blocks=[np.array([6])],
        source_first=[1],
        destination_blocks=[np.array([0, 2], dtype=np.int32)],
    )
    assert part[0].tolist() == [[0x1000 + 6 * block + row, 0x9000 + 2 * block + row, 3 * row]]
    held = plan.copies(tokens=8, cached=[8], source_blocks=[[]], destination_blocks=[[]])
    assert held[0].shape == (0, 3)
    assert plan.copies(tokens=0, source_blocks=[[]], destination_blocks=[[]])[0].shape == (0, 3)


@pytest.mark.parametrize(
    "request_, kind",
    [
        (dict(tokens=8, source_blocks=[[5]], destination_blocks=[[1, 2]]), "table_too_short"),
        (dict(tokens=8, source_blocks=[[5, 0]], destination_blocks=[[1, 2]]), "dead_block"),
        (dict(tokens=8, source_blocks=[[5, 99]], destination_blocks=[[1, 2]]), "no_such_block"),
        (dict(tokens=8, source_blocks=[[5, 6]], destination_blocks=[[1, 1]]), "block_twice"),
        (dict(tokens=8, source_blocks=[], destination_blocks=[[1, 2]]), "table_count"),
        (
            dict(tokens=8, cached=[9], source_blocks=[[5, 6]], destination_blocks=[[1, 2]]),
            "cached_beyond_end",
        ),
        (
            dict(tokens=8, cached=[1, 1], source_blocks=[[5, 6]], destination_blocks=[[1, 2]]),
            "cached_count",
        ),
    ],
)
def test_requests_that_do_not_fit(request_, kind):
    plan = kvferry.compile(rank("d", (0, 4), 4, 0x9000), [rank("p", (0, 4), 4, 0x1000)])
    for method in (plan.copies, plan.rest, plan.summary):
        with pytest.raises(kvferry.RequestError) as caught:
            method(**request_)
        assert caught.value.kind == kind


def test_keywords_are_checked():
    plan = kvferry.compile(rank("d", (0, 4), 4, 0x9000), [rank("p", (0, 4), 4, 0x1000)])
    good = dict(tokens=4, source_blocks=[[5]], destination_blocks=[[1]])
    with pytest.raises(TypeError, match="no keyword 'blocks'; the keywords are tokens"):
        plan.copies(**good, blocks=1)
    with pytest.raises(TypeError, match="'tokens' is missing"):
        plan.copies(source_blocks=[[5]], destination_blocks=[[1]])
    with pytest.raises(TypeError, match="source_blocks: "):
        plan.copies(**good | {"source_blocks": [5]})
    with pytest.raises(OverflowError, match="tokens: "):
        plan.copies(**good | {"tokens": -1})
    with pytest.raises(ValueError, match="source_first has 2 entries, but source_blocks has 1"):
        plan.copies(**good, source_first=[0, 0])


def test_a_pair_that_does_not_fit_says_why_in_fields():
    decode = rank("d", (0, 4), 4, 0x9000)
    other = draft("p", (0, 4), 4, 0x1000)
    other["kinds"][0]["format"]["name"] = "other"
    with pytest.raises(kvferry.Incompatible, match="same cache data type") as caught:
        kvferry.compile(decode, [kvferry.Manifest(other)])
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, kvferry.Incompatible) and str(error) == str(caught.value)
    assert (error.kind, error.state, error.fact) == ("format", "layers.0/kv", None)
    assert error.source_value == "other (8 bytes)"
    assert error.destination_value == "opaque (8 bytes)"
    assert error.source_rank == "p tp0"

    other = rank("p", (0, 4), 4, 0x1000, identity={"model": "another"})
    with pytest.raises(kvferry.Incompatible) as caught:
        kvferry.compile(decode, [other])
    error = caught.value
    assert (error.kind, error.fact, error.state) == ("identity", "model", None)
    assert (error.source_value, error.destination_value) == ("another", "example")

    with pytest.raises(kvferry.Incompatible) as caught:
        kvferry.compile(decode, [rank("p", (0, 3), 4, 0x1000)])
    assert (caught.value.kind, caught.value.state) == ("uncovered", "layers.0/kv")
    with pytest.raises(kvferry.Incompatible) as caught:
        kvferry.compile(decode, [])
    assert caught.value.kind == "missing"
    assert issubclass(kvferry.Incompatible, kvferry.Error)


def test_other_threads_run_while_a_plan_works():
    # A list of two million copies takes the compiled part far longer than this thread's switch
    # interval; a thread that only counts must get its turns meanwhile.
    blocks = 500_001
    prefill = rank("p", (0, 4), 4, 1 << 40, blocks)
    decode = rank("d", (0, 2), 4, 1 << 50, blocks)
    plan = kvferry.compile(decode, [prefill])
    ids = np.arange(1, blocks)
    request = dict(tokens=4 * len(ids), source_blocks=[ids], destination_blocks=[ids])
    counts = []
    stop = threading.Event()
    inside = threading.Event()

    def count():
        while not stop.is_set():
            if inside.is_set():
                counts.append(1)

    thread = threading.Thread(target=count)
    thread.start()
    inside.set()
    summary = plan.summary(**request)
    inside.clear()
    stop.set()
    thread.join()
    assert summary[0].copies == 2_000_000
    assert counts
