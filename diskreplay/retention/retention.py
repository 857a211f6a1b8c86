"""Places new segments under the store lock, and renames old ones out of sight; their files are deleted after it."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from diskreplay.errors import FormatError, SegmentGone, StorageFull, StoreLocked
from diskreplay.folders import OpenFolder, is_folder
from diskreplay.retention.policy import RetentionPolicy
from diskreplay.segments.damage.quarantine import (
    claimed_steps,
    copy_aside,
    include_number,
    move_aside,
    note_change,
    quarantined_numbers,
    remove_stale_records,
)
from diskreplay.segments.damage.unproven import WHY, Fate, fate_of
from diskreplay.segments.documents import layout, state_files
from diskreplay.segments.documents.eviction_list import (
    PREFIX,
    EvictionEntries,
    destroy,
    discarded_path,
    evict,
    evicted_by_removals,
    has_reserve,
    keep_hidden,
    removed_path,
    reserve,
)
from diskreplay.segments.documents.metadata import identify
from diskreplay.segments.documents.root import Limits, Root
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.durable import drafted, storage_errors, sync_folder
from diskreplay.segments.files.locks import Lock, held_lock, is_held, is_locked, try_lock
from diskreplay.segments.files.machine import Clock, clock_ns, this_clock
from diskreplay.segments.files.numbers import listed_numbers, live_numbers, next_number
from diskreplay.segments.files.times import last_time
from diskreplay.segments.marks import proven_rows
from diskreplay.segments.packs import KnownPack, KnownPacks, find_present
from diskreplay.segments.rebuild import finish_replacements, rebuild_copy
from diskreplay.segments.sealing import count_steps_in, may_seal
from diskreplay.segments.segment import (
    DRAFT,
    NeverWritten,
    SegmentInfo,
    Size,
    draft_segment,
    lock_draft,
    pack_draft,
    place_segment,
    read_segment,
    remove_draft,
)

# How the name of a folder begins in which a living process makes something, and where in it is the lock that it holds.
LOCK_OF_DRAFT = {DRAFT: f"{layout.COMMITTED}/{layout.LOCK}", state_files.DRAFT: layout.LOCK}
# The newest segments, in which the clock of this boot is searched: some may be damaged, or gone.
_NEIGHBOURS = 16
# Each dead segment that waits to be sealed holds a descriptor, and each that is renamed keeps others from the lock.
_AT_ONCE = 64
# A process that needs room also deletes the folders that others are deleting: few, while segments are merged.
_MERGED_AT_ONCE = 8
# So many segments at most are there that no counter knows: their makers died before they were counted.
_UNCOUNTED = 2 * layout.RESERVED_AT_ONCE
# Seconds for which the store lock is waited for to count what was sealed: by then, readers have found it without that.
_HINT_TIMEOUT_S = 1.0


class Retention:
    """Makes and removes segments of one store.

    Concurrency: any thread and process; each call takes the store lock. Segment locks are only tried under it. Files
    are deleted when the lock is free again.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._policy = RetentionPolicy(root, counters)
        self._tried: set[int] = set()  # dead segments that were handed out to be sealed
        self._sealed: set[int] = set()  # which stay so
        self._packs = KnownPacks(root)
        self._clock: Clock | None = None

    @contextmanager
    def _locked(self) -> Iterator[list[str]]:
        """Hold the store lock and make counters whole; StoreNotFound where the store was deleted or replaced.

        The folders that a block adds to the list are deleted as soon as the lock is free, also if the block raises.
        """
        gone: list[str] = []
        try:
            with self._root.still_there(), held_lock(self._root.lock_path):
                self._counters.restore_complements()
                yield gone
        finally:
            destroy(self._root, gone)

    def new_segment(
        self, writer: int | None, lanes: Sequence[int], size: Size, has_priority: bool = False
    ) -> tuple[SegmentInfo, Lock]:
        """Make the next segment and return it with its lock, held. Removes old ones first. See `draft_segment`.

        Raises StorageFull where there is no room for it, StoreNotFound where the store was deleted or replaced since it
        was opened, StoreLocked where the store lock was not free for a minute.
        """
        if not self._policy.is_idle:
            # With a segment an episode, many wait to be sealed: they are read again when that is done.
            again = self._root.segment_steps != "episode"
            if self._remove_some(again=again):
                self._remove_some(again=again)  # the first call may have found members of packs, to be made durable
        with self._locked():
            number = next_number(self._root, self._counters)
            building = f"{self._root.counters_folder}/new-{layout.segment_name(number)}"
            # What a writer that died here left is in the way; under the store lock nobody else can be building.
            first = number if writer is None else writer
            draft, lock = draft_segment(self._root, building, first, lanes, size, self.clock(), has_priority)
            try:
                return self._place(draft, number), lock
            except BaseException:
                remove_draft(draft, lock)
                raise

    def clock(self) -> Clock:
        """Return the clock of this boot as the newest segments have it.

        So the times of all segments of a boot compare to the nanosecond, whatever was done to the wall clock meanwhile.
        In a new boot it goes on behind what was written before, though somebody may have set the wall clock back: what
        comes last must not be taken for the oldest. The first call is made under the store lock.
        """
        if self._clock is None:
            words, here = self._counters.read(), this_clock()
            known, latest = None, int(max(words[layout.HORIZON], words[layout.FRONTIER]))
            for number in range(max(0, int(words[layout.NEXT_SEGMENT]) - _NEIGHBOURS), int(words[layout.NEXT_SEGMENT])):
                with suppress(OSError, FormatError):
                    info = read_segment(self._root, number)
                    known = info.clock if info.clock.boot == here.boot else known
                    latest = max(latest, last_time(info))
            self._clock = known or here._replace(wall=max(here.wall, latest - clock_ns()))
        return self._clock

    def place(self, draft: SegmentInfo) -> SegmentInfo:
        """Make a draft the next segment. Old ones are removed when the one before it is sealed.

        Raises StorageFull, FileNotFoundError, StoreLocked or StoreNotFound where it could not be placed, and is of no
        use any more.
        """
        with self._locked():
            return self._place(draft, next_number(self._root, self._counters))

    def _place(self, draft: SegmentInfo, number: int) -> SegmentInfo:
        info = place_segment(draft, number)
        try:
            self._counters.set(layout.NEXT_SEGMENT, number + 1)
        except BaseException:
            # Nothing was written to it. It cannot go back: a full disk may refuse the name that it had.
            shutil.rmtree(info.path, ignore_errors=True)
            raise
        return info

    def is_making_pack(self) -> bool:
        """Whether a process makes a pack now."""
        return is_held(f"{pack_draft(self._root)}/{LOCK_OF_DRAFT[DRAFT]}") is True

    def look(self, pace: Callable[[], None]) -> None:
        """Read all segments before any other thread uses this. Else the first removal does, under the store lock."""
        self._policy.look(pace)

    @contextmanager
    def making_pack(self, nbytes: int) -> Iterator[str]:
        """Have a block make a pack in the folder that is given to it. One at a time does, of all processes.

        Room for its ``nbytes`` is made first in a store that is limited to some, and counts until the block ends.
        Raises StoreLocked where another one is at it, StorageFull where there is no room.
        """
        building = pack_draft(self._root)
        with self._locked() as gone:
            gone += [*_finish_removals(self._root, self._counters), *_take_dead_draft(building, LOCK_OF_DRAFT[DRAFT])]
            if os.path.lexists(building):
                raise StoreLocked(f"another process merges segments of {self._root.path}; try again when it is done")
            with drafted(building):
                os.mkdir(building)
                lock, own = lock_draft(building), OpenFolder.of(building)
        try:
            self._policy.pack_nbytes = nbytes
            self.enforce()
            yield building
        finally:
            self._policy.pack_nbytes = 0
            # Where the pack was placed, another process may be making the next one here. While this one is open, its
            # inode is no other folder's.
            if own.is_at(building):
                shutil.rmtree(building, ignore_errors=True)
            lock.release()

    def place_pack(
        self, draft: SegmentInfo, sources: Sequence[SegmentInfo], pace: Callable[[], None] = lambda: None
    ) -> SegmentInfo:
        """Make a pack, which is complete and durable, the next segment, and delete those whose rows are in it.

        Readers leave these out as soon as the pack is there; whoever opens the store next deletes what is left of them.
        Raises SegmentGone where one of them is not what was read any more: the pack is of no use.
        """
        made = KnownPack.of(draft)._replace(document=identify(draft.path / layout.METADATA))
        for source in sources:
            self._packs.note(source)
        with self._locked():
            for source in sources:
                if identify(source.path / layout.METADATA) != source.document:
                    raise SegmentGone(f"segment {source.number} was evicted, repaired or merged meanwhile")
            info = self._place(draft, next_number(self._root, self._counters))
        self._packs.add(info.number, made)
        self._remove_merged(pace)
        return info

    def _remove_merged(self, pace: Callable[[], None] = lambda: None) -> None:
        """Delete the segments, and the packs, whose rows are in packs that came later; no step of these is evicted."""
        left = self._packs.find_merged(self._counters.peek(layout.NEXT_SEGMENT))
        if left:
            # The names of packs, and the number up to which readers look for them: a pack's maker may have died before.
            with self._root.still_there(), storage_errors(self._root.counters_folder):
                sync_folder(self._root.segments_folder)
                self._counters.sync()
        while left:
            with self._locked() as gone:  # some at a time: others get the lock in between
                for number, pack in left[:_MERGED_AT_ONCE]:
                    # A pack that was set aside or replaced since it was read may not have their rows.
                    if self._packs.is_same(pack) and os.path.lexists(self._root.segment_path(number)):
                        gone.append(_take_out(self._root, self._counters, number, 0))
            del left[:_MERGED_AT_ONCE]
            pace()

    def add_priority(self, add: Callable[[], None]) -> None:
        """Add the array of priorities to a segment, and notify readers before any row has one.

        Raises StorageFull where there is no room, StoreLocked or StoreNotFound as `new_segment` does.
        """
        with self._locked():
            add()
            self._counters.count(layout.SEALED)

    def after_sealing(self) -> None:
        """Notify readers that segments were sealed, and remove segments that are due."""
        self.count_sealed()
        self.enforce()

    def count_sealed(self) -> None:
        """Notify readers that segments were sealed. A hint: where another keeps the lock, they check by themselves."""
        lock_path = self._root.lock_path
        with suppress(StoreLocked), self._root.still_there(), held_lock(lock_path, timeout_s=_HINT_TIMEOUT_S):
            self._counters.restore_complements()
            self._counters.count(layout.SEALED)

    def resize(self, limits: Limits, find_hidden: Callable[[], int]) -> None:
        """Change what the store keeps at most, and remove what is due by then.

        What is hidden stays so. ``find_hidden`` tells before which time the limits hide everything; it is called under
        the lock.
        """
        with self._locked():
            keep_hidden(self._counters, find_hidden())
            self._root.write_limits(limits)
            self._counters.count(layout.CHANGES)
        self.enforce()

    def enforce(self) -> None:
        """Remove segments that are due; nothing else has to succeed first."""
        left = not self._policy.is_idle
        while left:  # others get the lock in between
            left = self._remove_some(again=True)

    def evict(self, episodes: Sequence[tuple[int, int]], find_hidden: Callable[[], int]) -> list[int]:
        """Hide episodes of sealed segments, all or, where that fails, none; return the first ids of those that were.

        Others were evicted meanwhile. ``find_hidden`` tells before which time the capacity hides everything; it
        is called under the lock.
        """
        with self._locked():
            entries = EvictionEntries(self._root).new(int(self._counters.read()[layout.EVICTION_ENTRIES]))
            known = set(entries[:, 0].tolist())
            left = find_present(
                self._root,
                [episode for episode in episodes if episode[0] not in known],
                has_lost=bool(self._counters.read()[layout.CHANGES]),
            )
            if left:
                evict(self._root, self._counters, left, find_hidden())
        return [first for first, _ in left]

    def reserve_entries(self) -> None:
        """Reserve room for evictions by hand on a disk that may become full; where there is none now, do nothing."""
        with suppress(StorageFull, StoreLocked, FormatError):
            if not has_reserve(self._root, self._counters.peek(layout.EVICTION_ENTRIES)):
                with held_lock(self._root.lock_path):
                    reserve(self._root, int(self._counters.read()[layout.EVICTION_ENTRIES]))

    def dead_segments(self, *, evicts: bool = True) -> list[tuple[SegmentInfo, Lock]]:
        """Lock and return unsealed segments whose writer is gone and that this machine may seal, some at a time.

        Those of an earlier boot without a durable row are set aside: they may have empty files. ``evicts``: what is due
        by the limits is evicted where a segment has returned, which takes room from others.
        """
        dead: list[tuple[SegmentInfo, Lock]] = []
        self._note_sealed()
        with self._locked() as gone:
            self._clean_up(gone)
            if self._find_returned(gone) and evicts and not self._policy.is_idle:
                self._remove_old(gone, again=True)
            for info in self._live():
                if len(dead) == _AT_ONCE:
                    break
                # One that is damaged is left as it is: readers warn of it, and repair is run by hand.
                with suppress(FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    if (taken := self._take_over(info, gone)) is not None:
                        dead.append(taken)
        with suppress(StorageFull, StoreLocked):  # next time; until then, readers ignore what is left
            self._remove_merged()
        return dead

    def _take_over(self, info: SegmentInfo, gone: list[str]) -> tuple[SegmentInfo, Lock] | None:
        """Lock a segment that has to be sealed, if its writer is gone and this machine may seal it."""
        if info.number in self._tried or info.sealed or not may_seal(info) or is_locked(info.lock_path):
            return None
        try:
            lock = try_lock(info.lock_path)
        except FileNotFoundError:  # the folder of its lock was lost with the power
            self.has_to_be_sealed(info, gone)
            return None
        if lock is None:
            return None
        with ExitStack() as undo:
            undo.callback(lock.release)
            info = read_segment(self._root, info.number)
            if not info.sealed and self.has_to_be_sealed(info, gone):  # a sealer may just have finished
                self._tried.add(info.number)
                undo.pop_all()
                return info, lock
        return None

    def has_to_be_sealed(self, info: SegmentInfo, gone: list[str]) -> bool:
        """Take out a segment to which nothing was ever written, set aside one of which files are missing.

        Tell whether there is anything left to seal. The caller holds the store lock, and the segment's. It deletes the
        folders in ``gone`` when the store lock is free.
        """
        fate = fate_of(info)
        if fate is not Fate.REMOVED and self._rebuild_copy(info):
            return False
        if fate is Fate.REMOVED:
            gone.append(_take_out(self._root, self._counters, info.number, 0))
        elif fate is Fate.SET_ASIDE:
            self._set_aside(info.number, WHY[fate])
        elif fate is Fate.COPIED:
            return self._copy_aside(info)
        return fate is Fate.SEALED

    def _rebuild_copy(self, info: SegmentInfo) -> bool:
        """Rebuild a copy of a sealed segment whose files do not fit their checksums; False: it has to be sealed."""
        try:
            with storage_errors(info.path):
                return rebuild_copy(info)
        except StorageFull:
            return True  # as it is, it waits for room: sealing it would forget the checksums
        except (FormatError, OSError):  # small files do not fit, or cannot be read
            return False

    def _copy_aside(self, info: SegmentInfo) -> bool:
        """Keep in quarantine what sealing takes from a segment of which files are missing; False: there is no room."""
        where = layout.segment_folder(info.number)
        known = claimed_steps(info.path)
        proven = count_steps_in(info, proven_rows(info))
        steps = known - proven if known is not None and known > proven else None
        with suppress(StorageFull):
            copy_aside(self._root.folder, where, WHY[Fate.COPIED], steps)
            return True
        return False

    def _clean_up(self, gone: list[str]) -> None:
        """Take out what processes that died left half removed or half made; the caller holds the store lock."""
        gone += _finish_removals(self._root, self._counters)
        finish_replacements(self._root)
        for name in os.listdir(self._root.counters_folder):
            path = f"{self._root.counters_folder}/{name}"
            if name.startswith("new-"):
                gone += _take_draft(path)
            for beginning, lock in LOCK_OF_DRAFT.items():
                if name.startswith(beginning):
                    gone += _take_dead_draft(path, lock)
        gone += state_files.take_stale(self._root)

    def _find_returned(self, gone: list[str]) -> bool:
        """Count the segments that are there and that the counters leave out; return whether any had been counted once.

        Somebody moved one back by hand, or its maker died before it was counted, or power was lost before its name
        was gone from the disk. Those that retention had taken out stay out: what it went by still holds for them. The
        caller holds the store lock.
        """
        from_quarantine = remove_stale_records(self._root.folder)
        for number, steps in from_quarantine.items():
            if not os.path.lexists(self._root.segment_path(number)):  # somebody deleted it by hand
                self._counters.set(layout.STEPS_EVICTED, self._counters.evicted_after(steps))
        returned = False
        for number in sorted(listed_numbers(self._root)):
            words = self._counters.read()
            first, following = int(words[layout.FIRST_LIVE]), int(words[layout.NEXT_SEGMENT])
            if first <= number < following or not self._is_in_place(number):
                returned |= number in from_quarantine
            elif number < first and self._is_below_horizon(number):
                steps = from_quarantine.get(number, 0)
                gone.append(_take_out(self._root, self._counters, number, steps))
            elif number < following + _UNCOUNTED:
                include_number(self._counters, number)
                returned |= number < first
        most = layout.MAX_SEGMENTS - _UNCOUNTED
        aside = [number for number in quarantined_numbers(self._root.folder) if number < most]
        if aside and aside[-1] >= self._counters.read()[layout.NEXT_SEGMENT]:
            self._counters.set(layout.NEXT_SEGMENT, aside[-1] + 1)
        least = self._packs.least_member
        if least < self._counters.read()[layout.FIRST_LIVE]:
            include_number(self._counters, least)
        if returned:
            note_change(self._root.folder)
        return returned

    def _is_in_place(self, number: int) -> bool:
        """Whether a folder is a segment by its name, and no process is writing to it."""
        path = self._root.segment_path(number)
        return is_folder(path) and not is_locked(path / layout.COMMITTED / layout.LOCK)

    def _is_below_horizon(self, number: int) -> bool:
        if not self._root.has_horizon:
            return False
        with suppress(OSError, FormatError):
            return read_segment(self._root, number).came_before(self._counters.peek(layout.HORIZON))
        return False

    def _set_aside(self, number: int, reason: str) -> None:
        """Move a segment into quarantine; where there is no room for that it stays where it is."""
        with suppress(StorageFull):
            move_aside(self._root.folder, layout.segment_folder(number), reason)

    def _note_sealed(self) -> None:
        """Find which segments are sealed without the lock: to read thousands of documents takes long."""
        words = self._counters.read()
        self._sealed = {number for number in self._sealed if number >= words[layout.FIRST_LIVE]}
        # Packs that no counter knows, too: `_find_returned` counts them.
        end = int(words[layout.NEXT_SEGMENT])
        uncounted = [number for number in listed_numbers(self._root) if end <= number < end + _UNCOUNTED]
        for number in [*live_numbers(self._root, words), *uncounted]:
            if number not in self._sealed:
                with suppress(OSError, FormatError):  # it is read again under the lock
                    info = read_segment(self._root, number)
                    self._packs.note(info)
                    if info.sealed:
                        self._sealed.add(number)

    def _live(self) -> list[SegmentInfo]:
        """Read the attributes of every segment that is there and not known to be sealed, lowest number first.

        Those that say nothing of themselves since the power went are set aside.
        """
        found = []
        for number in live_numbers(self._root, self._counters.read()):
            try:
                if number not in self._sealed:
                    found.append(read_segment(self._root, number))
            except NeverWritten as error:
                if not is_locked(f"{error.filename}/{layout.COMMITTED}/{layout.LOCK}"):
                    self._set_aside(number, "nothing of it was written when the power went")
            except (FormatError, FileNotFoundError, NotADirectoryError):
                continue  # evicted, or damaged: readers warn of it, and repair is run by hand
        return found

    def _remove_some(self, *, again: bool) -> bool:
        """Remove segments that are due, some at a time; return whether more are. There is room then."""
        self._policy.sync_packs()
        with self._locked() as gone:
            return self._remove_old(gone, again=again)

    def _remove_old(self, gone: list[str], *, again: bool) -> bool:
        """Take out segments that are due, some at a time; return whether more are."""
        gone += _finish_removals(self._root, self._counters)
        for number, steps in self._policy.due(_AT_ONCE, again=again):
            gone.append(_take_out(self._root, self._counters, number, steps))
        return self._policy.has_more


# --- taken out of sight, in one step ----------------------------------------------------------------------------------


def _take_out(root: Root, counters: StoreCounters, number: int, steps: int) -> str:
    """Move a segment beside the counters, so that it is never seen half deleted; return where it is now.

    Its steps count as evicted: see `eviction_list.removed_path`. The caller holds the store lock. Raises StorageFull
    where there is no room for the name.
    """
    evicted = counters.evicted_after(steps)
    gone = removed_path(root.counters_folder, number, evicted)
    shutil.rmtree(gone, ignore_errors=True)
    with storage_errors(gone):
        os.rename(root.segment_path(number), gone)
    counters.set(layout.STEPS_EVICTED, evicted)
    return gone


def _finish_removals(root: Root, counters: StoreCounters) -> list[str]:
    """Count the steps of folders that were taken out; return the folders. The caller holds the store lock.

    Their process died, or is deleting them now. A caller that needs the room does not wait for that.
    """
    names = [name for name in os.listdir(root.counters_folder) if name.startswith(PREFIX)]
    if evicted := evicted_by_removals(root):
        counters.set(layout.STEPS_EVICTED, max(int(counters.read()[layout.STEPS_EVICTED]), evicted))
    return [f"{root.counters_folder}/{name}" for name in names]


def _take_draft(path: str) -> list[str]:
    """Take out an unfinished folder; return its new path. The caller holds the store lock.

    Another process may make one at the same path as soon as the lock is free.
    """
    if not is_folder(path):
        return []  # no process made that
    gone = discarded_path(path)
    try:
        os.rename(path, gone)
    except OSError:  # no room for the name
        shutil.rmtree(path, ignore_errors=True)
    return [gone]


def _take_dead_draft(path: str, lock_path: str) -> list[str]:
    """Take out an unfinished folder if its process is gone, which held the lock in it; return its new path.

    The caller holds the store lock.
    """
    *inside, _ = lock_path.split("/")
    if any(os.path.islink("/".join([path, *inside[:depth]])) for depth in range(len(inside) + 1)):
        return []  # no process made that, and what is behind it is not ours
    try:
        lock = try_lock(f"{path}/{lock_path}")
    except OSError:
        # It has no place for a lock yet: its maker died, or is just about to make one; then this fails, or that does.
        with suppress(OSError):
            os.rmdir(path)
        # Or it had one until the power went: a place for the lock is made before anything else.
        if os.path.isdir(path) and lock_path.split("/")[0] not in (names := os.listdir(path)) and names:
            return _take_draft(path)
        return []
    if lock is None:
        return []
    try:
        return _take_draft(path)
    finally:
        lock.release()
