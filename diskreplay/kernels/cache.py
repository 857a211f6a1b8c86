"""Where compiled kernels are kept, and how processes share the work of compiling them.

numba keeps machine code next to the source, and only looks at the file of a function, not at those of the functions
that it calls. So the sources of all kernels are copied into a folder that is named after them, the versions of numba
and the processor, and imported from there: no release, and no edit, ever sees machine code of another one. The folder
lies where `NUMBA_CACHE_DIR` says, else in the user's cache, and never next to the package, where nothing would remove
it: after an uninstall, what is left of a package's folders can still be imported, as a namespace with nothing in it.
Without either place each process compiles for itself, and a warning says so.

Of processes that start at once, one compiles a kernel, and says so, and the others wait for what it saves. What cannot
be read is compiled again, what cannot be saved is not: a full disk or a damaged file costs time and nothing else.

A process that knows which kernels it needs has a second process compile the last ones meanwhile: see `Several`.
"""

import gc
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numba

from diskreplay.errors import MissingExtra, warn_caller

if TYPE_CHECKING:
    from filelock import BaseFileLock

COMPILING = (
    "diskreplay compiles its kernels, which takes seconds, once for each version and machine; diskreplay.warmup does "
    "it beforehand"
)
_NAME = "diskreplay-"
_NOTE = ".compiled"
# Folders of other sources that are left beside a new one.
_KEPT = 8
# Seconds. A process that holds the lock for so long is stopped or stuck: then it is quicker to compile.
_PATIENCE = 60.0
_POLL = 0.02
# Seconds since the epoch: when sources were copied, by all processes that do so. numba keeps it with the machine code.
_ONE_TIME = 1e9
# A terminal's line from its start on, whatever it shows.
_LINE = "\r\x1b[K"

compiling = threading.RLock()
# Folders that have refused a file: nothing more is kept there.
_refusing = set[str]()


def _hold_at_forks() -> None:
    """Fork between two kernels: a child would wait for ever for the thread that compiles one.

    What is registered last is done first: this may be called again.
    """
    os.register_at_fork(before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release)


_hold_at_forks()


def is_disabled() -> bool:
    """Tell whether `NUMBA_DISABLE_JIT`, or the program, asks for functions that are not compiled."""
    return not hasattr(numba.njit(is_disabled), "signatures")


@cache
def compile_kernel(module: str, name: str) -> Callable[..., Any]:
    """Return a kernel, loaded or compiled; shared ones that it calls are too, before it."""
    path = folder()
    package = import_kernels(path)
    jit, function = import_module(f"{package}.jit"), getattr(import_module(f"{package}.{module}"), name)
    for called in jit.shared_in(function):
        function.__globals__[called.__name__] = compile_kernel(called.__module__.rpartition(".")[2], called.__name__)
    with _no_garbage_collection():
        if path is None or path in _refusing:
            return jit.compiled(function, kept=False)
        return _keep(jit, function, Path(path))


def _keep(jit: ModuleType, function: Callable[..., Any], path: Path) -> Callable[..., Any]:
    """Load a kernel, or compile it while others wait, and note that it is there."""
    name, lock = function.__name__, None
    note = path / f"{name}{_NOTE}"
    try:
        if not note.exists():
            lock = _locked(f"{path}/lock-{name}")
        if not note.exists():
            _tell()
            if (several := getattr(_here, "several", None)) is not None:
                several.note_missing()
        try:
            found = jit.compiled(function, kept=True)
        except OSError:
            raise
        except Exception:  # a damaged file: pickle may raise anything
            note.unlink(missing_ok=True)
            for damaged in path.parent.glob(f"{path.name}*/**/*{name}-*.nb?"):
                damaged.unlink(missing_ok=True)
            found = jit.compiled(function, kept=True)
        with suppress(OSError):
            note.touch()
        return found
    except (OSError, RuntimeError):  # a full disk, or a folder that is gone; only then is a kernel compiled twice
        _refusing.add(str(path))
        return jit.compiled(function, kept=False)
    finally:
        if lock is not None:
            lock.release()


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
    """Return the folder of compiled kernels, which can be written, or None with a warning."""
    path, why = find_folder()
    if path is None:
        warn_caller(why, RuntimeWarning)
    return path


def find_folder() -> tuple[str | None, str]:
    """Make the folder of compiled kernels if it is missing, and return it; or None and a warning.

    It has the sources of these kernels.
    """
    tried = []
    for parent in _parents():
        path = parent / (_NAME + source_digest()[:16])
        try:
            is_new = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            for name, text in _sources().items():
                _put(path, name, text)
            tempfile.TemporaryFile(dir=path).close()
            os.utime(path)  # it is in use: see `_prune`
        except OSError as error:
            tried.append(str(error))
            continue
        if is_new:
            _prune(parent)
        return str(path), ""
    return None, (
        "compiled kernels cannot be kept, so each process compiles them for itself "
        f"({'; '.join(tried) or 'the user has no home'}): set NUMBA_CACHE_DIR to a folder that can be written"
    )


def count_kept(path: str) -> int:
    """Return how many compiled kernels a folder has."""
    return sum(name.endswith(_NOTE) for name in os.listdir(path))


def _put(path: Path, name: str, text: bytes) -> None:
    """Write a file, unless it is there."""
    with suppress(FileNotFoundError):
        if (path / name).read_bytes() == text:
            return
    written = path / f"{name}.{os.getpid()}.tmp"
    try:
        written.write_bytes(text)
        os.utime(written, (_ONE_TIME, _ONE_TIME))
        os.replace(written, path / name)
    finally:
        written.unlink(missing_ok=True)


