"""What a segment that is being written takes on disk: blocks for what was written, and not for what may come."""

import json
import os
import signal
from contextlib import suppress
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import diskreplay as dr
from tests.crash.injection import in_child
from tests.testing.filesystems import mounted
from tests.testing.support import append_numbered, serial_schema

CARTPOLE = {"obs": dr.Field((4,), "float32"), "action": dr.Field((), "int64"), "reward": dr.Field((), "float32")}


def taken(path: Path) -> int:
    """Count the bytes that everything below a folder takes on disk, as du does; files may leave meanwhile."""
    blocks = 0
    for folder, _, names in os.walk(path):
        for name in [".", *names]:
            with suppress(FileNotFoundError):
                blocks += os.lstat(f"{folder}/{name}").st_blocks
    return blocks * 512


def append_steps(writer: Any, steps: int, first: int = 0) -> None:
    for t in range(first, first + steps):
        obs = np.full(4, t, np.float32)
        writer.append(obs, t, float(t), terminated=t % 50 == 49, next_obs=obs + 1)


def wide_schema(width: int) -> dr.Schema:
    return dr.Schema(**CARTPOLE, extra={"wide": dr.Field((width,), "uint8"), "odd": dr.Field((7,), "uint8")})


def append_wide(writer: Any, t: int, mask: np.ndarray, width: int, byte: int) -> None:
    """Append a step of `wide_schema` to the lanes in the mask; its bytes in `wide` and `odd` are all equal."""
    lanes = len(mask)
    writer.append(
        obs=np.full((lanes, 4), t, np.float32),
        action=np.full(lanes, t),
        reward=np.full(lanes, t, np.float32),
        terminated=np.zeros(lanes, np.bool_),
        mask=mask,
        wide=np.full((lanes, width), byte, np.uint8),
        odd=np.full((lanes, 7), byte, np.uint8),
    )


def write_with_spares(path: Path, die: bool, tell: Any) -> None:
    """Append 100 steps with each of 16 writers, make the segment after each one ahead, and end in one way or other."""
    store = dr.open(path, "a")
    writers = [store.writer() for _ in range(16)]
    for writer in writers:
        append_steps(writer, 100)
        rotation = writer._episode_writer.rotation
        rotation.preallocator.request(rotation.newest.number, [0], rotation._size())
    for writer in writers:
        writer._episode_writer.rotation.preallocator._thread.join()
    tell({"spares": len(list((path / "counters").glob("next-*"))), "taken": taken(path)})
    if die:
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


@pytest.mark.slow
@pytest.mark.parametrize("die", [False, True])
def test_writers_with_few_steps_and_their_spare_segments_take_little_alive_and_killed(
    tmp_store: Path, die: bool
) -> None:
    dr.create(tmp_store, dr.Schema(**CARTPOLE)).close()
    death = in_child(partial(write_with_spares, tmp_store, die))
    (told,) = death.told
    assert (death.died, told["spares"]) == (die, 16)
    assert told["taken"] < 4_000_000
    assert taken(tmp_store) < 4_000_000
    with dr.open(tmp_store, "a") as store:
        assert len(store) == 1600
        assert store.verify(deep=True) == []
        assert taken(tmp_store) < 2_500_000  # of which a fifth are folders, on a file system that counts them


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 3, 40])
def test_a_first_chunk_takes_some_times_what_is_written_and_reads_as_before(tmp_store: Path, lanes: int) -> None:
    schema = wide_schema(5000)
    row_bytes = {"obs": 16, "action": 8, "reward": 4, "done": 1, "extra/wide": 5000, "extra/odd": 7}
    with dr.create(tmp_store, schema) as store:
        writer = store.writer(num_envs=lanes)
        rows = 0
        for t in range(700):
            mask = np.arange(lanes) % 3 <= t % 3  # lanes that are not in step
            append_wide(writer, t, mask, 5000, t % 251)
            rows += mask
            if t % 99 == 0:
                for leaf, nbytes in row_bytes.items():
                    ndim = {"action": 0, "reward": 0, "done": 0}.get(leaf, 1)
                    chunk = tmp_store / "segments" / "00000000" / leaf / ("c.0.0" + ".0" * ndim)
                    status = chunk.stat()
                    # A lane has some pages at least, two that it shares with others, and those of the next rows.
                    # With one of several go those that are an eighth of that behind, and the first pages grow faster.
                    times, pages = (2, 1) if lanes == 1 else (2.25, 3 * 16)
                    most = sum(times * max(int(n), 1) * nbytes for n in rows + 1) + lanes * (pages + 2) * 4096
                    assert status.st_blocks * 512 <= min(most, status.st_size + 4096), (leaf, t)
        segment = zarr.open_group(tmp_store / "segments" / "00000000", mode="r")
        committed = segment["committed"][:]
        assert committed.tolist() == rows.tolist()
        for lane in range(lanes):
            appended = [t for t in range(700) if lane % 3 <= t % 3]
            assert segment["action"][lane, : committed[lane]].tolist() == appended
            assert segment["extra/odd"][lane, : committed[lane], 6].tolist() == [t % 251 for t in appended]
        writer.close()
        assert store.verify(deep=True) == []


