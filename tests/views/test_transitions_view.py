"""Arguments of Transitions, the layout of its batches, and what it refuses."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from tests.views.fakes import FLAT_SCHEMA, SCHEMA, Segment, Snapshot, Table, check_every_id, episode, gathered
from tests.views.strategies import snapshots

N_STEP = "n_step must be an int of at least 1, or None for the return to the end, or (least, most), not"
RNG = np.random.default_rng(0)


def one_episode(
    schema: dr.Schema = FLAT_SCHEMA, steps: int = 6, end: str = "terminated", final: bool = True, **kwargs: Any
):
    return Snapshot(schema, [Segment([[episode(schema, steps, end, final, np.random.default_rng(1))]])], **kwargs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"n_step": 0},
            f"{N_STEP} 0",
        ),
        (
            {"n_step": True},
            f"{N_STEP} True",
        ),
        (
            {"n_step": 1.5},
            f"{N_STEP} 1.5",
        ),
        ({"gamma": 1.01}, "gamma must be a number from 0 to 1, not 1.01"),
        ({"gamma": float("nan")}, "gamma must be a number from 0 to 1, not nan"),
        ({"gamma": "0.9"}, "gamma must be a number from 0 to 1, not '0.9'"),
        ({"frame_stack": 0}, "frame_stack must be an int of at least 1, or a dict of them by observation leaf, not 0"),
        ({"frame_stack": {"image": 0}}, "frame_stack['image'] must be an int of at least 1, not 0"),
        ({"reward": {}}, 'reward must be None or weights by field, such as {"reward": 1.0}, not {}'),
        ({"reward": 1.0}, 'reward must be None or weights by field, such as {"reward": 1.0}, not 1.0'),
        ({"reward": {"reward": float("inf")}}, "reward['reward'] must be a finite number, not inf"),
        (
            {"next_fields": "action"},
            "next_fields must be a sequence of field names, such as (\"action\",), not 'action'",
        ),
        ({"next_fields": ("action", "action")}, "next_fields names a field twice: ('action', 'action')"),
        ({"next_fields": ("obs",)}, "next_fields must not name 'obs': a batch always has next_obs"),
        ({"next_missing": "zeros"}, 'next_missing must be "mask" or "drop", not \'zeros\''),
        ({"next_missing": "drop"}, 'next_missing="drop" needs next_fields: without them nothing can be missing'),
        ({"discount": 0.9}, "discount must be None or the name of an extra field, not 0.9"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Transitions(**arguments)


@pytest.mark.parametrize(
    ("schema", "arguments", "fields", "message"),
    [
        (
            SCHEMA,
            {"frame_stack": {"sound": 2}},
            None,
            "frame_stack names 'sound'; the observation leaves of this store are 'image', 'state'",
        ),
        (
            FLAT_SCHEMA,
            {"frame_stack": {"image": 2}},
            None,
            "frame_stack names 'image', but the observation is one array: give an int",
        ),
        (
            SCHEMA,
            {"reward": {"hidden": 1.0}},
            None,
            "reward names 'hidden', which is not an extra field; the scalar fields of this store are reward, bonus",
        ),
        (
            SCHEMA,
            {"reward": {"hidden/h": 1.0}},
            None,
            "reward names 'hidden/h', which is not scalar; the scalar fields of this store are reward, bonus",
        ),
        (
            SCHEMA,
            {"next_fields": ("value",)},
            None,
            "next_fields names 'value'; the step fields of this store are action, reward, bonus, hidden",
        ),
        (
            SCHEMA,
            {"discount": "reward"},
            None,
            "discount names 'reward', which is not an extra field; the scalar extra fields of this store are bonus",
        ),
        (
            FLAT_SCHEMA,
            {},
            ("obs", "reards"),
            "fields names 'reards', and a batch has action, age, discount, discounted_return_to_go, index, n_steps, "
            "next_obs, obs, population, priority, priority_sum, probability, return_to_go, reward, step, "
            "terminated, time, truncated, weight",
        ),
        (FLAT_SCHEMA, {}, "obs", "fields must be a sequence of names, not 'obs'"),
    ],
)  # fmt: skip
def test_a_name_that_the_schema_has_not_is_refused(
    schema: dr.Schema, arguments: Any, fields: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Transitions(**arguments).reader(schema, fields)


def test_a_batch_has_these_fields_in_this_order() -> None:
    view = dr.Transitions(frame_stack={"image": 4}, next_fields=("action",))
    leaves = {"/".join(leaf.path): (str(leaf.dtype), leaf.shape) for leaf in view.reader(SCHEMA).leaves}
    assert list(leaves.items()) == [
        ("obs/image", ("uint8", (4, 2, 3))),
        ("obs/state", ("float32", (3,))),
        ("action/0", ("int64", ())),
        ("action/1", ("float32", (2,))),
        ("reward", ("float32", ())),
        ("next_obs/image", ("uint8", (4, 2, 3))),
        ("next_obs/state", ("float32", (3,))),
        ("terminated", ("bool", ())),
        ("truncated", ("bool", ())),
        ("discount", ("float32", ())),
        ("n_steps", ("int64", ())),
        ("index", ("int64", ())),
        ("weight", ("float32", ())),
        ("bonus", ("float64", ())),
        ("hidden/h", ("float16", (2,))),
        ("next_action/0", ("int64", ())),
        ("next_action/1", ("float32", (2,))),
        ("next_mask", ("bool", ())),
    ]


def test_fields_choose_leaves_and_keep_index_and_weight() -> None:
    leaves = dr.Transitions().reader(SCHEMA, ("next_obs/image", "hidden", "n_steps")).leaves
    assert ["/".join(leaf.path) for leaf in leaves] == ["next_obs/image", "n_steps", "index", "weight", "hidden/h"]


def test_chosen_fields_hold_what_the_whole_batch_holds() -> None:
    snapshot = one_episode(SCHEMA)
    ids = sorted(snapshot.sampleable(2))
    whole = gathered(dr.Transitions(2, frame_stack=3), snapshot, ids)
    for name in ("obs/image", "reward", "discount", "terminated", "n_steps", "next_obs"):
        for path, array in gathered(dr.Transitions(2, frame_stack=3), snapshot, ids, (name,)).items():
            np.testing.assert_array_equal(array, whole[path])


@pytest.mark.slow
@given(snapshots(FLAT_SCHEMA), st.integers(1, 9) | st.none(), st.booleans())
def test_every_id_that_is_not_sampleable_is_an_invalid_index(snapshot: Snapshot, n: Any, whole: bool) -> None:
    view = dr.Transitions(n, next_fields=("action",) if whole else ())
    check_every_id(view, snapshot, snapshot.sampleable(n, whole))


def test_a_refused_id_says_why() -> None:
    cut = episode(FLAT_SCHEMA, 3, "cut", False, RNG)
    still_open = episode(FLAT_SCHEMA, 2, "open", True, RNG)
    snapshot = Snapshot(FLAT_SCHEMA, [None, Segment([[cut, still_open]])], origin=0, frontier=(1 << 35) + 1)
    start = 1 << 35
    reasons = {
        -1: "id -1 never existed",
        1 << 50: f"id {1 << 50} never existed",
        5: "id 5 is not in the store: it was evicted, or never existed",
        start: f"id {start} is hidden by the capacity or the max_age_s of the store: batches do not show it; read it "
        "from its episode in store.episodes",
        start + 9: f"id {start + 9} never existed, or is newer than this snapshot; call refresh() first",
        start
        + 2: f"id {start + 2} cannot be sampled as {dr.Transitions(2)}: its window is not complete yet, the episode "
        "ended without a final observation at this step, or the id is not a step's",
    }
    for step_id, reason in reasons.items():
        with pytest.raises(dr.InvalidIndex, match=f"^{re.escape(reason)}$"):
            dr.Transitions(2).reader(FLAT_SCHEMA).check(snapshot, np.array([step_id]))


def test_chunks_are_mapped_once_and_then_no_more() -> None:
    snapshot = one_episode(steps=30)
    ids = sorted(snapshot.sampleable(3))
    for _ in range(3):
        gathered(dr.Transitions(3), snapshot, ids)
    assert {leaf: snapshot.leaf(leaf).ensured for leaf in ("done", "action", "reward")} == {
        "done": 1,
        "action": 1,
        "reward": 1,
    }
    assert snapshot.leaf("obs").ensured <= 2


def test_chunks_that_another_thread_forgets_meanwhile_are_mapped_again() -> None:
    snapshot = one_episode(steps=30)
    forgetful = Forgetful(snapshot.leaf("obs"))
    snapshot.tables.leaves["obs"] = forgetful
    ids = sorted(snapshot.sampleable(1))
    batch = gathered(dr.Transitions(1), snapshot, ids)
    assert forgetful.forgot == 3
    want = [snapshot.model[i][0].steps[snapshot.model[i][1]].obs["obs"] for i in ids]
    np.testing.assert_array_equal(batch["obs"], want)


class Forgetful(Table):
    """Forgets what it mapped, three times."""

    def __init__(self, table: Table) -> None:
        self.__dict__.update(table.__dict__)
        self.forgot = 0

    def ensure(self, *rows: np.ndarray) -> None:
        super().ensure(*rows)
        if self.forgot < 3:
            self.forgot += 1
            self.bases = np.zeros_like(self.bases)


def test_a_table_without_the_chunk_is_a_format_error() -> None:
    snapshot = one_episode(steps=30)
    snapshot.leaf("action").ensure = lambda *rows: None
    with pytest.raises(
        dr.FormatError, match=r"^segment 2 has no chunk of action for row 0 of lane 0; run `diskreplay verify`"
    ):
        gathered(dr.Transitions(), snapshot, sorted(snapshot.model))


def test_rewards_of_every_dtype_are_weighed_in_float64() -> None:
    schema = dr.Schema(
        obs=dr.Field((), "float32"), action=dr.Field((), "int8"), reward=dr.Field((), "float16"),
        extra={"big": dr.Field((), "int64"), "flag": dr.Field((), "bool")},
    )  # fmt: skip
    snapshot = one_episode(schema, steps=4)
    weights = {"reward": 0.1, "big": 1e-9, "flag": 1.0}
    ids = sorted(snapshot.model)
    batch = gathered(dr.Transitions(1, reward=weights), snapshot, ids)
    steps = snapshot.model[ids[0]][0].steps
    want = [0.1 * float(np.float16(s.reward)) + 1e-9 * int(s.extra["big"]) + float(s.extra["flag"]) for s in steps]
    np.testing.assert_array_equal(batch["reward"], np.float32(want))


def test_views_are_equal_by_their_arguments_and_print_as_a_call() -> None:
    assert dr.Transitions(3) == dr.Transitions(n_step=3)
    assert dr.Transitions(3) != dr.Transitions(4)
    assert repr(dr.Transitions(3)) == "Transitions(n_step=3)"
    assert repr(dr.Transitions(gamma=0.9, frame_stack=4)) == "Transitions(n_step=1, gamma=0.9, frame_stack=4)"
