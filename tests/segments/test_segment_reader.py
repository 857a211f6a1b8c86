"""Flags of sealed segments: whichever way they are read, they are those that a zarr reader finds."""

from pathlib import Path

import numpy as np
import pytest
import zarr

import diskreplay as dr
from diskreplay.segments import segment_reader
from diskreplay.segments.segment import read_segment
from diskreplay.segments.segment_reader import rows_with_values
from tests.segments.test_values import schema, values_of
from tests.testing.support import serial_schema


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[5, 5, 5], [1, 40, 9], [0, 3, 70], [17, 0, 0]])
@pytest.mark.parametrize("sparse", [0, 4, 1 << 40])
def test_flags_are_the_same_by_whole_chunks_and_by_the_rows_that_count(tmp_store, monkeypatch, lengths, sparse):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64) as store, store.writer(num_envs=len(lengths)) as writer:
        for lane, length in enumerate(lengths):
            if length:
                steps = np.arange(length)
                writer.append_episode(
                    lane, np.ones((length, 3), np.float32), steps, steps * 1.0, terminated=True, serial=steps
                )
        root = store._root
    info = read_segment(root, 0)
    monkeypatch.setattr(segment_reader, "_SPARSE", sparse)
    committed, found = segment_reader.read_sealed(info)
    done = zarr.open_array(str(info.path / "done"), mode="r")[:]
    expected = np.concatenate([done[lane, :rows] for lane, rows in enumerate(committed.tolist())])
    np.testing.assert_array_equal(found.flags, expected)
    np.testing.assert_array_equal(found.rows, committed)


def test_a_segment_with_few_rows_of_each_lane_is_read_without_the_rest_of_its_chunks(tmp_store, monkeypatch):
    with dr.create(tmp_store, serial_schema()) as store, store.writer(num_envs=2) as writer:
        for lane in range(2):
            steps = np.arange(3)
            writer.append_episode(lane, np.ones((3, 3), np.float32), steps, steps * 1.0, terminated=True, serial=steps)
        root = store._root
    info, read = read_segment(root, 0), []
    real = segment_reader.read_part
    monkeypatch.setattr(
        segment_reader, "read_part", lambda fd, start, out: read.append(len(out)) or real(fd, start, out)
    )
    monkeypatch.setattr(segment_reader, "read_into", None)
    committed, found = segment_reader.read_sealed(info)
    assert sum(read) == len(found.flags) == committed.sum() < info.chunk_rows["done"]


def test_rows_end_before_values_without_a_file(tmp_path: Path) -> None:
    """Also where rows without values follow in another chunk."""
    path = tmp_path / "store"
    with dr.create(path, schema(), chunk_bytes=64) as made, made.writer() as writer:
        for t in range(300):
            writer.append(np.zeros(2), t, 0.0, t % 10 == 9, episode=values_of(t) if t in (9, 19) else None)
        writer.flush()
        info = read_segment(made._root, 0)
        assert [rows_with_values(info, 300, count) for count in range(4)] == [9, 19, 300, 300]
