"""Real weights: SmolLM2-135M goes on with a text from what P has read of it, and finds needles in what P has read.

How likely D finds each of the text's next tokens is what its perplexity is made of: D is made to go on with the text
as it is, and
says how likely each token was. All of that must be what one engine says.
"""

import math
import random

from transformers import AutoTokenizer
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from serving import sampled

from . import ROOT, spoil, table
from .asking import Failed, handing

#: Tokens of each excerpt that P reads, and that D goes on with; and of a needle's answer.
READ, CONTINUED, ANSWER = 256, 64, 8
NAMES = ("Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Klara", "Louis")
#: In float32 the two sides add up in the same order, but for ranks.
NEAR = {"cpu": 1e-3, "cuda": 0.5}


class Forced(AdapterLogitsProcessor):
    """Goes on with what a request says, whatever is likelier."""

    def is_argmax_invariant(self):
        return False

    def new_req_logits_processor(self, params):
        forced = (params.extra_args or {}).get("forced")
        if not forced:
            return None

        def force(made, logits):
            if len(made) < len(forced):
                token = forced[len(made)]
                likely = logits[token].clone()
                logits.fill_(-math.inf)
                logits[token] = likely
            return logits

        return force


class Texts:
    """Excerpts of a text that is in every checkout, and needles in others of it."""

    def __init__(self, folder, excerpts, needles):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        text = (ROOT / "LICENSE").read_text()
        tokens = self.tokenizer.encode(text)
        each = READ + CONTINUED
        self.excerpts = [tokens[at : at + each] for at in range(0, len(tokens) - each, each)][:excerpts]
        self.prompts = [one[:READ] for one in self.excerpts]
        self.forced = [one[READ:] for one in self.excerpts]
        draw = random.Random(1)
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 40]
        self.numbers = []
        for at in range(needles):
            name, number = NAMES[at % len(NAMES)], str(draw.randrange(1000, 10000))
            first = draw.randrange(len(lines) - 20)
            hay = lines[first : first + draw.randrange(6, 20)]
            # Anywhere but at the very end.
            hay.insert(draw.randrange(len(hay) - 1), f"The secret number of {name} is {number}.")
            asked = "\n".join(hay) + f"\n\nWhat is the secret number of {name}? The secret number of {name} is"
            self.prompts.append(self.tokenizer.encode(asked))
            self.forced.append([])
            self.numbers.append(number)

    def seen(self, made):
        """Of what an engine says: perplexity, needles that were found, and all log-probabilities."""
        chances = [chance for (_, chances), forced in zip(made, self.forced) if forced for chance in chances]
        answers = [self.tokenizer.decode(tokens).strip() for (tokens, _), forced in zip(made, self.forced) if not forced]
        found = sum(answer.startswith(number) for answer, number in zip(answers, self.numbers, strict=True))
        return {"perplexity": math.exp(-sum(chances) / len(chances)), "right": [found, len(self.numbers)]}


def go_on(engine, prompts, forced, params):
    """In an engine's process: the tokens of each answer, and the logarithm of each one's chance."""
    asked = []
    for one, handed in zip(forced, params, strict=True):
        extra = {"forced": one} | ({"kv_transfer_params": handed} if handed else {})
        asked.append(sampled(len(one) or ANSWER, logprobs=0, extra_args=extra))
    made = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
    answers = (one.outputs[0] for one in made)
    return [
        (list(it.token_ids), [step[token].logprob for token, step in zip(it.token_ids, it.logprobs or ())]) for it in answers
    ]


def alone(engine, texts):
    return engine.call(go_on, texts.prompts, texts.forced, [None] * len(texts.prompts))


def through(prefill, decode, texts):
    def ask(at, prompts, params):
        return decode.call(go_on, prompts, texts.forced[at : at + len(prompts)], params)

    return handing(prefill, decode, texts.prompts, ask)


def spoiled(prefill, decode, texts, kind, part):
    """What D says where one kind of state is spoiled in its memory behind each load, and how many numbers were."""
    decode.call(spoil.spoil, kind, part)
    try:
        made = through(prefill, decode, texts)
    finally:
        count = decode.call(spoil.spoilt)
        decode.call(spoil.spoil, None, None)
    return made, count


def controls(engines, texts, own):
    """Perplexity and needles where a state is spoiled."""
    prefill, decode = engines.ours(*engines.site.REAL_CELLS["TP 1 → 1"])
    for kind in decode.call(spoil.kinds):
        for part in ("one column", "one block", "all"):
            made, count = spoiled(prefill, decode, texts, kind, part)
            line = {"cell": f"{kind}, {part}", "through": "spoiled", "spoilt": count}
            yield line | texts.seen(made) | beside(made, own, texts.forced)
    engines.close()


def beside(made, own, forced):
    """How far two engines are apart: answers with other tokens, and the largest difference of a log-probability."""
    differ = sum(tokens != others for (tokens, _), (others, _) in zip(made, own, strict=True))
    apart = 0.0
    for (_, chances), (_, others), one in zip(made, own, forced, strict=True):
        if one:
            apart = max(apart, *(abs(chance - other) for chance, other in zip(chances, others, strict=True)))
    return {"differ": differ, "apart": apart}


def rows(found):
    """A table of it."""
    lines = []
    for one in found:
        name = one["through"] if one["through"] == table.ALONE else f"{one['through']}, {one['cell']}"
        if "error" in one:
            lines.append([name, f"does not run: `{one['error']}`", "", "", ""])
            continue
        apart = "" if "apart" not in one else f"{one['apart']:.1e}"
        right, of = one["right"]
        lines.append([name, f"{one['perplexity']:.4f}", apart, f"{right} of {of}", str(one.get("differ", ""))])
    return table.rows(["", "perplexity", "largest difference of a log-probability", "needles", "other tokens"], lines)


def measure(engines, cells, texts, progress, keep, rivals_of, spoils=False):
    """As `__main__.measure`, for these weights."""
    found, own = [], {}
    for name, cell, who in cells:
        kind = cell[1].get("kv_cache_dtype", table.USUAL)
        if kind not in own:
            progress("smollm2, one engine")
            own[kind] = alone(engines.alone({} if kind == table.USUAL else cell[1]), texts)
            engines.close()
            found.append({"cell": kind, "through": table.ALONE} | texts.seen(own[kind]))
        progress(f"smollm2, {name}, {who}")
        line = {"cell": name, "through": who}
        try:
            pair = rivals_of(engines, cell, who)
            made = through(*pair, texts)
            line |= texts.seen(made) | beside(made, own[kind], texts.forced)
        except Failed as error:
            engines.close()
            line["error"] = str(error)
        found.append(line)
        keep(found)
    if spoils:
        progress("smollm2, controls")
        for line in controls(engines, texts, own[table.USUAL]):
            found.append(line)
            keep(found)
    return found


def wrong(found, device):
    """Cells of ours that are not as they must be."""
    for one in found:
        if one["through"] != "kvferry":
            continue
        if "error" in one:
            yield f"smollm2, {one['cell']}: {one['error']}"
        elif device == "cpu" and one["differ"]:
            yield f"smollm2, {one['cell']}: {one['differ']} answers differ"
        elif one["apart"] > NEAR[device]:
            yield f"smollm2, {one['cell']}: a log-probability is {one['apart']:.1e} apart"
