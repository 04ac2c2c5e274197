"""Requests of every kind, asked in an engine's own process: for `Server.call`."""

from environment import REMOTE_DECODE
from serving import sampled


def ask(engine, questions):
    """Answers questions that are there at the same time. Each has a prompt, `tokens`, `params` of a hand-over,
    and options of `SamplingParams`; and `lora`, `priority` or `embeds` where it has."""
    prompts, samplings, loras, priorities = [], [], [], []
    for question in questions:
        question = dict(question)
        prompts.append(_prompt(question))
        loras.append(_adapter(question.pop("lora", None)))
        priorities.append(question.pop("priority", 0))
        samplings.append(_sampling(question))
    options = {}
    if any(loras):
        options["lora_request"] = loras
    if any(priorities):
        options["priority"] = priorities
    made = engine.generate(prompts, samplings, use_tqdm=False, **options)
    return [
        {
            "answers": [
                (list(one.token_ids), one.text, one.finish_reason, one.stop_reason)
                for one in answer.outputs
            ],
            "params": answer.kv_transfer_params,
        }
        for answer in made
    ]


def _prompt(question):
    prompt = {}
    if (embeds := question.pop("embeds", None)) is not None:
        import torch

        prompt["prompt_embeds"] = torch.tensor(embeds)
        question.pop("prompt", None)
    else:
        given = question.pop("prompt")
        prompt["prompt" if isinstance(given, str) else "prompt_token_ids"] = given
    for name in ("cache_salt", "multi_modal_data"):
        if name in question:
            prompt[name] = question.pop(name)
    return prompt


def _adapter(lora):
    if lora is None:
        return None
    from vllm.lora.request import LoRARequest

    name, number, path = lora
    return LoRARequest(name, number, path)


def _sampling(question):
    from vllm.sampling_params import StructuredOutputsParams

    if "structured" in question:
        question["structured_outputs"] = StructuredOutputsParams(**question.pop("structured"))
    return sampled(question.pop("tokens", 12), question.pop("params", None), **question)


def prefilled(question):
    """The same question as a router sends it to P."""
    return question | {"tokens": 1, "min_tokens": 0, "params": dict(REMOTE_DECODE)}


def cut(engine, text, length, params):
    """The answer to the last tokens of a text, and what P hands over; `params` is True for a P."""
    sampling = _sampling(
        {"tokens": 1, "params": dict(REMOTE_DECODE)} if params is True else {"params": params}
    )
    (made,) = engine.generate(
        text, sampling, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": length}
    )
    assert len(made.prompt_token_ids) == length
    return list(made.outputs[0].token_ids), made.kv_transfer_params


def pooled(engine, prompts):
    """What a model makes of prompts, rounded."""
    made = engine.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
    return [[round(number, 4) for number in one.outputs.embedding] for one in made]
