"""Each kind of layer's kernels are asked once whether they agree with how its cache is described."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..describe.geometry import View
from ..describe.specs import Fact
from ..logs import logger
from ..refusal import refuse
from . import probe
from . import writers as kernels
from .inputs import Lengths
from .known import writers_of
from .probe import Answer, CannotAsk, Places

#: Set to `off` where a kernel does not survive being asked.
SWITCH = "KVFERRY_ASK"

Make = Callable[[Any, Any, Any, Any, Lengths], probe.Kernel]


class Asking:
    """What the kernels of a rank's layers said."""

    def __init__(self, vllm_config: Any) -> None:
        compilation = getattr(vllm_config, "compilation_config", None)
        #: The layers of the running engine; none where a cache is described without one.
        self._layers: Mapping[str, Any] = getattr(compilation, "static_forward_context", None) or {}
        self._dtype = vllm_config.model_config.dtype
        self._answers: dict[Any, Answer | CannotAsk] = {}
        #: What was checked, and who writes it.
        self._agreed: dict[Any, dict[str, Fact]] = {}
        #: By what is asked.
        self._asked: set[str] = set()
        self._not_asked: dict[str, str] = {}
        self._seconds = 0.0

    def answer(
        self,
        layer: str,
        make: Make,
        spec: Any,
        tensor: Any,
        lengths: Lengths,
        module: Any = None,
    ) -> Answer | None:
        """What the kernel of a layer does, or None where that cannot be known. `module` stands in for a
        layer that does not run."""
        module = self.running(layer) or module
        if module is None:
            return None
        backend = module.get_attn_backend()
        key = self._key(module, backend, make, tensor, lengths)
        if key not in self._answers:
            begin = time.monotonic()
            try:
                if os.environ.get(SWITCH, "").lower() == "off":
                    raise CannotAsk(f"{SWITCH} is 'off'")
                kernel = make(module, backend, spec, self._dtype, lengths)
                self._answers[key] = probe.ask(kernel, tensor)
                self._asked.add(backend.get_name())
            except CannotAsk as error:
                self._answers[key] = error
                self._not_asked[backend.get_name()] = str(error)
            except Exception as error:
                # Whatever a kernel minds about being called alone, the engine may still run well.
                self._answers[key] = CannotAsk()
                why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                self._not_asked[backend.get_name()] = f"its kernel failed: {why}"
            self._seconds += time.monotonic() - begin
        found = self._answers[key]
        return found if isinstance(found, Answer) else None

    def check(
        self,
        layer: str,
        make: Make,
        spec: Any,
        tensor: Any,
        view: View,
        pieces: Sequence[Fact],
        described: Callable[[], tuple[dict[str, Places], dict[str, Places]]],
    ) -> dict[str, Fact]:
        """Refuses a layer whose kernel does otherwise than `pieces` say; `described` are their places, number by number
        and as they are named. Returns, by state, who writes it, where its format does not say what its bytes mean."""
        if (module := self.running(layer)) is None:
            return {}
        begin = time.monotonic()
        before = self._seconds
        relative = str([{**piece, "view": _relative(piece["view"], view)} for piece in pieces])
        backend = module.get_attn_backend()
        key = (type(module), backend, make, relative, tensor.shape[1:], tensor.stride())
        if key not in self._agreed:
            places, named = described()
            lengths = {name: where.at.shape for name, where in places.items()}
            answer = self.answer(layer, make, spec, tensor, lengths)
            wrong = answer.differs(places) if answer is not None else None
            if wrong is not None:
                raise refuse(
                    layer,
                    f"the back end {backend.get_name()} keeps its cache otherwise than it is described: "
                    f"{wrong}; use another attention back end, or a release of kvferry for this vLLM",
                )
            formats = {piece["state"]: piece["kind"]["format"]["name"] for piece in pieces}
            self._agreed[key] = writers_of(module, backend, answer, named, formats)
        self._seconds = before + time.monotonic() - begin
        return self._agreed[key]

    def running(self, layer: str) -> Any | None:
        """The layer itself, if it takes a cache."""
        module = self._layers.get(layer)
        return module if hasattr(module, "bind_kv_cache") else None

    def report(self) -> None:
        """Says once, at the end, what was asked and what could not be."""
        kernels.forget()
        if self._asked:
            logger.info(
                "kvferry: the engine's own kernels write where the cache is described to be: %s "
                "(asked in %.2f s)",
                ", ".join(sorted(self._asked)),
                self._seconds,
            )
        for name, why in sorted(self._not_asked.items()):
            logger.warning(
                "kvferry: %s could not be asked where it writes: %s; it is served between engines with the "
                "same code alone",
                name,
                why,
            )

    def _key(
        self, module: Any, backend: Any, make: Make, tensor: Any, lengths: Lengths
    ) -> Any:
        impl = type(getattr(module, "impl", None))
        cache_type = getattr(module, "kv_cache_dtype", None)
        tensor_key = (tensor.shape[1:], tensor.stride(), tensor.dtype)
        return (type(module), backend, impl, cache_type, make, tensor_key, tuple(lengths.items()))


def places(pieces: Sequence[Fact], view: View, tokens: int | None) -> dict[str, Places]:
    """Where pieces of a layer say that the numbers of its states lie in a block of the tensor. `tokens`
    is how many it has room for, where its states grow with tokens."""
    by_state: dict[str, list[Fact]] = {}
    for piece in pieces:
        by_state.setdefault(piece["state"], []).append(piece)
    found = {}
    for name, own in by_state.items():
        kind = own[0]["kind"]
        bounds = np.array([piece["bounds"] for piece in own], np.int64).reshape(len(own), -1, 2)
        first, end = bounds[:, :, 0].min(axis=0), bounds[:, :, 1].max(axis=0)
        lengths = [int(length) for length in end - first]
        axes = [str(axis["name"]) for axis in kind["axes"]]
        at = np.full(([tokens] if tokens else []) + lengths, -1, np.int64)
        for piece, held in zip(own, bounds, strict=True):
            where = piece["view"]
            offsets = np.array(where["offset"] - view.offset, np.int64)
            if tokens:
                token = np.arange(tokens)
                kernel = where["kernel"]
                if kernel is not None:
                    inner = token % kernel["entries"] * where["entry"]
                    offsets = offsets + token // kernel["entries"] * kernel["stride"] + inner
                else:
                    offsets = offsets + token * where["entry"]
            for (start, stop), stride in zip(held, where["axes"], strict=True):
                offsets = offsets[..., None] + np.arange(stop - start) * stride
            part = tuple(slice(a - b, c - b) for (a, c), b in zip(held, first, strict=True))
            at[(slice(None), *part) if tokens else part] = offsets
        names = ("token", *axes) if tokens else tuple(axes)
        found[name] = Places(names, at, int(kind["format"]["bytes"]))
    return found


def _relative(where: Fact, view: View) -> Fact:
    return {**where, "offset": where["offset"] - view.offset, "region": 0}
