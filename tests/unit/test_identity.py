"""What makes equal shapes mean equal things, in words of no engine."""

import json
import shutil
import struct
from types import SimpleNamespace

import pytest
from kvferry import _identity
from kvferry._first import First
from kvferry._identity import ENGINES, SHOWN, identity, positions, weights
from kvferry._origin import room_name

YARN = {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # As vLLM and SGLang rewrite what a configuration says.
        ({"rope_type": "default", "rope_theta": 1e6}, {"rope_theta": 1000000, "rope_type": "default", "type": "default"}),
        ({"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 1.0, "factor": None}),
        ({"rope_type": "yarn", **YARN}, {"rope_type": "deepseek_yarn", "type": "yarn", **YARN, "beta_fast": 32}),
        (
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}},
            {"sliding_attention": {"rope_theta": 10000, "type": "default"}, "full_attention": {"rope_theta": 1e6}},
        ),
    ],
)
def test_positions_that_mean_the_same_are_the_same(one, other):
    assert positions(one) == positions(other)


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 1e5},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.5},
        {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0},
        {"rope_theta": 1e6, "mrope_section": [1, 2]},
        {"rope_theta": 1e6, "truncate": True},
    ],
)
def test_positions_that_differ_are_told_apart(other):
    assert positions({"rope_theta": 1e6}) != positions(other)


def model(family, **text):
    return SimpleNamespace(hf_text_config=SimpleNamespace(**text), hf_config=SimpleNamespace(model_type=family))


def test_a_kind_of_engine_matters_where_no_other_was_shown():
    def said(engine, family, **role):
        return identity(engine, "m", model(family), "bf16", **role).get("engine", "")

    gives, takes = {"takes": False}, {"gives": False}
    for family, sources in SHOWN.items():
        for giver, taker in (ENGINES, ENGINES[::-1]):
            one, other = said(giver, family, **gives), said(taker, family, **takes)
            # Whoever does both is an equal of either.
            assert (giver in sources) == (not one or not other) == (not one or not said(taker, family))
    assert [said(engine, "mllama")[:8] for engine in ENGINES] == ["SGLang (", "vLLM (of"]
    # The reader's word alone counts.
    assert not said("SGLang", "mllama", **takes, tries_others=True)
    assert said("SGLang", "mllama", **gives, tries_others=True)


def save(path, numbers, header=None):
    header = json.dumps(header or {"a": {"dtype": "U8", "shape": [len(numbers)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(numbers))


def test_two_models_of_one_configuration_are_told_apart(tmp_path):
    numbers = bytearray(range(256)) * 4096
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for folder in (one, other):
        folder.mkdir()
        save(folder / "model-1.safetensors", numbers)
        save(folder / "model-2.safetensors", numbers[:7])
    shutil.copytree(one, same)
    assert weights(str(one)) == weights(str(same)) == weights(str(other))
    # A training changes numbers everywhere, and a few of them are looked at.
    save(other / "model-1.safetensors", bytearray((it + (at % 1000 == 0)) % 256 for at, it in enumerate(numbers)))
    assert weights(str(one)) != weights(str(other))
    save(same / "model-2.safetensors", numbers[:7], {"b": {}})
    assert weights(str(one)) != weights(str(same))
    # Half a file, a file of another format, and none.
    (other / "model-1.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    assert weights(str(other)) is None
    (other / "model-1.safetensors").write_bytes(b"123")
    assert weights(str(other)) is None
    assert weights(str(tmp_path)) is None


def test_a_model_that_is_no_folder_here_is_known_by_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(_identity, "_folder", lambda *_: tmp_path / "nowhere")
    assert weights("owner/name") is None


def test_a_first_token_is_read_as_it_was_written():
    first = First(17, "SGLang", True, {"output_ids": ["torch.int32", "11000000"]})
    read = First.read(first.write())
    assert (read.token, read.by, read.greedy, dict(read.row)) == (17, "SGLang", True, {"output_ids": ("torch.int32", "11000000")})


@pytest.mark.parametrize(
    "enclosed",
    [
        b"",
        b"{}",
        b"[1]",
        b"\xff",
        b"[" * 20000,
        b'{"token": -1, "by": "x", "greedy": true, "row": {}}',
        b'{"token": true, "by": "x", "greedy": true, "row": {}}',
        b'{"token": 1, "by": "x", "greedy": 1, "row": {}}',
        b'{"token": 1, "by": "x", "greedy": true, "row": {"a": ["k", "0g"]}}',
        b'{"token": 1, "by": "x", "greedy": true, "row": {"a": 1}}',
        b'{"token": 1, "by": "x", "greedy": true, "row": []}',
    ],
)
def test_what_is_no_first_token_is_refused(enclosed):
    with pytest.raises(ValueError, match="is no first token"):
        First.read(enclosed)


def test_rooms_have_names_of_their_own():
    names = {room_name(room, made, last) for room in (1, 2) for made in (b"a", b"b") for last in (False, True)}
    assert len(names) == 8
