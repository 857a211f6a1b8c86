"""Evictions by hand: hidden at once and whole, not counted, not drawn, deleted with their segment."""

import os
import shutil
import signal

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.commands import repair
from tests.testing.on_disk import set_words, words
from tests.testing.support import append_numbered, serial_schema
from tests.tiers import SHARES, each_share


def visible(store):
    store.refresh()
    shown = (serial for episode in store.episodes for serial in episode["serial"][episode.hidden_steps :])
    return sorted(map(int, shown))


def segments_on_disk(path):
    return sorted(int(folder.name) for folder in (path / "segments").glob("0*"))


def begins_with(*serials):
    return lambda episode: int(episode["serial"][0]) in serials


def write(store, episodes, steps=5, first=0):
    """Write sealed episodes of so many steps, numbered from `first`."""
    with store.writer() as writer:
        for start in range(first, first + episodes * steps, steps):
            append_numbered(writer, range(start, start + steps))


def steps_of(*firsts, steps=5):
    return [serial for first in firsts for serial in range(first, first + steps)]


@pytest.fixture
def store(tmp_store):
    with dr.create(tmp_store, serial_schema(), segment_steps=12, chunk_bytes=256) as store:
        yield store


def test_what_a_predicate_chooses_is_gone_in_every_process_that_refreshes(store):
    write(store, 8)
    with dr.open(store.path) as reader:
        assert store.evict(begins_with(5, 20)) == 10
        assert len(store) == 30
        assert visible(store) == steps_of(0, 10, 15, 25, 30, 35)
        assert visible(reader) == visible(store)
        assert reader.num_episodes == 6
    with dr.open(store.path) as late:
        assert visible(late) == visible(store)
    assert store.verify(deep=True) == []


def test_steps_of_open_segments_are_not_asked_about(store):
    write(store, 2)
    with store.writer() as writer:
        append_numbered(writer, range(10, 15))
        asked = []
        store.evict(lambda episode: asked.append(int(episode["serial"][0])))
        assert asked == [0, 5]
    assert store.evict(lambda episode: True) == 15
    assert visible(store) == []


def test_a_segment_that_is_hidden_whole_is_deleted(store):
    write(store, 12)
    store.refresh()
    by_segment = {}
    for episode in store.episodes:
        by_segment.setdefault(episode.segment, []).append(int(episode["serial"][0]))
    (one, firsts), *_ = sorted(by_segment.items())[2:]
    before = segments_on_disk(store.path)
    with dr.open(store.path) as reader:
        store.evict(begins_with(*firsts[:-1]))
        assert segments_on_disk(store.path) == before
        store.evict(begins_with(firsts[-1]))
        assert segments_on_disk(store.path) == [number for number in before if number != one]
        expected = [serial for serial in range(60) if serial - serial % 5 not in firsts]
        assert visible(store) == visible(reader) == expected
    assert store.info()["steps_evicted"] == len(firsts) * 5
    assert store.verify(deep=True) == []
    write(store, 4, first=60)
    assert visible(store) == expected + list(range(60, 80))


def test_the_best_episodes_by_return_are_kept(store):
    write(store, 10)
    rng = np.random.default_rng(0)
    store.refresh()
    returns = sorted(episode.total_reward for episode in store.episodes)
    least = returns[-3]
    assert store.evict(lambda episode: episode.total_reward < least) == 35
    assert sorted(episode.total_reward for episode in store.episodes) == returns[-3:]
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=64, seed=int(rng.integers(100)))
    assert set(sampler.sample().numpy()["serial"].tolist()) <= set(range(35, 50))
    sampler.close()


def test_a_policy_version_is_dropped(tmp_store):
    schema = serial_schema(extra={"policy_version": dr.Field((), "int32")})
    with dr.create(tmp_store, schema, segment_steps=12) as store:
        for version in range(3):
            with store.writer() as writer:
                for first in range(100 * version, 100 * version + 20, 5):
                    append_numbered(writer, range(first, first + 5), policy_version=version)
        assert store.evict(lambda episode: episode["policy_version"][0] == 1) == 20
        assert visible(store) == [*range(20), *range(200, 220)]
        assert {info["writer"] for info in store.info()["segments"]} == {0, 6} or len(store.info()["writers"]) == 2


