"""What ranks share among themselves, for every view; and rollouts of many actors, which are given once."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

SCHEMA = dr.Schema(obs=dr.Field((), "int64"), action=dr.Field((), "int64"), extra={"value": dr.Field((), "float32")})
LANES = 6
VIEWS = {
    "transitions": dr.Transitions(n_step=3),
    "sequences": dr.Sequences(length=8, overlap=4),
    "every window": dr.Sequences(length=5, overlap=4),
    "moved back": dr.Sequences(length=7, overlap=0, pad=False),
    "dropped": dr.Sequences(length=4, stride=6, pad="drop"),
    "aligned to the end": dr.Sequences(length=7, overlap=2, align="end"),
    "across episodes": dr.Sequences(length=7, stride=3, cross_episodes=True),
    "episodes": dr.Episodes(),
}


def append(writer: Any, first: int, steps: int, rng: np.random.Generator) -> None:
    """Append steps whose action is the number of the step and whose episodes end at random."""
    lanes = np.arange(LANES)
    for step in range(first, first + steps):
        ends = rng.random(LANES) < 0.1
        numbers = step * LANES + lanes
        columns = [numbers, numbers, np.zeros(LANES), ends, np.zeros(LANES, bool), numbers + LANES]
        writer.append(*columns, value=np.zeros(LANES))


def shares(store: Any, view: Any, world_size: int) -> list[np.ndarray]:
    """What a pass over each rank's ids gives, as it comes."""
    found = []
    for rank in range(world_size):
        with dr.Sampler(
            store, view, dr.Sweep(passes=1), batch_size=500, seed=rank, rank=rank, world_size=world_size
        ) as mine:
            batches = [batch.index.numpy() for batch in mine]
        found.append(np.concatenate([np.zeros(0, np.int64), *batches]))
    return found


def lanes_of(numbers: np.ndarray) -> np.ndarray:
    """The lane of each step, by its number; a second writer begins with step 200, in lanes of its own."""
    return numbers % LANES + LANES * (numbers >= 200 * LANES)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, LANES])
@pytest.mark.parametrize("view", VIEWS)
def test_shares_are_even_complete_disjoint_and_of_every_lane_and_stay(
    tmp_store: Path, view: str, world_size: int
) -> None:
    rng, before = np.random.default_rng(0), [np.zeros(0, np.int64)] * world_size
    # Several segments a lane, all of one width: what is regular in ids must not show in shares.
    with dr.create(tmp_store, SCHEMA, segment_steps=150 * LANES) as store, store.writer(LANES) as writer:
        for first in (0, 200):
            append(writer, first, 200 if first == 0 else 300, rng)
            every, found = shares(store, VIEWS[view], 1)[0], shares(store, VIEWS[view], world_size)
            assert sorted(np.concatenate(found).tolist()) == sorted(every.tolist())
            assert len(set(every.tolist())) == len(every)
            fair, spread = len(every) / world_size, np.sqrt(len(every) / world_size * (1 - 1 / world_size))
            for mine, earlier in zip(found, before, strict=True):
                assert abs(len(mine) - fair) < 4 * spread
                # A window that was moved back to an episode's end leaves with the next steps of that episode only.
                assert np.isin(earlier[np.isin(earlier, every)], mine).all()
            before = found
        with dr.Sampler(store, VIEWS["transitions"], fields=("action",)) as sampler:
            assert all(len(np.unique(sampler.gather(mine).action % LANES)) == LANES for mine in before)


def test_lanes_of_rollouts_are_dealt_and_stay(tmp_store: Path) -> None:
    rng, view, world_size = np.random.default_rng(0), dr.Rollouts(10), 4
    with dr.create(tmp_store, SCHEMA, segment_steps=50 * LANES) as store, ExitStack() as stack:
        samplers = [
            stack.enter_context(dr.Sampler(store, view, rank=rank, world_size=world_size)) for rank in range(world_size)
        ]
        before: list[set[int]] = [set() for _ in samplers]
        given: list[int] = []
        for first in (0, 200):
            writer = stack.enter_context(store.writer(LANES))
            append(writer, first, 100, rng)
            writer.close()
            for sampler, earlier in zip(samplers, before, strict=True):
                lanes: set[int] = set()
                while True:
                    try:
                        batch = sampler.sample()
                    except dr.NotEnoughData:
                        break
                    given += batch.action.flatten().tolist()
                    lanes |= set(lanes_of(batch.action.flatten().numpy()).tolist())
                assert not lanes & set().union(*(other for other in before if other is not earlier))
                earlier |= lanes
        # Of two writers with six lanes, each rank gets three; the last step of a lane is bootstrapped with nothing.
        assert [len(lanes) for lanes in before] == [3] * world_size
        assert len(given) == len(set(given))
        assert len(given) >= 2 * LANES * 90


ACTORS, STEPS, CAPACITY = 32, 128, 50_000


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("writers", [1, ACTORS], ids=["a vector", "a writer each"])
@pytest.mark.parametrize("backlog", [1, CAPACITY // (ACTORS * STEPS) - 1])
def test_actors_in_lockstep_give_every_step_once_when_the_store_is_full(
    tmp_store: Path, writers: int, backlog: int
) -> None:
    """A full store of 32 actors, read after every rollout, or when nearly all that it holds is unread."""
    with ExitStack() as stack:
        store = stack.enter_context(dr.create(tmp_store, SCHEMA, capacity=CAPACITY))
        several = [stack.enter_context(store.writer(ACTORS if writers == 1 else None)) for _ in range(writers)]
        sampler = stack.enter_context(dr.Sampler(store, dr.Rollouts(STEPS, next_value="value")))
        rng, actors, first, read = np.random.default_rng(0), np.arange(ACTORS), 0, 0
        while first * ACTORS < 3 * CAPACITY:
            for step in range(first, first + backlog * STEPS):
                numbers, ends = step * ACTORS + actors, rng.random(ACTORS) < 0.01
                columns = [numbers, numbers, np.zeros(ACTORS), ends, np.zeros(ACTORS, bool), numbers + ACTORS]
                if writers == 1:
                    several[0].append(*columns, value=np.zeros(ACTORS))
                else:
                    for writer, *row in zip(several, *columns, strict=True):
                        writer.append(*row, value=0.0)
            first += backlog * STEPS
            for _ in range(backlog):
                wanted = (read + np.arange(STEPS))[:, None] * ACTORS + actors
                np.testing.assert_array_equal(sampler.sample().action.numpy(), wanted)
                read += STEPS
            with pytest.raises(dr.NotEnoughData, match="has 0 steps that were not given yet"):
                sampler.sample()
        assert len(store) == CAPACITY
        assert read == first
