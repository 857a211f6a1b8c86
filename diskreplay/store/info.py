"""What a store says of itself: counts, statistics, segments and their writers."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import SegmentGone
from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters, map_lane_counter
from diskreplay.format.damaged_copies import read_shown
from diskreplay.format.eviction_list import HiddenEntries, evicted_in
from diskreplay.format.locks import is_held
from diskreplay.format.marks import map_trusted, shows_live_rows
from diskreplay.format.numbers import segment_numbers
from diskreplay.format.packs import PackTables, find_superseded, read_packs
from diskreplay.format.quarantine import claimed_steps, read_quarantine
from diskreplay.format.root import Root
from diskreplay.format.sealing import count_steps_in, may_seal
from diskreplay.format.segment import NeverWritten, SegmentInfo, read_segment
from diskreplay.format.unproven import claimed_rows
from diskreplay.ids import NO_STEP, OPEN
from diskreplay.store.reading.damaged import DAMAGE
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.store.retention.policy import disk_usage

Progress = Callable[[int, int], None]
_ROWS_AT_ONCE = 1 << 22


def episode_table(snapshot: Snapshot, progress: Progress | None = None) -> dict[str, NDArray[Any]]:
    """Return the episodes of a snapshot as columns, oldest first, without those whose segment has left meanwhile."""
    returns, gone = sum_rewards(snapshot, progress)
    table = _columns(snapshot, returns)
    return {name: column[~gone] for name, column in table.items()} if gone.any() else table


def _columns(snapshot: Snapshot, returns: NDArray[np.float64] | None) -> dict[str, NDArray[Any]]:
    """Return the columns of `episode_table`; without returns, nothing is read."""
    episodes = snapshot.episodes
    end = episodes.end
    position = episodes.first & layout.POSITION_MASK
    return {
        "id": episodes.first,
        "segment": episodes.first >> layout.POSITION_BITS,
        "lane": position % episodes.stride,
        "start": position // episodes.stride,
        "length": episodes.steps,
        **({} if returns is None else {"return": returns}),
        "terminated": (end & layout.TERMINATED) != 0,
        "truncated": (end & layout.TRUNCATED) != 0,
        "cut": (end & layout.CUT) != 0,
        "open": (end & OPEN) != 0,
    }


def sum_rewards(snapshot: Snapshot, progress: Progress | None = None) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Sum the rewards of every episode: each lane's rows are read once, in order. Tell also whose segment is gone."""
    episodes = snapshot.episodes
    position = episodes.first & layout.POSITION_MASK
    segment, lane = episodes.first >> layout.POSITION_BITS, position % episodes.stride
    start = position // episodes.stride
    order = np.lexsort((start, lane, segment))
    breaks = np.flatnonzero((np.diff(segment[order]) != 0) | (np.diff(lane[order]) != 0)) + 1
    returns, gone = np.zeros(len(episodes)), np.zeros(len(episodes), np.bool_)
    row_bytes = snapshot.schema.reward.row_bytes
    done, total = 0, int(episodes.steps.sum()) * row_bytes
    for group in np.split(order, breaks) if len(order) else []:
        try:
            for some in _sum_lane(snapshot, group, start, returns):
                done += int(episodes.steps[some].sum()) * row_bytes
                if progress is not None:
                    progress(done, total)
        except SegmentGone:
            gone[group] = True
    return returns, gone


def _sum_lane(
    snapshot: Snapshot, group: NDArray[np.int64], start: NDArray[np.int64], returns: NDArray[np.float64]
) -> Iterator[NDArray[np.int64]]:
    """Sum episodes of one lane, which are in order, a bounded number of rows at a time; yield which were summed."""
    episodes = snapshot.episodes
    stop = start[group] + episodes.steps[group]
    at = 0
    while at < len(group):
        upto = max(at + 1, int(np.searchsorted(stop, start[group[at]] + _ROWS_AT_ONCE)))
        first = int(start[group[at]])
        rewards = snapshot.rows("reward", int(episodes.first[group[at]]), int(stop[upto - 1]) - first)
        # Rows between two episodes hold observations only, and a reward of 0.
        with np.errstate(invalid="ignore"):
            sums = np.add.reduceat(rewards, start[group[at:upto]] - first, dtype=np.float64)
        returns[group[at:upto]] = sums
        yield group[at:upto]
        at = upto


