"""Where buffers keep their stores, and when these go."""

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.inner import wait_for_dropped
from tests.testing.support import said


def replay() -> dr.ReplayBuffer:
    buffer = dr.ReplayBuffer(100)
    buffer.add(np.zeros(2), 0, 1.0, np.ones(2), False)
    return buffer


def rollout() -> dr.RolloutBuffer:
    buffer = dr.RolloutBuffer(2, 5)
    buffer.add(np.zeros((2, 3)), np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2))
    return buffer


def distillation() -> dr.DistillationBuffer:
    buffer = dr.DistillationBuffer(100)
    buffer.add(np.zeros((4, 3)), np.zeros((4, 2)))
    return buffer


EVERY = pytest.mark.parametrize("make", [replay, rollout, distillation])
WITHOUT_STORE = pytest.mark.parametrize("make", [rollout, distillation])


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which temporary ones are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_temporary_folder_goes_when_the_buffer_is_closed(temporary: Path) -> None:
    buffer = replay()
    (folder,) = temporary.iterdir()
    assert folder.name.startswith("diskreplay-")
    assert buffer.store.path == folder / "store"
    buffer.close()
    assert list(temporary.iterdir()) == []
    buffer.close()


def test_a_temporary_folder_goes_with_the_buffer(temporary: Path) -> None:
    buffer = replay()
    assert len(list(temporary.iterdir())) == 1
    del buffer
    gc.collect()
    assert list(temporary.iterdir()) == []


@WITHOUT_STORE
def test_a_buffer_of_tensors_makes_no_file(make: Callable[[], dr.RolloutBuffer], temporary: Path) -> None:
    buffer = make()
    assert buffer.store is None
    shown = repr(buffer)
    assert shown in (
        "RolloutBuffer(1 of 5 steps, num_envs=2, cpu)",
        "DistillationBuffer(4 of 100 pairs, cpu)",
    )
    assert list(temporary.iterdir()) == []
    buffer.close()
    buffer.close()
    assert buffer.store is None


def test_a_buffer_at_a_path_that_nobody_closes_is_sealed_with_a_warning(tmp_path: Path) -> None:
    buffer = dr.ReplayBuffer(10, path=tmp_path / "store")
    buffer.add(np.zeros(2), np.zeros(2), 0.0, np.ones(2), False)
    with pytest.warns(ResourceWarning, match="was not closed"):
        del buffer
    wait_for_dropped()
    with dr.open(tmp_path / "store") as store:
        assert [segment["state"] for segment in store.info()["segments"]] == ["sealed"]


@EVERY
def test_a_closed_buffer_says_so(make: Callable[[], dr.ReplayBuffer], temporary: Path) -> None:
    buffer = make()
    buffer.close()
    with pytest.raises(dr.Closed, match="closed"):
        len(buffer) if not isinstance(buffer, dr.RolloutBuffer) else buffer.sample()
    arguments = {dr.ReplayBuffer: 5, dr.RolloutBuffer: 6, dr.DistillationBuffer: 2}[type(buffer)]
    with pytest.raises(dr.Closed, match=f"^this {type(buffer).__name__} is closed; make another$"):
        buffer.add(*[np.zeros(2)] * arguments)


def test_a_batch_outlives_its_buffer(temporary: Path) -> None:
    buffer = replay()
    batch, experience = buffer.sample(1), buffer[0]
    buffer.close()
    assert batch.next_states.tolist() == [[1.0, 1.0]]
    assert experience.next_state.tolist() == [1.0, 1.0]


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    root = Path(dr.__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=600,
    )


FILL = """
import os, sys, tempfile
import numpy as np
import diskreplay as dr
kept = [dr.ReplayBuffer(100), dr.ReplayBuffer(100)]
for buffer in kept:
    buffer.add(np.zeros(2), 0, 1.0, np.ones(2), False)
there = lambda: len(os.listdir(tempfile.gettempdir()))
print(there())
"""


@pytest.mark.slow(turns=4)
def test_temporary_folders_go_when_the_process_dies_of_an_exception(tmp_path: Path) -> None:
    done = run(FILL + "raise RuntimeError('the end')", tmp_path)
    assert done.returncode == 1
    assert done.stdout == "2\n"
    assert done.stderr.endswith("RuntimeError: the end\n")
    assert done.stderr.count("Error") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow(turns=4)
def test_a_forked_child_leaves_its_parents_folders_alone(tmp_path: Path) -> None:
    child = """
pid = os.fork()
if pid == 0:
    kept.clear()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(there(), len(kept[0]), kept[0].sample(1).states.tolist())
"""
    done = run(FILL + child, tmp_path)
    assert (done.stdout, said(done.stderr)) == ("2\n2 1 [[0.0, 0.0]]\n", "")
    assert list(tmp_path.iterdir()) == []


def test_a_repr_says_which_store_it_has(temporary: Path) -> None:
    buffer = replay()
    assert repr(buffer) == f"{type(buffer).__name__}({buffer.store!r})"
    assert str(temporary) in repr(buffer)
    buffer.close()
