"""Controls: one kind of state is spoiled in D's memory, behind a load and before the first step that uses it.

Where a state lies is read from the manifest of each rank, as peers read it. What is spoiled has noise in it
afterwards, of
the size of the numbers that were there: a wrong byte looks like a right one.

These run in the engine's process and in those of its ranks.
"""

import torch

#: Parts of a kind of state. A column is one number of the last axis, the same in all of a state: one of 32 numbers of
#: each key, or one of three columns of a convolution.
PARTS = ("all", "one rank", "one block", "one column")
NAMES = {"k": "keys", "v": "values", "latent": "latents", "conv": "convolution", "ssm": "recurrent state"}
FORMATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def kinds(engine):
    """What is kept for a request, on any of the ranks."""
    return sorted(set().union(*_on_ranks(engine, _kinds)))


def spoil(engine, kind, part):
    """From now on, in each request that is loaded; None and None: nothing."""
    _on_ranks(engine, _spoil, kind, part)


def spoilt(engine):
    """How many numbers since the last call."""
    return sum(_on_ranks(engine, _spoilt))


def count_guesses(engine):
    """From now on; they are in `guesses`: made, and right."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    given, scheduler.guesses = scheduler.make_spec_decoding_stats, [0, 0]

    def count(*args, num_draft_tokens, num_accepted_tokens, **options):
        scheduler.guesses[0] += num_draft_tokens
        scheduler.guesses[1] += num_accepted_tokens
        return given(*args, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **options)

    scheduler.make_spec_decoding_stats = count


def guesses(engine):
    """Those since the last call."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    made, scheduler.guesses = scheduler.guesses, [0, 0]
    return made


def _on_ranks(engine, function, *args):
    return engine.llm_engine.engine_core.engine_core.model_executor.collective_rpc(function, args=args)


# On a rank.


def _side():
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker


def _groups(side):
    from kvferry.vllm.describe.manifest import manifest

    if not hasattr(side, "facts"):
        side.facts = manifest(side.config, side.cache, side.kv_caches).to_dict()
    return side.facts["groups"]


def _kind(group, piece):
    layer, _, name = piece["state"].rpartition("/")
    window = "window " if group["window"]["tokens"] is not None else ""
    draft = "draft's " if layer.startswith("draft/") else ""
    return draft + window + NAMES[name.partition(".")[0]]


def _kinds(_worker):
    return {_kind(group, piece) for group in _groups(_side()) for piece in group["pieces"]}


def _spoil(_worker, kind, part):
    side = _side()
    side.spoiling = (kind, part)
    if hasattr(side, "spoilt"):
        return
    side.spoilt, side.begun = 0, {}
    side.noise = torch.Generator().manual_seed(side.rank)
    start, land = side._start, side._land

    def remembered(load):
        side.begun[load["request"]] = load
        start(load)

    def landed(request):
        land(request)
        load = side.begun.pop(request)
        kind, part = side.spoiling
        if kind is not None and (part != "one rank" or side.rank == 0):
            side.spoilt += sum(_change(view, part, side.noise) for view in _views(side, load, kind, part))

    side._start, side._land = remembered, landed


def _spoilt(_worker):
    side = _side()
    count, side.spoilt = side.spoilt, 0
    return count


def _views(side, load, kind, part):
    """Where this kind of state lies for a request: a tensor for each piece and block."""
    for group, table in zip(_groups(side), load["destination_blocks"], strict=True):
        live = [int(block) for block in table if int(block) != group["null_block"]]
        if part == "one block":
            # Where there is one block only, it is all.
            live = live[len(live) // 2 :][:1] if len(live) > 1 else []
        for piece in group["pieces"]:
            if _kind(group, piece) == kind:
                yield from (_view(side, group, piece, block) for block in live)


def _view(side, group, piece, block):
    view, facts = piece["view"], side.facts
    dtype = FORMATS[facts["kinds"][piece["kind"]]["format"]["name"]]
    shape = [end - first for first, end in piece["bounds"]]
    strides = list(view["axes"])
    if (tokens := group["tokens_per_block"]) is not None:
        split = view["kernel"] or {"entries": tokens, "stride": 0}
        shape = [tokens // split["entries"], split["entries"], *shape]
        strides = [split["stride"], view["entry"], *strides]
    base = facts["regions"][view["region"]]["base"]
    storage = next(one for one in side.storages if one.data_ptr() == base)
    numbers = torch.empty(0, dtype=dtype, device=storage.device).set_(storage.untyped_storage())
    at = view["offset"] + block * view["block"]
    return numbers.as_strided(shape, [stride // dtype.itemsize for stride in strides], at // dtype.itemsize)


def _change(view, part, generator):
    size = view.float().std()
    if part == "one column":
        view = view[..., view.shape[-1] // 2]
    noise = torch.randn(view.shape, generator=generator)
    view.copy_(noise * size.cpu())
    return view.numel()