def test_a_store_in_mode_r_and_what_is_no_function_are_refused(store):
    write(store, 1)
    with dr.open(store.path) as reader, pytest.raises(dr.ReadOnlyError, match='open it with mode "a" to evict'):
        reader.evict(lambda episode: True)
    with pytest.raises(
        ValueError,
        match="where must be a function of an episode, .*, not 5",
    ):
        store.evict(5)
    with pytest.raises(ZeroDivisionError):
        store.evict(lambda episode: 1 // 0)
    assert visible(store) == [0, 1, 2, 3, 4]


def test_evicted_ids_are_refused_not_drawn_and_their_priorities_are_gone(store):
    write(store, 10)
    store.refresh()
    gone = np.concatenate([e.ids for e in store.episodes if e["serial"][0] in (10, 15, 40)])
    kept = np.concatenate([e.ids for e in store.episodes if e["serial"][0] not in (10, 15, 40)])
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(alpha=1.0, beta=1.0), batch_size=64, seed=0)
    sampler.sample()
    sampler.update_priorities(gone, np.full(len(gone), 1000.0))
    sampler.update_priorities(kept, np.full(len(kept), 1.0))
    assert set(sampler.sample().index.tolist()) <= set(gone.tolist())
    store.evict(begins_with(10, 15, 40))

    drawn = sampler.sample()
    assert set(drawn.index.tolist()) <= set(kept.tolist())
    assert drawn.weight.numpy() == pytest.approx(1.0)
    assert sampler.update_priorities(gone, np.ones(len(gone))) == len(gone)
    assert sampler.update_priorities(np.append(kept[:2], gone[:3]), np.ones(5)) == 3
    assert not store.snapshot.holds(gone).any()
    assert store.snapshot.holds(kept).all()
    across = dr.Sequences(length=7, stride=1, cross_episodes=True)
    for view in (dr.Transitions(), dr.Sequences(2, 0), across, dr.Episodes(), dr.Transitions(n_step=None)):
        sampler.view = view
        with pytest.raises(dr.InvalidIndex, match="was evicted"):
            sampler.gather(gone[:1])
        assert set(sampler.sample().index.tolist()) <= set(kept.tolist())
    sampler.close()


def test_hidden_steps_do_not_count_towards_the_capacity_and_bring_nothing_back(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=50, segment_steps=20, chunk_bytes=1024) as store:
        write(store, 20)
        assert visible(store) == list(range(50, 100))
        with dr.open(tmp_store) as reader:
            store.evict(begins_with(80, 85))
            left = [*range(50, 80), *range(90, 100)]
            assert visible(store) == visible(reader) == left
            with dr.open(tmp_store) as late:
                assert visible(late) == left
            # There is room for 10 more before the oldest leave.
            write(store, 2, first=100)
            assert visible(store) == visible(reader) == [*left, *range(100, 110)]
            write(store, 1, first=110)
            assert visible(store) == visible(reader) == [*left[5:], *range(100, 115)]
            assert len(store) == 50
            write(store, 40, first=115)
            assert visible(store) == visible(reader) == list(range(265, 315))
        assert store.verify(deep=True) == []


def limits_change(store):
    for capacity in (100, 400, None):
        store.resize(capacity=capacity)


@pytest.mark.parametrize("segment_steps", [None, 20, "episode"])
@pytest.mark.parametrize("change", [lambda store: store.evict(begins_with(63)), limits_change], ids=["evict", "resize"])
def test_a_capacity_that_cuts_through_a_call_of_a_vector_hides_nothing_else(tmp_store, change, segment_steps):
    lanes, none = 64, np.zeros(64, bool)
    obs, serials = np.zeros((lanes, 3), np.float32), np.arange(lanes)
    with dr.create(tmp_store, serial_schema(), capacity=100, segment_steps=segment_steps) as store:
        with store.writer(num_envs=lanes) as writer:
            for first in range(0, 4 * lanes, lanes):
                writer.append(obs, serials, np.zeros(lanes), none | (first == 192), none, obs, serial=serials + first)
        before = visible(store)
        assert before == list(range(256 - 100, 256))
        change(store)
        evicted = {63, 127, 191, 255} if store.capacity else set()
        left = [serial for serial in before if serial not in evicted]
        assert visible(store) == left
        with dr.open(tmp_store) as fresh:
            assert visible(fresh) == left
            assert fresh.verify(deep=True) == []


