"""Initial priorities: an array of a segment that is there only where a writer gave some, and then exact to the step."""

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

import diskreplay as dr
from tests.testing.on_disk import marks_of, segment_of
from tests.testing.support import append_numbered, digest, serial_schema

NAN = np.nan
OBS = np.zeros(3, np.float32)


def create(path: Path, **kwargs: Any) -> Any:
    return dr.create(path, serial_schema(), **{"chunk_bytes": 256, "segment_steps": 40, **kwargs})


def segments_with(path: Path) -> list[int]:
    """The segments that have the array."""
    folders = sorted((path / "segments").glob("0*"))
    return [int(folder.name) for folder in folders if (folder / "priority").exists()]


def given(store: Any) -> dict[int, float]:
    """The priority of each step by its serial, of those that have one."""
    store.refresh()
    found = {}
    for episode in store.episodes:
        priorities = episode["priority"]
        assert (priorities.dtype, priorities.shape) == (np.dtype("float64"), (len(episode),))
        found |= dict(zip(episode["serial"].tolist(), priorities.tolist(), strict=True))
    return {serial: priority for serial, priority in found.items() if not np.isnan(priority)}


def step(writer: Any, serial: int, priority: Any = None, end: bool = False) -> None:
    append_numbered(writer, [serial], "terminated" if end else "open", priority=priority)


@pytest.fixture(params=["mapped", "by position"], autouse=True)
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by position":
        for module in ("files.commit", "segment_writer"):
            monkeypatch.setattr(f"diskreplay.segments.{module}.keeps_reservations", lambda path: False)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1, 39, 75])
def test_a_step_has_the_priority_it_was_given_and_no_other_has_one(tmp_store: Path, first: int) -> None:
    """The first one may come in the middle of an episode, and of a chunk: the episode goes on in its segment."""
    expected = {}
    with create(tmp_store) as store:
        with store.writer() as writer, dr.open(tmp_store) as reader:
            for serial in range(150):
                priority = (serial * 7 % 11 - 5) / 4 if serial >= first and serial % 3 != 1 else None
                step(writer, serial, priority, end=serial % 37 == 36)
                if priority is not None:
                    expected[serial] = abs(priority)
                if serial % 50 == 5:
                    assert given(reader) == expected
                    assert serial != 105 or reader.verify() == []
        assert 0.0 in expected.values()
        assert given(store) == expected
        assert [len(episode) for episode in store.episodes] == [37] * 4 + [2]
        where = {int(s): i >> 35 for e in store.episodes for s, i in zip(e["serial"], e.ids.tolist(), strict=True)}
        assert segments_with(tmp_store) == sorted({where[serial] for serial in range(min(expected), 150)})
        assert store.verify(deep=True) == []
    with dr.open(tmp_store) as store:
        assert given(store) == expected


def test_a_store_without_priorities_has_the_same_files_as_ever(tmp_store: Path, tmp_path: Path) -> None:
    with create(tmp_store) as store, store.writer() as writer:
        append_numbered(writer, range(100))
    assert segments_with(tmp_store) == []
    for folder in (tmp_store / "segments").glob("0*"):
        assert b"priority" not in (folder / "zarr.json").read_bytes()
    assert b"priority" not in (tmp_store / "zarr.json").read_bytes()
    with create(tmp_path / "other") as store, store.writer() as writer:
        append_numbered(writer, range(100), priority=None)
    assert digest(tmp_store).keys() == digest(tmp_path / "other").keys()


