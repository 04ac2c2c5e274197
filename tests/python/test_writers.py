"""A name means what the code that writes it makes of it: that code's fingerprint, by what it writes or by its text."""

from stand_in import Backend  # noqa: F401  first: it sets the environment up

# isort: split
import kvferry
import pytest
import torch
from kept import Attention, Topology, linear
from kvferry.vllm import versions
from kvferry.vllm.kernels import asking, known
from kvferry.vllm.kernels.code import Code
from test_probe import KEY, Layer, StateLayer, by_turns, describe, side_by_side
from vllm.v1.kv_cache_interface import KVQuantMode

EIGHT_BITS = {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR, "dtype": torch.uint8}


def writers(manifest):
    """What is said of each state's writer."""
    facts = manifest.to_dict()
    pieces = [piece for group in facts["groups"] for piece in group["pieces"]]
    said = {piece["state"]: facts.get("writers", {}).get(str(piece["kind"])) for piece in pieces}
    return {state: it for state, it in said.items() if it is not None}


def eight_bits(heads=4, store=side_by_side, **changes):
    return describe([Attention(heads)], Layer(store, **changes), quantised=EIGHT_BITS)


def test_plain_numbers_that_were_asked_need_no_word():
    assert writers(describe([Attention(4)], Layer(side_by_side))) == {}


def test_what_is_written_is_the_same_whatever_the_block_and_the_heads():
    one, other = writers(eight_bits(4)), writers(eight_bits(2))
    assert set(one) == {"layers.0/k", "layers.0/v"}
    assert {state: it["bytes"] for state, it in one.items()} == {state: it["bytes"] for state, it in other.items()}
    assert one["layers.0/k"]["name"].startswith("Layer.do_kv_cache_update of vLLM ")


class Halved(Layer):
    """Keeps other numbers in the same places."""

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        super().do_kv_cache_update(layer, key / 2, value, cache, slots)


def test_other_numbers_in_the_same_places_are_refused_with_both_writers():
    right, wrong = eight_bits(), describe([Attention(4)], Halved(side_by_side), quantised=EIGHT_BITS)
    kvferry.compile(right, [eight_bits()])
    with pytest.raises(kvferry.Incompatible, match="Start both sides with the same version and settings") as caught:
        kvferry.compile(right, [wrong])
    assert caught.value.kind == "writer" and caught.value.state == "layers.0/k"
    assert caught.value.source_value != caught.value.destination_value


def states(monkeypatch, version="0.32.0", card="CUDA cards of capability 9.x", switch=None):
    """Of linear attention, whose kernels cannot be called alone."""
    monkeypatch.setattr(versions, "build", lambda: version)
    monkeypatch.setattr(known, "card", lambda: card)
    monkeypatch.setattr(known, "SWITCHES", ("KVFERRY_TEST_SWITCH",))
    monkeypatch.delenv("KVFERRY_TEST_SWITCH", raising=False)
    if switch is not None:
        monkeypatch.setenv("KVFERRY_TEST_SWITCH", switch)
    kept = linear()
    return describe([kept], StateLayer("", name="LINEAR_ATTN", spec=kept.spec(Topology())))


@pytest.mark.parametrize(
    "other",
    [{"version": "0.33.0"}, {"version": "0.32.0 with 3 files of another build (12345678)"},
     {"card": "CUDA cards of capability 10.x"}, {"switch": "1"}],
)  # fmt: skip
def test_what_nobody_could_ask_is_served_between_equal_versions_cards_and_switches_alone(other, monkeypatch):
    one = states(monkeypatch)
    ((state, it),) = writers(one).items()
    assert it["bytes"] is None and "vLLM 0.32.0, LINEAR_ATTN, CUDA cards of capability 9.x" in it["code"]
    kvferry.compile(one, [states(monkeypatch)])
    with pytest.raises(kvferry.Incompatible, match="the kernels of LINEAR_ATTN") as caught:
        kvferry.compile(one, [states(monkeypatch, **other)])
    assert (caught.value.kind, caught.value.state) == ("writer", state)


def test_a_manifest_that_says_nothing_fits_what_was_asked_and_nothing_else(monkeypatch):
    def silent(manifest):
        facts = manifest.to_dict()
        facts.pop("writers")
        return kvferry.Manifest(facts)

    for made, fits in ((eight_bits(), True), (states(monkeypatch), False)):
        for pair in ((made, silent(made)), (silent(made), made)):
            if fits:
                kvferry.compile(pair[0], [pair[1]])
                continue
            with pytest.raises(kvferry.Incompatible, match="by what it does not say"):
                kvferry.compile(pair[0], [pair[1]])


