"""What one look after the other tells of stores that are written, evicted, damaged and deleted meanwhile."""

import multiprocessing
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.reading.known_segments import KnownSegments
from diskreplay.retention.policy import disk_usage
from diskreplay.store.activity import Activity, Look
from diskreplay.store.info import segment_state

SCHEMA = dr.Schema(dr.Field((2,), "float32"), dr.Field((), "int64"))


def append(writer: dr.Writer, steps: int, reward: float = 1.0, end: bool = True) -> None:
    obs = np.zeros(2, np.float32)
    for t in range(steps):
        writer.append(obs, 0, reward, end and t == steps - 1, next_obs=obs)


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    with dr.create(tmp_store, SCHEMA) as store:
        yield store


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The time of looks, which a test moves; rows have the real one."""
    now = [time.time()]
    monkeypatch.setattr("diskreplay.store.activity.time.time", lambda: now[0])
    return lambda seconds: now.__setitem__(0, now[0] + seconds)


def test_a_store_at_rest_has_totals_and_no_rates_at_first(store: dr.Store) -> None:
    with store.writer() as writer:
        append(writer, 5)
        append(writer, 3, reward=2.0)
        append(writer, 2, end=False)
    with Activity(store.path) as activity:
        look = activity.look()
    assert (look.steps, look.inserted, look.episodes, look.episodes_open) == (10, 10, 3, 0)
    assert (look.newest_episodes, look.mean_total_reward) == (3, pytest.approx((5 + 6 + 2) / 3))
    assert (look.steps_per_second, look.writers, look.problems) == (None, [], [])
    assert look.disk.bytes == disk_usage(store.path)[0]
    assert look.retention.share is None
    assert look.retention.oldest_age_s is not None


def test_an_empty_store_can_be_watched(store: dr.Store) -> None:
    with Activity(store.path) as activity:
        look = activity.look()
    assert (look.steps, look.episodes, look.mean_total_reward, look.retention.oldest_age_s) == (0, 0, None, None)


def test_each_writer_has_its_own_rate(store: dr.Store, clock: Any) -> None:
    with store.writer() as slow, store.writer(3) as fast, Activity(store.path) as activity:
        append(slow, 2, end=False)
        assert activity.look().steps_per_second is None
        clock(2.0)
        append(slow, 4, end=False)
        obs = np.zeros((3, 2), np.float32)
        for _ in range(10):
            fast.append(obs, np.zeros(3, np.int64), np.ones(3), np.zeros(3, bool), np.zeros(3, bool), obs)
        look = activity.look()
    assert look.steps_per_second == pytest.approx(17.0)
    one, three = sorted(look.writers, key=lambda writer: writer.lanes)
    assert (one.lanes, one.steps, one.steps_per_second, one.state) == (1, 6, pytest.approx(2.0), "writing")
    # Its first segment was made since the first look: all of it is new.
    assert (three.lanes, three.steps, three.state) == (3, 30, "writing")


def test_a_writer_goes_on_through_its_segments_and_is_closed_at_last(tmp_store: Path, clock: Any) -> None:
    with dr.create(tmp_store, SCHEMA, segment_steps=4) as store, Activity(tmp_store) as activity:
        with store.writer() as writer:
            append(writer, 3)
            activity.look()
            for _ in range(5):
                append(writer, 4)
            clock(1.0)
            look = activity.look()
            assert [(one.steps, one.state) for one in look.writers] == [(23, "writing")]
        clock(1.0)
        (closed,) = activity.look().writers
    assert (closed.state, closed.steps, closed.segments, closed.durable_behind_s) == ("closed", 23, (), None)


@pytest.mark.parametrize("leaves", [False, True])
def test_a_writer_that_closes_during_a_look_is_closed(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    def close_first(info: Any) -> str:
        writer.close()
        if leaves:
            shutil.rmtree(info.path)
        return segment_state(info)

    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer, Activity(tmp_store) as activity:
        append(writer, 3)
        monkeypatch.setattr("diskreplay.store.processes.segment_state", close_first)
        (one,) = activity.look().writers
    assert (one.state, one.segments, one.steps, one.durable_behind_s) == ("closed", (), 3, None)


def test_a_segment_that_is_sealed_while_it_is_read_first_is_sealed(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = KnownSegments.read

    def close_after(known: KnownSegments, number: int) -> Any:
        info = read(known, number)
        writer.close()
        return info

    with store.writer() as writer, Activity(store.path) as activity:
        append(writer, 3)
        monkeypatch.setattr(KnownSegments, "read", close_after)
        look = activity.look()
    assert (look.steps, look.writers) == (3, [])
    assert activity._follower.snapshot.rows_of(0) is None


def test_what_is_not_durable_is_told_by_its_age(tmp_store: Path, clock: Any) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer(durability="none") as writer, Activity(tmp_store) as looks:
        append(writer, 3, end=False)
        clock(100.0)
        (one,) = looks.look().writers
        assert one.durable_behind_s == pytest.approx(100.0, abs=30.0)
        assert one.seconds_since_append == pytest.approx(one.durable_behind_s, abs=1.0)
        writer.flush()
        (one,) = looks.look().writers
    assert one.durable_behind_s == 0.0


def test_the_newest_episodes_are_those_that_ended_last(store: dr.Store) -> None:
    with store.writer() as a, store.writer() as b, Activity(store.path) as activity:
        append(b, 1, reward=-1000.0)
        for e in range(70):
            append(a, 1, reward=float(e))
            append(b, 1, reward=float(e))
        for look in (activity.look(), activity.look()):
            assert (look.episodes, look.newest_episodes) == (141, 100)
            assert look.mean_total_reward == pytest.approx(np.mean(range(20, 70)))
        append(a, 2, reward=500.0)
        look = activity.look()
    assert look.episodes == 142
    assert look.mean_total_reward == pytest.approx((2 * sum(range(20, 70)) - 20 + 1000) / 100)


def test_many_lanes_are_followed_by_compiled_code_from_the_second_look_on(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diskreplay.store.activity._MANY_LANES", 3)
    obs, rng, flags = np.zeros((3, 2), np.float32), np.random.default_rng(0), np.zeros(3, bool)
    with dr.create(tmp_store, SCHEMA) as store, store.writer(num_envs=3) as writer, Activity(tmp_store) as activity:
        for number in range(3):
            for _ in range(20):
                writer.append(obs, np.zeros(3, int), np.ones(3), rng.random(3) < 0.2, flags, next_obs=obs)
            look = activity.look()
            assert activity._is_compiled is (number > 0)
            with Activity(tmp_store) as other:  # whose first look is without it
                plain = other.look()
            assert look.steps == 60 * (number + 1)
            assert (look.steps, look.episodes, look.mean_total_reward) == (
                plain.steps,
                plain.episodes,
                plain.mean_total_reward,
            )


def test_a_full_store_tells_what_leaves(tmp_store: Path, clock: Any) -> None:
    with dr.create(tmp_store, SCHEMA, capacity=20, segment_steps=5) as store, Activity(tmp_store) as activity:
        with store.writer() as writer:
            append(writer, 10)
            look = activity.look()
            assert (look.retention.share, look.retention.steps_gone) == (0.5, 0)
            clock(1.0)
            append(writer, 5)
            assert activity.look().retention.reached_in_s == pytest.approx(1.0)
            clock(1.0)
            for _ in range(7):
                append(writer, 5)
            look = activity.look()
        assert (look.steps, look.inserted, look.episodes) == (20, 50, 4)
        assert (look.retention.share, look.retention.steps_gone) == (1.0, 30)
        assert look.retention.gone_per_second == pytest.approx(15.0)
        assert look.disk.full_in_s is None  # it grows no more
        assert look.newest_episodes == 6  # with those that were seen and have left since


def test_episodes_that_are_evicted_and_a_store_that_is_resized_are_followed(tmp_store: Path) -> None:
    options: dict[str, Any] = {"segment_steps": 5}
    with dr.create(tmp_store, SCHEMA, **options) as store, store.writer() as writer, Activity(tmp_store) as activity:
        for e in range(6):
            append(writer, 5, reward=float(e))
        assert activity.look().steps == 30
        store._sealer.drain()
        store.refresh()
        store.evict(lambda episode: episode.total_reward < 10)
        look = activity.look()
        assert (look.steps, look.inserted, look.episodes) == (20, 30, 4)
        store.resize(capacity=10)
        look = activity.look()
        assert (look.steps, look.retention.capacity, look.retention.share) == (10, 10, 1.0)


def test_the_disk_grows_and_will_be_full(store: dr.Store, clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free = shutil._ntuple_diskusage(10**9, 0, 3_600_000)
    monkeypatch.setattr("diskreplay.store.activity.shutil.disk_usage", lambda path: free)
    sizes = iter([0, 1000, 1000 + 3600, 1000 + 72_000])
    monkeypatch.setattr("diskreplay.store.activity.DiskUse.read", lambda *_: next(sizes))
    with Activity(store.path) as activity:
        assert activity.look().disk.bytes_per_hour is None
        clock(3.6)
        assert activity.look().disk.bytes_per_hour is None  # blocks are reserved ahead
        clock(68.4)
        disk = activity.look().disk
    assert disk.bytes_per_hour == pytest.approx(3_600_000)
    assert disk.full_in_s == pytest.approx(3600)


@pytest.mark.parametrize("limits", [{"capacity": 100}, {"capacity_bytes": 4 * 10**6}])
def test_a_store_at_its_limit_does_not_grow(
    tmp_store: Path, clock: Any, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([0, 3_600_000, 3_800_000])
    monkeypatch.setattr("diskreplay.store.activity.DiskUse.read", lambda *_: next(sizes))
    with dr.create(tmp_store, SCHEMA, **limits) as store, store.writer() as writer:
        append(writer, 100)
        with Activity(tmp_store) as activity:
            activity.look()
            append(writer, 100)
            clock(100.0)
            disk = activity.look().disk
    assert (disk.bytes, disk.bytes_per_hour, disk.full_in_s) == (3_800_000, None, None)


def test_two_watches_that_began_at_different_times_agree_on_the_steps_of_writers(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, segment_steps=4, compaction="manual") as store, Activity(tmp_store) as early:
        writer = store.writer()
        early.look()
        for turn in range(5):
            append(writer, 4)
            store._sealer.drain()
            if turn == 2:
                store.compact()
        with Activity(tmp_store) as late:
            seen = [[(one.writer, one.steps, one.state) for one in each.look().writers] for each in (early, late)]
    assert seen[0] == seen[1]
    assert [steps for _, steps, _ in seen[0]] == [20]


def test_the_bytes_are_those_of_du_while_segments_come_and_go(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow the machine is, no next segment is made ready and no mark is written while the bytes are counted.
    monkeypatch.setattr("diskreplay.writing.rotation.LEAST_QUARTER_S", 3600.0)
    options: dict[str, Any] = {"capacity": 20, "segment_steps": 5}
    with (
        dr.create(tmp_store, SCHEMA, **options) as store,
        store.writer(durability=3600.0) as writer,
        Activity(tmp_store) as activity,
    ):
        for _ in range(12):
            append(writer, 5)
            store._sealer.drain()
            assert activity.look().disk.bytes == disk_usage(tmp_store)[0]


@pytest.mark.parametrize("given", [False, True])
def test_a_limiter_tells_its_counts_and_who_waits_where_its_numbers_are_known(store: dr.Store, given: bool) -> None:
    limiter = dr.RateLimiter(2.0, 4, 6.0, name="main", timeout=0.0)
    with store.writer(limiter=limiter) as writer, Activity(store.path, [limiter] if given else []) as activity:
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=4, limiter=limiter, seed=0)
        append(writer, 4, end=False)
        sampler.sample()
        (one,) = activity.look().limiters
        assert (one.name, one.inserted, one.drawn, one.samples_per_insert) == ("main", 4, 4, 1.0)
        assert (one.samples_until_held, one.inserts_until_held, one.held) == ((2, 5, None) if given else (None,) * 3)
        with pytest.raises(dr.RateLimited):
            sampler.sample()
        for _ in range(5):
            append(writer, 1, end=False)
        with pytest.raises(dr.RateLimited):
            append(writer, 1)
        (one,) = activity.look().limiters
        assert (one.inserts_until_held, one.held) == ((0, "writers") if given else (None, None))
        sampler.close()


def test_the_numbers_of_a_limiter_are_how_many_steps_go_until_it_holds(store: dr.Store) -> None:
    limiter = dr.RateLimiter(1.5, 3, 7.0, timeout=0.0)
    with store.writer(limiter=limiter) as writer, Activity(store.path, [limiter]) as activity:
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=1, limiter=limiter, seed=0)
        for turn in range(8):
            append(writer, 3, end=False)
            look = activity.look().limiters[0]
            assert look.samples_until_held is not None
            for _ in range(look.samples_until_held if turn % 2 else min(1, look.samples_until_held)):
                sampler.sample()
            if turn % 2:
                with pytest.raises(dr.RateLimited):
                    sampler.sample()
        sampler.sample() if activity.look().limiters[0].samples_until_held else None
        for _ in range(activity.look().limiters[0].inserts_until_held or 0):
            append(writer, 1, end=False)
        with pytest.raises(dr.RateLimited):
            append(writer, 1)
        sampler.close()


def test_saved_samplers_are_told_with_what_they_had_drawn(store: dr.Store) -> None:
    with store.writer() as writer:
        append(writer, 20)
    store.refresh()
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8, seed=0) as sampler:
        sampler.sample()
        sampler.save("learner")
        with Activity(store.path) as activity:
            (one,) = activity.look().samplers
            assert (one.name, one.batches, one.steps, one.batches_per_second) == ("learner", 1, 8, None)
            assert (one.view, one.distribution) == ("Transitions(n_step=1)", "Prioritized")
            saved = store.path / "samplers/learner/zarr.json"
            for _ in range(4):
                sampler.sample()
            sampler.save("learner")
            os.utime(saved.parent / "2/zarr.json", (time.time() + 1000, time.time() + 1000))
            (one,) = activity.look().samplers
            assert (one.batches, one.seconds_since_save) == (5, 0.0)
            assert one.batches_per_second is not None
            assert one.batches_per_second > 0
            assert activity.look().samplers[0].batches_per_second == one.batches_per_second
            saved.write_text("{")  # damaged: left out
            assert activity.look().samplers == []


def _write_and_wait(path: Path, ready: Any) -> None:
    with dr.open(path, "a") as store, store.writer() as writer:
        append(writer, 7, end=False)
        ready.set()
        time.sleep(60)


@pytest.mark.slow
def test_a_writer_that_dies_is_a_problem_until_it_is_sealed(store: dr.Store) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_write_and_wait, args=(store.path, ready))
    process.start()
    try:
        assert ready.wait(60)
        with Activity(store.path) as activity:
            assert [one.state for one in activity.look().writers] == ["writing"]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            look = activity.look()
            assert ([one.state for one in look.writers], look.steps) == (["dead"], 7)
            assert look.problems[0].startswith("writer 0 died")
            dr.open(store.path, "a").close()
            look = activity.look()
            assert ([one.state for one in look.writers], look.problems) == (["closed"], [])
    finally:
        process.kill()
        process.join()
        process.close()


def test_damage_and_quarantine_are_problems(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, segment_steps=5) as store, store.writer() as writer:
        for _ in range(3):
            append(writer, 5)
    (tmp_store / "segments/00000001/zarr.json").write_text("{")
    (tmp_store / "segments/00000001/durable/document").write_text("{")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dr.DamagedSegmentWarning)
        with Activity(tmp_store) as activity:
            look = activity.look()
            assert look.steps == 10
            assert look.problems[0].startswith("segment 1 is damaged")
            with dr.open(tmp_store, "a") as store:
                store.repair()
            look = activity.look()
    assert look.steps_in_quarantine == 5
    assert look.problems == ["entries in quarantine: 1; diskreplay repair --restore SEGMENT brings one back"]


def test_a_store_that_is_deleted_or_replaced_is_not_found(tmp_store: Path) -> None:
    dr.create(tmp_store, SCHEMA).close()
    with Activity(tmp_store) as activity:
        activity.look()
        shutil.rmtree(tmp_store)
        with pytest.raises(dr.StoreNotFound, match="was deleted"):
            activity.look()
    dr.create(tmp_store, SCHEMA).close()
    with Activity(tmp_store) as activity:
        tmp_store.rename(tmp_store.with_name("moved"))
        activity.look()  # it is followed
        dr.create(tmp_store, SCHEMA).close()
        with pytest.raises(dr.StoreNotFound, match="another store"):
            activity.look()


def test_nothing_is_written(store: dr.Store) -> None:
    with store.writer() as writer:
        append(writer, 5)
    store._sealer.drain()

    def states(look: Look | None = None) -> dict[str, tuple[int, int]]:
        found = (path.stat() for path in sorted(store.path.rglob("*")))
        return {str(number): (status.st_mtime_ns, status.st_size) for number, status in enumerate(found)}

    before = states()
    with Activity(store.path) as activity:
        activity.look()
        assert states() == before


def test_steps_that_are_put_into_a_pack_are_not_inserted_again(tmp_store: Path, clock: Any) -> None:
    with dr.create(tmp_store, SCHEMA, segment_steps="episode", compaction="manual") as store:
        with store.writer() as writer:
            for _ in range(4):
                append(writer, 5)
        with Activity(tmp_store) as activity:
            first = activity.look()
            with store.writer() as writer:
                append(writer, 3)
            number = max(row["writer"] for row in store.info()["writers"])
            store.compact()
            clock(1)
            look = activity.look()
    assert (first.inserted, look.inserted, look.steps) == (20, 23, 23)
    assert [(one.writer, one.steps) for one in look.writers] == [(number, 3)]
