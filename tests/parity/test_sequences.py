"""Windows and whole episodes gathered in bytes equal the reference enumeration, every field of every step."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import diskreplay as dr
from diskreplay import Episodes, Sequences
from diskreplay.testing import ModelStore, check_store
from diskreplay.testing.model import ModelEpisode
from diskreplay.testing.nested import flat
from diskreplay.testing.reference import window, window_starts
from diskreplay.testing.scripts import play
from diskreplay.testing.strategies import schemas, writer_plans
from tests.testing.on_disk import POSITION_BITS
from tests.testing.support import quiet, scratch
from tests.views.fakes import SCHEMA, Segment, Snapshot, episode, gathered, offered
from tests.views.strategies import snapshots

seeds = st.integers(0, 2**32 - 1)
stacks = st.integers(1, 4) | st.dictionaries(st.sampled_from(("image", "state")), st.integers(1, 4))
pads = st.sampled_from((True, False, "drop"))
start_only = st.sampled_from(((), ("hidden",), ("bonus", "hidden")))


@st.composite
def views(draw: st.DrawFn) -> Sequences:
    length = draw(st.integers(1, 12))
    overlap, stride = draw(st.integers(0, length - 1)), draw(st.none() | st.integers(1, 15))
    burn_in = draw(st.integers(0, overlap if stride is None else length - 1))
    how = draw(pads), draw(stacks), draw(start_only), stride, False, draw(st.sampled_from(("start", "end")))
    return Sequences(length, overlap if stride is None else None, burn_in, *how)


def let_some_continue(snapshot: Snapshot, seed: int) -> set[int]:
    """Make some episodes continuations of ones cut for their length; return the ids that these begin at."""
    rng = np.random.default_rng(seed)
    width = 1 << POSITION_BITS
    # The first row of a lane would continue its last episode in the segment before, which the model does not know.
    in_lane = {i for i in snapshot.model if i % width >= snapshot.lanes[i // width - snapshot.origin]}
    chosen = {i for i, (_, t) in snapshot.model.items() if t == 0 and rng.random() < 0.4 and i in in_lane}
    done = snapshot.leaf("done")
    for step_id in chosen:
        slot = (step_id >> POSITION_BITS) - snapshot.origin
        row, lane = divmod(step_id & ((1 << POSITION_BITS) - 1), int(snapshot.lanes[slot]))
        done.row(slot, lane, row)[0] |= 16
    return chosen


def starts_of(view: Sequences, of: ModelEpisode) -> list[int]:
    return window_starts(of, view.length, view.stride or view.length - view.overlap, view.pad, view.align)


def windows_of(view: Sequences, snapshot: Snapshot) -> dict[int, tuple[ModelEpisode, int]]:
    """Ask the reference for all windows: the id of each, its episode and the step it starts at."""
    found = {}
    for step_id, (of, t) in snapshot.model.items():
        if t in starts_of(view, of):
            found[step_id] = of, t
    return found


def expected(view: Sequences, of: ModelEpisode, start: int, continues: bool) -> dict[str, Any]:
    """Ask the reference, leaf by leaf where their stacks differ."""
    depths = {leaf: view.frame_stack for leaf in ("image", "state")}
    if not isinstance(view.frame_stack, int):
        depths = {leaf: view.frame_stack.get(leaf, 1) for leaf in depths}
    found: dict[str, Any] = {}
    for leaf, depth in depths.items():
        whole = window(of, start, view.length, view.burn_in, depth, tuple(view.start_only), continues)
        found = {**whole, **found}
        found |= {name: whole[name] for name in (f"obs/{leaf}", f"next_obs/{leaf}")}
    return found


def compare(batch: dict[str, np.ndarray], item: int, want: dict[str, Any]) -> None:
    assert want.keys() == batch.keys() - {"index", "weight"}
    for name, value in want.items():
        np.testing.assert_array_equal(batch[name][item], value, err_msg=name)


@pytest.mark.slow
@given(snapshots(), views())
def test_the_ids_offered_are_the_windows_of_the_reference(snapshot: Snapshot, view: Sequences) -> None:
    assert Counter(offered(view, snapshot)) == Counter(windows_of(view, snapshot).keys())


@pytest.mark.slow
@given(snapshots(), views(), seeds)
def test_every_field_of_every_window_equals_the_reference(snapshot: Snapshot, view: Sequences, seed: int) -> None:
    continuing = let_some_continue(snapshot, seed)
    windows = windows_of(view, snapshot)
    ids = sorted(windows)
    batch = gathered(view, snapshot, ids)
    assert batch["index"].tolist() == ids
    for item, step_id in enumerate(ids):
        of, start = windows[step_id]
        lanes = int(snapshot.lanes[(step_id >> POSITION_BITS) - snapshot.origin])
        compare(batch, item, expected(view, of, start, step_id - start * lanes in continuing))


@pytest.mark.slow
@given(snapshots(), views())
def test_windows_stay_in_their_episode_and_together_hold_every_step(snapshot: Snapshot, view: Sequences) -> None:
    apart = view.stride or view.length - view.overlap
    ids = offered(view, snapshot)
    batch = gathered(view, snapshot, ids, ("mask", "loss_mask"))
    seen: dict[str, set[int]] = {"mask": set(), "loss_mask": set()}
    for item, step_id in enumerate(ids):
        lanes = int(snapshot.lanes[(step_id >> POSITION_BITS) - snapshot.origin])
        steps = np.array([step_id + j * lanes for j in range(view.length)])
        inside = [snapshot.model[i][0] for i in steps[batch["mask"][item]].tolist()]
        assert all(of is inside[0] for of in inside)
        for name, held in seen.items():
            held |= set(steps[batch[name][item]].tolist())
    for step_id, (of, t) in snapshot.model.items():
        # What an open episode or the frontier has still cut off is in no window yet, or not any more.
        if of.ended and not of.hidden and t < of.window_end and view.pad != "drop":
            assert step_id in seen["mask"] or apart > view.length
            assert step_id in seen["loss_mask"] or apart > view.length - view.burn_in


@pytest.mark.slow
@given(snapshots(), st.integers(1, 12) | st.none(), seeds)
def test_every_field_of_every_episode_equals_the_reference(snapshot: Snapshot, most: Any, seed: int) -> None:
    continuing = let_some_continue(snapshot, seed)
    view = Episodes(most)
    ids = sorted(offered(view, snapshot))
    assert ids == sorted(
        i
        for i, (of, t) in snapshot.model.items()
        if t == 0 and of.ended and not of.hidden and of.window_end > 0
    )  # fmt: skip
    if not ids:
        return
    batch = gathered(view, snapshot, ids)
    lengths = [min(most or 99, snapshot.model[i][0].window_end) for i in ids]
    assert batch["mask"].shape == (len(ids), max(lengths))
    assert batch["mask"].sum(1).tolist() == lengths
    for item, step_id in enumerate(ids):
        compare(batch, item, window(snapshot.model[step_id][0], 0, max(lengths), continues=step_id in continuing))


def test_a_window_over_many_chunks_is_gathered_whole() -> None:
    rng = np.random.default_rng(0)
    lanes = [[episode(SCHEMA, 150, "truncated", True, rng)], [episode(SCHEMA, 90, "open", False, rng)]]
    snapshot = Snapshot(SCHEMA, [Segment(lanes, chunk_rows=8)])
    view = Sequences(80, 40, 10, frame_stack=3)
    windows = windows_of(view, snapshot)
    ids = sorted(windows)
    assert [windows[i][1] for i in ids] == [0, 0, 40, 80]
    batch = gathered(view, snapshot, ids)
    for item, step_id in enumerate(ids):
        compare(batch, item, expected(view, *windows[step_id], False))


@pytest.mark.slow(turns=4)
def test_windows_of_random_stores_equal_the_reference() -> None:
    counts = []

    @settings(max_examples=24, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        schema=schemas(),
        plans=st.lists(writer_plans(max_lanes=4, max_steps=40), min_size=1, max_size=2),
        chunk_bytes=st.sampled_from((256, 1024)),
        segment_steps=st.none() | st.integers(1, 60) | st.just("episode"),
        view=views(),
        seed=seeds,
    )
    def check(schema: Any, plans: Any, chunk_bytes: int, segment_steps: Any, view: Sequences, seed: int) -> None:
        depth = view.frame_stack if isinstance(view.frame_stack, int) else 1
        view = replace(view, frame_stack=depth, start_only=("serial",))
        with scratch() as folder:
            store = dr.create(Path(folder) / "store", schema, chunk_bytes=chunk_bytes, segment_steps=segment_steps)
            model, serial = ModelStore(), 0
            with store:
                writers = [store.writer(plan.num_envs) for plan in plans]
                for plan, writer in zip(plans, writers, strict=True):
                    serial = play(plan, schema, [model.writer(plan.num_envs), quiet(writer)], serial)
                store.refresh()
                ids = check_store(store, model, length_cuts=segment_steps is not None)
                counts.extend(compare_store(store, model, ids, of, seed) for of in (view, Episodes(7), Episodes()))
                for writer in writers:
                    writer.close()

    check()
    assert sum(counts) > 200


def compare_store(store: Any, model: ModelStore, ids: dict[int, int], view: Any, seed: int) -> int:
    """Gather every window of a store once, in random order, compare it with the reference, and count them."""
    columns = [c for episodes in (store.snapshot.log, store.snapshot.open) for c in episodes.lines.tolist()]
    continuing = {first for first, _, _, _, end, _ in columns if end & 4}
    whole = isinstance(view, Episodes)
    windows = {}
    for of in model.episodes:
        starts = [0] if of.ended and of.window_end else []
        for t in starts if whole else starts_of(view, of):
            windows[ids[int(of.steps[t].extra["serial"])]] = of, t
    assert Counter(offered(view, store.snapshot)) == Counter(windows.keys())
    if not windows:
        return 0
    wanted = np.random.default_rng(seed).permutation(np.array(list(windows)))
    with dr.Sampler(store, view, refresh=False) as sampler:
        batch = sampler.gather(wanted).numpy()
    assert batch["index"].tolist() == wanted.tolist()
    found = {leaf: x for name, value in batch.items() for leaf, x in flat(value, name).items()}
    length = found["mask"].shape[1]
    if not whole:
        assert found["serial"].tolist() == [int(of.steps[t].extra["serial"]) for of, t in map(windows.get, wanted)]
    for item, step_id in enumerate(wanted.tolist()):
        of, start = windows[step_id]
        continues = ids[int(of.steps[0].extra["serial"])] in continuing
        how = () if whole else (view.burn_in, view.frame_stack, view.start_only)
        want = window(of, start, length, *how, continues=continues)
        want["reward"] = want["reward"].astype(found["reward"].dtype)
        compare(found, item, want)
    return len(windows)
