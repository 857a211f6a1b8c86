"""What a store says of itself: counts, statistics, segments and their writers."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.format import layout
from diskreplay.format.commit import StoreCounters, map_lane_counter
from diskreplay.format.durable import is_held
from diskreplay.format.hidden import HiddenEntries
from diskreplay.format.root import Root
from diskreplay.format.sealing import count_steps, may_seal
from diskreplay.format.segment import SegmentInfo, read_segment, segment_numbers
from diskreplay.store.ledger import disk_usage
from diskreplay.store.scan import OPEN
from diskreplay.store.snapshot import Snapshot

Progress = Callable[[int, int], None]
_ROWS_AT_ONCE = 1 << 22


def episode_table(snapshot: Snapshot, progress: Progress | None = None) -> dict[str, NDArray[Any]]:
    """Return the episodes of a snapshot as columns, oldest first."""
    episodes = snapshot.episodes
    end = episodes.end
    position = episodes.first & layout.POSITION_MASK
    return {
        "id": episodes.first,
        "segment": episodes.first >> layout.POSITION_BITS,
        "lane": position % episodes.stride,
        "start": position // episodes.stride,
        "length": episodes.steps,
        "return": _returns(snapshot, progress),
        "terminated": (end & layout.TERMINATED) != 0,
        "truncated": (end & layout.TRUNCATED) != 0,
        "cut": (end & layout.CUT) != 0,
        "open": (end & OPEN) != 0,
    }


def _returns(snapshot: Snapshot, progress: Progress | None) -> NDArray[np.float64]:
    """Sum the rewards of every episode: each lane's rows are read once, in order."""
    episodes = snapshot.episodes
    position = episodes.first & layout.POSITION_MASK
    segment, lane = episodes.first >> layout.POSITION_BITS, position % episodes.stride
    start = position // episodes.stride
    order = np.lexsort((start, lane, segment))
    breaks = np.flatnonzero((np.diff(segment[order]) != 0) | (np.diff(lane[order]) != 0)) + 1
    returns = np.zeros(len(episodes))
    for done, group in enumerate(groups := np.split(order, breaks) if len(order) else []):
        _sum_lane(snapshot, group, start, returns)
        if progress is not None:
            progress(done + 1, len(groups))
    return returns


def _sum_lane(
    snapshot: Snapshot, group: NDArray[np.int64], start: NDArray[np.int64], returns: NDArray[np.float64]
) -> None:
    """Sum episodes of one lane, which are in order, a bounded number of rows at a time."""
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
        at = upto


def statistics(values: NDArray[Any]) -> dict[str, float] | None:
    """Describe numbers, or return None for none."""
    if not len(values):
        return None
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # rewards may be infinite both ways
        return _describe(values)


def _describe(values: NDArray[np.float64]) -> dict[str, float]:
    return {
        "count": len(values),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "median": float(np.median(values)),
        "max": float(values.max()),
    }


def store_info(root: Root, counters: StoreCounters, snapshot: Snapshot, progress: Progress | None) -> dict[str, Any]:
    """Return the dictionary of `Store.info`."""
    table = episode_table(snapshot, progress)
    ended = ~table["open"]
    words = counters.read()
    hidden = HiddenEntries(root).steps_by_segment(int(words[layout.HIDDEN_ENTRIES]))
    segments = _segments(root, words, hidden)
    on_disk, apparent = disk_usage(root.path)
    return {
        "path": str(root.path),
        "format_version": layout.FORMAT_VERSION,
        "created": root.created,
        "schema": root.schema.to_json(),
        "capacity": root.capacity,
        "capacity_bytes": root.capacity_bytes,
        "max_age_s": root.max_age_s,
        "steps": len(snapshot),
        "steps_evicted": int(words[layout.STEPS_EVICTED]) + sum(segment["steps_evicted"] for segment in segments),
        "episodes": {
            "total": len(ended),
            "open": int(np.count_nonzero(table["open"])),
            "terminated": int(np.count_nonzero(table["terminated"])),
            "truncated": int(np.count_nonzero(table["truncated"] & ~table["cut"] & ~table["terminated"])),
            "cut": int(np.count_nonzero(table["cut"])),
        },
        "returns": statistics(table["return"][ended]),
        "lengths": statistics(table["length"][ended]),
        "segments": segments,
        "writers": _writers(segments),
        "bytes_on_disk": on_disk,
        "bytes_apparent": apparent,
        "holes": max(0, apparent - on_disk),
    }


def _segments(root: Root, words: NDArray[np.int64], hidden: dict[int, int]) -> list[dict[str, Any]]:
    found = []
    for number in segment_numbers(root, int(words[layout.FIRST_LIVE]), int(words[layout.NEXT_SEGMENT])):
        try:
            found.append(_segment(root, read_segment(root, number), hidden.get(number, 0)))
        except FileNotFoundError:
            continue  # evicted, perhaps just now
    return found


def _segment(root: Root, info: SegmentInfo, hidden: int) -> dict[str, Any]:
    rows = map_lane_counter(str(info.path / layout.COMMITTED), len(info.lanes)).copy()
    steps = info.steps if info.steps is not None else count_steps(root, info)
    return {
        "number": info.number,
        "writer": info.writer,
        "lanes": len(info.lanes),
        "rows": int(rows.sum()),
        "steps": steps - hidden,
        "steps_evicted": hidden,
        "state": _state(info),
        "bytes": disk_usage(info.path)[0],
    }


def _state(info: SegmentInfo) -> str:
    if info.sealed:
        return "sealed"
    held = is_held(info.lock_path)
    if held or held is None:
        return "writing" if held else "unknown"
    return "dead" if may_seal(info) else "foreign"


def _writers(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Group segments by their writer; one whose segments are all sealed has closed."""
    writers: dict[int, dict[str, Any]] = {}
    for segment in segments:
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
        elif segment["state"] != "sealed" and writer["state"] == "closed":
            writer["state"] = "dead"
    return list(writers.values())
