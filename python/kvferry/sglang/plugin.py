"""Makes the transfer back end known to SGLang by its name alone.

SGLang calls `register` in each of its processes (entry point `kvferry` of the group `sglang.srt.plugins`), before it reads
its arguments. Nothing of SGLang is changed on disk: the hooks are those of its own registry, which applies them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: How the entry point is called in `pyproject.toml`, and so in `SGLANG_PLUGINS`.
GROUP, PLUGIN = "sglang.srt.plugins", "kvferry"
#: How users call the back end.
NAME = "kvferry"

_DISAGGREGATION = "sglang.srt.disaggregation"


def register() -> None:
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    add_disagg_transfer_backend_choices([NAME])
    # The enumeration of back ends has no door of its own.
    if NAME not in TransferBackend._value2member_map_:
        member = object.__new__(TransferBackend)
        member._name_, member._value_ = NAME.upper(), NAME
        TransferBackend._member_map_[member._name_] = member
        TransferBackend._value2member_map_[NAME] = member
        TransferBackend._member_names_.append(member._name_)

    prefill, decode = f"{_DISAGGREGATION}.prefill.PrefillBootstrapQueue", f"{_DISAGGREGATION}.decode.DecodePreallocQueue"
    HookRegistry.register(f"{_DISAGGREGATION}.utils.get_kv_class", _classes, HookType.AROUND)
    # The manager is given addresses only: the queue that makes it knows the pools.
    for queue in (prefill, decode):
        HookRegistry.register(f"{queue}._init_kv_manager", _bind, HookType.AFTER)
    # So is who sends or receives given a number only, and the request knows what it is for.
    HookRegistry.register(f"{prefill}.create_sender", _sends, HookType.AFTER)
    HookRegistry.register(f"{decode}._create_receiver_and_enqueue", _receives, HookType.AFTER)
    HookRegistry.register(f"{_DISAGGREGATION}.decode.DecodeTransferQueue.__init__", _waits, HookType.AFTER)


def _classes(given: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    if transfer_backend.value != NAME or class_type.name == "KVARGS":
        return given(transfer_backend, class_type)
    from .manager import Manager
    from .receiver import Receiver
    from .sender import NoBootstrapServer, Sender

    classes = {
        "MANAGER": Manager,
        "SENDER": Sender,
        "RECEIVER": Receiver,
        "BOOTSTRAP_SERVER": NoBootstrapServer,
    }
    return classes[class_type.name]


def _bind(manager: Any, queue: Any, *_: Any, **__: Any) -> None:
    if _is_ours(manager):
        manager.bind(queue)


def _sends(made: bool, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    sender = req.disagg_kv_sender
    # That of a warm-up is another.
    if made and _is_ours(sender):
        sender.begin(req)


def _receives(made: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    if _is_ours(made.kv_receiver):
        made.kv_receiver.begin(req, again=made.is_rebootstrap)


def _waits(_: None, queue: Any, *__: Any, **___: Any) -> None:
    """Pages of a load that failed stay where they are until nothing can land in them any more, on any rank, however long
    that takes. SGLang's own back ends do so when they are asked to, and give up after a while."""
    if queue.scheduler.transfer_backend.value == NAME:
        queue.enable_deferred_kv_release = True
        queue.deferred_kv_release_timeout = float("inf")


def _is_ours(it: Any) -> bool:
    return type(it).__module__.startswith(f"{__package__}.")
