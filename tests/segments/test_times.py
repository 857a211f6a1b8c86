import time

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.files import machine
from diskreplay.segments.files.times import count_until, repeat_times, time_bounds
from diskreplay.segments.segment import NOTHING_LOST, Lost, read_segment
from tests.testing import packed
from tests.testing.merged import folders
from tests.testing.on_disk import reseal
from tests.testing.support import append_numbered, serial_schema

SEGMENT = "segments/00000000"


def write_times(folder, lanes, per_chunk):
    """Chunk files of times, of lanes of different lengths."""
    rows = np.array([len(lane) for lane in lanes])
    (folder / "time").mkdir(parents=True)
    for chunk in range(-(-int(rows.max()) // per_chunk)):
        block = np.zeros((len(lanes), per_chunk), "<i8")
        for i, lane in enumerate(lanes):
            part = lane[chunk * per_chunk : (chunk + 1) * per_chunk]
            block[i, : len(part)] = part
        block.tofile(folder / "time" / layout.chunk_key(chunk, 0))
    return rows


def read_times(folder, rows, per_chunk):
    chunks = range(-(-int(rows.max()) // per_chunk))
    blocks = [np.fromfile(folder / "time" / layout.chunk_key(k, 0), "<i8").reshape(len(rows), -1) for k in chunks]
    return [lane[:count].tolist() for lane, count in zip(np.concatenate(blocks, axis=1), rows, strict=True)]


def test_bounds_are_those_of_the_first_and_last_rows_that_count(tmp_path):
    lanes = [[5, 6, 7, 8, 9], [], [4, 4, 20]]
    rows = write_times(tmp_path, lanes, 2)
    assert time_bounds(str(tmp_path), 2, rows, NOTHING_LOST) == (4, 20)
    # Row 0 and 1 of lane 2, then row 2 of it.
    assert time_bounds(str(tmp_path), 2, rows, Lost(((2, 2),), 2)) == (5, 20)
    assert time_bounds(str(tmp_path), 2, rows, Lost(((2, 2), (8, 1)), 3)) == (5, 9)
    assert time_bounds(str(tmp_path), 2, rows, Lost(((0, 5), (2, 3)), 8)) is None
    assert time_bounds(str(tmp_path), 2, np.zeros(3, np.int64), NOTHING_LOST) is None


@pytest.mark.parametrize("per_chunk", [1, 2, 4, 8])
def test_rows_that_are_zeros_repeat_the_time_before_and_never_fall(tmp_path, per_chunk):
    rng = np.random.default_rng(per_chunk)
    for trial in range(40):
        lanes = [np.sort(rng.integers(3, 99, rng.integers(0, 12))).tolist() for _ in range(3)]
        if not any(lanes):
            continue
        kept = [rng.random(len(lane)) < 0.5 for lane in lanes]
        zeroed = [[t if k else 0 for t, k in zip(*pair, strict=True)] for pair in zip(lanes, kept, strict=True)]
        folder = tmp_path / str(trial)
        rows = write_times(folder, zeroed, per_chunk)
        for chunk in range(-(-int(rows.max()) // per_chunk)):
            items = [
                lane * per_chunk + row
                for lane in range(3)
                for row in range(per_chunk)
                if chunk * per_chunk + row >= rows[lane] or not kept[lane][chunk * per_chunk + row]
            ]
            skipped = [(8 * i, 8 * i + 8) for i in items]
            repeat_times(str(folder), chunk, per_chunk, rows, skipped, 3, np.zeros(1, np.int64))
        expected = [
            [max([3, *(t for t, k in zip(lane[: i + 1], keep, strict=False) if k)]) for i in range(len(lane))]
            for lane, keep in zip(lanes, kept, strict=True)
        ]
        assert read_times(folder, rows, per_chunk) == expected


def test_in_a_pack_times_rise_from_one_beginning_to_the_next(tmp_path):
    lanes, begins = [[7, 8, 9, 3, 4, 5, 1, 0, 0, 6]], np.array([0, 3, 6, 6, 9])
    rows = write_times(tmp_path, lanes, 16)
    folder = str(tmp_path)
    assert time_bounds(folder, 16, rows, NOTHING_LOST, [0, 3, 7, 9]) == (0, 9)
    assert time_bounds(folder, 16, rows, Lost(((1, 2), (7, 2)), 4), [0, 3, 6, 9]) == (1, 7)
    repeat_times(folder, 0, 16, rows, [(8, 24), (40, 56), (56, 80)], 1, begins)
    assert read_times(tmp_path, rows, 16) == [[7, 7, 7, 3, 4, 4, 1, 1, 1, 1]]


def test_a_segment_says_how_its_clock_stands_to_wall_time(tmp_store):
    before = time.time_ns() - machine.clock_ns()
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
        live = read_segment(read_root(tmp_store), 0)
        assert live.times is None
    info = read_segment(read_root(tmp_store), 0)
    assert info.clock == live.clock
    assert info.clock.boot == info.boot == machine.boot_id()
    assert abs(info.clock.wall - before) < 1e9
    assert info.attributes()["clock"] == {"wall": info.clock.wall}
    (rows,) = np.fromfile(f"{tmp_store}/{SEGMENT}/committed/c.0", "<i8")
    times = np.fromfile(f"{tmp_store}/{SEGMENT}/time/c.0.0", "<i8")
    assert info.times == (times[0], times[rows - 1])
    assert (np.diff(times[:rows]) >= 0).all()
    assert not times[rows:].any()


def test_a_sealed_segment_without_rows_has_no_times(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
        with store.writer() as other, pytest.raises(dr.SchemaError):
            other.append(None, 0, 0.0, False, serial=0)
    info = read_segment(read_root(tmp_store), 0)
    assert info.times is not None
    reseal(tmp_store / SEGMENT / "zarr.json", lambda attributes: attributes.update(times=None))
    assert read_segment(read_root(tmp_store), 0).times is None


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_of_a_pack_are_counted_by_time_whatever_lane_they_are_of(tmp_store, compression):
    """Of a compressed one, rows between lanes are not."""
    schema = serial_schema(extra={"wide": dr.Field((300,), "uint8")})
    with dr.create(tmp_store, schema, segment_steps=8, compaction="manual", compression=compression) as store:
        writers = [store.writer(), store.writer()]
        for serial in range(0, 60, 3):  # each by turns: their times are interleaved
            for writer in writers:
                append_numbered(writer, range(serial, serial + 3), wide=np.zeros(300, np.uint8))
        for writer in writers:
            writer.close()
        store.refresh()
        ids = np.concatenate([episode.ids for episode in store.episodes])
        before = store.snapshot.times(ids)
        store.compact()
    root = read_root(tmp_store)
    (number,) = folders(tmp_store)
    info = read_segment(root, number)
    assert (info.compressed == {}) == (compression is None)
    for time_ in sorted(before)[::7]:
        steps = int(np.count_nonzero(before <= time_))
        counted = count_until(info, int(time_) - info.clock.wall)
        assert steps <= counted <= steps + steps // 3 + 2  # with the final observation of each episode
    assert count_until(info, 1 << 62) == 160


def test_rows_of_a_pack_that_are_older_are_counted_lane_by_lane(tmp_store):
    number = packed.write_packed(tmp_store)
    info = read_segment(read_root(tmp_store), number)
    _, runs = packed.tables(tmp_store, number)
    times = np.fromfile(tmp_store / f"segments/{number:08}/time/c.0.0", "<i8")
    rows = np.concatenate([times[first : first + count] for first, count in runs[:, :2].tolist()])
    assert (np.diff(rows) < 0).any()
    for until in (0, *np.quantile(rows, [0, 0.3, 0.5, 1]).astype(int).tolist()):
        assert count_until(info, until) == (rows <= until).sum()