def append_beside_a_reader(disk: Any, tell: Any) -> None:
    """Let the disk fill up while a lane has reserved pages that nobody touched but who read the chunk in order."""
    path = disk.path / "store"
    with dr.create(path, dr.Schema(**CARTPOLE)) as store:
        writer = store.writer(num_envs=2)

        def append(count: int, mask: Any) -> None:
            obs = np.full((2, 4), count, np.float32)
            writer.append(obs, np.full(2, count), np.full(2, count, np.float32), np.zeros(2, bool), mask=mask)

        append(0, [True, False])
        for chunk in path.glob("segments/*/*/c.0.0*"):
            with open(chunk, "rb", buffering=0) as file:
                while file.read(1 << 17):
                    pass
        count, full, ballast = 1, False, disk.fill()
        while not full:
            try:
                append(count, [False, True])
                count += 1
            except dr.StorageFull:
                full = True
        tell(count)
        ballast.unlink()
        append(count, [False, True])
        tell(count + 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_a_chunk_that_was_read_as_a_whole_has_no_stores_that_a_full_disk_could_refuse(kind: str) -> None:
    with mounted(kind, 64) as disk:
        full, all_of_it = in_child(partial(append_beside_a_reader, disk)).told
        assert all_of_it == full + 1
        with dr.open(disk.path / "store") as store:
            assert len(store) == all_of_it
            assert store.verify(deep=True) == []


@pytest.mark.parametrize(
    ("segment_steps", "rows"),
    [
        (25_000, {"obs": 8192, "reward": 32768, "done": 131072}),
        (4000, {"obs": 512, "reward": 1024, "done": 4096}),
        (1000, {"obs": 256, "reward": 1024, "done": 4096}),
        (100, {"obs": 16, "reward": 16, "done": 16}),
    ],
)
def test_a_file_is_128_kib_or_a_page_or_a_quarter_of_a_segment(tmp_store, segment_steps, rows):
    with dr.create(tmp_store, serial_schema(), segment_steps=segment_steps) as store, store.writer() as writer:
        append_numbered(writer, [0])
    attributes = json.loads((tmp_store / "segments/00000000/zarr.json").read_text())["attributes"]
    assert {name: attributes["chunk_rows"][name] for name in rows} == rows


def check_masked_appends(path: Path, lanes: int, phases: list[tuple[int, int, int]], width: int, **limits: int) -> None:
    """In each phase, append a number of steps to a range of lanes; compare all rows, and the sizes of the files."""
    appended: list[list[int]] = [[] for _ in range(lanes)]
    with dr.create(path, wide_schema(width), **limits) as store, store.writer(num_envs=lanes) as writer:
        times = count()
        for first, stop, steps in phases:
            mask = (np.arange(lanes) >= first) & (np.arange(lanes) < stop)
            for t in islice(times, steps):
                append_wide(writer, t, mask, width, 1 + t % 251)
                for lane in range(first, stop):
                    appended[lane].append(t)
        store.refresh()
        assert store.verify() == []
        found: list[list[int]] = [[] for _ in range(lanes)]
        for episode in store.episodes:
            found[episode.lane] += episode["action"].tolist()
            expected = 1 + episode["action"][:, None] % 251
            assert (episode["odd"] == expected).all()
            assert (episode["wide"] == expected).all()
            assert (episode["reward"] == episode["action"]).all()
        assert found == appended
        for chunk in path.glob("segments/*/extra/wide/c.0.*.0"):
            meta = json.loads((chunk.parent / "zarr.json").read_text())
            assert chunk.stat().st_size == np.prod(meta["chunk_grid"]["configuration"]["chunk_shape"])


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_lane_that_has_blocks_in_the_next_chunk_changes_no_row_of_its_neighbour(tmp_store: Path, ahead: int) -> None:
    lone = [(ahead, ahead + 1, 796), (1 - ahead, 2 - ahead, 796)]
    check_masked_appends(tmp_store, 2, [(0, 2, 3600), *lone], 1000, chunk_bytes=1 << 23)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 2, 6, 16, 700])
def test_adjacent_lanes_that_run_ahead_change_no_rows_of_others(tmp_store: Path, lanes: int) -> None:
    rng = np.random.default_rng(lanes)
    phases = [(0, lanes, 100)]
    for _ in range(12 if lanes < 100 else 30):
        first, stop = sorted(rng.choice(lanes + 1, 2, replace=False).tolist())
        phases.append((first, stop, int(rng.integers(1, 800 if lanes < 100 else 30))))
    check_masked_appends(tmp_store, lanes, phases, 1001 if lanes < 10 else 301)