@cache
def import_kernels(path: str | None) -> str:
    """Import the package of kernels that are compiled from a folder, None: from this one; return its name."""
    package, here = f"diskreplay_{source_digest()[:16]}", path or os.path.dirname(__file__)
    spec = importlib.util.spec_from_file_location(package, f"{here}/__init__.py", submodule_search_locations=[here])
    if spec is None or spec.loader is None:
        raise ImportError(f"no kernels can be imported from {here}")
    sys.modules[package] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return package


def _parents() -> Iterator[Path]:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield Path(chosen)
    # Relative paths are not looked at: the first as its specification asks, the second where there is no home.
    for cache_home in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(cache_home):
            yield Path(cache_home) / "diskreplay"
            return


@cache
def _sources() -> dict[str, bytes]:
    """Return the source of all kernels by the names of their files."""
    return {path.name: path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))}


@cache
def source_digest() -> str:
    """Return the SHA-256 of what kernels are compiled from, with and for.

    That is their source, and that of `ids`, whose numbers they contain; Python, numba and llvmlite; the processor.
    """
    digest = hashlib.sha256("\0".join((sys.version, numba.__version__, version("llvmlite"), *_processor())).encode())
    for name, text in {**_sources(), "ids.py": Path(__file__).parents[1].joinpath("ids.py").read_bytes()}.items():
        digest.update(name.encode() + b"\0" + text)
    return digest.hexdigest()


def _processor() -> Iterator[str]:
    """Yield what machine code depends on of the first processor, and what numba is told of it."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("model name", "flags", "Features", "CPU ")):
                yield line
            if not line.strip():
                break
    for variable in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        yield os.environ.get(variable, "")


def _prune(parent: Path) -> None:
    """Remove the folders of sources that were used longest ago, and numba's own of the same name."""
    with suppress(OSError):
        found = sorted(parent.glob(f"{_NAME}*"), key=lambda path: path.stat().st_mtime, reverse=True)
        kept = list(dict.fromkeys(path.name.partition("_")[0] for path in found))[:_KEPT]
        for path in found:
            if path.name.partition("_")[0] not in kept:
                shutil.rmtree(path, ignore_errors=True)


@cache
def _tell() -> None:
    """Say why the first batch takes long: on stderr too, where nobody has set up logging."""
    logging.getLogger("diskreplay").warning(COMPILING)


_here = threading.local()
"""The `Several` of a thread."""


class Several:
    """Kernels that are needed one after the other: a terminal shows which of them is compiled, and a process helps.

    The process begins when the first kernel must be compiled, and compiles from the last one on: both meet. It does so
    once for all processes that start at once.

    Concurrency: for one thread.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._at, self._is_told = names, 0, False
        self._helper: subprocess.Popen[bytes] | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the names; each kernel is to be asked for before the next one."""
        _here.several = self
        try:
            for at, name in enumerate(self._names):
                self._at = at
                yield name
        finally:
            _here.several = None
            if self._helper is not None:
                self._helper.kill()
                self._helper.wait()
            if self._is_told:
                _show(_LINE)

    def note_missing(self) -> None:
        """Note that the kernel that was asked for must be compiled."""
        left = self._names[self._at + 1 :]
        has_interpreter = bool(sys.executable) and not getattr(sys, "frozen", False)
        if not self._is_told and left and has_interpreter and len(os.sched_getaffinity(0)) > 1:
            with suppress(OSError):
                self._helper = _begin_helper(left)
        self._is_told = True
        _show(f"{_LINE}compiling kernel {self._at + 1} of {len(self._names)}: {self._names[self._at]}")


def _begin_helper(names: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Begin a process that runs `table.help_compiling`, with the import path of this one."""
    code = "import sys; from diskreplay.kernels import table; table.help_compiling(sys.argv[1:])"
    imported_from = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": imported_from, "NUMBA_CACHE_DIR": os.path.dirname(folder() or "")},
        process_group=0,  # what interrupts this one at a terminal does not interrupt that one
    )


def helper_lock() -> "BaseFileLock":
    """Return the lock of the process that helps, not yet taken: there is one for each folder of kernels."""
    return _file_lock()(f"{folder()}/lock-helper", timeout=0, fallback_to_soft=False)


def _show(text: str) -> None:
    """Write to the terminal, if there is one."""
    if sys.stderr is not None and sys.stderr.isatty() and logging.getLogger("diskreplay").isEnabledFor(logging.WARNING):
        sys.stderr.write(text)
        sys.stderr.flush()


@cache
def _file_lock() -> "type[BaseFileLock]":
    # Here and not above: it takes longer to import than kernels that were compiled before take to load.
    with MissingExtra.raised_for("sampling", "torch"):
        from filelock import FileLock
    # filelock takes a lock of its own at a fork, and whoever compiles takes that one behind ours.
    _hold_at_forks()
    return FileLock


def _locked(path: str) -> "BaseFileLock | None":
    """Return a lock that is held by the file of a kernel; None where none can be had, or not for long."""
    # Not `fallback_to_soft`: a file that stands for a lock would outlive a process that is killed.
    lock = _file_lock()(path, timeout=_PATIENCE, poll_interval=_POLL, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError:  # a timeout is one
        return None
    return lock
