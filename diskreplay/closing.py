"""What an adapter has opened is closed with it, when it is garbage, or when the interpreter ends."""

import os
import weakref
from typing import Any

from diskreplay import Sampler, Store, VectorWriter, Writer

Kept = list[Store | Sampler | Writer | VectorWriter]


def closes(owner: object, kept: Kept) -> "weakref.finalize[Any, Any]":
    """Return what closes all that is in `kept` when it is called, or else with its owner; the last one first."""
    return weakref.finalize(owner, _close, kept, os.getpid())


def _close(kept: Kept, pid: int) -> None:
    if os.getpid() == pid:  # else this is a forked child, and all of it is its parent's
        while kept:
            kept.pop().close()