def test_an_episode_that_the_frontier_cuts_through_is_hidden_whole(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=23, segment_steps=20) as store:
        write(store, 10)
        assert visible(store)[0] == 27
        assert store.evict(lambda episode: 27 in episode["serial"]) == 5
        assert visible(store) == list(range(30, 50))
        assert store.verify(deep=True) == []


def test_two_processes_do_not_hide_an_episode_twice(store):
    write(store, 6)
    with dr.open(store.path, "a") as other:
        turns = iter([lambda: other.evict(begins_with(5, 10))])

        def where(episode):
            for turn in turns:  # in the middle of the other's
                turn()
            return int(episode["serial"][0]) in (10, 15)

        assert store.evict(where) == 5
        assert visible(store) == visible(other) == steps_of(0, 20, 25)
    assert store.info()["steps_evicted"] == 15
    assert store.verify(deep=True) == []


def test_more_episodes_than_a_chunk_of_entries_holds(tmp_store):
    episodes = 4096 + 50
    with dr.create(tmp_store, serial_schema()) as store:
        write(store, episodes, steps=1)
        with dr.open(tmp_store) as reader:
            assert store.evict(lambda episode: episode["serial"][0] < 4096 - 3) == 4096 - 3
            assert store.evict(lambda episode: episode["serial"][0] < 4096 + 20) == 23
            assert visible(reader) == list(range(4096 + 20, episodes))
        assert store.verify(deep=True) == []
        with dr.open(tmp_store) as late:
            assert visible(late) == list(range(4096 + 20, episodes))


def test_limiters_count_evicted_steps_as_inserted_and_not_as_held(store):
    limiter = dr.RateLimiter(1.0, 20, 1000, timeout=0)
    attached = limiter.attach(store)
    write(store, 10)
    assert attached.counts()[0] == (50, 50)
    store.evict(begins_with(0, 30))
    assert attached.counts()[0] == limiter.attach(store).counts()[0] == (50, 40)
    store.evict(lambda episode: episode["serial"][0] < 25)
    assert len(segments_on_disk(store.path)) < 5
    assert attached.counts()[0] == limiter.attach(store).counts()[0] == (50, 20)
    write(store, 1, first=50)
    assert attached.counts()[0] == limiter.attach(store).counts()[0] == (55, 25)


def test_rollouts_leave_out_what_is_evicted(tmp_store):
    schema = serial_schema(extra={"value": dr.Field((), "float32")})
    with dr.create(tmp_store, schema, segment_steps=1000) as store:
        with store.writer() as writer:
            for first in range(0, 40, 5):
                append_numbered(writer, range(first, first + 5), value=0.0)
        sampler = dr.Sampler(store, dr.Rollouts(10))
        assert sampler.sample().numpy()["serial"].ravel().tolist() == list(range(10))
        store.evict(begins_with(10, 20))
        assert sampler.sample().numpy()["serial"].ravel().tolist() == steps_of(15, 25)
        sampler.close()


def test_counts_of_a_store_add_up(store):
    write(store, 10)
    store.evict(begins_with(0, 5, 10, 15, 30))
    info = store.info()
    assert (info["steps"], info["steps_evicted"], info["episodes"]["total"]) == (25, 25, 5)
    assert sum(segment["steps"] for segment in info["segments"]) == 25
    assert sum(writer["steps"] for writer in info["writers"]) == 25
    assert len(store.episode_table()["id"]) == 5


# --- when it dies in the middle --------------------------------------------------------------------------------------

OPERATIONS = ("rename", "replace", "fsync", "fdatasync", "write", "pwrite", "rmdir")


