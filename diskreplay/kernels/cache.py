"""The folder of compiled kernels, and how processes share the work of compiling.

numba saves machine code next to the source file. If that file changes, numba compiles its functions again. But if a
function calls a function of another file, numba does not notice a change of that other file. So the sources of all
kernels are copied to a folder whose name is a digest of everything that the machine code depends on. The folder is
never next to the package: after an uninstall, Python would import the remaining folder as an empty namespace package.

If processes start together, one of them compiles a kernel, and the others wait for the saved code.
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
# The largest number of folders that `_prune` leaves, including the folder in use.
_KEPT = 8
# Seconds to wait for a lock. A process that holds a lock longer is probably suspended, so the waiting process compiles
# the kernel itself.
_PATIENCE = 60.0
_POLL = 0.02
# Modification time of all copied sources, in seconds since the epoch. If the modification time of a source changes,
# numba compiles this source again.
_ONE_TIME = 1e9
# A text that moves a terminal's cursor to the start of the line and clears the line.
_LINE = "\r\x1b[K"

compiling = threading.RLock()
# Folders where saving a kernel failed.
_refusing = set[str]()


def _hold_at_forks() -> None:
    """Make forks wait while a thread compiles: a child would inherit the lock without the thread that holds it.

    Before a fork, Python calls the functions given to `register_at_fork` in the reverse order of their registration.
    At a fork, the lock `compiling` must be acquired before other locks. So call this function again after an import
    that calls `register_at_fork`.
    """
    os.register_at_fork(before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release)


_hold_at_forks()


def is_disabled() -> bool:
    return not hasattr(numba.njit(is_disabled), "signatures")


@cache
def compile_kernel(module: str, name: str) -> Callable[..., Any]:
    """Load or compile the shared kernels that a kernel calls, see `jit.kernel`; then load or compile the kernel."""
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
    """Return the compiled `function`: loaded from the folder `path`, or compiled now and saved there.

    `jit` is a module of the package that `import_kernels` has made.
    """
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
        except Exception:  # the file may be damaged, and then pickle may raise anything
            note.unlink(missing_ok=True)
            for damaged in path.parent.glob(f"{path.name}*/**/*{name}-*.nb?"):
                damaged.unlink(missing_ok=True)
            found = jit.compiled(function, kept=True)
        with suppress(OSError):
            note.touch()
        return found
    except (OSError, RuntimeError):  # the disk is full, or the folder was deleted
        _refusing.add(str(path))
        return jit.compiled(function, kept=False)
    finally:
        if lock is not None:
            lock.release()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, which would take a sixth of the compilation time."""
    was_on = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_on:
            gc.enable()


@cache
def folder() -> str | None:
    path, why = find_folder()
    if path is None:
        warn_caller(why, RuntimeWarning)
    return path


