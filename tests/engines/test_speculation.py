"""Speculation on one side only, or of another kind there: a guess may be worse, an answer is never another."""

import random

import pytest
from drafts import save_draft, save_eagle
from exact import check, hand_over, nothing_left, prompts
from heard import listen, said
from serving import Server
from tiny import save_model

pytestmark = pytest.mark.more

LENGTHS = (1, 2, 31, 33, 100, 200)
OWN = {"extra": {"draft": "own"}}


def speculative(method, model=None, count=3):
    said = {"method": method, "num_speculative_tokens": count}
    if model is None:
        said |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    else:
        said |= {"model": str(model)}
    return {"speculative_config": said}


@pytest.fixture(scope="module")
def engines(folder):
    """Engines of one model, by how they guess."""
    model = save_model("qwen3", folder / "guessed")
    draft, other = (save_draft(folder / f"draft-{seed}", seed) for seed in (1, 2))
    head, another = (save_eagle(folder / f"head-{seed}", seed) for seed in (1, 2))
    ways = {
        "not at all": {},
        "looked up": speculative("ngram"),
        "a draft": speculative("draft_model", draft),
        "the same draft": speculative("draft_model", draft),
        "a draft of its own": speculative("draft_model", draft) | OWN,
        "another draft": speculative("draft_model", other),
        "another draft of its own": speculative("draft_model", other) | OWN,
        "a head": speculative("eagle3", head),
        "the same head": speculative("eagle3", head),
        "a head of its own": speculative("eagle3", head) | OWN,
        "another head": speculative("eagle3", another),
    }
    running = {}

    def start(way):
        if way not in running:
            running[way] = Server(model, "kv_both", block_size=32, **ways[way])
        return running[way]

    yield start
    for server in running.values():
        server.close()


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ("not at all", "looked up"),
        ("looked up", "not at all"),
        ("not at all", "a draft of its own"),
        ("a draft of its own", "not at all"),
        ("a draft", "the same draft"),
        ("a draft of its own", "another draft of its own"),
        ("not at all", "a head of its own"),
        ("a head of its own", "not at all"),
        ("a head", "the same head"),
        ("looked up", "a head of its own"),
    ],
)
def test_the_answer_is_that_of_one_engine(engines, p, d):
    check(engines(p), engines(d), LENGTHS, seed=f"{p} to {d}")


@pytest.mark.parametrize(
    ("p", "d", "words"),
    [
        ("a draft", "another draft", ["'draft' differs", "draft-1", "draft-2"]),
        ("a head", "another head", ["'draft' differs", "head-1", "head-2"]),
        ("not at all", "a draft", ["'draft' differs", "draft-1"]),
        ("a draft", "not at all", ["'draft' differs", "draft-1"]),
    ],
)
def test_another_draft_is_refused_by_name(engines, p, d, words):
    prefill, decode = engines(p), engines(d)
    decode.call(listen)
    (prompt,) = prompts(random.Random(f"{p} to {d}"), [70])
    assert hand_over(prefill, decode, prompt) == []
    why = decode.call(said, "the load failed")
    for word in words:
        assert word in why
    nothing_left(prefill, decode)
