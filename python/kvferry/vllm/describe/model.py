"""What a cache's specs do not say, and where vLLM keeps it instead."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from ..._identity import identity as facts
from ..._identity import weights
from ..refusal import refuse
from .specs import format_of


class Model:
    """The facts of a model that a rank needs to say which part of a state it holds."""

    def __init__(self, vllm_config: Any, tp_size: int) -> None:
        self._config = vllm_config
        self._tp = tp_size
        self.layers: int = vllm_config.model_config.get_total_num_hidden_layers()

    def place(self, layer: str) -> tuple[bool, int]:
        """Whether a layer belongs to the draft, and its number there.

        vLLM numbers a draft's layers on from the model's own, or names them apart. Falcon-H1's Mamba layers are
        numbered on, too, from the attention layers that they stand beside: `model.36.mixer`, which is no
        layer in a list of layers.
        """
        parts = layer.split(".")
        at = next((at for at, part in enumerate(parts) if part.isdecimal()), None)
        if at is None:
            raise refuse(layer, "its name holds no layer number")
        number = int(parts[at])
        if parts[0] == "draft_model":
            return True, number
        if number < self.layers:
            return False, number
        return parts[at - 1] == "layers", number - self.layers

    def maker(self, index: int) -> int:
        """The layer that makes what layer `index` of the model keeps: itself, or, in a model whose last layers
        share caches, the last layer of its type before them.

        vLLM's own models keep nothing for those that share. Its back end for models of transformers keeps a
        second copy of the same numbers.
        """
        text = self._config.model_config.hf_text_config
        types = getattr(text, "layer_types", None) or []
        first = self.layers - (getattr(text, "num_kv_shared_layers", None) or 0)
        if not 0 < first <= index < len(types):
            return index
        same = (layer for layer in reversed(range(first)) if types[layer] == types[index])
        return next(same, index)

    def kv_heads(self, layer: str, local: int, sliding: bool) -> int:
        """KV heads of a layer in the whole model, of which this rank holds `local`.

        Heads that split evenly tell their number themselves. A single head may be a share or one of
        several replicas: then the model's configuration decides.
        """
        if local > 1 or self._tp == 1:
            return local * self._tp
        draft, index = self.place(layer)
        model = self._config.model_config
        if draft:
            model = self._config.speculative_config.draft_model_config
        total = int(model.model_arch_config[index].total_num_kv_heads)
        if sliding:
            # Some models give their sliding layers another number, beside the one that vLLM reads.
            total = int(getattr(model.hf_text_config, "swa_num_key_value_heads", None) or total)
        if max(1, total // self._tp) != local:
            raise refuse(
                layer,
                f"this rank of {self._tp} holds {local} KV head, but the model's configuration says "
                f"that there are {total} in all; say how many there are with `kv_heads`",
            )
        return total

    def shapes_alone(self, layer: str, kind: str, hint: str) -> Sequence[Sequence[int]]:
        """The shapes of a recurrent layer's states if there were a single rank, which the model's class
        says.

        One group on each of two ranks may be two groups or twice the same one: this tells them apart.
        `hint` is what a user can do where the class says nothing.
        """
        from vllm.model_executor.models import ModelRegistry

        model = self._config.model_config
        parallel = copy.copy(self._config.parallel_config)
        parallel.tensor_parallel_size = 1
        alone = copy.copy(self._config)
        alone.parallel_config = parallel
        architecture, _ = ModelRegistry.resolve_model_cls(model.architectures, model_config=model)
        if not hasattr(architecture, "get_mamba_state_shape_from_config"):
            raise refuse(
                layer,
                f"its shapes on one of {self._tp} ranks do not tell all sizes of its kind '{kind}', and "
                f"{architecture.__name__} does not say its shapes on a single rank{hint}",
            )
        shapes: Sequence[Sequence[int]] = architecture.get_mamba_state_shape_from_config(alone)
        return shapes

    def scales(self, layer: str) -> tuple[str, bool, list[float], list[float]]:
        """The cache data type of a layer, whether its heads have scales of their own, and the scales of
        its keys and values: one for all heads, or one for each that this rank holds."""
        compilation = getattr(self._config, "compilation_config", None)
        module = getattr(compilation, "static_forward_context", {}).get(layer)
        found: list[Any] = [getattr(module, name, None) for name in ("_k_scale", "_v_scale")]
        if module is None or any(scale is None for scale in found):
            raise refuse(layer, "it does not say the scales of its keys and values")
        cache = getattr(module, "kv_cache_dtype", self._config.cache_config.cache_dtype)
        keys, values = ([float(it) for it in scale.flatten().tolist()] for scale in found)
        # A rank with a single head has a single scale either way: the checkpoint's scheme tells.
        quantised = getattr(getattr(module, "quant_method", None), "quant_config", None)
        scheme = getattr(quantised, "kv_cache_scheme", None) or {}
        by_head = scheme.get("strategy") == "attn_head" or max(len(keys), len(values)) > 1
        return str(cache), by_head, keys, values

    def identity(self, own_draft: bool = False, tries_others: bool = False) -> dict[str, str]:
        """What makes equal shapes mean equal things: the keys are those of the facts."""
        model = self._config.model_config
        cache = getattr(getattr(self._config, "load_config", None), "download_dir", None)
        found = weights(str(model.model), getattr(model, "revision", None), cache)
        role = str(getattr(getattr(self._config, "kv_transfer_config", None), "kv_role", "kv_both"))
        gives, takes = role != "kv_consumer", role != "kv_producer"
        identity = facts(
            "vLLM",
            str(model.model),
            model,
            format_of("", model.dtype)[0],
            found,
            gives=gives,
            takes=takes,
            # It is for whoever reads to say.
            tries_others=tries_others and not (gives and not takes),
        )
        speculative = getattr(self._config, "speculative_config", None)
        # Guesses that are looked up keep no cache: vLLM names the model itself as their draft.
        if speculative is not None and speculative.uses_draft_kv_cache() and not own_draft:
            identity["draft"] = str(speculative.draft_model_config.model)
        return identity


def own_spec(vllm_config: Any, layer: str) -> Any | None:
    """The spec that a layer of the running process asks for. Its group may keep more than that."""
    compilation = getattr(vllm_config, "compilation_config", None)
    module = getattr(compilation, "static_forward_context", {}).get(layer)
    return module.get_kv_cache_spec(vllm_config) if module is not None else None


def backend_names(vllm_config: Any, layers: list[str]) -> Mapping[str, str]:
    """The attention back end of every layer, from the layers of the running process."""
    context = vllm_config.compilation_config.static_forward_context
    return {
        layer: context[layer].get_attn_backend().get_name() for layer in layers if layer in context
    }
