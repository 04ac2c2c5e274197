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
