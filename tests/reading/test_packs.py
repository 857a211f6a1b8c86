"""Readers of merged segments see what they saw before: new ones, those that follow, and those that stand still."""

import multiprocessing
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.crash.workloads import Single, Vector, create
from tests.testing.coded import check_coded_store
from tests.testing.merged import contents, folders, ignore, write_more
from tests.testing.on_disk import flip, segment_of
from tests.testing.packed import append, write_segments


@pytest.fixture
def store(many_segments: Path) -> Iterator[dr.Store]:
    """A store of sealed segments, open for writing."""
    with dr.open(many_segments, "a") as store:
        yield store


@pytest.fixture(params=[None, 300], ids=["whole", "in parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide arrays of packs as they are, or into parts of so few bytes that windows lie in several."""
    if request.param is not None:
        monkeypatch.setattr("diskreplay.segments.folder.PART_BYTES", request.param)


@pytest.mark.slow
@pytest.mark.usefixtures("parts")
def test_a_merged_store_is_read_as_before_by_whoever_reads_it(store: dr.Store) -> None:
    with dr.open(store.path) as follower, dr.open(store.path) as still:
        before, spans = contents(follower), check_coded_store(follower)
        done = store.compact()
        assert done["segments"] > 10
        assert len(folders(store.path)) == 2  # of each boot one
        assert done["steps"] == len(follower)
        assert contents(still) == before  # read from the pack: nothing of the segments was mapped
        assert follower.refresh() == 0
        assert contents(follower) == contents(store) == before
        with dr.open(store.path) as fresh:
            assert contents(fresh) == before
            assert check_coded_store(fresh) == spans


@pytest.mark.usefixtures("parts")
def test_rows_of_a_pack_are_views_wherever_they_lie(store: dr.Store) -> None:
    store.compact()
    with dr.open(store.path) as reader:
        for episode in reader.episodes:
            assert not episode.obs["code"].flags.owndata
            assert not episode.reward.flags.owndata


def numbered(number: int, steps: int) -> tuple[Any, ...]:
    """Return observations, actions and rewards of an episode."""
    return (
        np.full((steps + 1, 64), number, np.float32),
        np.arange(steps, dtype=np.uint8),
        np.full(steps, number, np.float32),
    )


@pytest.mark.slow(turns=4)
@pytest.mark.usefixtures("parts")
def test_packs_are_merged_with_what_came_later_and_old_snapshots_read_on(store: dr.Store) -> None:
    readers = [dr.open(store.path)]
    try:
        for number in (4, 7):
            store.compact()
            readers.append(dr.open(store.path))
            write_more(store.path, number)
            readers.append(dr.open(store.path))
        lengths = [len(reader) for reader in readers]
        store.compact()
        assert len(folders(store.path)) == 2
        with dr.open(store.path) as fresh:
            everything = {episode[0][0]: episode for episode in contents(fresh)}
        for reader, length in zip(readers, lengths, strict=True):
            found = contents(reader)
            assert sum(len(episode[0]) for episode in found) == length
            assert all(episode == everything[episode[0][0]] for episode in found)
            reader.refresh()
            assert {episode[0][0]: episode for episode in contents(reader)} == everything
    finally:
        for reader in readers:
            reader.close()


@pytest.mark.slow
def test_episodes_that_somebody_holds_are_read_on(store: dr.Store) -> None:
    with dr.open(store.path) as reader:
        held = list(reader.episodes)
        known = [held[0].obs["code"], held[0].obs["code"].copy()]
        store.compact()
        reader.refresh()
        write_more(store.path, 4)
        store.compact()
        reader.refresh()
        assert np.array_equal(*known)
        for episode, now in zip(held, reader.episodes, strict=False):
            assert np.array_equal(episode.ids, now.ids)
            assert np.array_equal(episode.obs["code"], now.obs["code"])
            assert np.array_equal(episode.times, now.times)
            assert np.array_equal(episode["priority"], now["priority"], equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_segment_that_a_reader_knew_live_is_found_in_a_pack(tmp_store: Path, rows: int) -> None:
    with (
        create(tmp_store, capacity=None, segment_steps=64) as store,
        dr.open(tmp_store) as reader,
        dr.open(tmp_store) as late,
    ):
        one, some = Single(store, 5, ignore), Vector(store, 6, ignore)
        for t in range(rows):
            one.step("terminated" if t == 3 else "", value=t == 3)
            some.step(ends=[t % 4], skip=[(t + 1) % 4])
        reader.refresh()
        for _ in range(4):
            some.step()
        late.refresh()
        one.step(known=False)
        some.block(1, 5)
        steps = len(reader)
        spans = [check_coded_store(one_of) for one_of in (reader, late)]
        one.close()
        some.close()
        assert store.compact()["segments"] == 2
        assert [check_coded_store(one_of) for one_of in (reader, late)] == spans
        arrived = reader.refresh()
        late.refresh()
        assert arrived == len(reader) - steps
        with dr.open(tmp_store) as fresh:
            assert contents(fresh) == contents(reader) == contents(late)
            check_coded_store(fresh)
            sealed = {segment["state"] for segment in fresh.info()["segments"]}
        assert sealed == {"sealed"}


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("capacity", [None, 200])
def test_readers_at_different_points_come_to_the_same(tmp_store: Path, capacity: int | None) -> None:
    readers = []
    with create(tmp_store, capacity=capacity, segment_steps=16, chunk_bytes=4096) as store:
        try:
            one, some = Single(store, 5, ignore), Vector(store, 6, ignore)
            for round_ in range(6):
                readers.append(dr.open(tmp_store))
                for t in range(18):
                    one.step("terminated" if t % 5 == 4 else "")
                    some.step(ends=[t % 5])
                readers.append(dr.open(tmp_store))
                if round_ % 2:
                    store._sealer.drain()
                    store.compact()
                for reader in readers[round_ % 3 :: 3]:
                    reader.refresh()
                    check_coded_store(reader)
            assert capacity is None or len(store) == capacity
            with dr.open(tmp_store) as fresh:
                last = contents(fresh)
                for reader in readers:
                    reader.refresh()
                    assert contents(reader) == last
            one.close()
            some.close()
        finally:
            for reader in readers:
                reader.close()


@pytest.mark.slow
def test_evicted_episodes_stay_evicted(store: dr.Store) -> None:
    with dr.open(store.path) as follower, dr.open(store.path) as late:
        chosen = {int(episode.ids[0]) for number, episode in enumerate(store.episodes) if number % 3 == 0}
        evicted = store.evict(lambda episode: int(episode.ids[0]) in chosen)
        assert evicted
        follower.refresh()
        before = contents(follower)
        steps = len(late)
        store.compact()
        follower.refresh()
        late.refresh()
        assert len(late) == steps - evicted
        assert contents(follower) == contents(late) == contents(store) == before
        write_more(store.path, 4)
        store.compact()
        with dr.open(store.path) as fresh:
            assert contents(fresh)[: len(before)] == before
            assert not chosen & {int(episode.ids[0]) for episode in fresh.episodes}


@pytest.mark.slow(turns=4)
def test_a_reader_goes_on_after_packs_that_it_never_saw_were_merged_and_left(tmp_store: Path) -> None:
    with create(tmp_store, capacity=400, segment_steps=16) as store, dr.open(tmp_store) as reader:
        one, some = Single(store, 5, ignore), Vector(store, 6, ignore)
        for round_ in range(7):
            for t in range(40):
                one.step("terminated" if t % 5 == 4 else "")
                some.step(ends=[t % 5])
            store._sealer.drain()
            store.compact()
            if round_ == 2:
                reader.refresh()
        assert folders(tmp_store)[0] > 10
        reader.refresh()
        assert len(reader) == 400
        check_coded_store(reader)
        with dr.open(tmp_store) as fresh:
            assert contents(reader) == contents(fresh)
        one.close()
        some.close()


def read_in_child(reader: dr.Store, sender: Any) -> None:
    sender.send([contents(reader), reader.refresh(), contents(reader)])


@pytest.mark.slow
def test_a_forked_child_reads_what_was_merged_meanwhile(store: dr.Store) -> None:
    with dr.open(store.path) as reader:
        before = contents(reader)
        receiver, sender = multiprocessing.Pipe(duplex=False)
        store.compact()
        child = multiprocessing.get_context("fork").Process(target=read_in_child, args=(reader, sender))
        child.start()
        assert receiver.recv() == [before, 0, before]
        child.join()
        receiver.close()
        sender.close()


def test_a_chunk_of_a_pack_that_is_missing_is_told(store: dr.Store) -> None:
    store.compact()
    folder = segment_of(store.path, folders(store.path)[-1])
    with dr.open(store.path) as reader:
        (folder / "action/c.0.0.0").unlink()
        with pytest.raises(dr.FormatError, match="is missing; the store is damaged"):
            contents(reader)


def test_a_segment_that_finds_no_memory_for_its_copy_from_a_pack_is_not_taken_for_evicted(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with dr.open(store.path) as reader:
        store.compact()

        def refuse(nbytes: int) -> Any:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr("diskreplay.segments.folder._zeros", refuse)
            with pytest.raises(MemoryError, match="^no memory for "):
                contents(reader)
        assert contents(reader) == contents(store)


@pytest.mark.parametrize("name", ["members/c.0.0", "runs/c.0.0", "zarr.json"])
def test_a_damaged_pack_is_left_out_with_a_warning_and_others_stay(store: dr.Store, name: str) -> None:
    store.compact()
    with dr.open(store.path) as reader:
        shown = contents(reader)
    file = segment_of(store.path, folders(store.path)[-1]) / name
    flip(file, file.stat().st_size // 3)
    (file.parents[1 if "/" in name else 0] / "durable/tables").unlink()
    with pytest.warns(dr.DamagedSegmentWarning):
        reader = dr.open(store.path)
    with reader:
        found = contents(reader)
        assert 0 < len(found) < len(shown)
        assert all(episode in shown for episode in found)
        assert reader.refresh() == 0


def test_members_that_lie_beside_a_pack_do_not_count(store: dr.Store, tmp_path: Path) -> None:
    before = contents(store)
    shutil.copytree(store.path, tmp_path / "copy")
    store.compact()
    for number in folders(tmp_path / "copy"):
        source = segment_of(tmp_path / "copy", number)
        target = segment_of(store.path, number)
        if not target.exists():
            shutil.copytree(source, target)
    with dr.open(store.path) as fresh:
        assert contents(fresh) == before
        assert len(fresh.info()["segments"]) == 2
    with dr.open(store.path, "a"):
        pass
    assert len(folders(store.path)) == 2


def values(store: dr.Store) -> dict[int, list[bytes]]:
    """Return all that is to be read of each episode, by the id of its first step."""
    names = "obs", "action", "reward", "serial", "wide", "priority"
    return {int(e.ids[0]): [np.asarray(e[n]).tobytes() for n in names] + [e.times.tobytes()] for e in store.episodes}


@pytest.mark.slow(turns=2)
@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    "compressions", [("zstd", "zstd"), (None, "zstd"), (("zstd", 3), None)], ids=["both", "the second", "the first"]
)
def test_old_snapshots_read_wide_fields_on_whatever_is_compressed(tmp_store: Path, compressions: Any) -> None:
    write_segments(tmp_store, compaction="manual")
    with ExitStack() as stack:
        store = stack.enter_context(dr.open(tmp_store, "a"))
        readers = [stack.enter_context(dr.open(tmp_store))]
        for compression in compressions:
            store.compact(compression=compression)
            readers.append(stack.enter_context(dr.open(tmp_store)))
            with store.writer() as writer:
                for first in range(0, 40, 20):
                    append(writer, 20, first)
            readers.append(stack.enter_context(dr.open(tmp_store)))
        lengths = [len(reader) for reader in readers]
        assert store.compact(compression=compressions[-1])["segments"]
        everything = values(stack.enter_context(dr.open(tmp_store)))
        for reader, length in zip(readers, lengths, strict=True):
            assert len(reader) == length
            assert values(reader).items() <= everything.items()
            with dr.Sampler(reader, dr.Transitions(), batch_size=64, seed=0, refresh=False) as sampler:
                batch = sampler.sample().numpy()
                assert (batch["wide"] == batch["wide"][:, :1]).all()
                assert len(np.unique(batch["index"])) > 32
            reader.refresh()
            assert values(reader) == everything
