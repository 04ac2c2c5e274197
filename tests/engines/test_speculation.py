"""Speculation on one side only, or of another kind there: a guess may be worse, an answer is never another."""

import pytest
from drafts import save_draft, save_eagle, save_latent_eagle, save_modules
from exact import check, check_refused
from families import LATENT, MORE

OWN = {"extra": {"draft": "own"}}


def guess(method, model=None, count=3, **more):
    said = {"method": method, "num_speculative_tokens": count, **more}
    if method == "ngram":
        said |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if model is not None:
        said |= {"model": str(model)}
    return {"block_size": 32, "speculative_config": said}


@pytest.fixture(scope="module")
def engines(folder, fleet):
    """Engines of one model, by how they guess."""
    draft, other = (save_draft(folder / f"draft-{seed}", seed) for seed in (1, 2))
    head, another = (save_eagle(folder / f"head-{seed}", seed) for seed in (1, 2))
    ways = {
        "not at all": {"block_size": 32},
        "looked up": guess("ngram"),
        "a draft": guess("draft_model", draft),
        "the same draft": guess("draft_model", draft),
        "a draft of its own": guess("draft_model", draft) | OWN,
        "another draft": guess("draft_model", other),
        "another draft of its own": guess("draft_model", other) | OWN,
        "a head": guess("eagle3", head),
        "the same head": guess("eagle3", head),
        "a head of its own": guess("eagle3", head) | OWN,
        "another head": guess("eagle3", another),
    }
    return lambda way: fleet("qwen3", ways, way)


@pytest.fixture(scope="module")
def latent(folder, fleet):
    """Engines of one model that has two modules of its own to guess with (MTP), by how they guess."""
    model = save_modules(folder / "modules", seed=1)
    head = save_latent_eagle(folder / "head-3", 3, model)
    # vLLM does not pass the model's back end on to what guesses.
    backend = {"attention_backend": "CPU_MLA"}
    modules = guess("mtp", count=2, **backend)
    ways = {
        "not at all": {"block_size": 32},
        "its modules": modules,
        "the same modules": modules,
        "modules of its own": modules | OWN,
        "the first module": guess("mtp", count=1, **backend),
        "a head": guess("eagle3", head, **backend),
        "a head of its own": guess("eagle3", head, **backend) | OWN,
    }
    ways = {way: LATENT | options for way, options in ways.items()}
    return lambda way: fleet("modules", ways, way)


@MORE
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
    check(engines(p), engines(d), seed=f"{p} to {d}")


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ("its modules", "the same modules"),
        *(
            pytest.param(p, d, marks=MORE)
            for p, d in [
                ("not at all", "modules of its own"),
                ("modules of its own", "not at all"),
                ("its modules", "the first module"),
                ("the first module", "its modules"),
                ("modules of its own", "a head of its own"),
                ("a head of its own", "modules of its own"),
            ]
        ),
    ],
)
def test_the_answer_is_that_of_one_engine_with_several_modules(latent, p, d):
    check(latent(p), latent(d), seed=f"{p} to {d}")


@MORE
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
    check_refused(engines(p), engines(d), words)


@MORE
@pytest.mark.parametrize(
    ("p", "d", "words"),
    [
        ("not at all", "its modules", ["'draft' differs", "modules"]),
        ("its modules", "not at all", ["'draft' differs", "modules"]),
        ("a head", "its modules", ["'draft' differs", "head-3", "modules"]),
        ("its modules", "a head", ["'draft' differs", "head-3", "modules"]),
    ],
)
def test_modules_beside_another_draft_are_refused_by_name(latent, p, d, words):
    """A head keeps states of the same names and shapes as the first module, and they mean something else."""
    check_refused(latent(p), latent(d), words)
