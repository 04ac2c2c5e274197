"""Pairs of a vLLM engine and an SGLang engine. The same vLLM engine prefills, decodes, and answers alone; what a router would
tell it, a test says here. Both kinds are forked from one process that has imported both."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "engines"))

import exact as exact_here
import serving
from engines import free_port


class Vllm(serving.Server):
    def __init__(self, model, **options):
        self.port = free_port()
        extra = {"port": self.port, "audit": "all", "push_timeout_seconds": 20} | options.pop("extra", {})
        super().__init__(model, options.pop("role", "kv_both"), extra=extra, **options)


def to_sglang(vllm, decode, prompts, tokens=8, sent=None):
    """The answers of SGLang, which goes on from the first tokens of vLLM."""
    rooms = [exact_here.room() for _ in prompts]
    asked = [decode.ask(prompt, tokens, room=room, source=vllm) for prompt, room in zip(sent or prompts, rooms)]
    vllm.generate_all(prompts, 1, [{"do_remote_decode": True, "kvferry_room": room} for room in rooms])
    return [decode.answer(one) for one in asked]


def to_vllm(prefill, vllm, prompts, tokens=8, sent=None):
    """The answers of vLLM, which computes the last token of each prompt itself, and those of SGLang."""
    rooms = [exact_here.room() for _ in prompts]
    asked = [prefill.ask(prompt, tokens, room=room) for prompt, room in zip(prompts, rooms)]
    where = {"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": prefill.port}
    made = vllm.generate_all(sent or prompts, tokens, [where | {"kvferry_room": room} for room in rooms])
    return [answer for answer, _ in made], [prefill.answer(one) for one in asked]


def pretend(engine, ids):
    """In vLLM's process: whatever a request is, what it is computed from is this prompt; None: what it is."""
    from kvferry.vllm.scheduler.origin import Origins
    from kvferry._origin import digest, origin
    from array import array

    if not hasattr(Origins, "given"):
        Origins.given = Origins.of
    made = ids and origin({"tokens": digest(array("Q", ids).tobytes())}, len(ids))
    Origins.of = (lambda *_: made) if ids else Origins.given


#: How far roundings take the logarithm of a token's chance: another state takes it much further.
NEAR = 0.15


def chances(engine, prompt, tokens):
    """In vLLM's process: what it holds for likely at each step of its answer."""
    (made,) = engine.generate({"prompt_token_ids": prompt}, serving.sampled(tokens, logprobs=20), use_tqdm=False)
    return [{token: it.logprob for token, it in step.items()} for step in made.outputs[0].logprobs]


def check(vllm, prompts, answers, near):
    """The tokens of vLLM alone. With `near`, where two kernels of bfloat16 round otherwise: up to a token that is as likely."""
    alone = [answer for answer, _ in vllm.generate_all(prompts, 8)]
    for prompt, answer, own in zip(prompts, answers, alone, strict=True):
        said = f"a prompt of {len(prompt)} tokens: {answer}, and alone {own}"
        assert answer is not None, said
        if near and answer != own:
            at = next(at for at, (a, b) in enumerate(zip(answer, own, strict=True)) if a != b)
            step = vllm.call(chances, prompt, 8)[at]
            assert step[own[at]] - step.get(answer[at], -100.0) < NEAR, f"{said}: {step}"
            continue
        assert answer == own, said
    assert vllm.idle() == 0


def check_to_sglang(vllm, decode, prompts, near):
    answers = to_sglang(vllm, decode, prompts)
    assert [answer["error"] for answer in answers if "error" in answer] == []
    check(vllm, prompts, [answer["ids"] for answer in answers], near)


def check_to_vllm(prefill, vllm, prompts, near):
    # What is not moved must not be there already: vLLM has no cache of prefixes here.
    answers, theirs = to_vllm(prefill, vllm, prompts)
    assert [answer["error"] for answer in theirs if "error" in answer] == []
    check(vllm, prompts, answers, near)


def check_controls(prefill, vllm, decode):
    """P is given another prompt than D, which ends with the same token: the answer is P's."""
    theirs, ours = exact_here.prompts(11, (60, 60))
    ours[-1] = theirs[-1]
    (made, _), (alone, _) = vllm.generate_all([theirs, ours], 8)
    assert made != alone
    try:
        if decode is not None:
            vllm.call(pretend, ours)
            (answer,) = to_sglang(vllm, decode, [theirs], sent=[ours])
            assert answer["ids"] == made
        if prefill is not None:
            vllm.call(pretend, theirs)
            (answer,), _ = to_vllm(prefill, vllm, [theirs], sent=[ours])
            assert answer == made
    finally:
        vllm.call(pretend, None)
