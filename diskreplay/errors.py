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
├── WriterClosed    ValueError         an append after close, or from a forked child
├── RateLimited     TimeoutError       a limiter did not let the call through in time
└── InvalidIndex    IndexError         an id that never existed
"""


class ReplayError(Exception):
    """Base of every error of this package."""


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


class WriterClosed(ReplayError, ValueError):
    """The writer is closed, or belongs to the parent of this forked process."""


class RateLimited(ReplayError, TimeoutError):
    """A rate limiter did not let the call through before its timeout."""


class InvalidIndex(ReplayError, IndexError):
    """An id that no step of the store ever had."""