def evict_and_die(path, operation, chosen):
    """Evict in a child process that dies just before its nth file operation; tell whether it died."""
    pid = os.fork()
    if pid == 0:
        left = [operation]

        def counted(call):
            def dying(*args, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return dying

        code = 1
        try:
            store = dr.open(path, "a")
            store._counters.set = counted(store._counters.set)
            for name in OPERATIONS:
                setattr(os, name, counted(getattr(os, name)))
            store.evict(begins_with(*chosen))
            code = 0
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, 4096 - 1])
@each_share
def test_a_process_that_dies_before_any_file_operation_hides_all_or_nothing(tmp_path, before, share):
    """With all entries of the first chunk but one in use, the entries lie in two chunks."""
    original = tmp_path / "original"
    with dr.create(original, serial_schema(), segment_steps=12 if not before else None, capacity=5000) as store:
        if before:
            write(store, before, steps=1, first=1000)
        write(store, 8)
        if before:
            store.evict(lambda episode: len(episode) == 1)
        everything = visible(store)
        evicted = store.info()["steps_evicted"]
    chosen = (0, 5, 10, 20)  # a whole segment, and a part of another
    outcomes = []
    for operation in [0, *range(1 + share, 1000, SHARES)]:
        path = tmp_path / "store"
        shutil.copytree(original, path)
        died = evict_and_die(path, operation, chosen)
        with dr.open(path, "a") as store:
            found = visible(store)
            assert found in (everything, [serial for serial in everything if serial - serial % 5 not in chosen])
            outcomes.append(found != everything)
            # Whoever comes next finds nothing in its way, and no step counts twice.
            store.evict(begins_with(*chosen))
            assert visible(store) == [serial for serial in everything if serial - serial % 5 not in chosen]
            assert store.info()["steps_evicted"] == evicted + 20
            write(store, 1, first=100)
            assert visible(store)[-5:] == [100, 101, 102, 103, 104]
            assert store.verify(deep=True) == []
        shutil.rmtree(path)
        if not died:
            break
    assert operation > 10
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


def test_a_full_disk_hides_nothing(store, monkeypatch):
    write(store, 4)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(dr.StorageFull):
            store.evict(begins_with(5))
    assert visible(store) == list(range(20))
    assert store.evict(begins_with(5)) == 5
    assert store.verify(deep=True) == []


def test_repair_restores_the_document_and_later_evictions_go_on(store):
    write(store, 6)
    store.evict(begins_with(0))
    (store.path / "evictions" / "zarr.json").unlink()
    assert [problem.where for problem in store.verify()] == ["evictions/zarr.json"]
    assert [action.what for action in repair(store.path).actions] == ["restored"]
    assert store.verify(deep=True) == []
    store.evict(begins_with(25))
    assert store.verify(deep=True) == []
    assert visible(store) == list(range(5, 25))


def test_an_entry_that_is_there_twice_or_names_nothing_is_found(store):
    write(store, 6)
    store.evict(begins_with(5, 15))
    entries = np.fromfile(store.path / "evictions" / "c.0.0", "<i8").reshape(-1, 2)
    assert [steps for _, steps in entries[:2].tolist()] == [5, 5]
    assert not entries[2:].any()
    entries[1] = entries[0]
    entries.tofile(store.path / "evictions" / "c.0.0")
    assert [problem.kind for problem in store.verify()] == ["eviction"]
    entries[1] = 0, 0
    entries.tofile(store.path / "evictions" / "c.0.0")
    assert "eviction" in [problem.kind for problem in store.verify()]
    with pytest.raises(dr.FormatError, match="is not an episode"):
        dr.open(store.path)


def test_an_eviction_at_rest_reads_as_the_format_says(store):
    write(store, 6)
    store.refresh()
    first = int(store.episodes[2].ids[0])
    store.evict(begins_with(10))
    assert words(store.path)["evictions"] == 1
    assert np.fromfile(store.path / "evictions" / "c.0.0", "<i8")[:2].tolist() == [first, 5]


@pytest.mark.parametrize("entries", [1, 1 << 20, 1 << 35])
def test_a_damaged_count_of_entries_makes_no_files(tmp_store, entries):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    (tmp_store / "evictions" / "c.0.0").unlink()
    set_words(tmp_store, evictions=entries)
    before = sorted(os.listdir(tmp_store / "evictions"))
    with pytest.raises(dr.FormatError, match="c\\..*is missing"):
        dr.open(tmp_store, "a")
    assert sorted(os.listdir(tmp_store / "evictions")) == before
