"""Locks that a forked child does not take: nobody there would ever release one that another thread held."""

import os
import threading
from typing import Any

from diskreplay.errors import ReplayError
from diskreplay.store.forks import told_of_forks


class ForeignLock:
    """In place of a lock, in a child of the process that made it: says so to whoever would take it."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __enter__(self) -> None:
        """Refuse: always a ReplayError."""
        raise ReplayError(self._words)

    def __exit__(self, *_: object) -> None:
        """Do nothing: it was never taken."""


def lock_of_one_process(owner: Any) -> Any:
    """Return a reentrant lock for the attribute `_lock` of an object that belongs to the process which makes it.

    In a forked child that attribute becomes a `ForeignLock`, with the words of the object's `foreign`, a format that is
    given the number of the process it belongs to. So taking the lock costs nothing more.
    """
    _owners.add(owner)
    return threading.RLock()


def _forbid(owner: Any) -> None:
    owner._lock = ForeignLock(owner.foreign.format(os.getppid()))


_owners = told_of_forks(_forbid)
