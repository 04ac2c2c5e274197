"""What a request's blocks depend on beside the model."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from kvferry.vllm import prompts


def request(**changes):
    facts = dict(
        prompt_token_ids=[1, 2, 3, 4],
        all_token_ids=[1, 2, 3, 4, 9],
        prompt_embeds=None,
        lora_request=None,
        mm_features=[],
    )
    return SimpleNamespace(**facts | changes)


def adapter(folder, weights=b"weights", alpha=16, base="/here"):
    folder.mkdir(exist_ok=True)
    settings = {"lora_alpha": alpha, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name="poet", lora_path=str(folder))


def image(identifier, offset=1):
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset))


def test_what_counts_is_what_was_computed():
    said = prompts.facts(request(), 3)
    assert said == prompts.facts(request(all_token_ids=[1, 2, 3, 7]), 3)
    assert said != prompts.facts(request(all_token_ids=[1, 2, 7, 4]), 3)
    # A prompt that is shorter than what is offered says nothing that could be the same.
    assert "tokens" not in prompts.facts(request(), 6)


@pytest.mark.parametrize(
    "changes, differs",
    [
        ({"mm_features": [image("a")]}, "media"),
        ({"mm_features": [image("a", offset=7)]}, None),
        ({"prompt_embeds": torch.ones(4, 8, dtype=torch.bfloat16)}, "embeddings"),
        ({"all_token_ids": [1, 2, 4, 4]}, "tokens"),
    ],
)
def test_what_differs_is_named_with_both_values(changes, differs):
    here, there = prompts.facts(request(**changes), 3), prompts.facts(request(), 3)
    wrong = prompts.differ(here, there)
    assert wrong == (
        None
        if differs is None
        else f"its {differs} differ: {there.get(differs, 'none')} there, {here[differs]} here"
    )


def test_embeddings_count_as_far_as_they_were_computed():
    one, other = torch.ones(4, 8), torch.ones(4, 8)
    other[3] = 2.0
    same = [prompts.facts(request(prompt_embeds=given), 3) for given in (one, other)]
    assert same[0] == same[1]
    assert prompts.facts(request(prompt_embeds=one), 4) != prompts.facts(request(prompt_embeds=other), 4)


def test_an_adapter_is_its_files_wherever_they_are(tmp_path):
    def said(lora):
        return prompts.surroundings(request(lora_request=lora))["adapter"]

    one = said(adapter(tmp_path / "one"))
    assert one.startswith("poet ") and str(tmp_path) not in one
    assert said(adapter(tmp_path / "two", base="/elsewhere")) == one
    assert said(adapter(tmp_path / "three", weights=b"others")) != one
    assert said(adapter(tmp_path / "four", alpha=32)) != one
    # Trained again, in the same place.
    again = adapter(tmp_path / "one", weights=b"again")
    os.utime(tmp_path / "one" / "adapter_model.safetensors", ns=(1, 1))
    assert said(again) != one
    # Not on this machine, or not to be read.
    assert said(SimpleNamespace(lora_name="poet", lora_path="hub/poet")) == "poet hub/poet"
    (tmp_path / "two" / "adapter_config.json").write_text("no settings")
    os.utime(tmp_path / "two" / "adapter_config.json", ns=(2, 2))
    where = str(tmp_path / "two")
    assert said(SimpleNamespace(lora_name="poet", lora_path=where)) == f"poet {where}"


def test_facts_of_others_are_read_or_left():
    assert prompts.read(None) == prompts.read("nonsense") == {}
    assert prompts.read({"tokens": 5}) == {"tokens": "5"}
