"""Moments of a store that grows are those of a plain loop over all steps that there ever were."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.sampling import normalize as module
from diskreplay.sampling.normalize import RETURN, Moments, StoreMoments
from diskreplay.views.arguments import reward_leaves

SCHEMA = dr.Schema(
    obs={"x": dr.Field((3,), "float32"), "pair": (dr.Field((), "float64"), dr.Field((2, 2), "uint8"))},
    action=dr.Field((), "int64"),
    extra={"bonus": dr.Field((), "float64")},
)
LEAVES = ("obs/x", "obs/pair/0", "obs/pair/1")
WEIGHTS = {"reward": 1.0, "bonus": 0.5}
LANES, GAMMA = 3, 0.9


def made() -> StoreMoments:
    fields = {leaf: SCHEMA.leaves[leaf] for leaf in LEAVES}
    return StoreMoments(fields, reward_leaves(SCHEMA, WEIGHTS), GAMMA)


class Collector:
    """A writer of one lane and one of several, and a plain account of what they appended."""

    def __init__(self, store: dr.Store, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.one, self.several = store.writer(), store.writer(num_envs=LANES)
        self.values: dict[str, list[Any]] = {leaf: [] for leaf in LEAVES} | {RETURN: []}
        self.running = np.zeros(LANES + 1)

    def grow(self, steps: int) -> None:
        for _ in range(steps):
            x = self.rng.normal(5, 2, (LANES + 1, 3)).astype(np.float32)
            pair = self.rng.normal(-1e3, 1, LANES + 1), self.rng.integers(0, 256, (LANES + 1, 2, 2), np.uint8)
            reward, bonus = self.rng.standard_normal(LANES + 1).astype(np.float32), self.rng.random(LANES + 1)
            done, truncated = self.rng.random((2, LANES + 1)) < 0.1
            takes = self.rng.random(LANES) < 0.8  # lanes advance each on its own
            if takes.any():
                self.several.append(
                    {"x": x[:LANES], "pair": tuple(part[:LANES] for part in pair)},
                    np.zeros(LANES, int), reward[:LANES], done[:LANES], truncated[:LANES],
                    mask=takes, bonus=bonus[:LANES],
                )  # fmt: skip
            obs = {"x": x[-1], "pair": tuple(part[-1] for part in pair)}
            self.one.append(obs, 0, reward[-1], done[-1], truncated[-1], bonus=bonus[-1])
            for lane in [*np.flatnonzero(takes), LANES]:
                self.running[lane] = self.running[lane] * GAMMA + float(reward[lane]) + 0.5 * bonus[lane]
                for leaf, value in zip(LEAVES, (x, *pair), strict=True):
                    self.values[leaf].append(value[lane].astype(np.float64))
                self.values[RETURN].append(self.running[lane])
                if done[lane] or truncated[lane]:
                    self.running[lane] = 0.0

    def close(self) -> None:
        self.one.close()
        self.several.close()

    def check(self, found: StoreMoments) -> int:
        """Compare with mean and variance of all values in two passes; return how many there were."""
        for name, values in self.values.items():
            counted = found.moments[name]
            assert counted.count == len(values)
            np.testing.assert_allclose(counted.mean, np.mean(values, 0), rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(counted.var, np.var(values, 0), rtol=1e-9)
        return len(self.values[RETURN])


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    with dr.create(tmp_store, SCHEMA, segment_steps=60) as store:
        yield store


@pytest.fixture
def collector(store: dr.Store) -> Iterator[Collector]:
    collector = Collector(store)
    yield collector
    collector.close()


def newest(store: dr.Store) -> Any:
    store.refresh()
    return store.snapshot


@pytest.mark.slow
def test_each_step_counts_once_when_it_comes(
    store: dr.Store, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    place = module.place
    monkeypatch.setattr(module, "place", lambda snapshot, ids: read.append(len(ids)) or place(snapshot, ids))
    monkeypatch.setattr(module, "PIECE_BYTES", 500)  # several pieces at once
    found, compared = made(), 0
    for steps in (1, 1, 30, 2, 100, 1, 1, 7, 60):
        collector.grow(steps)
        found.follow(newest(store))
        compared += collector.check(found)
        found.follow(newest(store))
    assert compared > 2000
    # Nothing is read twice.
    assert sum(read) == len(collector.values[RETURN])
    assert store.num_episodes > 50


@pytest.mark.slow
def test_what_leaves_the_store_goes_on_counting(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, capacity=120, segment_steps=40) as store:
        collector, found = Collector(store), made()
        for steps in (20, 15, 15, 20, 15, 15, 15):
            collector.grow(steps)
            found.follow(newest(store))
            collector.check(found)
        assert len(store) == 120 < found.moments[RETURN].count
        collector.close()
        generation = store.snapshot.generation
        evicted = store.evict(lambda episode: int(episode.ids[0]) % 2 == 0)
        found.follow(newest(store))
        assert evicted > 0
        assert store.snapshot.generation != generation
        collector.check(found)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["state", "copy"])
def test_a_state_and_a_copy_go_on_with_the_same_bits(store: dr.Store, collector: Collector, way: str) -> None:
    found = made()
    for _ in range(5):
        collector.grow(9)
        found.follow(newest(store))
    other = copy.deepcopy(found) if way == "copy" else made()
    if way == "state":
        other.load_state_dict(found.state_dict())
    with dr.open(store.path) as again:
        for steps in (0, 1, 30, 5):
            collector.grow(steps)
            found.follow(newest(store))
            other.follow(newest(again))
            collector.check(other)
            for name, moments in found.moments.items():
                assert [np.asarray(part).tobytes() for part in moments] == [
                    np.asarray(part).tobytes() for part in other.moments[name]
                ]


def test_without_rewards_there_are_no_returns(store: dr.Store, collector: Collector) -> None:
    collector.grow(5)
    found = StoreMoments({"obs/x": SCHEMA.leaves["obs/x"]}, [], GAMMA)
    found.follow(newest(store))
    assert list(found.moments) == ["obs/x"]
    assert found.moments["obs/x"].count > 5


def test_an_older_snapshot_has_nothing_new(store: dr.Store, collector: Collector) -> None:
    found = made()
    collector.grow(30)
    older = newest(store)
    collector.grow(90)
    assert len(newest(store).oldest) > len(older.oldest)
    for snapshot in (store.snapshot, older, store.snapshot):
        found.follow(snapshot)
        collector.check(found)
    collector.grow(9)
    found.follow(newest(store))
    collector.check(found)


def test_segments_that_go_meanwhile_count_when_they_are_there(
    store: dr.Store, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = made()
    collector.grow(20)
    place = module.place

    def gone(*_: Any) -> Any:
        raise dr.SegmentGone("gone")

    monkeypatch.setattr(module, "place", gone)
    found.follow(newest(store))
    assert found.moments[RETURN].count == 0
    monkeypatch.setattr(module, "place", place)
    found.follow(newest(store))
    collector.check(found)


def broken(change: Any) -> dict[str, Any]:
    state = made().state_dict()
    change(state)
    return state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["moments"].pop("obs/x"), "these are moments of"),
        (lambda state: state["moments"]["obs/x"].update(mean=np.zeros(2)), "no state of the moments of a store: count"),
        (lambda state: state["moments"]["obs/x"].update(count=-1.0), "no state of the moments of a store: count is -1"),
        (lambda state: state["moments"]["obs/x"].update(var=-np.ones(3)), "at least -1.0"),
        (lambda state: state.update(newest=np.zeros(1, np.int64)), "newest and returns are not one id and one number"),
        (lambda state: state.pop("newest"), "KeyError"),
    ],
)
def test_what_is_no_state_of_these_fields_is_refused(change: Any, message: str) -> None:
    found = made()
    before = found.state_dict()
    with pytest.raises(ValueError, match=message):
        found.load_state_dict(broken(change))
    assert repr(found.state_dict()) == repr(before)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.floats(-1e6, 1e6), st.integers(0, 2**32 - 1))
def test_merged_moments_are_those_of_all_values(sizes: list[int], shift: float, seed: int) -> None:
    parts = [np.random.default_rng(seed).normal(shift, 1.0, (size, 2)) for size in sizes]
    found = Moments.none((2,))
    for part in parts:
        found = found.merged(Moments.of(part))
    every = np.concatenate(parts)
    assert found.count == len(every)
    np.testing.assert_allclose(found.mean, every.mean(0), rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(found.var, every.var(0), rtol=1e-6, atol=1e-9)
