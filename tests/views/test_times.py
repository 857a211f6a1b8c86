"""The field `time` of a batch is when each step was published."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

SCHEMA = dr.Schema(
    obs=dr.Field((1,), "float32"), action=dr.Field((), "int64"), extra={"value": dr.Field((), "float32")}
)


@pytest.fixture
def collected(tmp_store: Path) -> Iterator[tuple[dr.Store, dict[int, float]]]:
    """A store with sealed and growing segments of two writers, and when each step was published, by its action."""
    with dr.create(tmp_store, SCHEMA, segment_steps=20) as store:
        vector, single, number = store.writer(num_envs=3), store.writer(), 0
        for t in range(40):
            obs, ends = np.zeros((3, 1), "f4"), np.array([t % 9 == 8, t % 5 == 4, False])
            vector.append(obs, number + np.arange(3), np.zeros(3), ends, ends & False, obs, value=np.zeros(3))
            single.append(obs[0], number + 3, 0.0, t % 7 == 6, next_obs=obs[0], value=0.0)
            number += 4
        store.refresh()
        at = {int(a): float(t) for e in store.episodes for a, t in zip(e.action, e.times, strict=True)}
        assert len(at) == 160
        yield store, at
        vector.close()
        single.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    "view",
    [
        dr.Transitions(),
        dr.Transitions(n_step=3, frame_stack=2),
        dr.Transitions(n_step=None),
        dr.Sequences(8, 4),
        dr.Sequences(5, 2, pad=False),
        dr.Sequences(8, stride=2, cross_episodes=True),
        dr.Episodes(),
        dr.Rollouts(4, next_value="value"),
    ],
    ids=str,
)
def test_every_view_has_times_on_request(collected: tuple[dr.Store, dict[int, float]], view: Any) -> None:
    store, at = collected
    with dr.Sampler(store, view, batch_size=64, seed=0, fields=("action", "time", "terminated")) as sampler:
        batch = sampler.sample()
        actions, times = batch.action.numpy(), batch.time.numpy()
        assert times.dtype == np.float64
        assert times.shape == actions.shape
        real = times > 0
        assert real.mean() > 0.2
        assert [at[a] for a in actions[real].tolist()] == times[real].tolist()
        assert (actions[~real] == 0).all()
        again = sampler.gather(batch.index.numpy().ravel())
        assert again.time.numpy().tolist() == times.tolist()
    with dr.Sampler(store, view, batch_size=4, seed=0) as sampler:
        assert "time" not in sampler.sample().keys()  # noqa: SIM118  # a batch is a Mapping: keys are what is meant
