"""Statistics of a store that grows are those of a plain loop over all steps that there ever were."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.views.inner import moments_of_gone_segments, moments_read_in_pieces

SCHEMA = dr.Schema(
    obs={"x": dr.Field((3,), "float32"), "pair": (dr.Field((), "float64"), dr.Field((2, 2), "uint8"))},
    action=dr.Field((), "int64"),
    extra={"bonus": dr.Field((), "float64")},
)
NAMES = ("x", "pair/0", "pair/1")
LEAVES = tuple(f"obs/{name}" for name in NAMES)
RETURN = "return"
WEIGHTS = {"reward": 1.0, "bonus": 0.5}
LANES, GAMMA = 3, 0.9


def sampler_of(store: dr.Store, transform: Any = None) -> tuple[dr.Sampler, Any]:
    """Make a sampler whose batches are normalised; a batch that it draws counts what is new."""
    transform = transform or dr.Normalize(NAMES, WEIGHTS, gamma=GAMMA)
    return dr.Sampler(store, dr.Transitions(), batch_size=4, seed=0, transform=transform), transform


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

    def check(self, found: dict[str, Any]) -> int:
        """Compare with mean and variance of all values in two passes; return how many there were."""
        for name, values in self.values.items():
            counted = found[name]
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


@pytest.mark.slow
def test_each_step_counts_once_when_it_comes(store: dr.Store, collector: Collector) -> None:
    sampler, transform = sampler_of(store)
    compared = 0
    with moments_read_in_pieces(500) as read:
        for steps in (2, 1, 30, 2, 100, 1, 1, 7, 60):
            collector.grow(steps)
            sampler.sample()
            compared += collector.check(transform.moments)
            sampler.sample()
    assert compared > 2000
    # Nothing is read twice.
    assert sum(read) == len(collector.values[RETURN])
    assert store.num_episodes > 50
    sampler.close()


@pytest.mark.slow
def test_what_leaves_the_store_goes_on_counting(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA, capacity=120, segment_steps=40) as store:
        collector, (sampler, transform) = Collector(store), sampler_of(store)
        for steps in (20, 15, 15, 20, 15, 15, 15):
            collector.grow(steps)
            sampler.sample()
            collector.check(transform.moments)
        assert len(store) == 120 < transform.moments[RETURN].count
        collector.close()
        generation = store.snapshot.generation
        evicted = store.evict(lambda episode: int(episode.ids[0]) % 2 == 0)
        sampler.sample()
        assert evicted > 0
        assert store.snapshot.generation != generation
        collector.check(transform.moments)
        sampler.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["state", "copy"])
def test_a_state_and_a_copy_go_on_with_the_same_bits(store: dr.Store, collector: Collector, way: str) -> None:
    sampler, transform = sampler_of(store)
    for _ in range(5):
        collector.grow(9)
        sampler.sample()
    with dr.open(store.path) as again:
        other, found = sampler_of(again, copy.deepcopy(transform) if way == "copy" else None)
        if way == "state":
            other.load_state_dict(sampler.state_dict())
        for steps in (0, 1, 30, 5):
            collector.grow(steps)
            sampler.sample()
            other.sample()
            collector.check(found.moments)
            for name, moments in transform.moments.items():
                assert [np.asarray(part).tobytes() for part in moments] == [
                    np.asarray(part).tobytes() for part in found.moments[name]
                ]
        other.close()
    sampler.close()


def test_without_rewards_there_are_no_returns(store: dr.Store, collector: Collector) -> None:
    collector.grow(5)
    sampler, transform = sampler_of(store, dr.Normalize(["x"]))
    sampler.sample()
    assert list(transform.moments) == ["obs/x"]
    assert transform.moments["obs/x"].count > 5


def test_segments_that_go_meanwhile_count_when_they_are_there(store: dr.Store, collector: Collector) -> None:
    collector.grow(20)
    sampler, transform = sampler_of(store)
    with moments_of_gone_segments():
        sampler.sample()
    assert transform.moments[RETURN].count == 0
    sampler.sample()
    collector.check(transform.moments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["moments"].pop("obs/x"), "these are moments of"),
        (
            lambda state: state["moments"]["obs/x"].update(mean=np.zeros(2)),
            "not a state of the moments of a store: count",
        ),
        (
            lambda state: state["moments"]["obs/x"].update(count=-1.0),
            "not a state of the moments of a store: count is -1",
        ),
        (lambda state: state["moments"]["obs/x"].update(var=-np.ones(3)), "at least -1.0"),
        (lambda state: state.update(newest=np.zeros(1, np.int64)), "newest and returns are not one id and one number"),
        (lambda state: state.pop("newest"), "KeyError"),
    ],
)
def test_what_is_no_state_of_these_fields_is_refused(store: dr.Store, change: Any, message: str) -> None:
    sampler, _ = sampler_of(store)
    before, state = sampler.state_dict(), sampler.state_dict()
    change(state["transforms"][0]["state"])
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert repr(sampler.state_dict()) == repr(before)
