"""What an object has opened is closed with it: when it is told to, when it is garbage, or when the interpreter ends."""

import os
import shutil
import weakref
from typing import Any, Protocol, TypeAlias

from diskreplay.errors import Closed


class Closeable(Protocol):
    """What can be closed: a store, a writer, a sampler."""

    def close(self) -> None:
        """Close it."""


Kept = list[Closeable]
Closing: TypeAlias = "weakref.finalize[Any, Any]"


def closes(owner: object, kept: Kept, folder: str | None = None) -> Closing:
    """Return what closes all that is in `kept` when it is called, or else with its owner; the last one first.

    Each is closed even where another fails; the first error is raised then. `folder`, a temporary one that holds the
    store, is removed with it: first of all, as what is not there need not be sealed. What fails for that is no error.
    """
    return weakref.finalize(owner, _close, kept, folder, os.getpid())


def check_open(owner: object, closing: Closing) -> None:
    """Raise Closed, which names the owner's class, where what `closes` returned for it has closed all."""
    if not closing.alive:
        raise Closed(f"this {type(owner).__name__} is closed; make another")


def _close(kept: Kept, folder: str | None, pid: int) -> None:
    if os.getpid() != pid:
        return  # a forked child: all of it is its parent's
    errors = []
    try:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        while kept:
            try:
                kept.pop().close()
            except Exception as error:
                errors.append(error)
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if errors and folder is None:
        raise errors[0]
