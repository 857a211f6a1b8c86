"""Windows of a drawn number of steps are those of the view with that number, drawn evenly and reproducibly."""

import re
from collections import Counter
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from scipy.stats import chisquare

import diskreplay as dr
from tests.views.fakes import (
    FLAT_SCHEMA,
    SCHEMA,
    Segment,
    Snapshot,
    check_every_id,
    episode,
    fields_of,
    gathered,
    offered,
)
from tests.views.strategies import snapshots
from tests.views.test_hindsight import SCHEMA as GOAL_SCHEMA, distance

ranges = st.tuples(st.integers(1, 6), st.integers(1, 9)).filter(lambda pair: pair[0] < pair[1])


def same(found: dict[str, np.ndarray], views: list[Any], snapshot: Snapshot, ids: Any) -> int:
    """Compare each item with that of the view of its number of steps, to the bit; return how many there are."""
    fixed = [gathered(view, snapshot, ids) for view in views]
    for i in range(len(ids)):
        alike = [batch for batch in fixed if batch["n_steps"][i] == found["n_steps"][i]]
        assert alike, found["n_steps"][i]
        # At an episode's end several numbers give one window.
        for batch in alike:
            for name, array in batch.items():
                assert array[i].tobytes() == found[name][i].tobytes(), name
    return len(ids)


@pytest.mark.slow
@given(
    snapshots(),
    ranges,
    st.integers(1, 4) | st.just({"image": 3}),
    st.sampled_from(((), ("action",), ("bonus", "hidden"))),
    st.sampled_from((None, "bonus")),
    st.integers(0, 2**62 - 1),
)
def test_each_item_is_that_of_the_number_drawn_for_it(
    snapshot: Snapshot, n: Any, stack: Any, next_fields: Any, discount: Any, entropy: int
) -> None:
    view = dr.Transitions(n, 0.9, stack, next_fields=next_fields, discount=discount)
    ids = sorted(snapshot.sampleable(n[1], bool(next_fields)))
    views = [replace(view, n_step=number) for number in range(n[0], n[1] + 1)]
    found = gathered(view, snapshot, ids, entropy=entropy)
    same(found, views, snapshot, ids)
    later = view.reader(snapshot.schema).for_device()
    later.seed(entropy)
    for name, array in fields_of(later, snapshot, ids).items():
        assert array.tobytes() == found[name].tobytes(), name
    most = gathered(view, snapshot, ids)
    for name, array in gathered(views[-1], snapshot, ids).items():
        assert array.tobytes() == most[name].tobytes(), name


@pytest.mark.slow
@given(snapshots(FLAT_SCHEMA), ranges)
def test_the_steps_that_can_be_sampled_are_those_of_the_largest_number(snapshot: Snapshot, n: Any) -> None:
    view = dr.Transitions(n)
    ids = offered(view, snapshot)
    assert sorted(ids) == sorted(snapshot.sampleable(n[1]))
    check_every_id(view, snapshot, ids, snapshot.model)


def long_episodes(schema: dr.Schema, rng: np.random.Generator, *lengths: int) -> Snapshot:
    ends = ("terminated", "truncated", "terminated")
    lanes = [[episode(schema, steps, end, True, rng)] for steps, end in zip(lengths, ends, strict=True)]
    return Snapshot(schema, [Segment(lanes, chunk_rows=16)])


def test_5000_items_equal_the_views_of_their_numbers_which_are_drawn_evenly() -> None:
    snapshot = long_episodes(SCHEMA, np.random.default_rng(0), 300, 200, 7)
    view = dr.Transitions((2, 6), 0.97, frame_stack=3)
    ids = np.random.default_rng(1).choice(sorted(snapshot.model), 5_000)
    found = gathered(view, snapshot, ids, entropy=11)
    assert same(found, [replace(view, n_step=n) for n in range(2, 7)], snapshot, ids) == 5_000
    inside = [i for i, step_id in enumerate(ids) if _left(snapshot, step_id) >= 6]
    counts = Counter(found["n_steps"][inside].tolist())
    assert sorted(counts) == [2, 3, 4, 5, 6]
    assert chisquare(list(counts.values())).pvalue > 0.01
    again, other = (gathered(view, snapshot, ids, entropy=entropy)["n_steps"] for entropy in (11, 12))
    assert np.array_equal(again, found["n_steps"])
    assert not np.array_equal(other, found["n_steps"])


def _left(snapshot: Snapshot, step_id: int) -> int:
    model, t = snapshot.model[step_id]
    return len(model.steps) - t


def test_what_lies_behind_a_short_window_is_mapped_too() -> None:
    drawn = set()
    for entropy in range(12):
        # Chunks of 2 rows, none of them mapped: the observation behind a window is in one of several.
        steps = episode(SCHEMA, 12, "terminated", True, np.random.default_rng(0))
        snapshot = Snapshot(SCHEMA, [Segment([[steps]], chunk_rows=2)])
        ids = sorted(snapshot.model)[:1]
        view = dr.Transitions((1, 9))
        drawn.add(int(gathered(view, snapshot, ids, entropy=entropy)["n_steps"][0]))
        same(
            gathered(view, snapshot, ids, entropy=entropy),
            [replace(view, n_step=n) for n in range(1, 10)],
            snapshot,
            ids,
        )
    assert len(drawn) > 4


