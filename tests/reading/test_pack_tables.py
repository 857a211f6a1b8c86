"""Tables of chunks, lanes and packs while segments are merged, and moments in which a reader opens or refreshes."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.reading import chunk_budget, followed_rows, known_segments
from diskreplay.reading.chunk_budget import Piece
from diskreplay.reading.chunk_table import ChunkTable, ChunkTables
from diskreplay.reading.snapshot import LaneMap
from diskreplay.segments import folder
from diskreplay.segments.files.mapping import MappingRefused
from tests.reading.test_packs import numbered, store
from tests.testing.merged import contents, write_more

assert store  # a fixture


def test_lanes_of_a_pack_are_those_of_its_segments(store: dr.Store) -> None:
    with dr.open(store.path) as still:
        store.compact()
        with dr.open(store.path) as fresh:
            lanes = [LaneMap(), LaneMap()]
            for found, reader in zip(lanes, (still, fresh), strict=True):
                found.update(reader.snapshot)
            assert lanes[0].key.tolist() == lanes[1].key.tolist()


def test_tables_of_chunks_have_a_line_a_pack_and_not_one_a_segment(tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((64,), "float32"), dr.Field((), "uint8"))  # obs needs chunks of its own first
    with dr.create(tmp_store, schema, compaction="manual", chunk_bytes=1 << 14) as store:
        for number in range(3):
            with store.writer() as writer:
                writer.append_episode(*numbered(number, 20), terminated=True)
        store.compact()
        with dr.open(tmp_store) as reader:
            leaves = reader.snapshot.tables.leaves
            assert [len(leaf.chunks) for leaf in leaves.values()] == [1] * len(leaves)
        with store.writer() as writer:
            writer.append_episode(*numbered(3, 300), terminated=True)
            store.refresh()
            assert [episode.obs[0, 0] for episode in store.episodes] == [0, 1, 2, 3]
            leaves = store.snapshot.tables.leaves
            assert leaves["obs"].chunks[-1] > leaves["action"].chunks[-1]
            for number, episode in enumerate(store.episodes):
                found, expected = (episode.obs, episode.action, episode.reward), numbered(number, len(episode))
                assert all(map(np.array_equal, found, expected))


def test_what_is_copied_from_a_pack_that_another_was_merged_into_leaves_for_more(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "PART_BYTES", 300)
    store.compact()
    with dr.open(store.path) as still:
        expected = [episode.obs["code"].copy() for episode in store.episodes]
        write_more(store.path, 4)
        assert store.compact()["segments"] > 3
        for most in (0, chunk_budget.MOST_DECOMPRESSED):
            monkeypatch.setattr(chunk_budget, "MOST_DECOMPRESSED", most)
            found = [episode.obs["code"].copy() for episode in still.episodes]
            assert all(map(np.array_equal, found, expected))
            table = still.snapshot.leaf("obs/code")
            held = [piece for piece in table.holder.values() if isinstance(piece, Piece)]
            assert len(held) > 3 if most else len(held) < 3


def test_tables_are_read_where_the_system_refuses_to_map_them(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.compact()
    before = contents(store)

    def refuse(*args: Any) -> Any:
        raise MappingRefused("too many")

    monkeypatch.setattr("diskreplay.segments.packs.map_file", refuse)
    with dr.open(store.path) as reader:
        assert contents(reader) == before


def test_no_other_thread_looks_at_tables_that_are_being_filled(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[bool] = []

    def look(tables: ChunkTables) -> None:
        locked.append(not tables.lock.acquire(blocking=False))
        if not locked[-1]:
            tables.lock.release()

    def looked_at(change: Any) -> Any:
        def look_and_change(self: ChunkTable, *places: Any) -> None:
            other = threading.Thread(target=look, args=[self._tables])
            other.start()
            other.join()
            change(self, *places)

        return look_and_change

    with dr.open(store.path) as reader:
        store.compact()
        for name in ("_add_places", "release"):
            monkeypatch.setattr(ChunkTable, name, looked_at(getattr(ChunkTable, name)))
        reader.refresh()
        monkeypatch.undo()
    assert len(locked) > 10
    assert all(locked)


@pytest.mark.slow
@pytest.mark.parametrize("called", ["KnownSegments.read", "read_sealed", "read_tables"])
def test_a_store_that_is_merged_while_it_is_opened_is_whole_at_once(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch, called: str
) -> None:
    before, steps = contents(store), len(store)
    if called == "read_tables":
        store.compact()
        write_more(Path(store.path), 4)
        store.refresh()
        before, steps = contents(store), len(store)
    owners = {"KnownSegments.read": known_segments.KnownSegments, "read_sealed": followed_rows, "read_tables": folder}
    owner: Any = owners[called]
    name = called.split(".")[-1]
    real, merged = getattr(owner, name), list[int]()

    def merge_first(*args: Any) -> Any:
        if not merged:
            merged.append(0)
            with dr.open(store.path, "a") as other:
                merged.append(other.compact()["segments"])
        return real(*args)

    monkeypatch.setattr(owner, name, merge_first)
    with dr.open(store.path) as fresh:
        assert merged[1] > 1
        assert len(fresh) == steps
        assert contents(fresh) == before
