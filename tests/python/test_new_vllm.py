"""The page about a new vLLM names what is new, what moved and what fails, and nothing else."""

import importlib.util
import json
import sys
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
found = importlib.util.spec_from_file_location("new_vllm", TOOLS / "new-vllm.py")
new_vllm = importlib.util.module_from_spec(found)
found.loader.exec_module(new_vllm)

ROPE = "rope_quant_insert, Blackwell: latent as fp8_ds_mla 528"
PASSED = '<testsuite><testcase name="a_pair" time="2"/></testsuite>'
FAILED = PASSED.replace("/></", "><failure message=\"AssertionError: 31 tokens\"/></testcase></")


@cache
def facts():
    return new_vllm.facts()


@pytest.fixture
def page(tmp_path):
    def page(change=lambda facts: None, pairs=PASSED):
        new = deepcopy(facts())
        change(new)
        for name, what in (("old.json", json.dumps(facts())), ("new.json", json.dumps(new))):
            (tmp_path / name).write_text(what)
        for name, what in (("rules.xml", PASSED), ("pairs.xml", pairs)):
            (tmp_path / name).write_text(what)
        return new_vllm.page(tmp_path)

    return page


def test_this_vllm_beside_itself_is_no_news(page):
    text, works = page()
    assert works and text.split("## What is new\n")[1].startswith("\n## What moved\n")
    moved = ("where they are not overridden", "takes other arguments", "To be read", "has all that ran)")
    for title in (*moved, "until it is", "does not start", "not where it was", "Failed"):
        assert f"{title}: nothing." in text
    # A hook that is left as it is, with what it does then.
    assert "- `get_finished_count`: `()`, `return None`\n" in text


@pytest.mark.parametrize(
    ("change", "says", "fails"),
    [
        (lambda it: it["backends"].append("NEW_MLA"), "- Attention back ends: new `NEW_MLA`\n", False),
        (lambda it: it["fields"]["MambaSpec"].remove("shapes"), "- Fields of `MambaSpec`: gone `shapes`\n", False),
        (lambda it: it["hooks"].update(new_hook=["it", "return 1"]), "- `new_hook` (new): `(it)`, `return 1`\n", False),
        (lambda it: it["hooks"]["role"].__setitem__(1, "other"), "`return self._role`; now `()`, `other`\n", False),
        (lambda it: it["touched"].update({"vllm.v1.request Request.get_skip_reading_prefix_cache": "(self, x)"}),
         "`(self) -> bool`; now `(self, x)`\n", False),
        (lambda it: it["fingerprints"].update({ROPE: "0 elsewhere"}), "512 from token to token`; now `0 elsewhere`\n", False),
        (lambda it: it["unknown"].append("the back end NEW"), "until it is:\n- the back end NEW\n", False),
        (lambda it: it["differences"].append("vLLM has no hook it"), "does not start:\n- vLLM has no hook it\n", True),
        (lambda it: it["missing"].append("vllm.v1 Gone"), "not where it was:\n- `vllm.v1 Gone`\n", True),
        (lambda it: it.update(vllm="0.99.0+cpu.over.0.32.0"), "There is no build of it for CPUs yet", False),
    ],
)  # fmt: skip
def test_what_changes_is_said(page, change, says, fails):
    assert says not in page()[0]
    text, works = page(change)
    assert says in text and works is not fails


def test_what_fails_is_said(page, tmp_path):
    text, works = page(pairs=FAILED)
    assert "0 of 1 as they should be, in 2 s. Failed:\n- `a_pair`: AssertionError: 31 tokens\n" in text and not works
    # None of them ran.
    assert not page(pairs="<testsuite/>")[1]
    (tmp_path / "rules.xml").unlink()
    assert new_vllm.ran(tmp_path / "rules.xml", "Rules") == ("\nRules: **could not run**.\n", False)


def test_a_kernel_is_another_with_other_code_and_not_with_other_comments(tmp_path, monkeypatch, page):
    file = tmp_path / "models/it.py"
    file.parent.mkdir()
    monkeypatch.setattr(new_vllm.source, "SOURCE", tmp_path)

    def digest(text):
        file.write_text(f"@triton.jit\ndef store_cache(at):\n{text}\n\ndef store(at): ...\n")
        ((name, made),) = new_vllm.writers()
        assert name == "models/it.py store_cache"
        return made

    before = digest("    return at * 512")
    assert digest('    """Where."""\n    # Where.\n    return at * 512') == before
    assert digest("    return at * 528") != before
    assert facts()["writers"]
