"""What a request's cache is computed from, in 16 bytes: every adapter makes it from the request that its engine has itself,
and of equal requests they must make the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


def origin(parts: Mapping[str, bytes], tokens: int) -> bytes:
    """Stands for `tokens` tokens, and for all that goes with them: a digest for each part that there is (`tokens`, `salt`)."""
    made = hashlib.sha256(b"%d tokens" % tokens)
    for name, part in sorted(parts.items()):
        made.update(b"\0" + name.encode() + b"\0" + part)
    return made.digest()[:16]


def digest(*contents: bytes) -> bytes:
    """With its length before each: no two lists are the same bytes."""
    made = hashlib.sha256()
    for content in contents:
        made.update(b"%d:" % len(content))
        made.update(content)
    return made.digest()


def room_name(room: int, made_of: bytes, but_last: bool = False) -> str:
    """The name of a request that SGLang's router has given a number to, its room: who comes with a room and another
    prompt finds nothing, and disturbs nobody. `but_last`: with the states before the prompt's last token, which some
    engines compute again, and not with those after it."""
    return f"room {room}{' but the last token' if but_last else ''}: {made_of.hex()}"
