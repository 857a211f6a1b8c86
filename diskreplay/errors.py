"""The errors that diskreplay raises on purpose. Each error is also a subclass of the builtin error that callers expect.

ReplayError
├── SchemaError     ValueError         a value, field or space does not fit the schema
├── FormatError     ValueError         a damaged or hostile store, or a store of an unknown version
├── StoreNotFound   FileNotFoundError  no store at this path
├── StoreExists     FileExistsError    a store is already there
├── StoreLocked     RuntimeError       another process or thread holds a lock that the call needs
├── ReadOnlyError   PermissionError    a write to a store that was opened with mode "r"
├── StorageFull     OSError            the disk has no space for the next row; no row is half-written
├── NotEnoughData   BufferError        fewer steps than the request needs
├── Closed          ValueError         a store, sampler or buffer that was closed
│   └── WriterClosed                   an append after close, or from a forked child
├── RateLimited     TimeoutError       a limiter did not let the call through in time
├── BufferFull      BufferError        a step was added to a full rollout buffer
├── SegmentGone     LookupError        a segment was evicted or quarantined since the snapshot was taken
├── InvalidIndex    IndexError         an id that never existed
└── MissingExtra    ImportError        a library that an extra of this package installs is missing

DamagedSegmentWarning, a RuntimeWarning, is issued if a segment of a store cannot be read, or is in quarantine.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from diskreplay.folders import shown

# `warn_caller` skips the frames of this package, and of the modules that run decorators and imports.
_INSIDE = (__name__.rpartition(".")[0] + ".", "contextlib", "importlib")


class ReplayError(Exception):
    """Base of every error of this package. Messages name a store's files by the path given to `open`.

    Examples
    --------
    >>> try:
    ...     dr.open("nowhere.replay")
    ... except dr.ReplayError as error:
    ...     print(type(error).__name__)
    StoreNotFound
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(shown(arg) if isinstance(arg, str) else arg for arg in args))


class SchemaError(ReplayError, ValueError):
    """A value, a field or a space does not fit the schema.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((4,), "float32"), dr.Field((), "int64"))
    >>> writer = dr.create("shapes.replay", schema).writer()
    >>> try:
    ...     writer.append(np.zeros(3), action=0, reward=0.0, terminated=False)
    ... except dr.SchemaError as error:
    ...     print("refused")
    refused
    >>> writer.close()
    """


class FormatError(ReplayError, ValueError):
    """The store on disk is damaged or hostile, or has a format version that this release cannot read.

    Examples
    --------
    >>> import pathlib
    >>> _ = dr.create("damaged.replay", dr.Schema(dr.Field((), "int8"), dr.Field((), "int8")))
    >>> document = pathlib.Path("damaged.replay/zarr.json")
    >>> _ = document.write_text(document.read_text().replace("int8", "int9"))
    >>> try:
    ...     dr.open("damaged.replay")
    ... except dr.FormatError as error:
    ...     print("refused")
    refused
    """


class StoreNotFound(ReplayError, FileNotFoundError):
    """No store is at the path.

    Examples
    --------
    >>> try:
    ...     dr.open("nowhere.replay")
    ... except dr.StoreNotFound as error:
    ...     print("refused")
    refused
    """


class StoreExists(ReplayError, FileExistsError):
    """A store is already at the path.

    Examples
    --------
    >>> try:
    ...     dr.create("cartpole.replay", dr.Schema(dr.Field((), "int8"), dr.Field((), "int8")))
    ... except dr.StoreExists as error:
    ...     print("refused")
    refused
    """


class StoreLocked(ReplayError, RuntimeError):
    """Another process holds a lock that the call needs, or another thread is using the writer. Try again later.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((4,), "float32"), dr.Field((), "int64"))
    >>> writer = dr.create("locked.replay", schema).writer()
    >>> try:
    ...     writer.append(np.zeros(4), action=0, reward=0.0, terminated=False)
    ... except dr.StoreLocked:
    ...     print("another thread uses this writer: give each thread its own")
    >>> writer.close()
    """


class ReadOnlyError(ReplayError, PermissionError):
    """The store was opened with mode "r", which never writes.

    Examples
    --------
    >>> try:
    ...     dr.open("cartpole.replay", mode="r").writer()
    ... except dr.ReadOnlyError as error:
    ...     print("refused")
    refused
    """


class StorageFull(ReplayError, OSError):
    """The disk has no room for what the call writes. Nothing was lost; repeat the call when there is space.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((4,), "float32"), dr.Field((), "int64"))
    >>> writer = dr.create("full.replay", schema).writer()
    >>> try:
    ...     writer.append(np.zeros(4), action=0, reward=0.0, terminated=False)
    ... except dr.StorageFull:
    ...     print("the disk is full: free some space, then append the same step again")
    >>> writer.close()
    """


class NotEnoughData(ReplayError, BufferError):
    """The store has fewer steps than the request needs; the message has both numbers.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((4,), "float32"), dr.Field((), "int64"))
    >>> store = dr.create("empty.replay", schema)
    >>> try:
    ...     dr.Sampler(store, dr.Transitions()).sample()
    ... except dr.NotEnoughData as error:
    ...     print("refused")
    refused
    """


class Closed(ReplayError, ValueError):
    """The store, sampler, writer or buffer is closed.

    Examples
    --------
    >>> sampler = dr.Sampler("cartpole.replay", dr.Transitions())
    >>> sampler.close()
    >>> try:
    ...     sampler.sample()
    ... except dr.Closed as error:
    ...     print("refused")
    refused
    """


