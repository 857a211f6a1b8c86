"""A batch gathered and summed in one call: the compiled kernel does what its twin does, and so do several threads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.kernels.table import get_kernel
from diskreplay.views import base, gather_plan
from diskreplay.views.base import CopyThreads
from tests.kernels.pairs import KERNELS
from tests.parity.test_sequences import views
from tests.views.fakes import Snapshot, gathered, offered
from tests.views.strategies import snapshots

REWARDS = (None, {"reward": 2.0, "bonus": -0.3}, {"bonus": 1.0})
FIELDS = (None, ("obs", "terminated"), ("reward",), ("action", "n_steps", "discount"))
WAYS = ("compiled", "plain", "in parts")


def calls_of(
    view: dr.Transitions, snapshot: Snapshot, ids: np.ndarray, fields: Any, way: str
) -> tuple[list[int], dict[str, np.ndarray]]:
    """Gather in one of the ways; return what each call of the kernel returned, and the batch."""
    at_once, threads = [], None

    def kernel(*arguments: Any) -> int:
        at_once.append(KERNELS["gather"][int(way == "plain")](*arguments))
        return at_once[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather_plan, "get_kernel", lambda name: kernel if name == "gather" else get_kernel(name))
        if way == "in parts":
            patch.setattr(base, "PART", 1)
            threads = CopyThreads(2)
        batch = gathered(view, snapshot, ids, fields, threads=threads, entropy=7)  # of those that draw something
    if threads is not None:
        threads.close()
    return at_once, batch


@pytest.mark.slow
@given(
    snapshots(),
    st.integers(1, 12) | st.none() | st.sampled_from(((1, 3), (2, 9))),
    st.sampled_from((0.0, 0.9, 1.0)),
    st.integers(1, 4),
    st.sampled_from(REWARDS),
    st.sampled_from(FIELDS),
    st.sampled_from((None, "bonus")),
    st.integers(0, 2**32 - 1),
)
def test_all_ways_gather_the_same_bytes(
    snapshot: Snapshot, n_step: Any, gamma: float, stack: int, reward: Any, fields: Any, discount: Any, seed: int
) -> None:
    view = dr.Transitions(n_step=n_step, gamma=gamma, frame_stack=stack, reward=reward, discount=discount)
    there = sorted(snapshot.sampleable(view.most_steps))
    if not there:
        return
    ids = np.random.default_rng(seed).choice(np.array(there, np.int64), 20)
    calls_of(view, snapshot, ids, fields, "plain")  # which maps what is needed
    found = [calls_of(view, snapshot, ids, fields, way) for way in WAYS]
    assert [at_once for at_once, _ in found] == [[-1], [-1], [-1, -1, -1]]
    for arrays in zip(*(batch.values() for _, batch in found), strict=True):
        assert len({array.tobytes() for array in arrays}) == 1


@pytest.mark.slow
@given(snapshots(), st.integers(1, 5))
def test_what_is_not_mapped_is_mapped_first_and_what_is_not_sampleable_refused(snapshot: Snapshot, n_step: int) -> None:
    view = dr.Transitions(n_step=n_step)
    there = sorted(snapshot.sampleable(n_step))
    if not there:
        return
    ids = np.array(there, np.int64)
    at_once, _ = calls_of(view, snapshot, ids, None, "compiled")
    assert at_once[0] >= 0
    assert at_once[1:] == [-1]
    with pytest.raises(IndexError):
        gathered(view, snapshot, [ids[-1] + (1 << 34)])


@pytest.mark.slow
@given(snapshots(), views())
def test_several_threads_gather_what_one_does(snapshot: Snapshot, view: dr.Sequences) -> None:
    ids = offered(view, snapshot) * 2
    alone = gathered(view, snapshot, ids)
    calls, copy = [], CopyThreads.copy
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "PART", 1)
        threads = CopyThreads(2)
        patch.setattr(CopyThreads, "copy", lambda *given: calls.append(given[0]) or copy(*given))
        for name, array in gathered(view, snapshot, ids, threads=threads).items():
            np.testing.assert_array_equal(array, alone[name])
    threads.close()
    assert threads in calls or not ids
