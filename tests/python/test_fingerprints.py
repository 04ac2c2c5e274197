"""The table of fingerprints that ships, and the page about it, are those of the versions that they name."""

from stand_in import Backend  # noqa: F401  first: it sets the environment up

# isort: split
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from kvferry.vllm.kernels import known

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))
found = importlib.util.spec_from_file_location("fingerprints", TOOLS / "fingerprints.py")
fingerprints = importlib.util.module_from_spec(found)
found.loader.exec_module(fingerprints)

TOLD = json.loads(fingerprints.TABLE.read_text())


def test_the_page_is_that_of_the_table():
    assert fingerprints.PAGE.read_text() == fingerprints.page(TOLD), "run tools/fingerprints.sh"


@pytest.mark.parametrize("version", fingerprints.VERSIONS)
def test_the_code_is_that_of_the_versions(version):
    assert fingerprints.codes(version) == TOLD["code"][version], "run tools/fingerprints.sh"


def test_what_is_written_is_what_the_table_says(monkeypatch):
    """Of one kernel: the input is the same for all."""
    first = next(fingerprints.cases("0.33.0"))
    monkeypatch.setattr(fingerprints, "cases", lambda version: iter([first]))
    rows = list(fingerprints.rows("0.33.0", "0.33.0"))
    assert len(rows) == 2 and all(row in TOLD["rows"] for row in rows)


def test_every_function_that_stands_in_is_on_the_page():
    """By its code, or because it is asked."""
    shown = {how[1] for _, how, _ in fingerprints.KINDS if isinstance(how, tuple)}
    shown |= {it["writer"] for it in TOLD["rows"]}
    assert shown == {name for _, name in {*known.BY_LAYER.values(), *known.FUSED.values()}}


def test_a_kernel_that_was_not_called_is_looked_up_by_its_code():
    for row in TOLD["rows"]:
        assert known.table()[f"{row['code']} {row['format']} {row['state']}"] == row["bytes"]
