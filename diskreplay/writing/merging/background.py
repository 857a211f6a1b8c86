"""Background compaction: a process that writes starts a child process that merges small segments."""

import errno
import os
import random
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress

from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.locks import Lock, try_lock
from diskreplay.segments.files.machine import boot_id

# The least number of segments that is worth a merge, and the least number of bytes that is worth a compression.
LEAST_SEGMENTS, MUCH_BYTES = 8, 256 << 20
# Seconds before the first check of segments, and the minimum of seconds between checks. The first check is late, so
# that short-lived writers merge nothing.
_FIRST_S, _BETWEEN_S = 5.0, 1.0
# The number of segments that must be begun before the next check.
_BEGUN = 32
# If the child process still runs after this many seconds, it is asked again to stop.
_ASK_AGAIN_S = 1.0
# The exit code of a child process that has merged segments: there may be more to merge.
MERGED = 3
_PROCESS = "diskreplay.writing.merging.process"


class _Stopped(Exception):
    """The store is being closed."""


class BackgroundCompaction:
    """Merges segments of one store in a child process, which is started when there may be something to merge.

    A thread in this process would often take the GIL from the threads that collect steps. Only one store of a user is
    merged at a time. The next store is a random one of the waiting stores.

    Concurrency: any thread of the process that made this object.
    """

    def __init__(self, root: Root, counters: StoreCounters, is_busy: Callable[[], bool]) -> None:
        """Prepare merging; ``is_busy()`` returns whether another process is merging this store."""
        self._is_busy = is_busy
        self._root, self._counters, self._compresses = root, counters, root.compression is not None
        self._between = _segments_between(root)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._looked_at: int | None = None  # the counter `layout.NEXT_SEGMENT` at the last check
        self._is_stopped = False
        self._wait_s = _FIRST_S

    def note_sealed(self) -> None:
        """Start a merge if one is due; call this after segments were sealed."""
        with self._condition:
            is_due = self._has_new and (self._compresses or self._has_many)
            # If an error has ended the thread, a new thread may be started.
            is_idle = self._thread is None or not self._thread.is_alive()
            if is_due and is_idle and not self._is_stopped:
                thread = threading.Thread(target=self._run, name="diskreplay-compaction", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending
                    thread.start()
                    self._thread = thread

    @property
    def _has_new(self) -> bool:
        """Whether enough segments were begun since the last check.

        The result is True before the first check, as there may be many old segments.
        """
        return self._looked_at is None or self._counters.peek(layout.NEXT_SEGMENT) - self._looked_at >= self._between

    @property
    def _has_many(self) -> bool:
        return self._counters.peek(layout.NEXT_SEGMENT) - self._counters.peek(layout.FIRST_LIVE) >= LEAST_SEGMENTS

    def stop_soon(self) -> None:
        """Ask the thread and the child process to stop, without waiting; the child removes its incomplete pack."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
            if self._process is not None:
                self._process.terminate()

    def stop(self) -> None:
        self.stop_soon()
        thread = self._thread
        while thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_ASK_AGAIN_S)
            self.stop_soon()  # the child may ignore SIGTERM until it has its own signal handler

    def _run(self) -> None:
        with suppress(_Stopped):
            goes_on = True
            while goes_on:
                self._pause(self._wait_s)
                self._wait_s, has_merged = _BETWEEN_S, False
                with suppress(OSError):  # no process could be started: the loop tries again later
                    has_merged = self._merge()
                with self._condition:
                    goes_on = has_merged or self._has_new
                    self._thread = self._thread if goes_on else None

    def _pause(self, seconds: float) -> None:
        with self._condition:
            if self._condition.wait_for(lambda: self._is_stopped, seconds):
                raise _Stopped

    def _merge(self) -> bool:
        """Wait for this store's turn and for a child process to merge; return whether the child merged segments.

        Raises _Stopped, and OSError if no process could be started.
        """
        since, turn = self._looked_at, None
        while not self._is_busy():  # another process may be merging this store
            self._looked_at = self._counters.peek(layout.NEXT_SEGMENT)
            has_turn, turn = _try_turn()
            if has_turn:
                break
            self._pause(random.uniform(0.5, 1.5) * _BETWEEN_S)
        else:
            self._looked_at = self._counters.peek(layout.NEXT_SEGMENT)
            return False
        try:
            with self._condition:
                if self._is_stopped:
                    raise _Stopped
                process = self._process = _begin(self._root, self._looked_at if since is None else since, turn)
            return process.wait() == MERGED
        finally:
            with self._condition:
                self._process = None
            if turn is not None:
                turn.release()


def _segments_between(root: Root) -> int:
    if root.compression is None or root.segment_steps == "episode":
        return _BEGUN
    limits = root.limits
    rows = layout.target_rows(1, root.step_bytes, limits.capacity, limits.capacity_bytes, root.segment_steps)
    return max(1, min(_BEGUN, MUCH_BYTES // (rows * root.step_bytes)))


def _try_turn() -> tuple[bool, Lock | None]:
    """Return whether this store may be merged now, and a lock: the user's other stores wait until it is released.

    If the user has no private folder for the lock, the lock is None, and any store may be merged.
    """
    # On cluster nodes and in containers, XDG_RUNTIME_DIR often names a folder that does not exist.
    for above in (os.environ.get("XDG_RUNTIME_DIR", ""), None):
        with suppress(OSError):
            folder = _private_folder(tempfile.gettempdir() if above is None else above)
            turn = try_lock(f"{folder}/compaction-{boot_id()}")  # several machines may share this folder
            return turn is not None, turn
    return True, None


def _private_folder(above: str) -> str:
    if not os.path.isabs(above):
        raise NotADirectoryError(errno.ENOTDIR, "not an absolute path", above)
    folder = f"{above}/diskreplay-{os.geteuid()}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "not a private folder of this user", folder)
    return folder


def _begin(root: Root, since: int, turn: Lock | None) -> "subprocess.Popen[bytes]":
    """Start and return a child process that merges segments; the child imports modules from the paths of this process.

    ``since`` is the value of the counter `layout.NEXT_SEGMENT` at the last check. The child holds the lock ``turn``
    until the child ends, even if this process dies. The working directory of the child is the store's folder, even if
    the folder is moved later.
    """
    from multiprocessing.spawn import get_executable  # programs that embed Python may set the executable

    interpreter = get_executable()
    if not interpreter or getattr(sys, "frozen", False):
        raise FileNotFoundError("this program has no Python interpreter to start")
    # sys.path may have items other than strings, which Python ignores.
    imported_from = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    return subprocess.Popen(
        [os.fsdecode(interpreter), "-P", "-m", _PROCESS, root.uuid, str(os.getpid()), str(since)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=root.folder,
        env={**os.environ, "PYTHONPATH": imported_from},
        pass_fds=() if turn is None else (turn.fd,),
        process_group=0,  # Ctrl-C at the terminal interrupts this process, but not the child
    )
