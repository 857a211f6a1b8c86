"""Measure a layout with a zarr group for each episode: the speed of making groups, and their disk usage."""

from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import ROW_BYTES, SCHEMA, append_whole, episodes
from tools.bench.fresh import measure
from tools.bench.harness import Report, Table, Target, number, timed


class Size(NamedTuple):
    """Groups, and steps of each."""

    groups: int
    steps: int = 200


FULL, TINY = Size(10_000), Size(8)


class Disk(NamedTuple):
    """Bytes of a store's files: allocated, without page rounding and holes, and of zarr.json only."""

    allocated: int
    contents: int
    metadata: int
    files: int


def _disk(path: Path) -> Disk:
    found = [(file.name, file.stat()) for file in path.rglob("*") if file.is_file()]
    contents = [min(status.st_size, status.st_blocks * 512) for _, status in found]
    return Disk(
        allocated=sum(status.st_blocks * 512 for _, status in found),
        contents=sum(contents),
        metadata=sum(size for (name, _), size in zip(found, contents, strict=True) if name == "zarr.json"),
        files=len(found),
    )


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Write groups of one episode each; there is no peer, and one round."""
    del rounds, peers
    path = folder / "store"
    given = list(episodes(size.groups * size.steps, size.steps, size.steps))
    with dr.create(path, SCHEMA, segment_steps="episode") as store:
        writer = store.writer()
        started = perf_counter()
        taken = timed(append_whole, [(writer, episode) for episode in given])
        written = perf_counter()
        writer.close()
        closed = perf_counter()
    opened = measure("opening", path)
    if opened["steps"] != size.groups * size.steps:
        raise RuntimeError(f"the store has {opened['steps']} steps, not {size.groups * size.steps}")
    disk = _disk(path)
    rows = size.groups * (size.steps + 1) * ROW_BYTES
    speed = Table(
        ["", "groups a second", "median ms", "p90 ms", "p99 ms", "close, s", "groups a second with close", "open, s"],
        [
            [
                f"{size.groups:,} groups",
                number(size.groups / (written - started)),
                *(number(value * 1e3) for value in (np.median(taken), *np.percentile(taken, [90, 99]))),
                number(closed - written),
                number(size.groups / (closed - started)),
                number(opened["open"]),
            ]
        ],
    )
    space = Table(
        ["", "bytes a group", "times the rows"],
        [
            [name, number(value / size.groups), number(value / rows)]
            for name, value in {
                "rows": rows,
                "all files, page rounding aside": disk.contents,
                "of that zarr.json": disk.metadata,
                "all files, whole blocks": disk.allocated,
            }.items()
        ],
    )
    return Report(
        "One group an episode",
        [speed, space],
        [
            Target("groups made", size.groups / (written - started), 200, "a second", at_least=True),
            Target("bytes on disk, page rounding aside", disk.contents / rows, 3, "times the rows"),
        ],
        [
            f'segment_steps="episode", {size.groups:,} episodes of {size.steps} steps of CartPole\'s shape '
            f"({ROW_BYTES} bytes a row, {size.steps + 1} rows), given to append_episode one after the other; "
            f"{disk.files / size.groups:.1f} files a group. Sealing goes on in a thread beside it; close waits for it.",
            "Making a file may be far slower on an ext4 where many files were deleted in the last five minutes: it "
            "passes over their inodes. Run it some minutes after that, or give --folder another file system.",
            "Page rounding aside: a file counts its size, or its blocks where it has holes.",
            "open is dr.open of the whole store in a fresh process, in the page cache.",
        ],
    )