def test_a_seed_is_for_one_batch() -> None:
    snapshot = long_episodes(FLAT_SCHEMA, np.random.default_rng(0), 40, 40, 40)
    reader, ids = dr.Transitions((1, 5)).reader(FLAT_SCHEMA), sorted(snapshot.model)[:20]
    reader.seed(3)
    assert len(set(fields_of(reader, snapshot, ids)["n_steps"])) > 1
    assert fields_of(reader, snapshot, ids)["n_steps"].tolist() == [5] * 20


@pytest.mark.slow
@given(snapshots(GOAL_SCHEMA), ranges, st.sampled_from((None, "bonus")), st.integers(0, 2**62 - 1))
def test_relabelled_items_have_the_returns_of_their_numbers(
    snapshot: Snapshot, n: Any, discount: Any, entropy: int
) -> None:
    # With the final goal nothing depends on chance but the numbers of steps.
    view = dr.Transitions(n, 0.9, relabel=dr.Hindsight("final", 1.0, distance), discount=discount)
    ids = sorted(snapshot.sampleable(None))
    found = gathered(view, snapshot, ids, entropy=entropy)
    for number in range(n[0], n[1] + 1):
        fixed = gathered(replace(view, n_step=number), snapshot, ids, entropy=entropy)
        alike = fixed["n_steps"] == found["n_steps"]
        for name, array in fixed.items():
            assert array[alike].tobytes() == found[name][alike].tobytes(), name


@pytest.mark.slow
@given(snapshots(), ranges, st.integers(1, 4), st.booleans())
def test_the_pages_are_those_of_every_number_that_may_be_drawn(
    snapshot: Snapshot, n: Any, stack: int, with_next: bool
) -> None:
    view = dr.Transitions(n, frame_stack=stack, next_fields=("action",) if with_next else ())
    ids = np.array(sorted(snapshot.sampleable(n[1], with_next)), np.int64)
    if not len(ids):
        return
    asked = set(pages_of(view, snapshot, ids))
    needed = {page for k in range(1, n[1] + 1) for page in pages_of(replace(view, n_step=k), snapshot, ids)}
    # Next fields are asked for as far as observations go: a step more at an episode's end.
    assert asked >= needed if with_next else asked == needed


def pages_of(view: Any, snapshot: Snapshot, ids: np.ndarray) -> list[int]:
    pages = view.reader(SCHEMA).pages(snapshot, ids)
    ranges = zip(pages.starts.tolist(), pages.sizes.tolist(), strict=True)
    return [page for start, size in ranges for page in range(start, start + size, PAGESIZE)]


def test_a_sampler_draws_them_reproducibly_and_gathers_the_largest(tmp_store: Path) -> None:
    rng = np.random.default_rng(0)
    with dr.create(tmp_store, FLAT_SCHEMA) as store, store.writer() as writer:
        writer.append_episode(
            rng.standard_normal((301, 4)).astype("f4"), np.zeros(300, int), np.ones(300, "f4"), terminated=True
        )
        samplers = [dr.Sampler(store, dr.Transitions((1, 5), gamma=1.0), batch_size=256, seed=s) for s in (0, 0, 1)]
        batches = [[sampler.sample() for _ in range(4)] for sampler in samplers]
        for one, other in zip(*batches[:2], strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert not torch.equal(batches[0][0].n_steps, batches[2][0].n_steps)
        for batch in batches[0]:
            assert set(batch.n_steps.tolist()) == {1, 2, 3, 4, 5}
            assert torch.equal(batch.reward, batch.n_steps.float())
        ids = store.episodes[0].ids
        gathered = samplers[0].gather(ids)
        assert gathered.n_steps.tolist() == [5] * 295 + [5, 4, 3, 2, 1]
        samplers[0].view = dr.Transitions(2)
        assert set(samplers[0].sample().n_steps.tolist()) <= {1, 2}


@pytest.mark.parametrize(
    ("n_step", "message"),
    [
        ((1, 2, 3), "n_step as a pair must be (least, most), not (1, 2, 3)"),
        ((0, 3), "n_step[0] must be an int of at least 1, not 0"),
        ((4, 3), "n_step[1] must be an int of at least 4, not 3"),
        ((1, 2.5), "n_step[1] must be an int of at least 1, not 2.5"),
        ((1, None), "n_step[1] must be an int of at least 1, not None"),
    ],
)
def test_a_range_that_makes_no_sense_is_refused(n_step: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Transitions(n_step)


def test_views_with_a_range_print_as_a_call_and_one_number_is_that_number() -> None:
    assert repr(dr.Transitions([1, 5])) == "Transitions(n_step=(1, 5))"
    assert dr.Transitions((3, 3)) == dr.Transitions(3)
    assert dr.Transitions((1, 5)).random
    assert not dr.Transitions((3, 3)).random
    assert dr.Transitions((1, 5)).kind == dr.Transitions(1).kind
