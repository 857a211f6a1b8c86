"""Without compiling, as ``NUMBA_DISABLE_JIT=1`` asks, the same batches come out."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.distributions.base import Distribution
from diskreplay.views.base import View
from tests.testing.packed import write_packed

ROOT = Path(__file__).parents[2]
BATCH = {"batch_size": 32, "seed": 0}
VIEWS = {
    "n steps": dr.Transitions(n_step=3),
    "stacks": dr.Transitions(n_step=2, frame_stack=3),
    "sequences": dr.Sequences(length=4, overlap=2),
    "over episodes": dr.Sequences(length=4, stride=2, cross_episodes=True),
    "episodes": dr.Episodes(),
}
NUMBERS = dr.Schema(
    obs={"number": dr.Field((), "float32"), "small": dr.Field((), "float16")},
    action=dr.Field((), "int64"),
    extra={"value": dr.Field((), "float32")},
)


def leaves(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a batch by name, also of nested fields."""
    found = {}
    for name, value in tree.items():
        inner = leaves(value) if isinstance(value, dict) else {"": value}
        found |= {f"{name}/{leaf}": array for leaf, array in inner.items()}
    return found


def all_batches(folder: Path) -> dict[str, np.ndarray]:
    """Draw from stores of every kind, by all that has kernels; return the arrays by name."""
    arrays: dict[str, np.ndarray] = {}
    for kind, how in (("raw", {}), ("compressed", {"compression": "zstd"})):
        write_packed(folder / kind, **how)
        with dr.open(folder / kind) as store:
            for name, view in VIEWS.items():
                arrays |= two_batches(f"{kind}, {name}", store, view, dr.Prioritized())
            arrays |= two_batches(f"{kind}, recent", store, VIEWS["n steps"], dr.Recency(half_life=9))
            arrays |= two_batches(f"{kind}, uniform", store, VIEWS["n steps"], dr.Uniform())
    return arrays | of_a_full_store(folder / "full") | rollouts(folder / "rollouts")


def two_batches(name: str, store: dr.Store, view: View, distribution: Distribution) -> dict[str, np.ndarray]:
    """Return two batches, with an update between them."""
    arrays = {}
    with dr.Sampler(store, view, distribution, **BATCH) as sampler:
        for batch in (0, 1):
            drawn = sampler.sample()
            arrays |= {f"{name}, batch {batch}, {leaf}": value for leaf, value in leaves(drawn.numpy()).items()}
            if sampler.distribution.weighted:
                sampler.update_priorities(drawn.index, np.arange(len(drawn.index)) - 7.5)
    return arrays


def append(writer: dr.VectorWriter, t: int) -> None:
    """Append step t in three lanes, whose episodes terminate at other times."""
    number, next_number = (np.arange(3.0) + at for at in (t, t + 1))
    obs, next_obs = ({"number": each, "small": each / 7} for each in (number, next_number))
    end = (t + np.arange(3)) % 11 == 10
    writer.append(obs, np.arange(3) * t, number / 3, end, next_obs=next_obs, value=number / 2)


def of_a_full_store(path: Path) -> dict[str, np.ndarray]:
    """Draw from a store that forgets its oldest steps, while it is written."""
    arrays = {}
    with (
        dr.create(path, NUMBERS, capacity=90, segment_steps=60) as store,
        store.writer(num_envs=3) as writer,
        dr.Sampler(store, dr.Transitions(n_step=3), dr.Prioritized(), **BATCH) as sampler,
    ):
        for t in range(80):
            append(writer, t)
            if t % 20 == 19:
                drawn = sampler.sample()
                arrays |= {f"full, {t}, {leaf}": value for leaf, value in leaves(drawn.numpy()).items()}
                sampler.update_priorities(drawn.index, np.arange(len(drawn.index)))
    return arrays


def rollouts(path: Path) -> dict[str, np.ndarray]:
    """Return rollouts of steps with values, and their advantages."""
    arrays = {}
    with dr.create(path, NUMBERS) as store, store.writer(num_envs=3) as writer:
        for t in range(20):
            append(writer, t)
        with dr.Sampler(store, dr.Rollouts(8), seed=0) as sampler:
            for batch in (0, 1):
                arrays |= {f"rollouts, {batch}, {k}": v for k, v in leaves(sampler.sample().numpy()).items()}
    return arrays


CHILD = """
import sys
from pathlib import Path
import numba
import numpy as np
numba.config.DISABLE_JIT = numba.config.DISABLE_JIT or sys.argv[2] == "config"
import tests.kernels.test_interpreted as test
from diskreplay.kernels import cache, table
assert cache.is_disabled() == (sys.argv[2] != "checked")
if sys.argv[2] == "checked":
    table._entry_of = lambda kernel: kernel  # so that numba checks the arguments of every call
folder = Path(sys.argv[1])
np.savez(folder / "arrays.npz", **test.all_batches(folder))
"""


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("by", ["environment", "config", "checked"])
def test_the_same_batches_come_out_without_compiling_and_if_numba_checks_all_arguments(by: str, tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    other_folder, compiled_folder = tmp_path / "other", tmp_path / "compiled"
    other_folder.mkdir()
    environment = os.environ | ({"NUMBA_DISABLE_JIT": "1"} if by == "environment" else {})
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", CHILD, str(other_folder), by]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert by == "checked" or "compiles" not in done.stderr
    found = np.load(other_folder / "arrays.npz")
    expected = all_batches(compiled_folder)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, name)
