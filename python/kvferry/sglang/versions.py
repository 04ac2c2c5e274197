"""The version of SGLang that the back end is tried with."""

from __future__ import annotations

#: Tried with real engines.
TRIED = ("0.5.23",)

#: What protects an engine whatever its version, in words.
STILL_CHECKED = (
    "what is used of its insides is looked for when it starts, pools and settings that have not been seen are refused by "
    "name, every plan is proven before a byte moves, and audits compare what D got with what P has"
)


def running() -> str:
    """The version of SGLang in this process."""
    import sglang

    return str(sglang.__version__)


def is_tried(version: str) -> bool:
    return version in TRIED


def untried(version: str) -> str:
    """What to say of a version that nobody has tried."""
    return (
        f"SGLang {version} has not been tried with this release of kvferry ({', '.join(TRIED)} has). "
        f"What still holds: {STILL_CHECKED}"
    )
