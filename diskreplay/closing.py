"""Closes the resources of an object: on request, when it is garbage collected, or when the interpreter ends."""

import os
import shutil
import weakref
from typing import Any, Protocol, TypeAlias

from diskreplay.errors import Closed


class Closeable(Protocol):
    """An object that can be closed, such as a store, a writer or a sampler."""

    def close(self) -> None:
        """Close this object."""


Kept = list[Closeable]
Closing: TypeAlias = "weakref.finalize[Any, Any]"


def closes(owner: object, kept: Kept, folder: str | None = None) -> Closing:
    """Return a finalizer that closes ``kept``, last one first, when called, or after ``owner`` is garbage collected.

    Every object is closed even if closing another one fails; the first error is raised at the end. ``folder`` is a
    temporary folder that contains the store; None: the store is not temporary. The folder is deleted before the objects
    are closed, because the segments of a deleted store need not be sealed. If a ``folder`` is given, errors of closing
    are ignored.
    """
    return weakref.finalize(owner, _close, kept, folder, os.getpid())


def check_open(owner: object, closing: Closing) -> None:
    """Raise Closed, which names the owner's class, if the finalizer that `closes` returned has run."""
    if not closing.alive:
        raise Closed(f"this {type(owner).__name__} is closed; make another")


def _close(kept: Kept, folder: str | None, pid: int) -> None:
    if os.getpid() != pid:
        return  # in a forked child: the objects belong to the parent
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
