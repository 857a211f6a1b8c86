"""The episodes of steps are those of the model, whatever snapshots were looked at before."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay.ids import EpisodeTable
from diskreplay.kernels.runs import Visible
from diskreplay.views import successors
from diskreplay.views.successors import EpisodeFinder
from tests.views.fakes import FLAT_SCHEMA, Snapshot
from tests.views.strategies import snapshots


class Older:
    """A snapshot of the same store, when fewer episodes had ended: they are open, with all of their steps."""

    def __init__(self, snapshot: Snapshot, count: int) -> None:
        self.generation, self.origin, self.lanes = snapshot.generation, snapshot.origin, snapshot.lanes
        self.log = snapshot.log.select(slice(count))
        self.open = EpisodeTable.concatenate([snapshot.log.select(slice(count, None)), snapshot.open])
        self.visible: Visible = snapshot.visible


@pytest.fixture(autouse=True, scope="module")
def few_at_once() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(successors, "_FEW", 1)
        yield


@pytest.mark.slow
@given(snapshots(FLAT_SCHEMA), st.data())
def test_each_step_has_its_episode_and_its_number_in_it(snapshot: Snapshot, data: st.DataObject) -> None:
    finder, ids = EpisodeFinder(), np.array(list(snapshot.model), np.int64)
    for _ in range(4):
        older = Older(snapshot, data.draw(st.integers(0, len(snapshot.log))))
        found = finder.find(older, ids)  # type: ignore[arg-type]
        assert ((ids - found.first) // found.stride).tolist() == [t for _, t in snapshot.model.values()]
        assert found.steps.tolist() == [len(episode.steps) for episode, _ in snapshot.model.values()]
        assert len(finder.find(older, ids[:0])) == 0  # type: ignore[arg-type]
