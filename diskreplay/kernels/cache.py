"""Where compiled kernels are kept, and how processes share the work of compiling them.

The folder is named after the source of all kernels and the version of numba, so that no release, and no edit, ever sees
machine code of another one. It lies where `NUMBA_CACHE_DIR` says, else in the user's cache, and never beside the
package, where nothing would remove it: after an uninstall, what is left of a package's folders can still be imported,
as a namespace with nothing in it. Without either place each process compiles for itself, and a warning says so.

Of processes that start at once, one compiles, and says so, and the others wait for what it saves. What cannot be read
is compiled again, what cannot be saved is not: a full disk or a damaged file costs time and nothing else.
"""

import gc
import hashlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numba

from diskreplay.errors import MissingExtra, warn_caller
from diskreplay.kernels import numba_private
from diskreplay.kernels.numba_private import Cache, CacheLocator, Dispatcher, NumbaType

if TYPE_CHECKING:
    from filelock import BaseFileLock

COMPILING = (
    "diskreplay compiles its kernels, which takes seconds, once for each version and machine; diskreplay.warmup does "
    "it beforehand"
)
_NAME = "diskreplay-"
# Folders of other sources that are left beside a new one.
_KEPT = 8
# Seconds. A process that holds the lock for so long is stopped or stuck: then it is quicker to compile.
_PATIENCE = 60.0
_POLL = 0.02

compiling = threading.RLock()


def _hold_at_forks() -> None:
    """Fork between two kernels: a child would wait for ever for the thread that compiles one.

    What is registered last is done first: this may be called again.
    """
    os.register_at_fork(before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release)


_hold_at_forks()


def compile_kernel(dispatcher: Dispatcher, signature: NumbaType) -> None:
    """Load a kernel for one signature, or compile it, and no other ever."""
    kept = None if folder() is None else _KernelCache(dispatcher.py_func)
    try:
        with _no_garbage_collection():
            numba_private.compile_one(dispatcher, signature, kept)
    finally:
        if kept is not None:
            kept.release()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Leave cycles alone meanwhile: looking for them again and again takes a sixth of the time of compiling."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def folder() -> str | None:
    """Return the folder of compiled kernels, which can be written, or None."""
    name = _NAME + source_digest()[:16]
    tried = []
    for parent in _parents():
        path = parent / name
        try:
            is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path).close()
            os.utime(path)  # it is in use: see `_prune`
        except OSError as error:
            tried.append(str(error))
            continue
        if is_new:
            _prune(parent)
        return str(path)
    why = "; ".join(tried) or "the user has no home"
    warn_caller(
        f"compiled kernels cannot be kept, so each process compiles them for itself ({why}): set "
        "NUMBA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
    )
    return None


def _parents() -> Iterator[Path]:
    if chosen := numba_private.chosen_folder():
        yield Path(chosen)
    # Relative paths are not looked at: the first as its specification asks, the second where there is no home.
    for cache_home in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(cache_home):
            yield Path(cache_home) / "diskreplay"
            return


@cache
def source_digest() -> str:
    """Return the SHA-256 of numba's version and the source of all kernels, and of `ids`, whose numbers they contain."""
    digest, here = hashlib.sha256(numba.__version__.encode()), Path(__file__).parent
    for path in (here.parent / "ids.py", *sorted(here.glob("*.py"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _prune(parent: Path) -> None:
    """Remove the folders of sources that were used longest ago."""
    with suppress(OSError):
        found = sorted(parent.glob(f"{_NAME}*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[_KEPT:]:
            shutil.rmtree(path, ignore_errors=True)


class _Locator(CacheLocator):
    """Tells numba where a kernel is kept."""

    def __init__(self, path: str, line: int) -> None:
        self._path, self._line = path, line

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> Self:
        """Return the one of a function."""
        return cls(folder() or "", py_func.__code__.co_firstlineno)

    def get_cache_path(self) -> str:
        """Return the folder."""
        return self._path

    def get_source_stamp(self) -> str:
        """Return what changes with the source."""
        return source_digest()

    def get_disambiguator(self) -> str:
        """Tell functions of one name apart."""
        return str(self._line)


class _KernelCache(Cache):
    """What numba asks for a kernel before it compiles it, and gives it to afterwards; one process at a time between."""

    _impl_class: Any = numba_private.located_by(_Locator)

    _lock: "BaseFileLock | None" = None

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the compiled kernel, None if there is none: then the caller compiles it, and others wait."""
        found = self._load(signature, target_context)
        if found is None:
            self._lock = _locked(self.cache_path)
            found = self._load(signature, target_context)
        if found is None:
            _tell()
        return found

    def _load(self, signature: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(signature, target_context)
        except Exception:  # a damaged file: pickle may raise anything
            with suppress(OSError):
                self.flush()  # or else nothing could be saved beside it
            return None

    def save_overload(self, signature: Any, data: Any) -> None:
        """Keep a compiled kernel."""
        with suppress(OSError):
            super().save_overload(signature, data)

    def release(self) -> None:
        """Let other processes compile."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


@cache
def _tell() -> None:
    """Say why the first batch takes long: on stderr too, where nobody has set up logging."""
    logging.getLogger("diskreplay").warning(COMPILING)


@cache
def _file_lock() -> "type[BaseFileLock]":
    # Here and not above: it takes longer to import than kernels that were compiled before take to load.
    with MissingExtra.raised_for("sampling", "torch"):
        from filelock import FileLock
    # filelock takes a lock of its own at a fork, and whoever compiles takes that one behind ours.
    _hold_at_forks()
    return FileLock


def _locked(path: str) -> "BaseFileLock | None":
    """Return a lock that is held on a folder's kernels; None where none can be had, or not for long."""
    # Not `fallback_to_soft`: a file that stands for a lock would outlive a process that is killed.
    lock = _file_lock()(f"{path}/lock", timeout=_PATIENCE, poll_interval=_POLL, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError:  # a timeout is one
        return None
    return lock
