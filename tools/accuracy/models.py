"""The models by name, how their engines are started on a CPU, and between which they are handed over; `on_card` has the
same for a GPU."""

import cards
import patches
import standins
from families import CHANNELS_FIRST, LATENT, NATIVE, RANKS
from life.test_held import let_states_be_cached

from . import smollm2

DEVICE = "cpu"
#: Requests that are asked at once, and the blocks that they need.
AT_ONCE = 32
USUAL = {"max_num_seqs": AT_ONCE, "blocks": 600}

STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
DS = {"prepare": [CHANNELS_FIRST]}
CHUNKS = {"max_num_batched_tokens": 64}
PUSH = {"extra": {"push": "always"}}
PREFIX = {"prefix": True}
OWN = {"extra": {"draft": "own"}}
LOCAL, NIXL = ({"extra": {"transport": transport}} for transport in ("local", "nixl"))
LOOKED_UP = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    }
}
#: vLLM does not pass the model's back end on to what guesses.
MODULE = {
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}
}

#: By family: what all of its engines need on a CPU. Qwen3.5's kernel knows bfloat16 only.
FAMILIES = {
    "nemotron-h": {},
    "falcon-h1": {},
    "lfm2": NATIVE,
    "gemma3": {"block_size": 32},
    "deepseek": {"block_size": 32, **LATENT},
    "kimi-linear": {"block_size": 128, **LATENT, "prepare": [patches.latent_blocks, standins.kimi]},
    "qwen3.5": {"dtype": "bfloat16", "prepare": [patches.split_prompts]},
}
#: Real weights, which come from elsewhere (`smollm2`).
REAL = {
    "smollm2": {
        "block_size": 32,
        "blocks": 250,
        "max_model_len": 1024,
        "logits_processors": ["accuracy.real:Forced"],
    }
}
#: Families with states, whose convolutions NixlConnector's page wants channels first.
STATES = ("nemotron-h", "falcon-h1", "qwen3.5", "kimi-linear", "lfm2")

#: A cell: P and D, and what is special about asking them.
EVERY = {
    "TP 1 → 1": ({}, {}),
    "TP 1 → 2": ({}, RANKS),
    "TP 2 → 1": (RANKS, {}),
}
STAGED = {
    "PP 2 → 1": (STAGES, {}),
    "PP 1 → 2": ({}, STAGES),
    "PP 2 → TP 2": (STAGES, RANKS),
}
#: Of ours alone: NixlConnector takes channels first only.
ORDERS = {
    "convolution SD → DS, TP 1 → 2": ({}, {**RANKS, **DS}),
    "convolution DS → SD, TP 2 → 1": ({**RANKS, **DS}, {}),
}
#: Likewise: ways that the bytes take, and when.
WAYS = {
    "over local, TP 1 → 2": (LOCAL, {**RANKS, **LOCAL}),
    "over nixl, TP 2 → 1": ({**RANKS, **NIXL}, NIXL),
    "push, chunks of 64, TP 1 → 2": ({**PUSH, **CHUNKS}, RANKS, "push"),
}


def blocks(first, second):
    return {
        f"blocks of {first} → {second}, TP 1 → 2": ({"block_size": first}, {**RANKS, "block_size": second}),
        f"blocks of {second} → {first}, TP 2 → 1": ({**RANKS, "block_size": second}, {"block_size": first}),
    }


#: Through either connector.
CELLS = {
    "nemotron-h": EVERY,
    "falcon-h1": EVERY
    | STAGED
    | blocks(128, 256)
    | {"prefix hits, TP 1 → 1": ({**PREFIX, "prepare": [let_states_be_cached]},) * 2 + ("prefix",)},
    "lfm2": EVERY,
    "gemma3": EVERY
    | blocks(32, 64)
    | {
        "prefix hits, TP 1 → 2": (PREFIX, {**PREFIX, **RANKS}, "prefix"),
        "guesses that are looked up, TP 1 → 2": (LOOKED_UP, {**LOOKED_UP, **RANKS}),
    },
    "deepseek": EVERY
    | {
        "prefix hits, TP 2 → 1": ({**PREFIX, **RANKS}, PREFIX, "prefix"),
        "its module guesses (MTP), TP 1 → 1": (MODULE, MODULE),
        "its module guesses (MTP), TP 1 → 2": (MODULE, {**MODULE, **RANKS}),
    },
    "kimi-linear": EVERY | STAGED,
    "qwen3.5": EVERY | STAGED | blocks(640, 1280),
}
#: Through ours alone. vLLM has blocks of 16 for latents on a CPU: larger ones come from `patches.latent_blocks`, which
#: nobody but these tests promises anything about.
OURS = {
    "falcon-h1": ORDERS | WAYS | {"drafts of their own, TP 1 → 2": (OWN, {**RANKS, **OWN})},
    "deepseek": blocks(32, 96),
    "kimi-linear": blocks(128, 256) | ORDERS | WAYS,
    "qwen3.5": ORDERS | WAYS,
}
THREE = {"tensor_parallel_size": 3, "distributed_executor_backend": "mp"}
REAL_CELLS = {
    "TP 1 → 1": ({}, {}),
    "TP 3 → 1": (THREE, {}),
    "TP 1 → 3": ({}, THREE),
    "PP 2 → 1": (STAGES, {}),
    "PP 1 → 2": ({}, STAGES),
    "blocks of 32 → 64": ({}, {"block_size": 64, "blocks": 125}),
    "blocks of 64 → 32": ({"block_size": 64, "blocks": 125}, {}),
}
REAL_OURS = {"over local, TP 3 → 1": ({**THREE, **LOCAL}, LOCAL), "over nixl, TP 1 → 3": (NIXL, {**THREE, **NIXL})}
#: Where states are spoiled.
CONTROL = "TP 1 → 2"
#: Where a draft keeps something of its own.
DRAFTS = {"deepseek": "its module guesses (MTP), TP 1 → 2"}


def weights(folder, _):
    """Where the model lies that engines are to load; `Spoilt`, where it is not the one that was trained."""
    if folder.name in REAL:
        return smollm2.weights()
    cards.checked(folder)
    return folder


def merged(*parts):
    """Options of an engine: of lists and dictionaries all, of the rest the last."""
    made = {}
    for part in parts:
        for name, value in part.items():
            if name == "prepare":
                made[name] = [*made.get(name, []), *value]
            elif name == "extra":
                made[name] = made.get(name, {}) | value
            else:
                made[name] = value
    return made
