"""Tables of chunks, lanes and packs while segments are merged, and moments in which a reader opens or refreshes."""

import re
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.reading.inner import MOST_DECOMPRESSED, before_opening, lane_keys, limit, pieces_of, refuse_tables
from tests.reading.test_packs import numbered, store
from tests.testing.merged import contents, write_more

assert store  # a fixture


def test_lanes_of_a_pack_are_those_of_its_segments(store: dr.Store) -> None:
    with dr.open(store.path) as still:
        store.compact()
        with dr.open(store.path) as fresh:
            assert lane_keys(still) == lane_keys(fresh)


def test_tables_of_chunks_have_a_line_a_pack_and_not_one_a_segment(tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((64,), "float32"), dr.Field((), "uint8"))  # obs needs chunks of its own first
    with dr.create(tmp_store, schema, compaction="manual", chunk_bytes=1 << 14) as store:
        for number in range(3):
            with store.writer() as writer:
                writer.append_episode(*numbered(number, 20), terminated=True)
        store.compact()
        with dr.open(tmp_store) as reader:
            tables = [reader.snapshot.leaf(leaf) for leaf in ("obs", "action", "reward", "done", "time")]
            assert [len(table.chunks) for table in tables] == [1] * len(tables)
        with store.writer() as writer:
            writer.append_episode(*numbered(3, 300), terminated=True)
            store.refresh()
            assert [episode.obs[0, 0] for episode in store.episodes] == [0, 1, 2, 3]
            assert store.snapshot.leaf("obs").chunks[-1] > store.snapshot.leaf("action").chunks[-1]
            for number, episode in enumerate(store.episodes):
                found, expected = (episode.obs, episode.action, episode.reward), numbered(number, len(episode))
                assert all(map(np.array_equal, found, expected))


def test_what_is_copied_from_a_pack_that_another_was_merged_into_leaves_for_more(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, copied_bytes=300)
    store.compact()
    with dr.open(store.path) as still:
        expected = [episode.obs["code"].copy() for episode in store.episodes]
        write_more(store.path, 4)
        assert store.compact()["segments"] > 3
        for most in (0, MOST_DECOMPRESSED):
            limit(monkeypatch, decompressed_bytes=most)
            found = [episode.obs["code"].copy() for episode in still.episodes]
            assert all(map(np.array_equal, found, expected))
            held = pieces_of(still.snapshot.leaf("obs/code"))
            assert held > 3 if most else held < 3


def test_tables_are_read_where_the_system_refuses_to_map_them(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.compact()
    before = contents(store)
    refuse_tables(monkeypatch)
    with dr.open(store.path) as reader:
        assert contents(reader) == before


def test_a_store_that_is_merged_whenever_it_is_read_is_locked(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, openings=1)
    message = (
        f"segments of {store.path} were merged while they were read, 1 times; try again when no process merges them"
    )
    with (
        before_opening("KnownSegments.read", store.compact),
        pytest.raises(dr.StoreLocked, match=f"^{re.escape(message)}$"),
    ):
        dr.open(store.path)
    with dr.open(store.path) as fresh:
        assert contents(fresh) == contents(store)


@pytest.mark.slow
@pytest.mark.parametrize("called", ["KnownSegments.read", "read_sealed", "read_tables"])
def test_a_store_that_is_merged_while_it_is_opened_is_whole_at_once(store: dr.Store, called: str) -> None:
    before, steps = contents(store), len(store)
    if called == "read_tables":
        store.compact()
        write_more(Path(store.path), 4)
        store.refresh()
        before, steps = contents(store), len(store)
    merged = list[int]()

    def merge() -> None:
        with dr.open(store.path, "a") as other:
            merged.append(other.compact()["segments"])

    with before_opening(called, merge), dr.open(store.path) as fresh:
        assert merged[0] > 1
        assert len(fresh) == steps
        assert contents(fresh) == before
