"""What a request's cache is computed from: whatever vLLM tells blocks of the same tokens apart by."""

import random
from types import SimpleNamespace

import pytest
import torch
from kvferry.vllm import logs
from kvferry.vllm.origin import Origins

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
