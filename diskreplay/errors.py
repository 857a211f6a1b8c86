"""Every error diskreplay raises on purpose. Each is also the builtin a caller would expect.

ReplayError
├── SchemaError     ValueError         a value, field or space does not fit the schema
├── FormatError     ValueError         a store that is damaged, hostile, or of an unknown version
├── StoreNotFound   FileNotFoundError  no store at this path
├── StoreExists     FileExistsError    a store is there already
├── StoreLocked     RuntimeError       another process or thread holds what is needed
├── ReadOnlyError   PermissionError    a write through mode "r"
├── StorageFull     OSError            no space for the next row; nothing was half-written
├── NotEnoughData   BufferError        fewer steps than the request needs
├── Closed          ValueError         a store, sampler or buffer that was closed
│   └── WriterClosed                   an append after close, or from a forked child
├── RateLimited     TimeoutError       a limiter did not let the call through in time
├── BufferFull      BufferError        a step for a rollout buffer that has all its steps
├── SegmentGone     LookupError        evicted or set aside since the snapshot was taken
├── InvalidIndex    IndexError         an id that never existed
└── MissingExtra    ImportError        a library that an extra of this package installs

DamagedSegmentWarning is the RuntimeWarning of a store that is used without a segment which cannot be read.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from diskreplay.folders import shown

# Names of modules that a warning is not told of: ours, and those of decorators and imports between two of ours.
_INSIDE = (__name__.rpartition(".")[0] + ".", "contextlib", "importlib")


class ReplayError(Exception):
    """Base of every error of this package. Its messages name the files of a store by the path it was opened with."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(shown(arg) if isinstance(arg, str) else arg for arg in args))


class SchemaError(ReplayError, ValueError):
    """A value, a field or a space does not fit the schema."""


class FormatError(ReplayError, ValueError):
    """The store on disk is damaged, hostile, or of a version this release does not know."""


class StoreNotFound(ReplayError, FileNotFoundError):
    """There is no store at the path."""


class StoreExists(ReplayError, FileExistsError):
    """There is a store at the path already."""


class StoreLocked(ReplayError, RuntimeError):
    """Another process holds a lock that the call needs, or another thread is using the writer. Try again later."""


class ReadOnlyError(ReplayError, PermissionError):
    """The store was opened with mode "r", which never writes."""


class StorageFull(ReplayError, OSError):
    """The disk has no room for the next row. What was committed is intact; append again when there is space."""


class NotEnoughData(ReplayError, BufferError):
    """There are fewer steps than the request needs; the message says how many there are and how many are needed."""


class Closed(ReplayError, ValueError):
    """The store, sampler, writer or buffer is closed."""


class WriterClosed(Closed):
    """The writer is closed, or belongs to the parent of this forked process."""


class RateLimited(ReplayError, TimeoutError):
    """A rate limiter did not let the call through before its timeout."""


class BufferFull(ReplayError, BufferError):
    """A rollout buffer has all its steps; `clear` it before the next."""


class SegmentGone(ReplayError, LookupError):
    """A segment was evicted or set aside after the snapshot was taken, and what is asked for was not mapped yet."""


class InvalidIndex(ReplayError, IndexError):
    """An id that no step of the store ever had."""


class MissingExtra(ReplayError, ImportError):
    """A library that the call needs cannot be imported; the message has the command that installs it."""

    @classmethod
    @contextmanager
    def raised_for(cls, what: str, extra: str) -> Iterator[None]:
        """Raise this for an ImportError of the block: ``what`` needs the libraries of ``extra``."""
        try:
            yield
        except cls:
            raise
        except ImportError as error:
            raise cls(
                f'{what} needs a library that cannot be imported ({error}): pip install "diskreplay[{extra}]"'
            ) from error


class DamagedSegmentWarning(RuntimeWarning):
    """A segment of a store cannot be read, and the rest is used without it; or one in quarantine takes up space."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn of the line outside of this package whose call led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).startswith(_INSIDE):
        level += not name.startswith("importlib._bootstrap")  # which `warnings` does not count
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