class WriterClosed(Closed):
    """The writer is closed, or belongs to the parent of this forked process.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((4,), "float32"), dr.Field((), "int64"))
    >>> writer = dr.create("closed.replay", schema).writer()
    >>> writer.close()
    >>> try:
    ...     writer.append(np.zeros(4), action=0, reward=0.0, terminated=False)
    ... except dr.WriterClosed as error:
    ...     print("refused")
    refused
    """


class RateLimited(ReplayError, TimeoutError):
    """A rate limiter did not let the call through before its timeout.

    Examples
    --------
    >>> limiter = dr.RateLimiter(1.0, min_size=10**9, error_buffer=10.0, name="slow", timeout=0.1)
    >>> store = dr.open("cartpole.replay", mode="a")
    >>> sampler = dr.Sampler(store, dr.Transitions(), limiter=limiter)
    >>> try:
    ...     sampler.sample()
    ... except dr.RateLimited as error:
    ...     print("refused")
    refused
    """


class BufferFull(ReplayError, BufferError):
    """The rollout buffer is full; call its method `clear` before adding the next step.

    Examples
    --------
    >>> buffer = dr.RolloutBuffer(num_envs=2, num_steps=1)
    >>> buffer.add(*[torch.zeros(2, 3)] + [torch.zeros(2)] * 5)
    >>> try:
    ...     buffer.add(*[torch.zeros(2, 3)] + [torch.zeros(2)] * 5)
    ... except dr.BufferFull as error:
    ...     print("refused")
    refused
    """


class SegmentGone(ReplayError, LookupError):
    """A segment was evicted or quarantined after the snapshot was taken, before its rows were mapped into memory.

    Examples
    --------
    >>> schema = dr.Schema(dr.Field((4,), "float32"), dr.Field((), "int64"))

    >>> store = dr.create("gone.replay", schema, segment_steps="episode")
    >>> with store.writer() as writer:
    ...     writer.append_episode(np.zeros((4, 4)), np.zeros(3, int), np.ones(3), terminated=True)
    >>> _ = store.refresh()
    >>> episode = store.episodes[0]
    >>> store.evict(lambda episode: True)
    3
    >>> try:
    ...     episode.obs
    ... except dr.SegmentGone as error:
    ...     print("evicted")
    evicted
    """


class InvalidIndex(ReplayError, IndexError):
    """An id that no step of the store ever had.

    Examples
    --------
    >>> try:
    ...     dr.Sampler("cartpole.replay", dr.Transitions()).gather([1 << 60])
    ... except dr.InvalidIndex as error:
    ...     print("refused")
    refused
    """


class MissingExtra(ReplayError, ImportError):
    """A library that the call needs cannot be imported; the message has the command that installs it.

    Examples
    --------
    >>> try:
    ...     table = dr.open("cartpole.replay").to_pandas()
    ... except dr.MissingExtra as error:
    ...     print(error)  # has the command that installs pandas
    """

    @classmethod
    @contextmanager
    def raised_for(cls, purpose: str, extra: str) -> Iterator[None]:
        """Raise this error if an import in the block fails.

        ``purpose`` is the beginning of the message: what needs the library. ``extra`` is the extra of this package that
        installs the library. An import may fail with any error. For example, a library that was built for another
        version of NumPy may raise ValueError.
        """
        try:
            yield
        except (cls, Warning):
            raise
        except Exception as error:
            library = _fails_to_import(error)
            if library is not None:
                version = _version(library)
                problem = f"another version of {library} than {version}, which is installed and cannot be imported"
                said, command = f"{type(error).__name__}: {error}", "pip install --upgrade"
            elif isinstance(error, ImportError):
                problem, said, command = "a library that cannot be imported", str(error), "pip install"
            else:
                raise
            raise cls(f'{purpose} needs {problem} ({said}): {command} "diskreplay[{extra}]"') from error


def _fails_to_import(error: Exception) -> str | None:
    """Return the name of an installed library whose import raised the error; None if the library is missing."""
    top, _, inside = (getattr(error, "name", None) or "").partition(".")
    library, at = None, error.__traceback__
    while at is not None and library is None:
        module = str(at.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if at.tb_frame.f_code.co_name == "<module>" and module != __name__.partition(".")[0]:
            library = module
        at = at.tb_next
    if isinstance(error, ModuleNotFoundError):
        # A missing part of a namespace package, such as google.protobuf, is a missing library, and not a broken one.
        whole = library == top or getattr(sys.modules.get(top), "__file__", None) is not None
        return top if inside and whole else None
    return library or (isinstance(error, ImportError) and top) or None


def _version(library: str) -> str:
    from importlib import metadata  # not at the top: the import is slow, and only this message needs metadata

    for name in (library, *metadata.packages_distributions().get(library, ())):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "?"


class DamagedSegmentWarning(RuntimeWarning):
    """A segment of a store cannot be read, or is in quarantine. An unreadable segment is left out.

    Examples
    --------
    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", dr.DamagedSegmentWarning)  # refuse a damaged store
    ...     store = dr.open("cartpole.replay")
    """


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning at the line of the user's code that called this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).startswith(_INSIDE):
        level += not name.startswith("importlib._bootstrap")  # `warnings` does not count frames of imports
        frame = frame.f_back
    warnings.warn(message, category, stacklevel=level)
