"""Compressed fields: what `create` and `Store.compact` take, what is compressed, and what stays as it is."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.on_disk import attributes_of

pytest.importorskip("zstandard")

SCHEMA = dr.Schema(obs=dr.Field((16, 17), "uint8"), action=dr.Field((255,), "uint8"))


def fill(store: dr.Store, episodes: int = 3) -> None:
    """Write episodes of ten steps, whose observations say which steps they are of."""
    with store.writer() as writer:
        for number in range(episodes):
            obs = np.arange(10 * number, 10 * number + 11).astype(np.uint8)[:, None, None]
            frames = np.broadcast_to(obs, (11, 16, 17))
            writer.append_episode(frames, np.zeros((10, 255), np.uint8), np.ones(10), terminated=True)


def make_pack(path: Path, episodes: int) -> None:
    """Make a store whose episodes are in one pack, compressed."""
    with dr.create(path, SCHEMA, compression="zstd", compaction="manual") as store:
        fill(store, episodes)
        store.compact()


def attributes(path: Path) -> dict[str, Any]:
    """Return the attributes of the one segment that there is."""
    (document,) = path.glob("segments/*/zarr.json")
    return attributes_of(document.parent)


@pytest.mark.parametrize(
    ("given", "level"), [("zstd", 1), (("zstd", 7), 7), (("zstd", np.int64(22)), 22)], ids=["name", "level", "numpy"]
)
def test_fields_of_at_least_256_bytes_are_compressed(tmp_store: Path, given: Any, level: int) -> None:
    with dr.create(tmp_store, SCHEMA, compression=given, compaction="manual") as store:
        fill(store)
        store.refresh()
        before = [episode["obs"].copy() for episode in store.episodes]
        assert store.compact()["segments"] == 1
        assert [episode["obs"].tolist() for episode in store.episodes] == [obs.tolist() for obs in before]
    (leaf,) = attributes(tmp_store)["compressed"]
    assert leaf == "obs"
    assert attributes(tmp_store)["compressed"]["obs"]["level"] == level
    assert dr.open(tmp_store).verify(deep=True) == []


def test_segments_are_compressed_without_copying_packs(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, compression="zstd", compaction="manual") as store:
        for count in (1, 2):
            fill(store)
            assert store.compact(dry_run=True, only_compress=True)["segments"] == 1
            done = store.compact(only_compress=True)
            assert (done["segments"], done["steps"]) == (1, 30)
            assert [each["merged"] for each in store.info()["segments"]] == [1] * count
        assert store.compact(only_compress=True)["segments"] == 0
        assert store.verify(deep=True) == []
        assert store.compact()["segments"] == 2


def test_segments_without_wide_fields_are_not_put_into_packs_to_be_compressed(tmp_store: Path) -> None:
    narrow = dr.Schema(dr.Field((4,), "float32"), dr.Field((), "int64"))
    with dr.create(tmp_store, narrow, compression="zstd", compaction="manual") as store:
        for _ in range(2):
            with store.writer() as writer:
                writer.append_episode(np.zeros((4, 4), "f4"), np.zeros(3, int), np.ones(3), terminated=True)
        assert store.compact(only_compress=True)["segments"] == 0
        assert store.compact()["segments"] == 2


@pytest.mark.parametrize(
    "given", ["gzip", ("zstd", 0), ("zstd", 23), ("zstd", None), ("zstd", 1.5), 3, ("zstd",)], ids=str
)
def test_what_is_no_compression_is_refused_before_anything_is_made(tmp_store: Path, given: Any) -> None:
    with pytest.raises(ValueError, match="zstd"):
        dr.create(tmp_store, SCHEMA, compression=given)
    assert not tmp_store.exists()
    with dr.create(tmp_store, SCHEMA, compaction="manual") as store, pytest.raises(ValueError, match="zstd"):
        store.compact(compression=given)


def test_a_pack_of_fewer_rows_than_an_inner_chunk_is_whole(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, compression="zstd", compaction="manual") as store:
        with store.writer() as writer:
            frames = np.full((2, 16, 17), 9, np.uint8)
            writer.append_episode(frames, np.zeros((1, 255), np.uint8), np.ones(1), terminated=True)
        assert store.compact()["segments"] == 1
        assert store.verify(deep=True) == []
        store.refresh()
        (episode,) = store.episodes
        assert episode.obs.shape == (2, 16, 17)
        assert (episode.obs == 9).all()


def test_what_is_no_compaction_is_refused(tmp_store: Path) -> None:
    with pytest.raises(ValueError, match='^compaction must be "auto" or "manual", not \'never\'$'):
        dr.create(tmp_store, SCHEMA, compaction="never")  # type: ignore[arg-type]
    assert not tmp_store.exists()


def test_a_store_that_was_made_without_is_compressed_if_asked_and_stays_so(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, segment_steps="episode", compaction="manual") as store:
        fill(store)
        assert store.compact(compression="zstd")["segments"] == 3
        assert attributes(tmp_store)["compressed"].keys() == {"obs"}
        fill(store, 2)
        assert store.compact()["segments"] == 2  # without what is compressed, which it would decompress
        assert store.compact(compression="zstd")["segments"] == 2  # both packs
        assert attributes(tmp_store)["packed"]["members"] == 5
        store.refresh()
        assert [int(obs.max()) for obs in (episode["obs"] for episode in store.episodes)] == [10, 20, 30, 10, 20]
    assert dr.open(tmp_store).verify(deep=True) == []


def test_without_zstandard_the_extra_is_named(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pack(tmp_store, 3)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(dr.MissingExtra, match=r"pip install \"diskreplay\[zstd\]\""):
        dr.create(f"{tmp_store}-other", SCHEMA, compression="zstd")
    with dr.open(tmp_store) as store, pytest.raises(dr.MissingExtra, match=r"pip install \"diskreplay\[zstd\]\""):
        store.episodes[0]["obs"]
