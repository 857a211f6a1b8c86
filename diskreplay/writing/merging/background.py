"""Compaction by itself: a process that writes has another one merge small segments; one at a time for all stores."""

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

# With fewer segments there is nothing that pays; so much is worth being compressed.
LEAST_SEGMENTS, MUCH_BYTES = 8, 256 << 20
# Seconds after which segments are looked at first, and then at the least: who writes for a moment merges nothing.
_FIRST_S, _BETWEEN_S = 5.0, 1.0
# So many segments have to be begun before they are looked at again.
_BEGUN = 32
# Seconds after which a process that goes on is told to stop once more.
_ASK_AGAIN_S = 1.0
# How a process ends that has merged segments: there may be more to merge.
MERGED = 3
_PROCESS = "diskreplay.writing.merging.process"


class _Stopped(Exception):
    """The store is being closed."""


class BackgroundCompaction:
    """Merges segments of one store, now and then, in a process that lives while there may be something to merge.

    It is a process as a thread would wait for Python's lock after each file, and take it from those who collect. All
    stores of a user take turns: one of them is merged at a time. Chance decides which of the waiting stores is next.

    Concurrency: any thread of the process that made it.
    """

    def __init__(self, root: Root, counters: StoreCounters, is_busy: Callable[[], bool]) -> None:
        """Merge unless ``is_busy()``: another process is at it."""
        self._is_busy = is_busy
        self._root, self._counters, self._compresses = root, counters, root.compression is not None
        self._between = _segments_between(root)
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._looked_at: int | None = None  # the number that the next segment had then
        self._is_stopped = False
        self._wait_s = _FIRST_S

    def note_sealed(self) -> None:
        """Note that segments were sealed."""
        with self._condition:
            is_due = self._has_new and (self._compresses or self._has_many)
            # One that an error ended is there no more: another may begin.
            is_idle = self._thread is None or not self._thread.is_alive()
            if is_due and is_idle and not self._is_stopped:
                thread = threading.Thread(target=self._run, name="diskreplay-compaction", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending
                    thread.start()
                    self._thread = thread

    @property
    def _has_new(self) -> bool:
        """Whether enough segments were begun since they were looked at; those that were there may be many."""
        return self._looked_at is None or self._counters.peek(layout.NEXT_SEGMENT) - self._looked_at >= self._between

    @property
    def _has_many(self) -> bool:
        """Whether there may be enough segments to merge."""
        return self._counters.peek(layout.NEXT_SEGMENT) - self._counters.peek(layout.FIRST_LIVE) >= LEAST_SEGMENTS

    def stop_soon(self) -> None:
        """Stop, and wait for nothing; what is half made is removed."""
        with self._condition:
            self._is_stopped = True
            self._condition.notify_all()
            if self._process is not None:
                self._process.terminate()

    def stop(self) -> None:
        """Stop, and wait until nothing is being merged."""
        self.stop_soon()
        thread = self._thread
        while thread is not None and thread is not threading.current_thread() and thread.is_alive():
            thread.join(_ASK_AGAIN_S)
            self.stop_soon()  # a program that ignores signals hands that on: the process heard nothing before it began

    def _run(self) -> None:
        with suppress(_Stopped):
            goes_on = True
            while goes_on:
                self._pause(self._wait_s)
                self._wait_s, has_merged = _BETWEEN_S, False
                with suppress(OSError):  # no process can be had: next time
                    has_merged = self._merge()
                with self._condition:
                    goes_on = has_merged or self._has_new
                    self._thread = self._thread if goes_on else None

    def _pause(self, seconds: float) -> None:
        """Wait. Raises _Stopped."""
        with self._condition:
            if self._condition.wait_for(lambda: self._is_stopped, seconds):
                raise _Stopped

    def _merge(self) -> bool:
        """Have a process merge segments when it is this store's turn; wait for it, and return whether it merged any.

        Raises _Stopped, and OSError where there can be none.
        """
        since, turn = self._looked_at, None
        while not self._is_busy():  # else another process has it merged
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
    """Return how many segments are begun between two looks: of long ones that are to be compressed, fewer."""
    if root.compression is None or root.segment_steps == "episode":
        return _BEGUN
    limits = root.limits
    rows = layout.target_rows(1, root.step_bytes, limits.capacity, limits.capacity_bytes, root.segment_steps)
    return max(1, min(_BEGUN, MUCH_BYTES // (rows * root.step_bytes)))


def _try_turn() -> tuple[bool, Lock | None]:
    """Return whether a store may be merged now, and the lock that keeps other stores of the user waiting meanwhile.

    Without a private folder there is no lock, and each store may be merged.
    """
    # Nodes of a cluster and containers often name the first folder, and lack it.
    for above in (os.environ.get("XDG_RUNTIME_DIR", ""), None):
        with suppress(OSError):
            folder = _private_folder(tempfile.gettempdir() if above is None else above)
            turn = try_lock(f"{folder}/compaction-{boot_id()}")  # other machines may have the same folder
            return turn is not None, turn
    return True, None


def _private_folder(above: str) -> str:
    """Return a folder for processes of this user alone in another one, made where it is missing. Raises OSError."""
    if not os.path.isabs(above):
        raise NotADirectoryError(errno.ENOTDIR, "not the path that it has to be", above)
    folder = f"{above}/diskreplay-{os.geteuid()}"
    with suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    status = os.lstat(folder)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(errno.EPERM, "not a private folder of this user", folder)
    return folder


def _begin(root: Root, since: int, turn: Lock | None) -> "subprocess.Popen[bytes]":
    """Begin a process that merges what is due; it finds what this one imports from.

    ``since`` is the number that the next segment had when segments were looked at last. The process keeps the ``turn``
    as long as it lives, whatever becomes of this one. The store's folder is where it works, whatever becomes of the
    path.
    """
    from multiprocessing.spawn import get_executable  # the user's, where Python is part of another program

    interpreter = get_executable()
    if not interpreter or getattr(sys, "frozen", False):
        raise FileNotFoundError("this program knows no interpreter")
    # Others than strings are allowed there, and mean nothing.
    imported_from = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    return subprocess.Popen(
        [os.fsdecode(interpreter), "-P", "-m", _PROCESS, root.uuid, str(os.getpid()), str(since)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        cwd=root.folder,
        env={**os.environ, "PYTHONPATH": imported_from},
        pass_fds=() if turn is None else (turn.fd,),
        process_group=0,  # what interrupts this one at a terminal does not interrupt that one
    )