def test_a_kernel_that_may_not_be_called_is_known_by_its_code(monkeypatch):
    asked = eight_bits()
    monkeypatch.setenv(asking.SWITCH, "off")
    off = eight_bits()
    assert {it["bytes"] for it in writers(off).values()} == {None}
    # Of one version and card.
    kvferry.compile(off, [asked])
    monkeypatch.setattr(versions, "build", lambda: "0.33.0")
    with pytest.raises(kvferry.Incompatible, match="could not be called"):
        kvferry.compile(eight_bits(), [asked])


def test_a_plug_in_s_back_end_that_replaces_a_writer_is_asked_itself():
    """It has a known name, and keeps keys and values by turns."""
    with pytest.raises(kvferry.vllm.Unsupported, match="keeps its cache otherwise than it is described"):
        eight_bits(store=by_turns)


class TestHalfUpgraded:
    """What the installation wrote down of its files, and what is there."""

    @pytest.fixture
    def site(self, tmp_path):
        files = {"vllm/__init__.py": "1", "vllm/_C.abi3.so": "compiled", "vllm/data.json": "{}", "other/it.py": "2"}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        record = tmp_path / "vllm-0.33.0.dist-info/RECORD"
        record.parent.mkdir()
        record.write_text("".join(f"{name},sha256=x,{len(text)}\n" for name, text in files.items()) + f"{record},,\n")
        return tmp_path

    def test_what_was_installed_is_of_one_build(self, site):
        assert versions.foreign(site) == []
        # Another's, and what is no code.
        (site / "other/it.py").write_text("another")
        (site / "vllm/data.json").write_text("another")
        assert versions.foreign(site) == []

    def test_another_file_is_named(self, site):
        (site / "vllm/_C.abi3.so").write_text("compiled of another version")
        assert versions.foreign(site) == ["vllm/_C.abi3.so 27"]
        (site / "vllm/_C.abi3.so").unlink()
        assert versions.foreign(site) == ["vllm/_C.abi3.so None"]

    def test_what_was_built_where_it_lies_wrote_nothing_down(self, site):
        (site / "vllm-0.33.0.dist-info/RECORD").write_text("vllm.pth,,\n")
        (site / "vllm/_C.abi3.so").write_text("another")
        assert versions.foreign(site) == []

    def test_this_vllm_is_of_one_build(self):
        assert versions.build() == versions.running()


class TestCode:
    """The code of a writer and of all that it calls: its names and comments are nothing of it."""

    TEXT = '''
import torch
from .helpers import rounded as near
from vllm.platforms import current_platform
STRIDE = 528

def unused():
    return 1

def scale(number: int, by=2):
    """Makes it larger."""
    return near(number * by)

def store(page, slot):  # into a page
    at = page + slot * STRIDE
    return scale(number=at)
'''
    HELPERS = "def rounded(it):\n    return it // 16\n"

    def digest(self, folder, text=TEXT, helpers=HELPERS):
        package = folder / f"{len(list(folder.iterdir()))}"
        package.mkdir()
        (package / "writer.py").write_text(text)
        (package / "helpers.py").write_text(helpers)
        return Code(package).digest("writer", "store")

    @pytest.mark.parametrize(
        "before, after",
        [("at", "place"), ("number", "it"), ("scale", "larger"), ('"""Makes it larger."""', '"""Larger."""'),
         ("  # into a page", ""), (": int", ""), ("return 1", "return 2"), ("near", "even"), ("STRIDE", "ROW")],
    )  # fmt: skip
    def test_names_and_comments_change_nothing(self, tmp_path, before, after):
        assert before in self.TEXT
        import re

        whole = rf"\b{before}\b" if before.isidentifier() else re.escape(before)
        assert self.digest(tmp_path) == self.digest(tmp_path, re.sub(whole, after, self.TEXT)) != ""

    @pytest.mark.parametrize("before, after", [("528", "544"), ("slot * STRIDE", "STRIDE * slot"), ("by=2", "by=4")])
    def test_what_it_does_is_all_of_it(self, tmp_path, before, after):
        assert self.digest(tmp_path) != self.digest(tmp_path, self.TEXT.replace(before, after))

    def test_what_it_calls_belongs_to_it(self, tmp_path):
        assert self.digest(tmp_path) != self.digest(tmp_path, helpers=self.HELPERS.replace("16", "32"))

    def test_a_function_that_is_not_there_has_none(self, tmp_path):
        assert Code(tmp_path).digest("writer", "store") == ""


def test_the_functions_that_are_known_by_their_code_are_there():
    for writer in {*known.BY_LAYER.values(), *known.FUSED.values()}:
        assert known._code().digest(*writer), writer
