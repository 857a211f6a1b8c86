"""Functions that close the resources of an object: on request, when the object is garbage collected, or at exit."""

import os
import shutil
import weakref
from typing import Any, Protocol, TypeAlias

from diskreplay.errors import Closed


class Closeable(Protocol):
    def close(self) -> None: ...


Kept = list[Closeable]
Closing: TypeAlias = "weakref.finalize[Any, Any]"


def closes(owner: object, kept: Kept, folder: str | None = None) -> Closing:
    """Return a finalizer that closes the objects in ``kept``, in reverse order.

    The finalizer runs when it is called, when ``owner`` is garbage collected, or at exit. If closing an object fails,
    the other objects are closed, too, and the first error is raised at the end. ``folder`` is a temporary folder with
    the store; None: the store is not temporary. The folder is deleted before the objects are closed: the writers of a
    deleted store have nothing to seal. If the store is temporary, errors of closing are ignored.
    """
    return weakref.finalize(owner, _close, kept, folder, os.getpid())


def check_open(owner: object, closing: Closing) -> None:
    if not closing.alive:
        raise Closed(f"this {type(owner).__name__} is closed; make another")


def _close(kept: Kept, folder: str | None, pid: int) -> None:
    if os.getpid() != pid:
        return  # in a forked child, the objects belong to the parent
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