def find_folder() -> tuple[str | None, str]:
    """Return the folder of compiled kernels and "", or None and the text of a warning if no folder can be written.

    A missing folder is created, and the sources of the kernels are copied to it.
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
            os.utime(path)  # so that `_prune` keeps this folder
        except OSError as error:
            tried.append(str(error))
            continue
        if is_new:
            _prune(parent)
        return str(path), ""
    return None, (
        "compiled kernels cannot be saved, so each process compiles them for itself "
        f"({'; '.join(tried) or 'the user has no home'}): set NUMBA_CACHE_DIR to a writable folder"
    )


def count_kept(path: str) -> int:
    return sum(name.endswith(_NOTE) for name in os.listdir(path))


def _put(path: Path, name: str, text: bytes) -> None:
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
    # Relative paths are ignored, as the XDG specification demands. `expanduser` returns the relative path ~/.cache if
    # the user has no home.
    for cache_home in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(cache_home):
            yield Path(cache_home) / "diskreplay"
            return


@cache
def _sources() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py"))}


@cache
def source_digest() -> str:
    """Return the SHA-256, in hexadecimal, of everything that machine code depends on."""
    digest = hashlib.sha256("\0".join((sys.version, numba.__version__, version("llvmlite"), *_processor())).encode())
    for name, text in {**_sources(), "ids.py": Path(__file__).parents[1].joinpath("ids.py").read_bytes()}.items():
        digest.update(name.encode() + b"\0" + text)
    return digest.hexdigest()


def _processor() -> Iterator[str]:
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith(("model name", "flags", "Features", "CPU ")):
                yield line
            if not line.strip():
                break
    for variable in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        yield os.environ.get(variable, "")


def _prune(parent: Path) -> None:
    """Remove all folders of compiled kernels from `parent`, except the `_KEPT` most recently used ones.

    With `NUMBA_CACHE_DIR`, numba saves the machine code beside the folder of sources. The name of this second folder is
    the name of the first folder, then "_" and more text.
    """
    with suppress(OSError):
        found = sorted(parent.glob(f"{_NAME}*"), key=lambda path: path.stat().st_mtime, reverse=True)
        kept = list(dict.fromkeys(path.name.partition("_")[0] for path in found))[:_KEPT]
        for path in found:
            if path.name.partition("_")[0] not in kept:
                shutil.rmtree(path, ignore_errors=True)


@cache
def _tell() -> None:
    logging.getLogger("diskreplay").warning(COMPILING)


_here = threading.local()
"""`_here.several` is the `Several` object that the current thread is iterating over, or None."""


class Several:
    """Iterates over names of kernels, while the caller compiles or loads each kernel; only one thread may use it.

    As soon as a kernel must be compiled, the terminal shows the progress. A helping process then starts to compile the
    kernels in reverse order. Processes that start together share one helping process.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names, self._at, self._is_told = names, 0, False
        self._helper: subprocess.Popen[bytes] | None = None

    def __iter__(self) -> Iterator[str]:
        """Yield the names; the caller must call `table.get_kernel` with each name before it takes the next name."""
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
        left = self._names[self._at + 1 :]
        has_interpreter = bool(sys.executable) and not getattr(sys, "frozen", False)
        if not self._is_told and left and has_interpreter and len(os.sched_getaffinity(0)) > 1:
            with suppress(OSError):
                self._helper = _begin_helper(left)
        self._is_told = True
        _show(f"{_LINE}compiling kernel {self._at + 1} of {len(self._names)}: {self._names[self._at]}")


def _begin_helper(names: Sequence[str]) -> "subprocess.Popen[bytes]":
    code = "import sys; from diskreplay.kernels import table; table.help_compiling(sys.argv[1:])"
    imported_from = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *names],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": imported_from, "NUMBA_CACHE_DIR": os.path.dirname(folder() or "")},
        process_group=0,  # so that an interrupt from the terminal does not reach the helper
    )


def helper_lock() -> "BaseFileLock":
    return _file_lock()(f"{folder()}/lock-helper", timeout=0, fallback_to_soft=False)


def _show(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty() and logging.getLogger("diskreplay").isEnabledFor(logging.WARNING):
        sys.stderr.write(text)
        sys.stderr.flush()


@cache
def _file_lock() -> "type[BaseFileLock]":
    # filelock is imported here, because its import takes longer than loading compiled kernels.
    with MissingExtra.raised_for("sampling", "torch"):
        from filelock import FileLock
    # filelock acquires its own lock at a fork. A compiling thread acquires `compiling` before filelock's lock, so a
    # fork must acquire the two locks in this order, too.
    _hold_at_forks()
    return FileLock


def _locked(path: str) -> "BaseFileLock | None":
    """Acquire and return the lock of the file `path`; return None if this takes more than `_PATIENCE` seconds."""
    # With `fallback_to_soft`, the existence of the file could be the lock: a killed process would never release it.
    lock = _file_lock()(path, timeout=_PATIENCE, poll_interval=_POLL, fallback_to_soft=False)
    try:
        lock.acquire()
    except OSError:  # filelock.Timeout is an OSError, too
        return None
    return lock
