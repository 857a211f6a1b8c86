"""What a capacity and an age leave of a store with several collectors: the newest steps by time."""

import time

import numpy as np
import pytest

import diskreplay as dr
from tests.tiers import whole_or_part

SCHEMA = dr.Schema(
    obs=dr.Field((1,), "float32"), action=dr.Field((), "int64"), extra={"value": dr.Field((), "float32")}
)


class Collectors:
    """Writers with lanes of their own that take turns; the last one may be slower. Steps are numbered as they come.

    An action is the number of its step; the observation is the lane's number.
    """

    def __init__(self, store, writers, lanes, slow, seed=0):
        self.rng = np.random.default_rng(seed)
        self.store, self.lanes, self.slow = store, lanes, slow
        self.writers = [store.writer(num_envs=lanes) for _ in range(writers)]
        self.steps = 0
        self.turns = 0

    def turn(self):
        self.turns += 1
        for i in self.rng.permutation(len(self.writers)).tolist():
            if self.slow and i == len(self.writers) - 1 and self.turns % 20:
                continue
            self.append(i)

    def append(self, i):
        lanes = np.arange(i * self.lanes, (i + 1) * self.lanes)
        numbers = np.arange(self.steps, self.steps + self.lanes)
        ends, none = self.rng.random(self.lanes) < 0.01, np.zeros(self.lanes, bool)
        obs = lanes[:, None].astype(np.float32)
        self.writers[i].append(obs, numbers, np.zeros(self.lanes), ends, none, obs, value=np.zeros(self.lanes))
        self.steps += self.lanes

    def close(self):
        for writer in self.writers:
            writer.close()


def visible(store):
    store.refresh()
    found = [np.asarray(episode.action)[episode.hidden_steps :] for episode in store.episodes]
    return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


def check(collectors, seen, capacity):
    """Compare what is seen with the newest steps."""
    assert seen.tolist() == list(range(max(0, collectors.steps - capacity), collectors.steps))


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("slow", [False, True], ids=["alike", "one is slow"])
@pytest.mark.parametrize(("writers", "lanes"), [(1, 1), (4, 1), (4, 16), (32, 1), (8, 8)])
def test_the_newest_steps_are_left_at_every_point(tmp_store, writers, lanes, slow):
    capacity = 1_000
    with dr.create(tmp_store, SCHEMA, capacity=capacity, segment_steps=100) as store, dr.open(tmp_store) as reader:
        collectors, checked = Collectors(store, writers, lanes, slow), 0
        while collectors.steps < 6 * capacity:
            collectors.turn()
            # A slow collector alone appends in one turn of twenty.
            if collectors.turns % 5 == 0 and collectors.steps >= checked + whole_or_part(1, 30):
                checked = collectors.steps
                check(collectors, visible(reader), capacity)
        with dr.open(tmp_store) as fresh:
            check(collectors, visible(fresh), capacity)
        collectors.close()
        check(collectors, visible(reader), capacity)
        with dr.open(tmp_store) as fresh:
            check(collectors, visible(fresh), capacity)
        store._sealer.drain()
        # What has left the view leaves the disk: a collector keeps the segments that it writes to.
        held = sum(episode.obs_rows for episode in _every_episode(tmp_store))
        assert held <= 2 * capacity + writers * 400
        assert store.verify(deep=True) == []


def _every_episode(path):
    """The episodes that are on disk, also those that the capacity hides."""
    with dr.open(path) as store:
        log = store.snapshot.log
        return [log.select(np.array([i])) for i in range(len(log))]


@pytest.mark.slow
def test_what_is_evicted_by_hand_does_not_bring_older_steps_back(tmp_store):
    with dr.create(tmp_store, SCHEMA, capacity=200, segment_steps=50) as store:
        collectors = Collectors(store, 4, 1, slow=False)
        for _ in range(300):
            collectors.turn()
        collectors.close()
        before = visible(store)
        store.evict(lambda episode: episode.action[-1] > 1_100)
        after = visible(store)
        assert 0 < len(after) < len(before)
        assert np.isin(after, before).all()
        with dr.open(tmp_store) as fresh:
            assert (visible(fresh) == after).all()


@pytest.fixture
def clock(monkeypatch):
    """How many nanoseconds all clocks are `ahead`."""
    clock, look = {"ahead": 0}, time.clock_gettime_ns
    monkeypatch.setattr("diskreplay.writing.append_cursor.clock_gettime_ns", lambda which: look(which) + clock["ahead"])
    for where in ("writing.episode_writer.clock_ns", "reading.follower.clock_ns", "retention.retention.clock_ns"):
        monkeypatch.setattr(f"diskreplay.{where}", lambda: look(time.CLOCK_BOOTTIME) + clock["ahead"])
    return clock


def test_steps_leave_one_by_one_when_they_are_too_old(tmp_store, clock):
    with dr.create(tmp_store, SCHEMA, max_age_s=60) as store:
        collectors = Collectors(store, 2, 1, slow=False)
        for number in range(30):
            collectors.turn()
            clock["ahead"] += 5 * 10**9
            newest = visible(store)
            # Each turn is 5 s after the one before; the last one was 5 s ago.
            assert newest.tolist() == list(range(max(0, 2 * (number - 10)), 2 * number + 2))
        collectors.close()


def test_what_is_too_old_leaves_beside_a_segment_whose_times_are_gone(tmp_store, clock):
    with dr.create(tmp_store, SCHEMA, max_age_s=60) as store:
        for number in range(2):
            with store.writer() as writer:
                for ahead in (0, 50):
                    clock["ahead"] = ahead * 10**9
                    for _ in range(5):
                        writer.append(np.zeros(1), number, 0.0, False, next_obs=np.zeros(1), value=0.0)
    with dr.open(tmp_store) as reader:
        assert np.bincount(visible(reader)).tolist() == [10, 10]
        for chunk in (tmp_store / "segments" / "00000000" / "time").glob("c*"):
            chunk.unlink()
        reader.snapshot.tables.forget()
        clock["ahead"] = 70 * 10**9  # what came first is too old now, in both segments
        with pytest.warns(dr.DamagedSegmentWarning):
            assert np.bincount(visible(reader)).tolist() == [0, 5]
