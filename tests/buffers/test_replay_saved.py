"""Priorities of a replay buffer outlive it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.buffers.streams import serials, stream


def learn(buffer: dr.ReplayBuffer, batches: int) -> list[tuple[list[int], list[float]]]:
    """Sample and update; return what was drawn and with which weights."""
    found = []
    for _ in range(batches):
        batch = buffer.sample(8)
        buffer.update_priorities(batch.index, batch.actions % 7)
        found.append((batch.actions[:, 0].tolist(), batch.weights[:, 0].tolist()))
    return found


def filled(path: Path | None, steps: int = 30, **arguments: Any) -> dr.ReplayBuffer:
    beta = dr.Linear(0.0, 1.0, 20)
    buffer = dr.ReplayBuffer(100, path=path, **{"prioritized": True, "beta": beta, "seed": 0, **arguments})
    for step in stream(steps, start=len(buffer)):
        buffer.push(step)
    return buffer


def test_a_prioritized_buffer_that_is_opened_again_goes_on(tmp_path: Path) -> None:
    """The trap: it forgot its priorities. They, the random state and the schedule's count go on where they were."""
    with filled(None) as whole:
        expected = learn(whole, 30)
    with filled(tmp_path / "store") as buffer:
        found = learn(buffer, 10)
    with filled(tmp_path / "store", steps=0) as buffer:
        found += learn(buffer, 5)
        buffer.prioritized = False
    with filled(tmp_path / "store", steps=0) as buffer:  # it was saved while they were switched off
        found += learn(buffer, 5)
    with filled(tmp_path / "store", steps=0, prioritized=False) as buffer:  # opened without
        assert sorted(serials(buffer.sample(30))) == list(range(30))
    with filled(tmp_path / "store", steps=0, prioritized=False) as buffer:
        buffer.prioritized = True
        probabilities = np.bincount([x for ids, _ in learn(buffer, 10) for x in ids], minlength=30)
    assert found == expected[:20]
    assert probabilities[np.arange(30) % 7 == 0].sum() < probabilities[np.arange(30) % 7 == 6].sum()
    store = dr.open(tmp_path / "store")
    assert store.verify(deep=True) == []


def test_priorities_are_of_steps_whatever_the_view(tmp_store: Path) -> None:
    with filled(tmp_store, alpha=1.0) as buffer:
        batch = buffer.sample(30)
        buffer.update_priorities(batch.index, (batch.actions == 4).float() * 1e6)
    with filled(tmp_store, steps=0, n_step=3, gamma=0.5, alpha=1.0) as buffer:
        batch = buffer.sample(20)
        assert set(serials(batch)) == {4}
        assert (batch.n_steps == 3).all()


def test_steps_added_since_have_the_largest_priority_given(tmp_store: Path) -> None:
    with filled(tmp_store) as buffer:
        batch = buffer.sample(30)
        buffer.update_priorities(batch.index, np.where(batch.actions[:, 0] == 7, 1.0, 1e-6))
        assert set(batch.actions[:, 0].tolist()) == set(range(30))
    with filled(tmp_store, steps=5) as buffer:
        assert len(buffer) == 35
        drawn = np.concatenate([buffer.sample(35).actions[:, 0] for _ in range(50)])
        # Six of priority 1 next to 29 of (2e-6) ** 0.6.
        assert np.mean((drawn >= 30) | (drawn == 7)) > 0.98
        assert np.mean(drawn >= 30) == pytest.approx(5 / 6, abs=0.02)


KILLED = """
import os, sys
from pathlib import Path
import diskreplay.buffers.replay as replay
from tests.buffers.test_replay_saved import filled, learn
if sys.argv[2] == "every":
    replay.SAVE_EVERY_S = 0.0
buffer = filled(Path(sys.argv[1]))
learn(buffer, 10)
if sys.argv[2] == "save":
    buffer.save()
    learn(buffer, 3)
buffer.store  # still open
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("saved", ["save", "every"])
def test_a_buffer_that_is_killed_goes_on_from_what_was_saved_last(tmp_store: Path, saved: str) -> None:
    root = Path(dr.__file__).parents[1]
    command = [sys.executable, "-c", KILLED, str(tmp_store), saved]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, timeout=600, capture_output=True)
    assert done.returncode == -9, done.stderr
    with filled(None) as whole:
        expected = learn(whole, 20)
    with filled(tmp_store, steps=0) as buffer:
        assert len(buffer) == 30
        assert learn(buffer, 10) == expected[10:]


def test_priorities_that_are_damaged_are_told_and_the_store_is_closed(tmp_store: Path) -> None:
    with filled(tmp_store) as buffer:
        learn(buffer, 2)
    (document,) = (tmp_store / "samplers" / "replay-buffer").glob("*/zarr.json")
    document.write_text("{}")
    with pytest.raises(dr.FormatError):
        filled(tmp_store)
    with dr.open(tmp_store, "a") as store:
        store.delete_sampler_state("replay-buffer")
    with filled(tmp_store, steps=0) as buffer:
        assert len(buffer) == 30


def test_a_temporary_buffer_cannot_be_saved() -> None:
    with filled(None) as buffer, pytest.raises(ValueError, match="^this buffer is in a temporary folder"):
        buffer.save()
