"""The exceptions of the package. Each carries its reason as fields, beside the message."""

from __future__ import annotations

from typing import Any


class Error(Exception):
    """What kvferry refuses to do. Nothing has been copied."""

    #: Which reason it is, in one word: `format`, `block_twice`.
    kind: str

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # Fields travel with the exception between the processes of an engine.
        return _restore, (type(self), str(self), dict(self.__dict__))


def _restore(cls: type[Error], message: str, fields: dict[str, Any]) -> Error:
    return cls(message, **fields)


class ManifestError(Error):
    """Facts that make no sense, or bytes that are not a manifest. The message names the place."""


class RequestError(Error):
    """A request that does not fit its plan: a table too short, a block that does not exist."""


class AgentError(Error):
    """What an agent cannot do on its own side: an option, a key, an address, a name in use."""


class Incompatible(Error):
    """Two sides that cannot serve each other: what differs, both values, and what to do.

    `kind` is `identity`, `format`, `axes`, `law`, `window`, `phase`, `missing`, `uncovered`,
    `too_complex` or `unproven`.
    """

    #: The state that it is about (`layers.3/k`); None where it is about the engines as a whole.
    state: str | None
    #: The fact that differs (`model`), where `kind` is `identity`.
    fact: str | None
    #: The source rank that was looked at, where one is to blame.
    source_rank: str | None
    #: What the source has; None where it says nothing.
    source_value: str | None
    #: What the destination has or needs; None where it says nothing.
    destination_value: str | None
