"""A lock that says so when it is used by another process than the one that made it."""

import os
import threading

from diskreplay.errors import ReplayError


class ProcessLock:
    """A reentrant lock of one process; a forked child, where nobody would ever release it, cannot take it.

    Parameters
    ----------
    what, advice : str
        What it guards, and what to do in a child instead: words of the error.
    """

    def __init__(self, what: str, advice: str) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._what, self._advice = what, advice

    @property
    def here(self) -> bool:
        """Whether this is the process that made it."""
        return os.getpid() == self._pid

    def __enter__(self) -> None:
        """Take it.

        Raises
        ------
        ReplayError
            This is a forked child of the process that made it.
        """
        if os.getpid() != self._pid:
            raise ReplayError(f"this {self._what} belongs to another process, number {self._pid}: {self._advice}")
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self._lock.release()

    def __reduce__(self) -> str:
        """Refuse to be pickled, as what it guards cannot be."""
        raise TypeError(f"a {self._what} cannot be sent to another process: {self._advice}")