def statistics(values: NDArray[Any]) -> dict[str, float] | None:
    """Describe numbers, or return None for none."""
    if not len(values):
        return None
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # rewards may be infinite both ways
        return {
            "count": len(values),
            "mean": float(values.mean()),
            "std": float(values.std()),
            "min": float(values.min()),
            "median": float(np.median(values)),
            "max": float(values.max()),
        }


def store_info(
    root: Root,
    counters: StoreCounters,
    snapshot: Snapshot,
    damaged: Collection[int],
    progress: Progress | None,
    returns: bool = True,
) -> dict[str, Any]:
    """Return the dictionary of `Store.info`; ``damaged`` are the segments that the snapshot leaves out."""
    table = episode_table(snapshot, progress) if returns else _columns(snapshot, None)
    ended = ~table["open"]
    words = counters.read()
    hidden = HiddenEntries(root).steps_by_segment(int(words[layout.HIDDEN_ENTRIES]))
    segments, members = _segments(root, words, hidden, damaged)
    aside = [
        {**dataclasses.asdict(entry), "bytes": disk_usage(root.folder / entry.where)[0]}
        for entry in read_quarantine(root.folder)
    ]
    on_disk, apparent = disk_usage(root.folder)
    return {
        "path": str(root.path),
        "format_version": layout.FORMAT_VERSION,
        "created": root.created,
        "schema": root.schema.to_json(),
        **vars(root.limits),
        "validate": root.validate,
        "steps": int(table["length"].sum()),
        "steps_evicted": int(words[layout.STEPS_EVICTED]) + sum(segment["steps_evicted"] for segment in segments),
        "steps_lost": sum(segment["steps_lost"] for segment in segments),
        "steps_unproven": sum(segment["steps_unproven"] for segment in segments),
        "episodes": {
            "total": len(ended),
            "open": int(np.count_nonzero(table["open"])),
            "terminated": int(np.count_nonzero(table["terminated"])),
            "truncated": int(np.count_nonzero(table["truncated"] & ~table["cut"] & ~table["terminated"])),
            "cut": int(np.count_nonzero(table["cut"])),
        },
        "returns": statistics(table["return"][ended]) if returns else None,
        "lengths": statistics(table["length"][ended]),
        "segments": segments,
        "writers": _writers([*(segment for segment in segments if not segment["merged"]), *members]),
        "quarantine": {
            "steps": sum(entry["steps"] or 0 for entry in aside),
            "segments": sum(entry["segment"] is not None for entry in aside),
            "bytes": sum(entry["bytes"] for entry in aside),
            "entries": aside,
        },
        "bytes_on_disk": on_disk,
        "bytes_apparent": apparent,
        "holes": max(0, apparent - on_disk),
    }


