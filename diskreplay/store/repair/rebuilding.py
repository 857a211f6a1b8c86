"""Repair of a sealed segment by what is whole in it: how much is lost, and in which words that is told."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from diskreplay.errors import DamagedSegmentWarning, FormatError
from diskreplay.folders import OpenFolder
from diskreplay.format import layout
from diskreplay.format.damage import Damage, find_damage
from diskreplay.format.durable import sync_file
from diskreplay.format.mapping import read_regular
from diskreplay.format.quarantine import QUARANTINE
from diskreplay.format.rebuild import build_anew, drop_build, finish_replacements, put_in_place
from diskreplay.format.root import Root, read_root
from diskreplay.format.segment import SegmentInfo
from diskreplay.store.reading.follower import Follower
from diskreplay.store.repair.repair_documents import known_in_segment
from diskreplay.store.repair.repaired import Action, Repaired
from diskreplay.verify.check_root import read_hidden, read_words
from diskreplay.verify.check_segment import verify_folder
from diskreplay.verify.documents import Plan
from diskreplay.verify.files import Files, Problem

_RANGES_TOLD = 3
_OF_A_FILE = ("checksum", "missing", "size", "type", "unreadable")


@dataclass(frozen=True)
class Losses:
    """What a damaged segment loses when it is rebuilt: found by looking, before anything is changed."""

    info: SegmentInfo
    damage: Damage

    @property
    def steps(self) -> int:
        """How many steps are lost that were not before."""
        return max(0, self.damage.steps_lost - self.info.lost.steps)

    def __str__(self) -> str:
        """Tell what is lost: episodes, steps, ids."""
        if not any(self.damage.more.values()):
            return "no step is lost"
        episodes, steps, lanes = self.damage.episodes, self.steps, len(self.info.lanes)
        count = f"{episodes} episode{'' if episodes == 1 else 's'}"
        if self.damage.flags_damaged:
            count = f"at least {count}" if episodes else "part of an episode, or more"
        base = self.info.number << layout.POSITION_BITS
        ranges = sorted(
            (base | first * lanes + lane, base | (stop - 1) * lanes + lane)
            for lane, rows in self.damage.more.items()
            for first, stop in rows
        )
        ids = ", ".join(f"{first} to {last}" if first < last else f"{first}" for first, last in ranges[:_RANGES_TOLD])
        more = f" and {len(ranges) - _RANGES_TOLD} more ranges" if len(ranges) > _RANGES_TOLD else ""
        every = f", every {lanes}th of each range" if lanes > 1 else ""
        return f"{count}, {steps} step{'' if steps == 1 else 's'} lost, ids {ids}{more}{every}"


def is_of_rows(info: SegmentInfo | None, plan: Plan, name: str, problem: Problem) -> bool:
    """Whether something wrong with a segment may follow from damaged rows; ``name`` is the file's below the segment."""
    if info is None or not info.sealed:
        return False
    if (problem.kind, name) in (("flags", layout.DONE), ("times", layout.TIME), ("counters", layout.METADATA)):
        return True
    folder, _, file = name.rpartition("/")
    in_array = folder in plan.arrays and file.startswith("c.") and problem.kind in _OF_A_FILE
    is_folder = name in plan.folders and name not in layout.LANE_COUNTERS and problem.kind in _OF_A_FILE
    is_blocks = name == layout.BLOCKS and known_in_segment(info, plan, name) is None
    return in_array or is_folder or is_blocks


def find_losses(info: SegmentInfo, plan: Plan, evicted: Sequence[tuple[int, int]]) -> Losses | None:
    """Return what is lost if a segment is rebuilt; None where nothing is left of it, or nothing is known to be damaged.

    ``evicted`` are position and steps of its episodes that were evicted by hand.
    """
    counter = known_in_segment(info, plan, f"{layout.COMMITTED}/c.0")
    if counter is None:
        return None
    rows, lanes = np.frombuffer(counter, "<i8"), len(info.lanes)
    if len(rows) != lanes or (rows < 0).any() or int(rows.max()) > layout.POSITION_MASK // lanes:
        return None
    try:
        damage = find_damage(info, plan.arrays, rows, evicted)
    except FormatError:
        return None
    is_damaged = bool(damage.parts) or damage.resized
    return Losses(info, damage) if is_damaged and damage.steps_kept > 0 else None


def replace_by_rebuilt(
    root: Root, plan: Plan, losses: Losses, evicted: Sequence[tuple[int, int]], reason: str
) -> str | None:
    """Rebuild a segment and put it in place of the damaged one; return where that one is now.

    ``reason`` goes into the record of the damaged one.

    None, and nothing is changed, where what was built is not in order: the segment was damaged before it was sealed, or
    its small files are too. The caller holds the lock of the store and that of the segment. Raises StorageFull where
    there is no room for it; nothing is changed.
    """
    try:
        built = build_anew(root, losses.info, losses.damage)
    except (FormatError, FileNotFoundError, NotADirectoryError):
        return None
    # Rows that do not count, as nothing proves them, are kept as they were.
    if any(problem.kind != "unproven" for problem in verify_folder(str(root.folder), built, plan, list(evicted))):
        drop_build(root, built)
        return None
    return put_in_place(root, losses.info.number, built, reason, losses.steps)


