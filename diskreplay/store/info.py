"""The description of a store: counts, statistics, segments and their writers."""

import dataclasses
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.errors import SegmentGone
from diskreplay.ids import OPEN
from diskreplay.reading.episodes import sums_between
from diskreplay.reading.follower import Follower
from diskreplay.reading.snapshot import Snapshot
from diskreplay.reading.step_account import StepAccount, read_account
from diskreplay.retention.policy import disk_usage
from diskreplay.segments.damage.quarantine import read_quarantine
from diskreplay.segments.damage.unproven import claimed_rows
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.commit import map_lane_counter
from diskreplay.segments.files.locks import is_held
from diskreplay.segments.marks import map_trusted, shows_live_rows
from diskreplay.segments.packs import read_members
from diskreplay.segments.rebuild import read_shown
from diskreplay.segments.sealing import count_steps_in, may_seal
from diskreplay.segments.segment import DAMAGE, NeverWritten, SegmentInfo, read_segment

Progress = Callable[[int, int], None]
_ROWS_AT_ONCE = 1 << 22


def episode_table(snapshot: Snapshot, progress: Progress | None = None) -> dict[str, NDArray[Any]]:
    total_rewards, gone = sum_rewards(snapshot, progress)
    table = _columns(snapshot, total_rewards)
    return {name: column[~gone] for name, column in table.items()} if gone.any() else table


def _columns(snapshot: Snapshot, total_rewards: NDArray[np.float64] | None) -> dict[str, NDArray[Any]]:
    episodes = snapshot.episodes
    end = episodes.end
    position = episodes.first & layout.POSITION_MASK
    return {
        "id": episodes.first,
        "segment": episodes.first >> layout.POSITION_BITS,
        "lane": position % episodes.stride,
        "start": position // episodes.stride,
        "length": episodes.steps,
        "hidden_steps": snapshot.hidden_steps(episodes),
        **({} if total_rewards is None else {"total_reward": total_rewards}),
        "terminated": (end & layout.TERMINATED) != 0,
        "truncated": (end & layout.TRUNCATED) != 0,
        "cut": (end & layout.CUT) != 0,
        "open": (end & OPEN) != 0,
    }