def test_an_episode_in_one_piece_and_vectors_have_priorities(tmp_store: Path) -> None:
    with create(tmp_store) as store:
        with store.writer(num_envs=3) as writer:

            def vector(serial: int, priority: Any = None, ends: Any = (0, 0, 0), mask: Any = None) -> None:
                serials = np.arange(serial, serial + 3)
                obs = np.zeros((3, 3), np.float32)
                writer.append(
                    obs, serials, np.zeros(3), np.array(ends, bool), mask=mask, priority=priority, serial=serials
                )

            vector(0)
            vector(3, [1, NAN, -2.5])
            vector(6, torch.tensor([NAN, np.inf, 4.0], requires_grad=True), mask=[True, False, True])
            vector(9, ends=(0, 1, 1))
            writer.append_episode(
                1, np.zeros((31, 3), np.float32), range(30), np.zeros(30), terminated=True,
                priority=np.arange(30.0), serial=np.arange(100, 130),
            )  # fmt: skip
            writer.append_episode(
                2, np.zeros((2, 3), np.float32), range(2), np.zeros(2), terminated=True, serial=np.arange(200, 202)
            )
            writer.append_episode(
                0, np.zeros((3, 3), np.float32), range(3), np.zeros(3), terminated=True,
                priority=[NAN, -3.0, NAN], serial=np.arange(300, 303),
            )  # fmt: skip
            vector(12, np.float32([0.5, 0.25, 0.125]))
            writer.end_episode()
        expected = {3: 1.0, 5: 2.5, 8: 4.0, 12: 0.5, 13: 0.25, 14: 0.125, 301: 3.0}
        expected |= {100 + i: float(i) for i in range(30)}
        assert given(store) == expected
        assert store.verify(deep=True) == []


