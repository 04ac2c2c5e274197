"""The facts that the package gets from Rust."""

import pytest
from kvferry._core import facts, solve, states
from kvferry.vllm.describe import specs

BF16, F32 = ("bf16", 2), ("f32", 4)
MAMBA2 = {"inner": 32, "heads": 8, "head": 4, "groups": 2, "state": 16, "columns": 3}


def held(rank, ranks):
    conv, ssm = states("mamba2", MAMBA2, {"model": BF16, "state": F32}, rank=rank, ranks=ranks)
    assert (conv["packing"], conv["spare"], ssm["packing"]) == ("convolution", True, "plain")
    return {state["name"]: state["bounds"] for state in (*conv["states"], *ssm["states"])}


def test_ranks_share_heads_and_replicate_groups():
    assert held(0, 1) == {
        "conv.x": [[0, 32], [0, 3]],
        "conv.b": [[0, 32], [0, 3]],
        "conv.c": [[0, 32], [0, 3]],
        "ssm": [[0, 8], [0, 4], [0, 16]],
    }
    assert held(3, 4) == {
        "conv.x": [[24, 32], [0, 3]],
        "conv.b": [[16, 32], [0, 3]],
        "conv.c": [[16, 32], [0, 3]],
        "ssm": [[6, 8], [0, 4], [0, 16]],
    }


def test_a_kind_says_what_does_not_fit():
    formats = {"model": BF16, "state": F32}
    for kind, sizes, problem in [
        ("mamba3", MAMBA2, "no kind of states 'mamba3' .*did you mean 'mamba"),
        ("mamba2", {**MAMBA2, "inner": 33}, "inner is 33, but should equal heads \\* head, which is 32"),
        ("mamba2", {**MAMBA2, "depth": 1}, "it has no size 'depth'"),
        ("mamba2", {**MAMBA2, "groups": 0}, "'groups' is 0"),
        ("mamba2", {key: MAMBA2[key] for key in ("inner", "heads", "head")}, "'columns' is not given"),
        ("mamba2", {**MAMBA2, "state": 1 << 43}, "more than"),
    ]:
        with pytest.raises(ValueError, match=problem):
            states(kind, sizes, formats, rank=0, ranks=2)
    with pytest.raises(ValueError, match="format 'state' is not given"):
        states("mamba2", MAMBA2, {"model": BF16}, rank=0, ranks=2)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        states("mamba2", MAMBA2, formats, rank=2, ranks=2)


def test_sizes_follow_from_the_shapes_of_a_rank():
    half = [[16 + 2 * 16, 3], [4, 4, 16]]
    assert solve("mamba2", half, {"groups": 2}, ranks=2) == MAMBA2
    assert solve("mamba2", half, {"groups": 1}, ranks=2) == {**MAMBA2, "groups": 1}
    # One group on each of two ranks: two, or twice the same one.
    assert solve("mamba2", half, {}, ranks=2) == {
        size: value for size, value in MAMBA2.items() if size != "groups"
    }
    assert solve("mamba2", [[32 + 2 * 32, 3], [8, 4, 16]], {}, ranks=1) == MAMBA2
    # Queries, keys and values of a delta net: heads that ranks always divide.
    net = {"keys": 2, "values": 4, "key": 6, "value": 8, "columns": 3}
    assert solve("gdn", [[6 + 6 + 2 * 8, 3], [2, 8, 6]], {}, ranks=2) == net


def test_a_kind_that_cannot_be_solved_is_refused_by_name():
    for kind, shapes, told, problem in [
        ("echo", [[44, 3], [2, 5, 16]], {}, "no kind of states 'echo'"),
        ("mamba2", [[48, 3], [4, 4, 16]], {"groups": 5}, "'mamba2' .*of conv.x .*does not fit the sizes"),
        ("gdn", [[6 + 6 + 2 * 8 + 1, 3], [2, 8, 6]], {}, "'gdn' .*\\[29, 3\\] of conv.q \\+ conv.k"),
        ("gdn", [[28, 3]], {}, "'gdn' .*1 shapes, but it has 2 tensors"),
        ("gdn", [[28, 3], [2, 8]], {}, "'gdn' .*should have 3 axes"),
        ("gdn", [[28, 3], [2, 8, 6]], {"heads": 1}, "'gdn' .*no size 'heads'"),
    ]:
        with pytest.raises(ValueError, match=problem):
            solve(kind, shapes, told, ranks=2)


def test_vllms_names_are_mapped_to_kinds_that_exist():
    kinds = facts()["kinds"]
    recurrent = {name for name, kind in kinds.items() if kind["sort"] == "recurrent"}
    # Kimi's delta nets are a case of the others; rings have a class of their own.
    assert set(specs.RECURRENT.values()) == recurrent - {"kda", "ring"}
    assert specs.FORMATS["torch.bfloat16"] == BF16
    assert specs.FORMATS["torch.float8_e4m3fn"] == ("fp8_e4m3", 1)