def sum_rewards(snapshot: Snapshot, progress: Progress | None = None) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the total reward of every episode, and a mask of the episodes whose segment is gone.

    Sealed segments store the sums of rewards of their ended episodes. For episodes without a stored sum, the rewards of
    each lane are read once, in ascending order of rows.
    """
    episodes = snapshot.episodes
    position = episodes.first & layout.POSITION_MASK
    segment, lane = episodes.first >> layout.POSITION_BITS, position % episodes.stride
    start = position // episodes.stride
    total_rewards, gone = np.zeros(len(episodes)), np.zeros(len(episodes), np.bool_)
    are_known = np.zeros(len(episodes), np.bool_)
    # Episodes are sorted by id, so the episodes of a segment follow one another.
    for some in np.split(np.arange(len(episodes)), np.flatnonzero(np.diff(segment)) + 1) if len(episodes) else []:
        total_rewards[some], are_known[some] = snapshot.kept_reward_sums(episodes.select(some))
    order = np.flatnonzero(~are_known)
    order = order[np.lexsort((start[order], lane[order], segment[order]))]
    breaks = np.flatnonzero((np.diff(segment[order]) != 0) | (np.diff(lane[order]) != 0)) + 1
    row_bytes = snapshot.schema.reward.row_bytes
    done, total = 0, int(episodes.steps[order].sum()) * row_bytes
    for group in np.split(order, breaks) if len(order) else []:
        try:
            for some in _sum_lane(snapshot, group, start, total_rewards):
                done += int(episodes.steps[some].sum()) * row_bytes
                if progress is not None:
                    progress(done, total)
        except SegmentGone:
            gone[group] = True
    return total_rewards, gone


def _sum_lane(
    snapshot: Snapshot, group: NDArray[np.int64], start: NDArray[np.int64], total_rewards: NDArray[np.float64]
) -> Iterator[NDArray[np.int64]]:
    """Sum the rewards of successive episodes of a lane, and write the sums to ``total_rewards``.

    ``group`` has the indices of these episodes in ``snapshot.episodes``. ``start`` has the first row of every episode
    of the snapshot. The rewards are read in parts of about `_ROWS_AT_ONCE` rows. After each part, yields the indices of
    the episodes whose rewards were summed in this part.
    """
    episodes = snapshot.episodes
    stop = start[group] + episodes.steps[group]
    at = 0
    while at < len(group):
        upto = max(at + 1, int(np.searchsorted(stop, start[group[at]] + _ROWS_AT_ONCE)))
        first = int(start[group[at]])
        rewards = snapshot.rows("reward", int(episodes.first[group[at]]), int(stop[upto - 1]) - first)
        bounds = np.stack([start[group[at:upto]], stop[at:upto]], axis=1) - first
        total_rewards[group[at:upto]] = sums_between(rewards, bounds)
        yield group[at:upto]
        at = upto


def statistics(values: NDArray[Any]) -> dict[str, float] | None:
    if not len(values):
        return None
    values = values.astype(np.float64)
    with np.errstate(invalid="ignore"):  # rewards may be +inf and -inf
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
    follower: Follower,
    progress: Progress | None,
    total_reward: bool = True,
) -> dict[str, Any]:
    counter = StepCounter(root)
    snapshot, account = read_account(follower, counter)
    table = episode_table(snapshot, progress) if total_reward else _columns(snapshot, None)
    if len(table["id"]) < len(snapshot.episodes):  # segments were evicted since the account was read
        account = read_account(follower, counter)[1]
    ended = ~table["open"]
    segments, members, gone = _segments(root, account, follower.damaged)
    account = account.without(gone)
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
        **account.total.by_key(),
        "steps_unproven": sum(segment["steps_unproven"] for segment in segments),
        "episodes": {
            "total": len(ended),
            "open": int(np.count_nonzero(table["open"])),
            "terminated": int(np.count_nonzero(table["terminated"])),
            "truncated": int(np.count_nonzero(table["truncated"] & ~table["cut"] & ~table["terminated"])),
            "cut": int(np.count_nonzero(table["cut"])),
        },
        "total_reward": statistics(table["total_reward"][ended]) if total_reward else None,
        "length": statistics(table["length"][ended]),
        "segments": segments,
        "writers": _writers([*(segment for segment in segments if not segment["merged"]), *members]),
        "quarantine": {
            "steps": account.quarantined,
            "segments": sum(entry["segment"] is not None for entry in aside),
            "bytes": sum(entry["bytes"] for entry in aside),
            "entries": aside,
        },
        "bytes_on_disk": on_disk,
        "bytes_apparent": apparent,
        "holes": max(0, apparent - on_disk),
    }


def _segments(
    root: Root, account: StepAccount, damaged: Collection[int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[int]]:
    """Return descriptions of the segments and packs, lowest number first, and of all segments merged into packs.

    The third result has the numbers of segments that were deleted after their steps were counted for ``account``.
    """
    found, members, gone = list[dict[str, Any]](), list[dict[str, Any]](), list[int]()
    for number, steps in sorted(account.segments.items()):
        try:
            described, merged = _segment(root, number, number in damaged)
        except FileNotFoundError:
            gone.append(number)
            continue
        found.append({**described, **steps.by_key(), "merged": len(merged)})
        for member, lanes, writer, _ in merged:
            counts = {"steps": account.visible.get(member, 0), "state": described["state"]}
            members.append({"writer": writer, "lanes": lanes, **counts})
    return found, members, gone


def _segment(root: Root, number: int, is_damaged: bool) -> tuple[dict[str, Any], list[list[int]]]:
    """Return the description of a segment or pack, and the lines of `read_members` for its members.

    A damaged segment is described as far as possible. Raises FileNotFoundError if the segment is gone.
    """
    path = root.segment_path(number)
    found: dict[str, Any] = {"number": number, "writer": None, "lanes": None, "rows": None, "steps_unproven": 0}
    try:
        info = read_shown(root, number)
        rows = map_lane_counter(str(info.path / layout.COMMITTED), len(info.lanes)).copy()
        state = "damaged" if is_damaged else segment_state(info)
        unproven = _unproven(info, state)
    except NeverWritten:
        raise
    except DAMAGE:
        if not os.path.lexists(path):
            raise FileNotFoundError(path) from None
        return {**found, "state": "damaged", "bytes": disk_usage(path)[0]}, []
    members = list[list[int]]()
    with suppress(*DAMAGE):
        members = read_members(info).tolist()
    found |= {"writer": info.writer, "lanes": len(info.lanes), "rows": int(rows.sum()), "steps_unproven": unproven}
    found |= {"state": state, "bytes": disk_usage(info.path)[0]}
    return found, [member for member in members if member[0] != number]


def _unproven(info: SegmentInfo, state: str) -> int:
    """Return an upper bound for the number of a segment's unproven steps."""
    if info.sealed or state not in ("dead", "foreign") or shows_live_rows(info):
        return info.unproven_steps
    proven = map_trusted(info)[1]
    return count_steps_in(info, claimed_rows(info, proven)) - count_steps_in(info, proven)


def segment_state(info: SegmentInfo) -> str:
    """Return the state of a segment: "sealed", "writing", "dead", "foreign" or "unknown".

    The state is "foreign" if another machine wrote the segment to a shared file system: the writer may be alive. The
    state is "unknown" if this process cannot test the segment's lock.
    """
    if info.sealed:
        return "sealed"
    held = is_held(info.lock_path)
    if held or held is None:
        return "writing" if held else "unknown"
    if read_segment(info.root, info.number).sealed:  # the process that held the lock has just sealed the segment
        return "sealed"
    return "dead" if may_seal(info) else "foreign"


def _writers(segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    writers: dict[int, dict[str, Any]] = {}
    for segment in segments:
        if segment["writer"] is None:  # the segment is damaged, so nobody knows its writer
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
