"""What a request's cache is computed from: whatever vLLM tells blocks of the same tokens apart by."""

import copy
import json
import os
import random
from types import SimpleNamespace

import pytest
import torch
from kvferry.vllm import logs
from kvferry.vllm.scheduler.origin import Origins, differ

TOKENS = 40


def origins(media=None, prefix=False):
    return Origins(
        SimpleNamespace(
            model_config=SimpleNamespace(multimodal_config=media),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix),
        )
    )


def request(tokens=range(TOKENS), lora=None, salt=None, embeds=None, media=()):
    return SimpleNamespace(
        all_token_ids=list(tokens),
        lora_request=lora and SimpleNamespace(lora_name=lora, lora_path=f"/{random.random()}"),
        cache_salt=salt,
        prompt_embeds=embeds,
        mm_features=[
            SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=at, length=length))
            for name, at, length in media
        ],
    )


def test_whatever_changes_the_cache_changes_it():
    embeds = torch.zeros(TOKENS, 8, dtype=torch.bfloat16)
    others = embeds.clone()
    others[-1, -1] = 1
    different = [
        request(),
        request([*range(TOKENS - 1), 77]),
        request([77, *range(1, TOKENS)]),
        request([1, 0, *range(2, TOKENS)]),
        request(lora="a"),
        request(lora="b"),
        request(salt="a"),
        request(lora="a", salt="b"),
        request(lora="ab"),
        request(embeds=embeds),
        request(embeds=others),
        request(media=[("a", 3, 4)]),
        request(media=[("b", 3, 4)]),
        request(media=[("a", 4, 4)]),
        request(media=[("a", 3, 5)]),
        request(media=[("a", 3, 4), ("a", 9, 4)]),
    ]
    made = [origins().of(one, TOKENS) for one in different]
    assert len(set(made)) == len(made) and all(len(one) == 16 for one in made)
    # Each side makes it by itself.
    assert made == [origins().of(one, TOKENS) for one in different]


@pytest.mark.parametrize("count", [1, 5, 39])
def test_only_so_many_tokens_count(count):
    begin = request(media=[("a", 2, 2)], embeds=torch.ones(TOKENS, 2))
    other = request(
        [*range(count), *range(100, 200)],
        media=[("a", 2, 2), ("b", 39, 1)],
        embeds=torch.cat([torch.ones(count, 2), torch.zeros(50, 2)]),
    )
    assert origins().of(begin, count) == origins().of(other, count)
    assert origins().of(begin, count) != origins().of(begin, count + 1)
    assert origins().of(begin, TOKENS) != origins().of(other, TOKENS)
    assert origins().of(begin, TOKENS + 1) is None


def test_random_tokens_are_told_apart_by_each_of_them():
    draw = random.Random(0)
    for _ in range(200):
        tokens = [draw.randrange(1 << 20) for _ in range(draw.randrange(1, 300))]
        other = list(tokens)
        other[draw.randrange(len(tokens))] ^= 1 << draw.randrange(20)
        made = [origins().of(request(ids), len(ids)) for ids in (tokens, other, tokens)]
        assert made[0] == made[2] != made[1]


def test_media_that_vllm_does_not_hash(monkeypatch):
    """Their names are made up on each side: they say nothing, and that is said once."""
    off, on = SimpleNamespace(mm_processor_cache_gb=0), SimpleNamespace(mm_processor_cache_gb=4)
    said = []
    monkeypatch.setattr(logs.logger, "warning", said.append)
    sides = [origins(off), origins(off)]
    for side in sides:
        ours, theirs = request(media=[("p-image-0", 3, 4)]), request(media=[("d-image-0", 3, 4)])
        assert side.of(ours, TOKENS) == side.of(theirs, TOKENS) != side.of(request(), TOKENS)
    assert len(said) == len(sides) and all("mm_processor_cache_gb" in line for line in said)
    for side in (origins(on), origins(off, prefix=True), origins(on, prefix=True)):
        assert side.of(ours, TOKENS) != side.of(theirs, TOKENS)


def adapter(folder, weights=b"weights", alpha=16, base="/here"):
    folder.mkdir(exist_ok=True)
    settings = {"lora_alpha": alpha, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name="poet", lora_path=str(folder))


def test_what_counts_is_what_was_computed():
    said = origins().facts(request(), 3)
    assert said == origins().facts(request([0, 1, 2, 7]), 3)
    assert said != origins().facts(request([0, 1, 7, 3]), 3)
    # A prompt that is shorter than what is offered says nothing that could be the same.
    assert origins().facts(request(), TOKENS + 1) == {}


@pytest.mark.parametrize(
    "changes, differs",
    [
        ({"media": [("a", 1, 1)]}, "media"),
        ({"media": [("a", 7, 1)]}, None),
        ({"embeds": torch.ones(4, 8, dtype=torch.bfloat16)}, "embeddings"),
        ({"tokens": [1, 2, 4, 4]}, "tokens"),
    ],
)
def test_what_differs_is_named_with_both_values(changes, differs):
    here, there = origins().facts(request(**changes), 3), origins().facts(request(), 3)
    wrong = differ(here, there)
    assert wrong == (
        None
        if differs is None
        else f"its {differs} differ: {there.get(differs, 'none')} there, {here[differs]} here"
    )


def test_embeddings_count_as_far_as_they_were_computed():
    one, other = torch.ones(4, 8), torch.ones(4, 8)
    other[3] = 2.0
    same = [origins().facts(request(embeds=given), 3) for given in (one, other)]
    assert same[0] == same[1]
    assert origins().facts(request(embeds=one), 4) != origins().facts(request(embeds=other), 4)


def test_an_adapter_is_its_files_wherever_they_are(tmp_path):
    def said(lora):
        asked = request()
        asked.lora_request = lora
        return origins().facts(asked, TOKENS)["adapter"]

    one = said(adapter(tmp_path / "one"))
    assert said(adapter(tmp_path / "two", base="/elsewhere")) == one
    assert said(adapter(tmp_path / "three", weights=b"others")) != one
    assert said(adapter(tmp_path / "four", alpha=32)) != one
    # Trained again, in the same place.
    again = adapter(tmp_path / "one", weights=b"again")
    os.utime(tmp_path / "one" / "adapter_model.safetensors", ns=(1, 1))
    assert said(again) != one
    # Not on this machine, or not to be read.
    hub, other = (SimpleNamespace(lora_name="poet", lora_path=path) for path in ("hub/poet", "hub/other"))
    assert said(hub) == said(copy.copy(hub)) != said(other)
    (tmp_path / "two" / "adapter_config.json").write_text("no settings")
    os.utime(tmp_path / "two" / "adapter_config.json", ns=(2, 2))
    unread = SimpleNamespace(lora_name="poet", lora_path=str(tmp_path / "two"))
    assert said(unread) == said(copy.copy(unread)) != one
