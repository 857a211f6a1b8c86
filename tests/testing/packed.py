"""Stores with packs, for the tests of what looks at these."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from crc32c import crc32c

import diskreplay as dr
from tests.testing.inner import keep_members as keep_members
from tests.testing.on_disk import reseal, segment_of
from tests.testing.support import serial_schema


def write_segments(path: Path, **kwargs) -> None:
    """Make a store of short sealed segments of two writers, of one lane and of three, with priorities in some."""
    if kwargs:
        _write_segments(path, **kwargs)
    else:
        shutil.copytree(_segments(), path)


@cache
def _segments() -> Path:
    """Make such a store once for all tests of a process."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write_segments(path := Path(folder, "store"))
    return path


def _write_segments(path: Path, **kwargs) -> None:
    kwargs = {"compaction": "manual", "segment_steps": 12, **kwargs}
    dr.create(path, serial_schema(extra={"wide": dr.Field((300,), "uint8")}), **kwargs).close()
    with dr.open(path, "a") as store:
        with store.writer() as writer:
            for t in range(60):
                following = np.full(3, t + 1, np.float32)
                writer.append(
                    following - 1, t, float(t), t % 5 == 4, next_obs=following, serial=t, wide=np.full(300, t, np.uint8)
                )
        with store.writer(num_envs=3) as writer:
            for t in range(20):
                serial = 100 + 3 * t + np.arange(3)
                writer.append(
                    np.full((3, 3), t, np.float32),
                    serial,
                    serial.astype(float),
                    np.arange(3) == t % 4,
                    serial=serial,
                    wide=np.full((3, 300), t, np.uint8),
                    priority=np.arange(3) + t,
                )


def write_packed(path: Path, evict: bool = True, **kwargs) -> int:
    """Make such a store, merge its segments, with an eviction by hand before and after; return the pack's number."""
    write_segments(path, **kwargs)
    with dr.open(path, "a") as store:
        if evict:
            store.evict(lambda episode: 7 in episode["serial"])
        store.compact()
        if evict:
            store.evict(lambda episode: 17 in episode["serial"])
    return pack_numbers(path)[-1]


def pack_numbers(path: Path) -> list[int]:
    """Return the numbers of the packs of a store."""
    folders = (path / "segments").iterdir()
    return sorted(int(folder.name) for folder in folders if (folder / "members").exists())


def shown(path: Path) -> dict[int, dict[str, bytes]]:
    """Return what a store shows of each of its episodes, by the id of its first step."""
    names = "obs", "action", "reward", "serial", "wide"
    with dr.open(path) as store:
        return {int(e.ids[0]): {name: e[name].tobytes() for name in names} for e in store.episodes}


def tables(path: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two tables of a pack."""
    folder = path / "segments" / f"{number:08}"
    members = np.fromfile(folder / "members" / "c.0.0", "<i8").reshape(-1, 4)
    return members, np.fromfile(folder / "runs" / "c.0.0", "<i8").reshape(-1, 5)


def change(path: Path, number: int, files: dict[str, bytes], attributes: dict | None = None) -> None:
    """Replace files of a pack, and attributes, as if its writer had made it so: with checksums that match."""
    folder = segment_of(path, number)

    def update(current: dict) -> None:
        current["checksums"] |= {name: crc32c(data) for name, data in files.items()}
        current |= attributes or {}

    for name, data in files.items():
        (folder / name).chmod(0o644)
        (folder / name).write_bytes(data)
    reseal(folder / "zarr.json", update)
    (folder / "durable/document").write_bytes((folder / "zarr.json").read_bytes())


def change_tables(path: Path, number: int, members: np.ndarray, runs: np.ndarray) -> None:
    """Replace the tables of a pack, and their copy, by others with the same numbers of lines."""
    data = members.astype("<i8").tobytes(), runs.astype("<i8").tobytes()
    change(path, number, {"members/c.0.0": data[0], "runs/c.0.0": data[1], "durable/tables": b"".join(data)})


def copied(path: Path, target: Path) -> Path:
    """Return a copy of a store, to be damaged."""
    shutil.copytree(path, target)
    return target


def append(writer, steps: int, first: int = 0) -> None:
    """Append an episode to a store that `write_segments` made."""
    for t in range(first, first + steps):
        obs = np.full(3, t, np.float32)
        last = t == first + steps - 1
        writer.append(obs, t, float(t), last, next_obs=obs + 1, serial=t, wide=np.full(300, t % 256, np.uint8))