def _segments(
    root: Root, words: NDArray[np.int64], hidden: dict[int, int], damaged: Collection[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Describe the segments, lowest number first, and those that are in packs, which `_writers` counts."""
    packs = {info.number: (info, tables) for info, tables in read_packs(root)}
    superseded = find_superseded(root) if packs else set()
    found, members = [], list[dict[str, Any]]()
    for number in segment_numbers(root, 0, int(words[layout.NEXT_SEGMENT])):
        if number in superseded:
            continue
        info, tables = packs.get(number, (None, None))
        numbers = [] if tables is None else tables.numbers.tolist()
        try:
            evicted = sum(hidden.get(member, 0) for member in [number, *numbers])
            segment = {**_segment(root, number, evicted, number in damaged), "merged": len(numbers)}
        except FileNotFoundError:
            continue  # evicted, perhaps just now
        found.append(segment)
        if info is not None and tables is not None:
            members += _members(info, tables, hidden, segment["state"])
    return found, members


def _members(info: SegmentInfo, tables: PackTables, hidden: dict[int, int], state: str) -> list[dict[str, Any]]:
    """Describe the segments that are in a pack, for the counts of their writers."""
    lost = dict[int, int]()
    with suppress(*DAMAGE):
        lost = _lost_by_member(info, tables) if info.lost.steps else {}
    return [
        {
            "writer": writer,
            "lanes": lanes,
            "steps": steps - hidden.get(number, 0) - lost.get(number, 0),
            "state": state,
        }
        for number, lanes, writer, steps in tables.members.tolist()
    ]


def _lost_by_member(info: SegmentInfo, tables: PackTables) -> dict[int, int]:
    """Return how many steps each segment in a pack lost to damage: it says how many it had, and flags what is left."""
    rows = int((tables.first_rows + tables.rows).max())
    is_step = info.map_numbers(layout.DONE, 0)[0, :rows] & NO_STEP == 0
    for first, count in info.lost.ranges:
        is_step[first : first + count] = False
    before = np.concatenate([[0], np.cumsum(is_step)])
    by_run = before[tables.first_rows + tables.rows] - before[tables.first_rows]
    left = np.add.reduceat(by_run, tables.first_run[:-1])
    return dict(zip(tables.numbers.tolist(), (tables.steps - left).tolist(), strict=True))


def _segment(root: Root, number: int, hidden: int, is_damaged: bool) -> dict[str, Any]:
    """Describe a segment; of a damaged one, what can be known of it.

    Raises FileNotFoundError where it is gone.
    """
    path = root.segment_path(number)
    try:
        info = read_shown(root, number)
        rows = map_lane_counter(str(info.path / layout.COMMITTED), len(info.lanes)).copy()
        steps = info.steps
        if steps is None:
            shown = map_trusted(info)[1].copy()
            steps, hidden = count_steps_in(info, shown), min(hidden, _hidden_in(info, shown))
    except NeverWritten:
        raise
    except DAMAGE:
        if not os.path.lexists(path):
            raise FileNotFoundError(path) from None
        lost = {"number": number, "writer": None, "lanes": None, "rows": None, "steps": claimed_steps(path)}
        counts = {"steps_evicted": hidden, "steps_lost": 0, "steps_unproven": 0}
        return {**lost, **counts, "state": "damaged", "bytes": disk_usage(path)[0]}
    state = "damaged" if is_damaged else segment_state(info)
    return {
        "number": info.number,
        "writer": info.writer,
        "lanes": len(info.lanes),
        "rows": int(rows.sum()),
        "steps": steps - hidden - info.lost.steps,
        "steps_evicted": hidden,
        "steps_lost": info.lost.steps,
        "steps_unproven": _unproven(info, state),
        "state": state,
        "bytes": disk_usage(info.path)[0],
    }


def _hidden_in(info: SegmentInfo, rows: NDArray[np.int64]) -> int:
    """Return how many steps among the first rows of each lane were evicted by hand."""
    lanes = len(info.lanes)
    entries = [(*divmod(position, lanes), steps) for position, steps in evicted_in(info.root, info.number)]
    return sum(max(0, min(steps, int(rows[lane]) - row)) for row, lane, steps in entries)


def _unproven(info: SegmentInfo, state: str) -> int:
    """Return how many steps at most no mark proves, of a segment that nobody writes to: they do not count."""
    if info.sealed or state not in ("dead", "foreign") or shows_live_rows(info):
        return info.unproven_steps
    proven = map_trusted(info)[1]
    return count_steps_in(info, claimed_rows(info, proven)) - count_steps_in(info, proven)


def segment_state(info: SegmentInfo) -> str:
    """Return whether a segment is "sealed", or being written: "writing", "dead", "foreign", or "unknown"."""
    if info.sealed:
        return "sealed"
    held = is_held(info.lock_path)
    if held or held is None:
        return "writing" if held else "unknown"
    if read_segment(info.root, info.number).sealed:  # just now, by the process that held the lock
        return "sealed"
    return "dead" if may_seal(info) else "foreign"


def _writers(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group segments by their writer; one whose segments are all sealed has closed."""
    writers: dict[int, dict[str, Any]] = {}
    for segment in segments:
        if segment["writer"] is None:  # damaged, and does not say whose it is
            continue
        writer = writers.setdefault(
            segment["writer"],
            {"writer": segment["writer"], "state": "closed", "segments": 0, "lanes": segment["lanes"], "steps": 0},
        )
        writer["segments"] += 1
        writer["steps"] += segment["steps"]
        writer["lanes"] = max(writer["lanes"], segment["lanes"])
        if segment["state"] == "writing":
            writer["state"] = "alive"
        elif segment["state"] == "unknown" and writer["state"] != "alive":
            writer["state"] = "unknown"
        elif segment["state"] not in ("sealed", "damaged") and writer["state"] == "closed":
            writer["state"] = "dead"
    return list(writers.values())