class Rebuilder:
    """Rebuilds damaged segments for a repair, which notes what was done in ``actions``. Needs the store lock."""

    def __init__(
        self, home: OpenFolder, plan: Plan, dry_run: bool, max_lost_steps: int | None, actions: list[Action]
    ) -> None:
        self._home, self._root, self._plan, self._dry_run = home, home.path, plan, dry_run
        self._most, self._actions = max_lost_steps, actions

    @cached_property
    def _store(self) -> Root:
        return read_root(self._home.name, self._home)

    @cached_property
    def _evicted(self) -> dict[int, list[tuple[int, int]]]:
        """Position and steps of the episodes of each segment that were evicted by hand."""
        files = Files(str(self._root))
        words = read_words(files)
        return {} if words is None else read_hidden(files, self._plan, words)

    def may_lose(self, where: str, detail: str, steps: int) -> bool:
        """Whether so many steps more may be set aside; that they may not is noted."""
        left = None if self._most is None else max(0, self._most - Repaired(self._actions).steps_lost)
        if left is None or steps <= left:
            return True
        self._actions.append(
            Action("refused", where, f"{detail}; {steps} steps would be set aside, and {left} may be", steps)
        )
        return False

    def finish_others(self) -> None:
        """Go on where a process died that was replacing a damaged segment."""
        if self._dry_run:
            return
        with suppress(FormatError):  # the store's counters may have to be mended first; an opener finishes it then
            for number in finish_replacements(self._store):
                where = f"{layout.SEGMENTS}/{layout.segment_name(number)}"
                self._actions.append(Action("rebuilt", where, "a process died in the middle of it"))

    def _keep_hidden(self) -> None:
        """See that what a capacity hides stays hidden, though fewer steps will be left to count."""
        if self._store.capacity is None:
            return
        counters = self._store.counters(writable=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamagedSegmentWarning)  # it is being repaired
                follower = Follower(self._store, counters)
        except (FormatError, OSError):
            return  # nobody can see what it hides
        hidden_before = min(follower.snapshot.hidden_before, layout.MOST_COUNTED)
        follower.close()
        if hidden_before > counters.peek(layout.FRONTIER):
            counters.set(layout.FRONTIER, hidden_before)
            sync_file(counters.path)

    def rebuild(self, info: SegmentInfo, where: str, problems: list[Problem]) -> bool:
        """Replace a segment by what is whole of it; False where that cannot be done, and nothing was changed."""
        evicted = self._evicted.get(info.number, [])
        losses = find_losses(info, self._plan, evicted)
        if losses is None:
            return False
        detail = f"{told(problems, where)}; {losses}"
        if not self.may_lose(where, detail, losses.steps):
            return True
        now: str | None = f"{QUARANTINE}/{where}"
        if not self._dry_run:
            self._keep_hidden()
            now = replace_by_rebuilt(self._store, self._plan, losses, evicted, detail)
        if now is not None:
            self._actions.append(Action("rebuilt", where, f"{detail}; the damaged one is now {now}", losses.steps))
        return now is not None


def steps_at_stake(info: SegmentInfo | None, segment: Path) -> int:
    """Return how many steps a segment says it has or, where that cannot be believed, the most that it may have."""
    rows = _rows_with_flags(segment)
    # A document that claims more than there is room for is not believed.
    counted = info.steps if info is not None and info.steps and info.steps <= rows else 0
    return counted or _rows_committed(segment, rows)


def told(problems: list[Problem], where: str) -> str:
    """Return what is wrong with a segment: the first of it."""
    name = problems[0].where.removeprefix(f"{where}/")
    return problems[0].detail if name == where else f"{name} {problems[0].detail}"


def _rows_committed(segment: Path, most: int) -> int:
    """Return how many rows a segment says it has, or as many as there can be."""
    with suppress(OSError, FormatError):
        data = read_regular(str(segment / layout.COMMITTED / "c.0"), None, 8 * layout.MAX_LANES)
        rows = np.frombuffer(data[: len(data) & ~7], "<i8").astype(np.float64).clip(0).sum()
        return int(min(rows, most))
    return most


def _rows_with_flags(segment: Path) -> int:
    """Return for how many rows a segment has files; a flag is a byte."""
    with suppress(OSError):
        return sum(entry.lstat().st_size for entry in (segment / layout.DONE).iterdir() if entry.name.startswith("c."))
    return 0
