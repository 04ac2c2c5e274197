"""Whether what an adapter touches of an engine is still there: nothing of it is promised by anybody."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any


def is_there(module: str, name: str) -> bool:
    """Whether a module has a name: `function`, `Class`, or `Class.attribute`."""
    try:
        found: Any = import_module(module)
    except ImportError:
        return False
    first, _, attribute = name.partition(".")
    if not hasattr(found, first):
        return False
    owner = getattr(found, first)
    return not attribute or hasattr(owner, attribute) or _is_given(owner, attribute)


def _is_given(owner: Any, attribute: str) -> bool:
    """Whether objects of a class have an attribute: it is declared, or set in one of their methods."""
    for cls in getattr(owner, "__mro__", ())[:-1]:
        if attribute in vars(cls).get("__annotations__", {}) or attribute in getattr(cls, "__slots__", ()):
            return True
        if re.search(rf"\bself\.{attribute}\b[^=\n]*=[^=]", inspect.getsource(cls)):
            return True
    return False
