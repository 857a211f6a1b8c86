"""Make new segments and move old ones away, under the store lock; files are deleted after the lock is released."""

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
from diskreplay.segments.damage.unproven import REASONS, Fate, fate_of
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

# The path of the lock in a draft folder, by the prefix of the folder's name. The first prefix is for drafts of segments
# and packs, and the second prefix is for drafts of saved states. The process that makes a draft holds its lock.
LOCK_OF_DRAFT = {DRAFT: f"{layout.COMMITTED}/{layout.LOCK}", state_files.DRAFT: layout.LOCK}
# This many of the newest segments are searched for the clock of this boot, because some may be damaged or gone.
_NEIGHBOURS = 16
# The maximum number of segments that one call seals or removes. Each segment that waits to be sealed takes a descriptor
# for its lock, and each rename delays other processes that wait for the store lock.
_AT_ONCE = 64
# The maximum number of merged segments that are removed at once. The number is small, because a process that needs disk
# space first deletes the folders that other processes have moved away.
_MERGED_AT_ONCE = 8
# At most this many segments exist that no counter includes: their makers died before counting them.
_UNCOUNTED = 2 * layout.RESERVED_AT_ONCE
# Seconds to wait for the store lock before counting newly sealed segments. Readers find newly sealed segments even
# without the count.
_HINT_TIMEOUT_S = 1.0


