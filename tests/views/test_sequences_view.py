"""Arguments of Sequences and Episodes, the layout of their batches, what they refuse, and both on real stores."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

import diskreplay as dr
from tests.parity.test_sequences import views, windows_of
from tests.testing.support import append_numbered, serial_schema
from tests.views.fakes import (
    FLAT_SCHEMA,
    OPEN,
    SCHEMA,
    Columns,
    Segment,
    Snapshot,
    check_every_id,
    episode,
    gathered,
    ids_in,
    offered,
    runs_of,
)
from tests.views.strategies import snapshots


def one_episode(steps: int, end: str = "terminated", final: bool = True, schema: dr.Schema = FLAT_SCHEMA) -> Snapshot:
    return Snapshot(schema, [Segment([[episode(schema, steps, end, final, np.random.default_rng(1))]])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be an int of at least 1, not 0"),
        ({"length": 4, "overlap": 4}, "overlap must be less than length, 4, not 4"),
        ({"length": 20}, "overlap must be less than length, 20, not 40 (the default): give one, such as overlap=10"),
        ({"overlap": -1}, "overlap must be an int from 0 to 79, not -1"),
        ({"overlap": 1.5}, "overlap must be an int from 0 to 79, not 1.5"),
        ({"burn_in": 41}, "burn_in must be at most overlap, 40, not 41: steps would be in no window's loss"),
        ({"burn_in": -1}, "burn_in must be an int from 0 to 40, not -1"),
        ({"stride": 0}, "stride must be an int of at least 1, or None for length - overlap, not 0"),
        ({"stride": 10, "burn_in": 80}, "burn_in must be an int from 0 to 79, not 80"),
        (
            {"overlap": 40, "stride": 10},
            "windows of length=80 and stride=10 share 70 steps, not overlap=40: give overlap or stride alone",
        ),
        ({"pad": 0}, 'pad must be True, False or "drop", not 0'),
        ({"align": "middle"}, 'align must be "start" or "end", not \'middle\''),
        ({"frame_stack": 0}, "frame_stack must be an int of at least 1, or a dict of them by observation leaf, not 0"),
        ({"start_only": "h"}, "start_only must be a sequence of field names, such as (\"action\",), not 'h'"),
    ],
)
def test_an_argument_of_sequences_that_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Sequences(**arguments)


def test_a_length_of_episodes_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^max_length must be an int of at least 1, or None for no limit, not 0$"):
        dr.Episodes(0)


@pytest.mark.parametrize(
    ("schema", "view", "fields", "message"),
    [
        (
            SCHEMA,
            dr.Sequences(start_only=("h",)),
            None,
            "start_only names 'h'; the extra fields of this store are bonus, hidden",
        ),
        (
            FLAT_SCHEMA,
            dr.Sequences(start_only=("action",)),
            None,
            "start_only names 'action'; the extra fields of this store are none",
        ),
        (
            SCHEMA,
            dr.Sequences(frame_stack={"sound": 2}),
            None,
            "frame_stack names 'sound'; the observation leaves of this store are 'image', 'state'",
        ),
        (
            FLAT_SCHEMA,
            dr.Sequences(frame_stack={"image": 2}),
            None,
            "frame_stack names 'image', but the observation is one array: give an int",
        ),
        (
            FLAT_SCHEMA,
            dr.Episodes(),
            ("discount",),
            "fields names 'discount', and a batch has action, age, discounted_return_to_go, index, is_first, "
            "loss_mask, mask, next_obs, obs, population, priority, priority_sum, probability, return_to_go, reward, "
            "step, terminated, time, truncated, weight",
        ),
    ],
)
def test_a_name_that_the_schema_has_not_is_refused(schema: Any, view: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        view.reader(schema, fields)


def test_a_batch_has_these_fields_in_this_order() -> None:
    snapshot = one_episode(9, schema=SCHEMA)
    view = dr.Sequences(4, 1, frame_stack={"image": 3}, start_only=("hidden",))
    batch = gathered(view, snapshot, offered(view, snapshot))
    assert [(name, str(array.dtype), array.shape) for name, array in batch.items()] == [
        ("obs/image", "uint8", (3, 4, 3, 2, 3)),
        ("obs/state", "float32", (3, 4, 3)),
        ("next_obs/image", "uint8", (3, 4, 3, 2, 3)),
        ("next_obs/state", "float32", (3, 4, 3)),
        ("action/0", "int64", (3, 4)),
        ("action/1", "float32", (3, 4, 2)),
        ("reward", "float32", (3, 4)),
        ("terminated", "bool", (3, 4)),
        ("truncated", "bool", (3, 4)),
        ("is_first", "bool", (3, 4)),
        ("mask", "bool", (3, 4)),
        ("loss_mask", "bool", (3, 4)),
        ("index", "int64", (3,)),
        ("weight", "float32", (3,)),
        ("bonus", "float64", (3, 4)),
        ("hidden/h", "float16", (3, 2)),
    ]


def test_observations_and_their_stacks_are_views_of_frames_gathered_once() -> None:
    snapshot = one_episode(20, schema=SCHEMA)
    view = dr.Sequences(8, 4, frame_stack={"image": 3})
    batch = gathered(view, snapshot, offered(view, snapshot))
    image, following = batch["obs/image"], batch["next_obs/image"]
    frame_bytes = 6
    assert image.strides == following.strides == ((8 + 3) * frame_bytes, frame_bytes, frame_bytes, 3, 1)
    for leaf, step_bytes in (("image", frame_bytes), ("state", 12)):
        first, second = (batch[f"{name}/{leaf}"].__array_interface__["data"][0] for name in ("obs", "next_obs"))
        assert second - first == step_bytes
        np.testing.assert_array_equal(batch[f"obs/{leaf}"][:, 1:], batch[f"next_obs/{leaf}"][:, :-1])


@pytest.mark.slow
@given(snapshots(), views())
def test_chosen_fields_hold_what_the_whole_batch_holds(snapshot: Snapshot, view: dr.Sequences) -> None:
    ids = offered(view, snapshot)
    whole = gathered(view, snapshot, ids)
    for name in ("obs/image", "next_obs", "action", "hidden", "terminated", "is_first", "loss_mask", "index"):
        part = gathered(view, snapshot, ids, (name,))
        chosen = {path for path in whole if path == name or path.startswith(f"{name}/")}
        assert part.keys() == chosen | {"index", "weight"}
        for path in chosen:
            np.testing.assert_array_equal(part[path], whole[path])


@pytest.mark.slow
@given(snapshots(FLAT_SCHEMA), views())
def test_every_id_at_which_no_window_starts_is_an_invalid_index(snapshot: Snapshot, view: dr.Sequences) -> None:
    view = replace(view, frame_stack=1, start_only=())
    check_every_id(view, snapshot, set(windows_of(view, snapshot)))


@pytest.mark.slow
@given(snapshots(FLAT_SCHEMA), st.integers(1, 9) | st.none())
def test_every_id_at_which_no_ended_episode_starts_is_an_invalid_index(snapshot: Snapshot, most: Any) -> None:
    check_every_id(dr.Episodes(most), snapshot, set(offered(dr.Episodes(most), snapshot)))


def test_a_refused_id_says_why() -> None:
    snapshot = one_episode(9)
    first = min(snapshot.model)
    view = dr.Sequences(4, 1)
    reasons = {
        (view, 2): f"id {first + 2} is step 2 of its episode, and no window of {view} starts there",
        (dr.Episodes(), 3): f"id {first + 3} is step 3 of its episode; {dr.Episodes()} start at step 0",
    }
    for (of, step), reason in reasons.items():
        with pytest.raises(dr.InvalidIndex, match=f"^{re.escape(reason)}$"):
            of.reader(FLAT_SCHEMA).check(snapshot, np.array([first, first + step]))


def test_filling_refuses_an_id_that_is_no_step() -> None:
    snapshot = one_episode(9)
    behind = max(snapshot.model) + 1
    for view in (dr.Sequences(4, 1), dr.Episodes()):
        with pytest.raises(dr.InvalidIndex, match=f"^id {behind} cannot be sampled as {re.escape(str(view))}: "):
            gathered(view, snapshot, [behind])


def starts(view: Any, steps: int, obs_rows: int, end: int) -> list[int]:
    first, count, stride = 1 << 35, 3, 5
    ids = ids_in(runs_of(view, Columns.of([(first + count, stride, steps, obs_rows, end)])))
    assert all((i - first - count) % stride == 0 for i in ids)
    return [(i - first - count) // stride for i in ids]


@pytest.mark.slow
@pytest.mark.parametrize("pad", [True, False, "drop"])
@pytest.mark.parametrize(("length", "overlap"), [(1, 0), (4, 0), (4, 2), (4, 3), (7, 3)])
def test_a_window_of_an_open_episode_is_still_there_when_it_grows_and_ends(
    length: int, overlap: int, pad: bool | str
) -> None:
    view = dr.Sequences(length, overlap, pad=pad)
    known: set[int] = set()
    for steps in range(1, 30):
        # Without the observation behind it, the newest step is in no window yet, and never is if the episode is cut.
        for final, ends in ((0, (1, 2 | 16)), (8, (1, 2, 3, 2 | 16))):
            now = set(starts(view, steps, steps + (final > 0), OPEN))
            sampleable = steps - (not final)
            assert known <= now
            assert all(s + length <= sampleable for s in now)
            known = now
            for end in ends:
                ended = starts(view, steps, steps + (final > 0), end | final)
                assert known <= set(ended)
                assert len(set(ended)) == len(ended)
                covered = {t for s in ended for t in range(s, min(s + length, steps))}
                total = steps if end & 1 else sampleable
                assert covered >= set(range(total if pad != "drop" else max(total - view.length + 1, 0)))


@pytest.mark.parametrize("pad", [True, False])
def test_an_overlap_of_all_but_one_step_gives_every_full_window(pad: bool) -> None:
    assert starts(dr.Sequences(5, 4, pad=pad), 12, 13, 1 | 8) == list(range(8))


def test_the_window_that_reaches_the_end_is_the_last_or_is_moved_back_to_it() -> None:
    assert starts(dr.Sequences(80, 40), 200, 201, 1 | 8) == [0, 40, 80, 120]
    assert starts(dr.Sequences(80, 40), 201, 202, 1 | 8) == [0, 40, 80, 120, 160]
    assert starts(dr.Sequences(80, 40, pad=False), 201, 202, 1 | 8) == [0, 40, 80, 120, 121]
    for pad in (True, False):
        assert starts(dr.Sequences(80, 40, pad=pad), 30, 31, 1 | 8) == [0]


def test_partial_windows_are_padded_moved_back_or_dropped_and_strides_may_leave_gaps() -> None:
    assert starts(dr.Sequences(80, 40, pad="drop"), 201, 202, 1 | 8) == [0, 40, 80, 120]
    assert starts(dr.Sequences(80, 40, pad="drop"), 30, 31, 1 | 8) == []
    assert starts(dr.Sequences(80, stride=60), 201, 202, 1 | 8) == [0, 60, 120, 180]
    assert starts(dr.Sequences(10, stride=30), 70, 71, 1 | 8) == [0, 30, 60]
    # The next window would start behind the end: there is none that could be padded, or moved back.
    assert starts(dr.Sequences(10, stride=30), 60, 61, 1 | 8) == [0, 30]
    assert starts(dr.Sequences(10, stride=30, pad=False), 60, 61, 1 | 8) == [0, 30]
    assert starts(dr.Sequences(10, stride=30, pad=False), 65, 66, 1 | 8) == [0, 30, 55]


def test_windows_that_are_aligned_to_the_end_are_there_once_the_episode_has_ended() -> None:
    view = dr.Sequences(80, 40, align="end")
    assert starts(view, 200, 201, 1 | 8) == [0, 40, 80, 120]
    assert starts(view, 201, 202, 1 | 8) == [0, 1, 41, 81, 121]
    assert starts(view, 201, 202, OPEN) == []
    assert starts(view, 201, 201, 2) == [0, 40, 80, 120]
    assert starts(view, 30, 31, 1 | 8) == [0]
    assert starts(replace(view, pad="drop"), 201, 202, 1 | 8) == [1, 41, 81, 121]
    assert starts(replace(view, pad="drop"), 30, 31, 1 | 8) == []
    assert starts(dr.Sequences(10, stride=30, align="end"), 65, 66, 1 | 8) == [0, 25, 55]
    assert starts(dr.Sequences(10, stride=30, align="end"), 60, 61, 1 | 8) == [20, 50]


def test_kinds_tell_ids_apart_that_mean_different_things() -> None:
    assert dr.Sequences(8, 4).kind == dr.Sequences(8, 4, burn_in=2, frame_stack=4).kind == ("sequences", 8, 4, True)
    assert dr.Sequences(8, 4).kind == dr.Sequences(8, stride=4).kind == dr.Sequences(8, 4, stride=4).kind
    assert dr.Sequences(8, 4, align="end").kind == dr.Sequences(8, 4, pad=False, align="end").kind
    others = (
        dr.Sequences(8, 4), dr.Sequences(8, 4, pad=False), dr.Sequences(8, 4, pad="drop"), dr.Sequences(8, 3),
        dr.Sequences(8, stride=9), dr.Sequences(8, 4, align="end"), dr.Sequences(8, 4, pad="drop", align="end"),
    )  # fmt: skip
    assert len({view.kind for view in others}) == len(others)
    assert dr.Episodes().kind == dr.Episodes(5).kind == ("episodes",)


# On real stores.


def test_a_continuation_after_a_length_cut_is_no_start(tmp_store: Path) -> None:
    store = dr.create(tmp_store, serial_schema(), segment_steps=8)
    with store, store.writer() as writer:
        append_numbered(writer, range(40))
        store.refresh()
        assert store.num_episodes > 1
        sampler = dr.Sampler(store, dr.Sequences(6, 3, burn_in=3), batch_size=300, seed=0)
        batch = sampler.sample()
        cuts = {int(piece.action[0]) for piece in store.episodes}
        starts_episode = torch.tensor([a in cuts for a in batch.action[:, 0].tolist()])
        assert starts_episode.any()
        first = batch.action[:, 0] == 0
        assert first.any()
        assert torch.equal(batch.is_first[:, 0], first)
        assert not batch.is_first[:, 1:].any()
        assert torch.equal(batch.loss_mask[:, :3].any(1), first)
        whole = dr.Sampler(store, dr.Episodes(), batch_size=300, seed=0).sample()
        assert torch.equal(whole.is_first[:, 0], whole.action[:, 0] == 0)
        # A length cut is a truncation with a final observation.
        assert torch.equal(whole.truncated.any(1), ~whole.terminated.any(1))
        assert torch.equal(whole.next_obs[..., 0][whole.mask], whole.action[whole.mask].float() + 1)


def test_a_batch_lives_as_long_as_any_view_of_it(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(200))
        sampler = dr.Sampler(store, dr.Sequences(8, 4, frame_stack=2), batch_size=16, seed=0, debug=True)
        held = []
        for _ in range(6):
            batch = sampler.sample()
            held.append((batch.next_obs[:, 2:, 1], batch.action.clone()))
            del batch
        for next_obs, action in held:
            assert torch.equal(next_obs[..., 0], (action[:, 2:] + 1).float())