def test_every_episode_of_its_own_segment_has_the_array_from_the_first_priority_on(tmp_store: Path) -> None:
    with create(tmp_store, segment_steps="episode") as store:
        with store.writer() as writer:
            append_numbered(writer, range(5))
            step(writer, 5)
            step(writer, 6, 2.0)
            step(writer, 7, end=True)
            append_numbered(writer, range(8, 12), priority=3.0)
            writer.append_episode(
                np.zeros((300, 3)), range(300), np.zeros(300), terminated=True, priority=np.ones(300),
                serial=np.arange(20, 320),
            )  # fmt: skip
        assert given(store) == {6: 2.0} | dict.fromkeys(range(8, 12), 3.0) | dict.fromkeys(range(20, 320), 1.0)
        assert segments_with(tmp_store) == [1, 2, 3]
        assert store.verify(deep=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("bad", [NAN, np.inf, -np.inf, "1", [1.0], np.ones(2), 1j, [[1.0]], {}])
def test_what_is_no_priority_is_refused_before_anything_changes(tmp_store: Path, bad: Any) -> None:
    with create(tmp_store) as store, store.writer() as writer, store.writer(num_envs=2) as vector:
        step(writer, 0)
        lanes = {"action": [0, 0], "reward": [0, 0], "terminated": [False, False], "serial": [11, 12]}
        vector.append(np.zeros((2, 3)), **lanes)
        before = digest(tmp_store)
        with pytest.raises(dr.SchemaError, match="priority"):
            step(writer, 1, bad)
        in_arrays = [
            lambda: writer.append_episode(
                np.zeros((3, 3)), [1, 2], [0, 0], terminated=True, serial=[1, 2], priority=[1.0, bad]
            ),
            lambda: vector.append(np.zeros((2, 3)), **lanes, priority=[1.0, bad]),
            lambda: vector.append_episode(0, np.zeros((2, 3)), [1], [0], terminated=True, serial=[1], priority=[bad]),
        ]
        for call in [] if bad is NAN else in_arrays:  # there, NaN is a step without one
            with pytest.raises(dr.SchemaError, match="priority"):
                call()
        assert digest(tmp_store) == before
        assert segments_with(tmp_store) == []
        step(writer, 1, 1.5)
        assert given(store) == {1: 1.5}


def test_a_step_that_is_refused_for_another_reason_brings_no_array(tmp_store: Path) -> None:
    with create(tmp_store) as store, store.writer() as writer:
        step(writer, 0)
        with pytest.raises(dr.SchemaError):
            writer.append(OBS, 0, 0.0, False, priority=1.0)  # no serial
        with pytest.raises(dr.SchemaError, match="step that ends"):
            writer.append(OBS, 0, 0.0, False, priority=1.0, serial=1, episode={"seed": 1})
        assert segments_with(tmp_store) == []


def test_no_field_may_have_the_name() -> None:
    field = dr.Field((), "float32")
    for part in ("extra", "episode"):
        with pytest.raises(dr.SchemaError, match="'priority' is taken"):
            dr.Schema(field, field, **{part: {"priority": field}})


def test_zarr_reads_it_as_it_reads_the_others(tmp_store: Path) -> None:
    with create(tmp_store, segment_steps=None, chunk_bytes=1024) as store, store.writer() as writer:
        for serial in range(200):
            step(writer, serial, None if serial < 150 else -float(serial))
        group = zarr.open_group(tmp_store, mode="r")["segments/00000000"]
        like, found = group["time"].metadata.to_dict(), group["priority"].metadata.to_dict()
        assert found == like | {"data_type": "float64", "fill_value": 0.0}
        assert group["priority"].dtype == np.float64
        expected = [0.0] * 150 + [float(serial) for serial in range(150, 200)]
        assert group["priority"][0, :200].tolist() == expected
        own = zarr.create_array({}, shape=(1, 256), chunks=(1, 128), dtype="float64", compressors=None, fill_value=0)
        assert own.metadata.to_dict()["fill_value"] == found["fill_value"]


@pytest.mark.slow
def test_the_segment_that_is_made_ahead_has_the_array_too(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was asked for before there was a priority."""
    monkeypatch.setattr("diskreplay.writing.rotation.LEAST_QUARTER_S", 0.0)
    for late in (0, 20):
        path = tmp_store / str(late)
        with create(path) as store, store.writer() as writer:
            for serial in range(200):
                step(writer, serial, 1.0 if serial >= late else None, end=serial % 5 == 4)
                thread = writer._episode_writer.rotation.preallocator._thread
                if thread is not None:
                    thread.join()
            assert given(store) == dict.fromkeys(range(late, 200), 1.0)
            assert segments_with(path) == list(range(len(store.info()["segments"])))


def test_bytes_of_an_append_that_was_interrupted_are_no_priority(tmp_store: Path) -> None:
    with create(tmp_store) as store, store.writer() as writer:
        step(writer, 0, 1.0)
        column = writer._episode_writer.rotation.open[0].columns["priority"]
        for row in range(1, 4):
            column.write_row(0, row, 77.0)
        step(writer, 1)
        append_numbered(writer, [2], "terminated")
        writer.append_episode(np.zeros((3, 3)), [3, 4], [0, 0], terminated=True, serial=[3, 4])
        assert given(store) == {0: 1.0}
        assert store.verify() == []


def test_a_full_disk_refuses_the_first_priority_and_the_step_may_be_repeated(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create(tmp_store) as store, store.writer() as writer:
        step(writer, 0)

        def full(path: str, *args: Any, **kwargs: Any) -> None:
            raise OSError(28, os.strerror(28), path)

        with monkeypatch.context() as patch:
            patch.setattr("diskreplay.segments.segment.write_zeros", full)
            with pytest.raises(dr.StorageFull):
                step(writer, 1, 2.0)
            step(writer, 1)
        step(writer, 2, 2.0)
        assert given(store) == {2: 2.0}
        assert [len(episode) for episode in store.episodes] == [3]
        assert store.verify() == []


def test_the_array_of_a_first_priority_has_its_blocks(tmp_store: Path) -> None:
    """Where it had holes, reading it through a mapping would need room: on a full tmpfs, readers died of SIGBUS."""
    with create(tmp_store, segment_steps=None, chunk_bytes=mmap.PAGESIZE) as store, store.writer() as writer:
        for serial in range(3 * mmap.PAGESIZE // 8):
            step(writer, serial)
        step(writer, serial + 1, 2.0)
        chunks = sorted(segment_of(tmp_store).glob("priority/c.*"))
        assert len(chunks) > 2
        assert all(chunk.stat().st_blocks * 512 >= chunk.stat().st_size for chunk in chunks)


@pytest.mark.slow
def test_marks_that_are_made_meanwhile_lose_nothing(tmp_store: Path) -> None:
    """A thread makes marks all the time while writers give their first priorities."""
    with create(tmp_store, segment_steps=None) as store:
        writers = [store.writer(durability=0.001) for _ in range(8)]
        stop = threading.Event()
        flushing = threading.Thread(target=lambda: [w.flush() for w in writers if not stop.is_set()])
        for serial in range(20):
            for number, writer in enumerate(writers):
                step(writer, 100 * number + serial, float(serial + 1) if serial >= number else None)
        flushing.start()
        stop.set()
        flushing.join()
        for writer in writers:
            writer.flush()
        for number in range(8):
            assert marks_of(segment_of(tmp_store, number), 1)[-1][0] == [20]
        expected = {100 * n + s: s + 1.0 for n in range(8) for s in range(n, 20)}
        assert given(store) == expected
        for writer in writers:
            writer.close()