class Retention:
    """Makes and removes segments of one store.

    Any thread and process may use a `Retention`. Each call takes the store lock. Under the store lock, a call tries the
    locks of segments, but never waits for them. Files are deleted after the store lock is released.
    """

    def __init__(self, root: Root, counters: StoreCounters) -> None:
        self._root, self._counters = root, counters
        self._policy = RetentionPolicy(root, counters)
        self._tried: set[int] = set()  # Segments that `dead_segments` returned once, and does not return again.
        self._sealed: set[int] = set()  # Sealed segments, which never change again.
        self._packs = KnownPacks(root)
        self._clock: Clock | None = None

    @contextmanager
    def _locked(self) -> Iterator[list[str]]:
        """Hold the store lock and make the counters consistent; StoreNotFound if the store was deleted or replaced.

        The `with` block adds the paths of folders to the yielded list. After the lock is released, these folders are
        deleted, even if the block raises.
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
        """Remove segments that are due, make the next segment, and return the segment and its held lock.

        ``writer`` is the number of the writer's first segment; None: the new segment is the writer's first segment. See
        `draft_segment` for the other arguments.

        Raises StorageFull if the disk has no room, StoreNotFound if the store was deleted or replaced since it was
        opened, and StoreLocked if the store lock stayed taken for a minute.
        """
        if not self._policy.is_idle:
            # With one segment per episode, many segments wait to be sealed. Reading all these segments again here would
            # be slow, so they are read again only after a sealing.
            again = self._root.segment_steps != "episode"
            # If the first call finds merged segments, the names of their packs may not be durable yet. The second call
            # makes these names durable, and then removes the merged segments.
            if self._remove_some(again=again):
                self._remove_some(again=again)
        with self._locked():
            number = next_number(self._root, self._counters)
            building = f"{self._root.counters_folder}/new-{layout.segment_name(number)}"
            # A process that died while it made a segment may have left its draft at this path. The draft can be
            # deleted, because no other process makes a segment while this process holds the store lock.
            first = number if writer is None else writer
            draft, lock = draft_segment(self._root, building, first, lanes, size, self.clock(), has_priority)
            try:
                return self._place(draft, number), lock
            except BaseException:
                remove_draft(draft, lock)
                raise

    def clock(self) -> Clock:
        """Return the clock of this boot, as recorded in the newest segments.

        With this clock, the times of all segments of a boot can be compared to the nanosecond, even if the wall clock
        was set meanwhile. In a new boot, the clock starts after the latest time in the store, even if the wall clock
        was set back. So the newest steps never look oldest. The caller holds the store lock at the first call, which
        reads the newest segments.
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
        """Move a draft into the store as the next segment.

        Segments that are due are removed later, when the writer's previous segment is sealed.

        Raises StorageFull, FileNotFoundError, StoreLocked or StoreNotFound. After an error, the draft cannot be used.
        """
        with self._locked():
            return self._place(draft, next_number(self._root, self._counters))

    def _place(self, draft: SegmentInfo, number: int) -> SegmentInfo:
        info = place_segment(draft, number)
        try:
            self._counters.set(layout.NEXT_SEGMENT, number + 1)
        except BaseException:
            # The segment has no rows yet. The segment's folder is not renamed back, because a full disk may refuse the
            # old name.
            shutil.rmtree(info.path, ignore_errors=True)
            raise
        return info

    def is_making_pack(self) -> bool:
        return is_held(f"{pack_draft(self._root)}/{LOCK_OF_DRAFT[DRAFT]}") is True

    def look(self, pace: Callable[[], None]) -> None:
        """Read all segments, so that the first removal under the store lock is fast; see `RetentionPolicy.look`."""
        self._policy.look(pace)

    @contextmanager
    def making_pack(self, nbytes: int) -> Iterator[str]:
        """Yield a folder for the pack that a `with` block makes; among all processes, one such block runs at a time.

        If the store has a capacity in bytes, ``nbytes`` bytes count as used until the block ends. Segments that become
        due are removed before the block runs. Raises StoreLocked if another process is making a pack, and StorageFull
        if the disk has no room.
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
            # If this pack was moved into the store, another process may already be making another pack at this path. No
            # other folder can have the inode of this process's folder, because that folder is still open here.
            if own.is_at(building):
                shutil.rmtree(building, ignore_errors=True)
            lock.release()

    def place_pack(
        self, draft: SegmentInfo, sources: Sequence[SegmentInfo], pace: Callable[[], None] = lambda: None
    ) -> SegmentInfo:
        """Move a complete, durable pack into the store as the next segment, and delete the merged segments.

        Readers ignore the merged segments as soon as the pack is visible. If this process dies, the next process that
        opens the store deletes the merged segments. ``pace`` is called after every few deletions. Raises SegmentGone,
        and does not move the pack, if one of ``sources`` changed since it was read.
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
        """Delete the segments and packs whose rows are in later packs; their steps do not count as evicted."""
        left = self._packs.find_merged(self._counters.peek(layout.NEXT_SEGMENT))
        if left:
            # Make the names of packs and the counter of segments durable: readers look only for segments below the
            # counter. The process that made a pack may have died before this step.
            with self._root.still_there(), storage_errors(self._root.counters_folder):
                sync_folder(self._root.segments_folder)
                self._counters.sync()
        while left:
            with self._locked() as gone:  # a few segments at a time, so that other processes get the lock in between
                for number, pack in left[:_MERGED_AT_ONCE]:
                    # A pack that was quarantined or replaced since it was read may lack the segment's rows.
                    if self._packs.is_same(pack) and os.path.lexists(self._root.segment_path(number)):
                        gone.append(_take_out(self._root, self._counters, number, 0))
            del left[:_MERGED_AT_ONCE]
            pace()

    def add_priority(self, add: Callable[[], None]) -> None:
        """Call ``add``, which adds a segment's array of priorities, and notify readers before any priority is written.

        Raises StorageFull if the disk has no room; StoreLocked and StoreNotFound as in `new_segment`.
        """
        with self._locked():
            add()
            self._counters.count(layout.SEALED)

    def after_sealing(self) -> None:
        self.count_sealed()
        self.enforce()

    def count_sealed(self) -> None:
        """Tell readers that segments were sealed; if the store lock stays taken, readers find out by themselves."""
        lock_path = self._root.lock_path
        with suppress(StoreLocked), self._root.still_there(), held_lock(lock_path, timeout_s=_HINT_TIMEOUT_S):
            self._counters.restore_complements()
            self._counters.count(layout.SEALED)

    def resize(self, limits: Limits, find_hidden: Callable[[], int]) -> None:
        """Change the limits of the store, and remove the segments that the new limits make due.

        Hidden steps stay hidden. ``find_hidden`` is called under the store lock, and returns a time: steps that were
        published before it stay hidden.
        """
        with self._locked():
            keep_hidden(self._counters, find_hidden())
            self._root.write_limits(limits)
            self._counters.count(layout.CHANGES)
        self.enforce()

    def enforce(self) -> None:
        left = not self._policy.is_idle
        while left:  # between two calls, other processes get the lock
            left = self._remove_some(again=True)

    def evict(self, episodes: Sequence[tuple[int, int]], find_hidden: Callable[[], int]) -> list[int]:
        """Hide episodes of sealed segments, and return the ids of their first steps.

        After an error, all episodes stay visible. Each of ``episodes`` is (id of the first step, number of steps).
        Episodes that were evicted meanwhile are not returned. ``find_hidden`` is called under the store lock, and
        returns a time: steps that were published before it stay hidden.
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
        """Reserve disk space, so that evictions by hand work on a full disk; do nothing if the disk is full already."""
        with suppress(StorageFull, StoreLocked, FormatError):
            if not has_reserve(self._root, self._counters.peek(layout.EVICTION_ENTRIES)):
                with held_lock(self._root.lock_path):
                    reserve(self._root, int(self._counters.read()[layout.EVICTION_ENTRIES]))

    def dead_segments(self, *, evicts: bool = True) -> list[tuple[SegmentInfo, Lock]]:
        """Lock and return at most `_AT_ONCE` unsealed segments whose writer is gone and that this machine may seal.

        A segment of an earlier boot without a durable row is quarantined, because its files may be empty. If a segment
        was moved back into the store and ``evicts`` is True, the segments that are due are removed.
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
                # A damaged segment stays as it is: readers warn of it, and the user runs repair.
                with suppress(FormatError, FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    if (taken := self._take_over(info, gone)) is not None:
                        dead.append(taken)
        with suppress(StorageFull, StoreLocked):  # the next call tries again; readers ignore merged segments
            self._remove_merged()
        return dead

    def _take_over(self, info: SegmentInfo, gone: list[str]) -> tuple[SegmentInfo, Lock] | None:
        """Lock and return a segment that needs sealing; None if its writer lives, or this machine may not seal it."""
        if info.number in self._tried or info.sealed or not may_seal(info) or is_locked(info.lock_path):
            return None
        try:
            lock = try_lock(info.lock_path)
        except FileNotFoundError:  # a power loss took the folder of the lock
            self.has_to_be_sealed(info, gone)
            return None
        if lock is None:
            return None
        with ExitStack() as undo:
            undo.callback(lock.release)
            info = read_segment(self._root, info.number)
            if not info.sealed and self.has_to_be_sealed(info, gone):  # another process may just have sealed it
                self._tried.add(info.number)
                undo.pop_all()
                return info, lock
        return None

    def has_to_be_sealed(self, info: SegmentInfo, gone: list[str]) -> bool:
        """Return whether a segment needs sealing; an empty segment is removed instead.

        A segment that lacks files is quarantined. The caller holds the store lock and the segment's lock. After
        releasing the store lock, the caller deletes the folders that this call adds to ``gone``.
        """
        fate = fate_of(info)
        if fate is not Fate.REMOVED and self._rebuild_copy(info):
            return False
        if fate is Fate.REMOVED:
            gone.append(_take_out(self._root, self._counters, info.number, 0))
        elif fate is Fate.SET_ASIDE:
            self._set_aside(info.number, REASONS[fate])
        elif fate is Fate.COPIED:
            return self._copy_aside(info)
        return fate is Fate.SEALED

    def _rebuild_copy(self, info: SegmentInfo) -> bool:
        """Rebuild a copy of a sealed segment whose files do not match their checksums.

        Returns False if the segment has to be sealed instead.
        """
        try:
            with storage_errors(info.path):
                return rebuild_copy(info)
        except StorageFull:
            return True  # The segment waits for room: sealing it now would lose the checksums that prove its rows.
        except (FormatError, OSError):  # Small files, such as a zarr.json, are damaged.
            return False

    def _copy_aside(self, info: SegmentInfo) -> bool:
        """Before sealing a segment that lacks files, copy it into quarantine; return False if the disk has no room."""
        where = layout.segment_folder(info.number)
        known = claimed_steps(info.path)
        proven = count_steps_in(info, proven_rows(info))
        steps = known - proven if known is not None and known > proven else None
        with suppress(StorageFull):
            copy_aside(self._root.folder, where, REASONS[Fate.COPIED], steps)
            return True
        return False

    def _clean_up(self, gone: list[str]) -> None:
        """Add half-deleted folders, and unfinished folders of dead processes, to ``gone``.

        The caller holds the store lock.
        """
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
        """Include all existing segments in the counters; return whether an older segment is back in the store.

        The counters may lack a segment for three reasons: a user moved it back by hand, its maker died before counting
        it, or a power loss undid its removal. Segments that retention had removed are removed again, because the same
        limits still hold. The caller holds the store lock.
        """
        from_quarantine = remove_stale_records(self._root.folder)
        for number, steps in from_quarantine.items():
            if not os.path.lexists(self._root.segment_path(number)):  # a user deleted the segment by hand
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
        path = self._root.segment_path(number)
        return is_folder(path) and not is_locked(path / layout.COMMITTED / layout.LOCK)

    def _is_below_horizon(self, number: int) -> bool:
        if not self._root.has_horizon:
            return False
        with suppress(OSError, FormatError):
            return read_segment(self._root, number).came_before(self._counters.peek(layout.HORIZON))
        return False

    def _set_aside(self, number: int, reason: str) -> None:
        with suppress(StorageFull):
            move_aside(self._root.folder, layout.segment_folder(number), reason)

    def _note_sealed(self) -> None:
        """Update `_sealed` and `_packs` without the store lock, because reading thousands of segments takes long."""
        words = self._counters.read()
        self._sealed = {number for number in self._sealed if number >= words[layout.FIRST_LIVE]}
        # Packs that no counter includes are read, too: `_find_returned` will include them in the counters.
        end = int(words[layout.NEXT_SEGMENT])
        uncounted = [number for number in listed_numbers(self._root) if end <= number < end + _UNCOUNTED]
        for number in [*live_numbers(self._root, words), *uncounted]:
            if number not in self._sealed:
                with suppress(OSError, FormatError):  # raised later, when the segment is read again under the lock
                    info = read_segment(self._root, number)
                    self._packs.note(info)
                    if info.sealed:
                        self._sealed.add(number)

    def _live(self) -> list[SegmentInfo]:
        """Return every readable segment that is not in `_sealed`, lowest number first.

        A segment is quarantined if a power loss came before its metadata were written.
        """
        found = []
        for number in live_numbers(self._root, self._counters.read()):
            try:
                if number not in self._sealed:
                    found.append(read_segment(self._root, number))
            except NeverWritten as error:
                if not is_locked(f"{error.filename}/{layout.COMMITTED}/{layout.LOCK}"):
                    self._set_aside(number, "nothing of it was on the disk when the power failed")
            except (FormatError, FileNotFoundError, NotADirectoryError):
                continue  # the segment was evicted, or is damaged: readers warn of damage, and the user runs repair
        return found

    def _remove_some(self, *, again: bool) -> bool:
        self._policy.sync_packs()
        with self._locked() as gone:
            return self._remove_old(gone, again=again)

    def _remove_old(self, gone: list[str], *, again: bool) -> bool:
        """Move at most `_AT_ONCE` due segments away, and add the new paths to ``gone``; return whether more are due."""
        gone += _finish_removals(self._root, self._counters)
        for number, steps in self._policy.due(_AT_ONCE, again=again):
            gone.append(_take_out(self._root, self._counters, number, steps))
        return self._policy.has_more


# --- removal of folders by a rename -----------------------------------------------------------------------------------


def _take_out(root: Root, counters: StoreCounters, number: int, steps: int) -> str:
    """Move a segment to the folder of the counters, so that no reader sees it half deleted; return its new path.

    The segment's steps count as evicted: see `eviction_list.removed_path`. The caller holds the store lock. Raises
    StorageFull if the disk has no room for the new entry of that folder.
    """
    evicted = counters.evicted_after(steps)
    gone = removed_path(root.counters_folder, number, evicted)
    shutil.rmtree(gone, ignore_errors=True)
    with storage_errors(gone):
        os.rename(root.segment_path(number), gone)
    counters.set(layout.STEPS_EVICTED, evicted)
    return gone


def _finish_removals(root: Root, counters: StoreCounters) -> list[str]:
    """Count the steps of segments that were moved to the folder of the counters; return the folders to delete there.

    The process that moved these segments died, or is deleting them now. A caller that needs the room also deletes these
    folders, without waiting for that process. The caller holds the store lock.
    """
    names = [name for name in os.listdir(root.counters_folder) if name.startswith(PREFIX)]
    if evicted := evicted_by_removals(root):
        counters.set(layout.STEPS_EVICTED, max(int(counters.read()[layout.STEPS_EVICTED]), evicted))
    return [f"{root.counters_folder}/{name}" for name in names]


def _take_draft(path: str) -> list[str]:
    """Rename an unfinished folder that is to be deleted; return its new path.

    The caller holds the store lock. As soon as the lock is free, another process may make a folder at the old path.
    """
    if not is_folder(path):
        return []  # a file at this path is not from diskreplay
    gone = discarded_path(path)
    try:
        os.rename(path, gone)
    except OSError:  # the disk has no room for the name
        shutil.rmtree(path, ignore_errors=True)
    return [gone]


def _take_dead_draft(path: str, lock_path: str) -> list[str]:
    """Rename an unfinished folder as `_take_draft` does, if its maker is gone: no process holds the lock in the folder.

    The caller holds the store lock.
    """
    *inside, _ = lock_path.split("/")
    if any(os.path.islink("/".join([path, *inside[:depth]])) for depth in range(len(inside) + 1)):
        return []  # diskreplay makes no links, and the link's target may belong to another program
    try:
        lock = try_lock(f"{path}/{lock_path}")
    except OSError:
        # The draft has no folder for its lock yet: its maker died, or is about to make the lock's folder. If this
        # process and the maker act at once, either this rmdir or the maker's mkdir fails.
        with suppress(OSError):
            os.rmdir(path)
        # The lock's folder is made before anything else in a draft. If a draft has files, but no folder for the lock, a
        # power loss took that folder.
        if os.path.isdir(path) and lock_path.split("/")[0] not in (names := os.listdir(path)) and names:
            return _take_draft(path)
        return []
    if lock is None:
        return []
    try:
        return _take_draft(path)
    finally:
        lock.release()
