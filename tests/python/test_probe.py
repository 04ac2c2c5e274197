"""Kernels are asked where they write, and a description that says otherwise is refused with both orders.

Stand-ins for vLLM's layers keep their blocks in orders that are known here; the rest is the adapter's own.
"""

import logging
from dataclasses import replace
from types import SimpleNamespace

from stand_in import order_convolutions  # first: it sets the environment up

# isort: split
import kvferry.vllm
import numpy as np
import pytest
import torch
from kept import Attention, Latent, Topology, linear, mamba1, mamba2
from kvferry.vllm import Unsupported
from kvferry.vllm.kernels import asking, probe
from kvferry.vllm.logs import logger
from pools import Engine
from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d
from vllm.v1.kv_cache_interface import KVQuantMode

KEY, VALUE = 32, 32


class Layer:
    """A layer of attention whose kernel keeps each token of a block in an order of its own."""

    _k_scale_float = _v_scale_float = 0.5
    _k_scale = _v_scale = torch.tensor(0.5)
    forward_includes_kv_cache_update = False
    name = "FLASH_ATTN"

    def __init__(self, store, **changes):
        self.kv_cache, self.impl, self.store = None, self, store
        vars(self).update(changes)

    def get_attn_backend(self):
        # Its class decides, as with vLLM's own.
        return type(
            f"Backend{self.name}",
            (),
            {
                "get_name": staticmethod(lambda: self.name),
                "get_impl_cls": staticmethod(lambda: Layer),
                "forward_includes_kv_cache_update": self.forward_includes_kv_cache_update,
            },
        )

    def bind_kv_cache(self, cache):
        self.kv_cache = cache

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        tokens = cache.shape[2]
        if cache.dtype == torch.uint8:
            key, value = (
                (given.float() / 0.5).to(torch.float8_e4m3fn).view(torch.uint8)
                for given in (key, value)
            )
        for token, slot in enumerate(slots.tolist()):
            # [heads, tokens, content], and what goes there: [heads, numbers].
            self.store(cache[slot // tokens], slot % tokens, key[token], value[token])


def side_by_side(block, token, key, value):
    block[:, token] = torch.cat([key, value], dim=-1)


def values_first(block, token, key, value):
    block[:, token] = torch.cat([value, key], dim=-1)


def by_turns(block, token, key, value):
    block[:, token] = torch.stack([key, value], dim=-1).flatten(1)


def heads_swapped(block, token, key, value):
    side_by_side(block, token, key.flip(0), value)


def tokens_swapped(block, token, key, value):
    side_by_side(block, token ^ 1, key, value)


def numbers_swapped(block, token, key, value):
    side_by_side(block, token, key, value.view(-1, 2, VALUE // 2).flip(1).flatten(1))


def transposed(block, token, key, value):
    """All keys of a head by number, then all values by token."""
    heads, tokens, _ = block.shape
    whole = block.view(heads, -1)
    whole[:, : KEY * tokens].view(heads, KEY, tokens)[:, :, token] = key
    whole[:, KEY * tokens :].view(heads, tokens, VALUE)[:, token] = value


def nothing(block, token, key, value):
    pass


def one_number_missing(block, token, key, value):
    block[:, token, 1:] = torch.cat([key, value], dim=-1)[:, 1:]


def describe(layers, made, conv="SD", quantised=None, **topology):
    """The description of a rank whose layers are all `made`, with a word on what was asked."""
    order_convolutions(conv)
    engine = Engine("engine", layers, Topology(conv=conv, **topology))
    engine.config.compilation_config = SimpleNamespace(
        static_forward_context=dict.fromkeys(engine.layers, made)
    )
    config, tensors = engine.stages[0]
    caches = tensors[0]
    if quantised is not None:
        (group,) = config.kv_cache_groups
        group.kv_cache_spec = replace(group.kv_cache_spec, **quantised)
        # As many tokens of half the size.
        caches = {
            layer: torch.zeros((*tensor.shape[:3], KEY + VALUE), dtype=torch.uint8)
            for layer, tensor in caches.items()
        }
        engine.config.cache_config = SimpleNamespace(cache_dtype="fp8", enable_prefix_caching=False)
    return kvferry.vllm.manifest(
        engine.config, config, caches, tp_rank=0, pp_rank=0, engine="e", conv_order=conv,
        layer_specs=engine.specs,
    )  # fmt: skip


def attend(store, dtype=torch.bfloat16, **changes):
    return describe([Attention(4)], Layer(store, **changes), dtype=dtype)


@pytest.fixture
def said():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)


TYPES = [torch.bfloat16, torch.float16, torch.float32]
OTHERS = [values_first, by_turns, heads_swapped, tokens_swapped, numbers_swapped, transposed]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC"])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_kernel_that_agrees_is_asked(said, dtype, layout):
    made = Layer(side_by_side)
    describe([Attention(4), Attention(4)], made, dtype=dtype, layout=layout)
    ((level, line),) = said
    assert level == "INFO" and "FLASH_ATTN" in line and "asked in" in line


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("store", OTHERS)
def test_a_known_back_end_with_another_order_is_refused_with_both(store, dtype):
    with pytest.raises(Unsupported) as error:
        attend(store, dtype)
    why = str(error.value)
    assert "layer 'model.layers.0.mixer': the back end FLASH_ATTN keeps its cache otherwise" in why
    name = "v" if store is numbers_swapped else "k"
    size = dtype.itemsize
    should = "from byte 0" if name == "k" else f"from byte {KEY * size}"
    assert f"'{name}' should lie {should}, {64 * size} from token to token" in why
    assert "but its kernel wrote it from byte" in why


def test_both_orders_are_said_in_numbers():
    with pytest.raises(Unsupported) as error:
        attend(values_first)
    assert (
        "'k' should lie from byte 0, 128 from token to token, 2048 from head to head, 2 from dim to dim, "
        "but its kernel wrote it from byte 64, 128 from token to token, 2048 from head to head, "
        "2 from dim to dim;" in str(error.value)
    )


@pytest.mark.parametrize(
    ("store", "words"),
    [(nothing, "but its kernel wrote it nowhere"), (one_number_missing, "without 64 of 2048 numbers")],
)
def test_numbers_that_are_not_kept_are_noticed(store, words):
    with pytest.raises(Unsupported, match=words):
        attend(store)


def views(manifest):
    (group,) = manifest.to_dict()["groups"]
    return {
        piece["state"]: (piece["view"]["offset"], piece["view"]["entry"], piece["view"]["axes"])
        for piece in group["pieces"]
    }


@pytest.mark.parametrize(
    ("store", "keys", "values"),
    [
        (side_by_side, (0, 128, [2048, 2]), (64, 128, [2048, 2])),
        (values_first, (64, 128, [2048, 2]), (0, 128, [2048, 2])),
        (by_turns, (0, 128, [2048, 4]), (2, 128, [2048, 4])),
        (transposed, (0, 2, [2048, 32]), (1024, 64, [2048, 2])),
    ],
)
def test_an_unknown_back_end_is_served_as_it_answers(said, store, keys, values):
    made = attend(store, name="BRAND_NEW")
    assert views(made) == {"layers.0/k": keys, "layers.0/v": values}
    assert "BRAND_NEW" in said[0][1]


@pytest.mark.parametrize("store", [heads_swapped, tokens_swapped])
def test_an_unknown_back_end_in_an_order_without_strides_is_refused(store):
    with pytest.raises(Unsupported, match="BRAND_NEW keeps a block is not understood: keys from byte"):
        attend(store, name="BRAND_NEW")


def broken(block, token, key, value):
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("store", "changes", "why"),
    [
        (broken, {}, "its kernel failed: RuntimeError: no such instruction"),
        (
            nothing,
            {"forward_includes_kv_cache_update": True},
            "its cache is written in the midst of its attention kernel",
        ),
    ],
)
def test_what_cannot_be_asked_is_said_by_name(said, store, changes, why):
    attend(store, **changes)
    ((level, line),) = said
    assert level == "WARNING" and f"FLASH_ATTN could not be asked where it writes: {why}" in line
    with pytest.raises(Unsupported, match="back end BRAND_NEW keeps keys and values, and it cannot be"):
        attend(store, name="BRAND_NEW", **changes)


def test_asking_can_be_switched_off(said, monkeypatch):
    monkeypatch.setenv(asking.SWITCH, "off")
    attend(values_first)
    ((level, line),) = said
    assert level == "WARNING" and "KVFERRY_ASK is 'off'" in line


@pytest.mark.parametrize("store", [side_by_side, values_first, heads_swapped, by_turns])
def test_records_of_bytes_are_asked_number_by_number(said, store):
    quantised = {"kv_quant_mode": KVQuantMode.FP8_PER_TENSOR, "dtype": torch.uint8}

    def asked():
        return describe([Attention(4)], Layer(store), quantised=quantised)

    if store is side_by_side:
        asked()
        assert said[0][0] == "INFO"
        return
    with pytest.raises(Unsupported, match="'k' should lie from byte 0, 64 from token"):
        asked()


class LatentLayer(Layer):
    """`store` says where the position goes."""

    name = "FLASHMLA"
    kv_lora_rank, qk_rope_head_dim = 64, 32
    kv_cache_dtype, _k_scale = "auto", None

    def bind_kv_cache(self, cache):
        self.kv_cache = cache.squeeze(1)

    def do_kv_cache_update(self, latent, position, cache, slots, cache_type, scale):
        parts = [latent, position.squeeze(1)]
        flat = cache.view(-1, cache.shape[-1])
        flat[slots] = torch.cat(parts if self.store == "behind" else parts[::-1], dim=-1)


def test_latents_are_asked(said):
    describe([Latent(96)], LatentLayer("behind"))
    assert "FLASHMLA" in said[0][1]
    with pytest.raises(Unsupported, match="'latent' should lie from byte 0, .* but its kernel wrote it"):
        describe([Latent(96)], LatentLayer("before"))


# What vLLM's files of layers call kernels.

causal_conv1d_fn = causal_conv1d.causal_conv1d_fn_cpu


def selective_state_update(
    states, x, dt, A, B, C, D, dt_bias, *, state_batch_indices, out, **_options
):
    slot = int(state_batch_indices[0])
    made = x[0].float().unsqueeze(-1) * B[0].float().view(*[1] * (x.dim() - 1), -1)
    states[slot] = made if RIGHT else made.flip(0)


RIGHT = True


class StateLayer(Layer):
    name = "MAMBA2_ATTN"
    split_sizes = None

    def bind_kv_cache(self, cache):
        pages = cache.squeeze(dim=(1, 2))
        kept, offset = [], 0
        for shape, dtype in zip(self.spec.shapes, self.spec.dtypes, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            kept.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
            offset += size
        self.kv_cache = tuple(kept)

    def split_hidden_states_B_C_fn(self, channels):
        parts = channels.split([96, 96, 96], dim=-1)
        return parts if self.store == "x b c" else parts[::-1]


@pytest.mark.parametrize("conv", ["SD", "DS"])
@pytest.mark.parametrize("kept", [mamba1(), mamba2()])
def test_states_are_asked(said, monkeypatch, kept, conv):
    order_convolutions(conv)
    made = StateLayer("x b c", spec=kept.spec(Topology(conv=conv)))
    describe([kept], made, conv=conv)
    assert said[0][0] == "INFO" and "MAMBA2_ATTN" in said[0][1]
    monkeypatch.setattr(f"{__name__}.RIGHT", False)
    with pytest.raises(Unsupported, match="'ssm' should lie from byte .* but its kernel wrote it from"):
        describe([kept], made, conv=conv)


def test_the_order_of_a_convolution_s_sections_is_asked():
    order_convolutions("SD")
    made = StateLayer("c b x", spec=mamba2().spec(Topology()))
    with pytest.raises(Unsupported, match="'conv.x' should lie from byte 0, .* wrote it from byte 384"):
        describe([mamba2()], made)


class TurnedLayer(StateLayer):
    """As if the numbers of a convolution lay in the other order in the same bytes."""

    def bind_kv_cache(self, cache):
        super().bind_kv_cache(cache)
        first, *rest = self.kv_cache
        rows, columns = first.shape[1:]
        turned = first.reshape(len(first), -1).as_strided(
            (len(first), rows, columns), (first.stride(0), 1, rows)
        )
        self.kv_cache = (turned, *rest)


@pytest.mark.parametrize("conv", ["SD", "DS"])
def test_the_other_order_of_a_convolution_is_refused(conv):
    order_convolutions(conv)
    kept = mamba2()
    made = TurnedLayer("x b c", spec=kept.spec(Topology(conv=conv)))
    with pytest.raises(Unsupported, match="'conv.x' should lie from byte 0"):
        describe([kept], made, conv=conv)


def test_states_without_a_way_to_ask_are_said(said):
    kept = linear()
    made = StateLayer("", name="LINEAR_ATTN", spec=kept.spec(Topology()))
    describe([kept], made)
    ((level, line),) = said
    assert level == "WARNING" and "LINEAR_ATTN could not be asked" in line
    assert "there is no way yet to call the kernels that update linear states" in line


class TestRuns:
    """Turning an order of numbers into even runs."""

    def runs(self, offsets):
        """By token and number, of one head, in numbers of 4 bytes."""
        at = np.asarray(offsets, np.int64)[:, None, :] * 4
        return probe.runs(probe.Places(("token", "head", "dim"), at, 4), head=1)

    def test_what_is_even_is_one_run(self):
        offsets = np.arange(32).reshape(4, 8)
        assert self.runs(offsets) == [probe.Run(0, 8, 0, 0, 0, 8, 1)]
        assert self.runs(offsets.T) == [probe.Run(0, 4, 0, 0, 0, 1, 8)]

    def test_tiles(self):
        # Tiles of 2 tokens; pairs of numbers.
        t, d = np.arange(4).reshape(4, 1), np.arange(4).reshape(1, 4)
        offsets = 100 + t // 2 * 8 + t % 2 * 2 + d // 2 * 4 + d % 2
        runs = self.runs(offsets)
        assert runs == [probe.Run(0, 2, 100, 2, 8, 2, 1), probe.Run(2, 4, 104, 2, 8, 2, 1)]

    def test_what_is_not_even_is_none(self):
        assert self.runs([[0, 1], [1, 3]]) is None
        assert self.runs([[0], [1], [5], [6], [11], [12]]) is None

    def test_nor_what_runs_backwards(self):
        assert self.runs([[3, 2], [1, 0]]) is None

    def test_nor_what_was_not_found(self):
        assert self.runs([[0, 1], [2, -1]]) is None
