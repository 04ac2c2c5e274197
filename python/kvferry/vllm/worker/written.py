"""P's workers: which states the running step has written, layer by layer, for those who read them meanwhile.

vLLM calls a connector behind every layer of attention. On a GPU that is when the layer's kernels have been launched: it
is written when the stream has passed a point behind them. Where vLLM replays a whole step from a CUDA graph it does not
call, and of the layers of that step nothing is said before all of them are written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..._core import Manifest, Worker
from .. import buffer
from ..describe.manifest import names_of_layers
from .starter import Event, Starter


def is_known(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether a layer is written for good when vLLM says that it is through with it. Both sides of the connector ask:
    where it is not, the scheduler names no steps, and D reads what is complete."""
    parallel = vllm_config.parallel_config
    return not (
        # Others read from host memory, where everything comes at the end of a step.
        buffer.is_wanted(vllm_config)
        or any(getattr(group, "host_resident", False) for group in kv_cache_config.kv_cache_groups)
        # Draft models write behind the model, and more than once.
        or vllm_config.speculative_config is not None
        # The step is divided, and comes by every layer several times.
        or getattr(parallel, "enable_dbo", False)
        or getattr(parallel, "use_ubatching", False)
    )


#: Seconds between two words of a step: what they let others read ahead takes longer where it matters.
PAUSE = 0.005


class Written:
    """Tells a worker's agent what its steps write. `mark` gives a point of the stream on which the model computes, behind
    all that it was told to do; there is none where that is done already."""

    def __init__(
        self,
        keepers: Mapping[str, set[str]],
        agent: Worker,
        mark: Callable[[], Event | None] | None = None,
    ) -> None:
        self._agent, self._mark = agent, mark
        #: By layer, the states that it keeps; and by state, the layers.
        self._states: dict[str, list[str]] = {}
        self._keepers = keepers
        for state, layers in keepers.items():
            for layer in layers:
                self._states.setdefault(layer, []).append(state)
        self._said = Starter(self._say, PAUSE)
        #: The present step, if D knows of it, and the layers that it is through with.
        self._step = 0
        self._through: set[str] = set()
        #: States that it has written, of which nothing was said yet.
        self._unsaid: list[str] = []

    def begin(self, step: int) -> None:
        """Before a step computes; 0 is one that D does not know of."""
        self._step, self._through, self._unsaid = step, set(), []
        self._put({"begin": step})

    def layer(self, layer: str) -> None:
        """vLLM is through with a layer."""
        if not self._step or layer not in self._states:
            return
        self._through.add(layer)
        self._unsaid += [it for it in self._states[layer] if self._keepers[it] <= self._through]
        # A mark costs the engine's own thread and the GPU time, which is lost where nobody reads ahead.
        if self._unsaid and (self._mark is None or self._agent.is_heard(self._step)):
            states, self._unsaid = self._unsaid, []
            self._put({"wrote": self._step, "states": states})

    def end(self) -> None:
        """The step has computed everything."""
        self._put({"end": self._step})
        self._step = 0

    def close(self) -> None:
        self._said.close()

    def _put(self, word: dict[str, Any]) -> None:
        if self._step:
            # In their order: a step that has begun says that those before it are over.
            self._said.put(self._mark() if self._mark else None, [word])

    def _say(self, word: dict[str, Any]) -> None:
        match word:
            case {"begin": step}:
                self._agent.begin_step(step)
            case {"wrote": step, "states": states}:
                self._agent.wrote(step, states)
            case {"end": step}:
                self._agent.end_step(step)


def keepers_of_states(
    vllm_config: Any, kv_cache_config: Any, manifest: Manifest
) -> dict[str, set[str]]:
    """By state, the layers that keep it, or part of it. Several may: those that share a cache, or keep what another one
    makes a second time. A layer that is of another kind than attention is never said to be written, so that a state
    which such a layer keeps, too, waits for the end of the step."""
    transferred = [group for group in kv_cache_config.kv_cache_groups if group.enable_kv_transfer]
    names = names_of_layers(vllm_config, transferred)
    keepers: dict[str, set[str]] = {}
    for group, facts in zip(transferred, manifest.to_dict()["groups"], strict=True):
        for piece in facts["pieces"]:
            name = piece["state"].rpartition("/")[0]
            same = {layer for layer in group.layer_names if names[layer] == name}
            keepers.setdefault(piece["state"], set()).update(same)
    return keepers
