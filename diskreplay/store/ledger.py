"""What each segment of a store holds and takes, and so which of them leave: the rules of retention."""

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diskreplay.errors import FormatError
from diskreplay.folders import is_folder
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters
from diskreplay.format.hidden import HiddenEntries
from diskreplay.format.numbers import present_segments, segment_numbers
from diskreplay.format.root import Root
from diskreplay.format.sealing import count_steps
from diskreplay.format.segment import SegmentInfo, read_segment
from diskreplay.store.ages import Ages


@dataclass(slots=True)
class _Account:
    """What is known of a segment; one that is not sealed may have more by now."""

    steps: int = 0
    hidden: int = 0  # of these steps, evicted by hand
    nbytes: int = 0  # on disk; 0 where the store has no capacity in bytes
    info: SegmentInfo | None = None
    inode: int = 0  # of the file that `info` was read from

    @property
    def sealed(self) -> bool:
        return self.info is not None and self.info.sealed

    @property
    def lost(self) -> int:
        return 0 if self.info is None else self.info.lost.steps

    @property
    def kept(self) -> int:
        return max(0, self.steps - self.hidden - self.lost)


class Ledger:
    """Follows the segments of a store for its retention. Not thread-safe: used under the store lock.

    Only sealed segments that can be read leave. Those that do, by any of the rules: the lowest, while the others hold
    `capacity` steps that are not hidden; the lowest, while all segments together take more than `capacity_bytes` on
    disk; those that were sealed `max_age_s` ago (`Ages`); those whose every step was evicted by hand. The first two
    move the retention horizon.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._changes = 0
        self._begin()

    def _begin(self) -> None:
        """Know nothing."""
        self._next = 0  # numbers below it were looked at
        self._accounts: dict[int, _Account] = {}  # of every segment, lowest number first
        self._unsealed: set[int] = set()
        self._newest: deque[int] = deque()  # segments from the horizon on, lowest number first
        self._kept = 0  # their steps
        self._nbytes = 0  # of all segments
        self._older: list[int] = []  # segments below the horizon that are still there
        self._ages = Ages()
        self._doomed: set[int] = set()  # too old, or hidden whole
        self._entries = HiddenEntries(self._root)
        self._evicted = 0
        self._changes = 0
        self.has_more = False

    @property
    def is_idle(self) -> bool:
        """Whether no rule can remove anything."""
        root = self._root
        limits = (root.capacity, root.capacity_bytes, root.max_age_s)
        return limits == (None, None, None) and not self._counters.peek(layout.HIDDEN_ENTRIES)

    def leaving(self, most: int, *, again: bool) -> Iterator[tuple[int, int]]:
        """Yield number and steps of segments that have to leave; each is forgotten when the next one is asked for.

        They are ``most`` at most; `has_more` tells whether that is fewer than have to.

        Moves the horizon first. ``again``: look at known segments that were not sealed too. Without it their steps may
        be too few, which only makes the horizon move later.
        """
        words = self._counters.read()
        if words[layout.CHANGES] != self._changes:  # a segment was set aside, brought back or replaced
            self._changes = int(words[layout.CHANGES])
            self._begin()
        first, end = max(self._next, int(words[layout.FIRST_LIVE])), int(words[layout.NEXT_SEGMENT])
        if self._evicted != words[layout.STEPS_EVICTED] and (self._root.max_age_s or words[layout.HIDDEN_ENTRIES]):
            self._forget_gone()
        for number in segment_numbers(self._root, first, end):
            self._newest.append(number)
            self._accounts[number] = _Account()
            self._unsealed.add(number)
        self._next = max(end, self._next)
        self._read_hidden(int(words[layout.HIDDEN_ENTRIES]))
        # Some segments may have been replaced by what was whole in them.
        replaced, self._changes = self._changes != words[layout.CHANGES], int(words[layout.CHANGES])
        for number in [n for n in (self._accounts if replaced else self._unsealed) if again or replaced or n >= first]:
            self._look(number)
        self._move_horizon(int(words[layout.HORIZON]), end)
        due = self._due()
        self.has_more = len(due) > most
        for number in due[:most]:
            steps = self._accounts[number].steps
            if os.path.exists(self._root.segment_path(number)):
                yield number, steps
            self._forget(number)  # by another process, or by hand
        first = min([*self._older[:1], *([self._newest[0]] if self._newest else [end])])
        if first > words[layout.FIRST_LIVE]:
            self._counters.set(layout.FIRST_LIVE, first)
        self._evicted = int(self._counters.read()[layout.STEPS_EVICTED])

    def _due(self) -> list[int]:
        if self._root.max_age_s is not None:
            self._doomed |= self._ages.older_than(self._root.max_age_s) & self._accounts.keys()
        gone = [n for n in self._older if n in self._unsealed and not os.path.exists(self._root.segment_path(n))]
        below = [number for number in self._older if number not in self._unsealed]
        return sorted({*gone, *below, *self._doomed})

    # --- the horizon -------------------------------------------------------------------------------------------------

    def _move_horizon(self, horizon: int, end: int) -> None:
        newest, before = self._newest, len(self._newest)
        capacity = self._root.capacity
        while newest and (newest[0] < horizon or (capacity is not None and self._without_oldest() >= capacity)):
            self._pass_oldest()
        for _ in range(self._too_many()):
            self._pass_oldest()
        now = newest[0] if newest else end
        if len(newest) < before and now > horizon:
            self._counters.set(layout.HORIZON, now)

    def _without_oldest(self) -> int:
        return self._kept - self._accounts[self._newest[0]].kept

    def _pass_oldest(self) -> None:
        self._older.append(self._newest.popleft())
        self._kept -= self._accounts[self._older[-1]].kept

    def _too_many(self) -> int:
        """Return how many of the oldest segments must go for the others to take no more than `capacity_bytes`.

        Up to a sealed one: an unsealed one in front stays on disk, and its writer moves on.
        """
        most = self._root.capacity_bytes
        if most is None:
            return 0
        leaving = sum(self._accounts[number].nbytes for number in self._older if number not in self._unsealed)
        excess, many = self._nbytes - leaving - most, 0
        for place, number in enumerate(self._newest, start=1):
            if excess <= 0:
                break
            if number not in self._unsealed:
                excess -= self._accounts[number].nbytes
                many = place
        return many

    # --- what segments hold ------------------------------------------------------------------------------------------

    def _read_hidden(self, count: int) -> None:
        if count <= self._entries.count:
            return
        for number, steps in self._entries.steps_by_segment(count).items():
            account = self._accounts.get(number)
            if account is not None:  # else it is gone
                self._set(number, account, hidden=account.hidden + steps)
                self._note_hidden_whole(number, account)

    def _look(self, number: int) -> None:
        """Count the steps and bytes of a segment that was not sealed when it was last looked at, if ever."""
        account, path = self._accounts[number], self._root.segment_path(number)
        try:
            inode = os.stat(path / layout.METADATA).st_ino
            info = account.info if account.info and account.inode == inode else read_segment(self._root, number)
            steps = count_steps(self._root, info) if info.steps is None else info.steps
        except FileNotFoundError:
            if not os.path.lexists(path):
                self._forget(number)  # set aside; who brings it back counts a change
            return
        except (FormatError, NotADirectoryError, IsADirectoryError):
            # Damaged: it holds what it takes on disk, and stays until it is repaired, as one that is not sealed.
            if self._root.capacity_bytes is not None:
                self._set(number, account, hidden=account.hidden, nbytes=disk_usage(path)[0])
            return
        before = account.kept
        account.info, account.inode = info, inode
        self._count(number, account.kept - before)  # some of it may have been lost since
        nbytes = 0 if self._root.capacity_bytes is None else disk_usage(path)[0]
        self._set(number, account, steps=steps, hidden=account.hidden, nbytes=nbytes)
        if info.sealed:
            if self._root.max_age_s is not None and number in self._unsealed:
                self._ages.add(number, info)
            self._unsealed.discard(number)
            self._note_hidden_whole(number, account)

    def _set(
        self, number: int, account: _Account, *, hidden: int, steps: int | None = None, nbytes: int | None = None
    ) -> None:
        before = account.kept
        account.hidden = hidden
        if steps is not None:
            account.steps = steps
        if nbytes is not None:
            self._nbytes += nbytes - account.nbytes
            account.nbytes = nbytes
        self._count(number, account.kept - before)

    def _count(self, number: int, more: int) -> None:
        if self._newest and number >= self._newest[0]:
            self._kept += more

    def _note_hidden_whole(self, number: int, account: _Account) -> None:
        if account.sealed and account.hidden + account.lost and not account.kept:
            self._doomed.add(number)

    def _forget_gone(self) -> None:
        """Forget what other processes removed from between the others."""
        there = set(present_segments(self._root, list(self._accounts)))
        for number in [n for n in self._accounts if n not in there]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        account = self._accounts.pop(number)
        self._nbytes -= account.nbytes
        if self._newest and number >= self._newest[0]:
            self._newest.remove(number)
            self._kept -= account.kept
        else:
            self._older.remove(number)
        self._unsealed.discard(number)
        self._doomed.discard(number)


def disk_usage(path: Path) -> tuple[int, int]:
    """Return the bytes that a file, or the files below a folder, take on disk, and the bytes they seem to have."""
    on_disk = apparent = 0
    for folder, _, files in os.walk(path) if is_folder(path) else [(str(path.parent), [], [path.name])]:
        for name in files:
            try:
                status = os.stat(os.path.join(folder, name), follow_symlinks=False)
            except (FileNotFoundError, NotADirectoryError):
                continue  # replaced or evicted meanwhile
            on_disk += status.st_blocks * 512
            apparent += status.st_size
    return on_disk, apparent
