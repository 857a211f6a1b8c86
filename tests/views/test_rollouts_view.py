"""The view of rollouts: its arguments, and what it refuses of a schema. What it gathers: tests/sampling."""

import re
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.views.fakes import Columns, runs_of, without

SCHEMA = dr.Schema(
    obs={"image": dr.Field((2, 2), "uint8")},
    action=dr.Field((), "int64"),
    extra={
        "value": dr.Field((), "float16"),
        "hidden": dr.Field((3,), "float32"),
        "v": {"one": dr.Field((), "float32")},
    },
)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_steps": 0}, "num_steps must be an int of at least 1, not 0"),
        ({"gamma": 1.5}, "gamma must be a number from 0 to 1, not 1.5"),
        ({"gae_lambda": True}, "gae_lambda must be a number from 0 to 1, not True"),
        ({"value": None}, "value must be the name of an extra field, not None"),
        ({"next_value": 3}, "next_value must be None or the name of an extra field, not 3"),
        ({"discount": 0.9}, "discount must be None or the name of an extra field, not 0.9"),
        ({"value_fn": "v"}, "value_fn must be None or a function of observations, not 'v'"),
        ({"frame_stack": 0}, "frame_stack must be an int of at least 1, or a dict of them by observation leaf, not 0"),
        ({"reward": 1}, 'reward must be None or weights by field, such as {"reward": 1.0}, not 1'),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Rollouts(**{"num_steps": 8, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"value": "values"},
            "value names 'values', which is not an extra field; the scalar extra fields of this store are value, v/one",
        ),
        (
            {"next_value": "hidden"},
            "next_value names 'hidden', which is not scalar; the scalar extra fields of this store are value, v/one",
        ),
        (
            {"discount": "hidden"},
            "discount names 'hidden', which is not scalar; the scalar extra fields of this store are value, v/one",
        ),
        (
            {"frame_stack": {"images": 2}},
            "frame_stack names 'images'; the observation leaves of this store are 'image'",
        ),
    ],
)
def test_what_the_schema_has_not_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.Rollouts(8, **arguments).reader(SCHEMA)


def test_the_value_of_a_batch_is_the_field_that_was_named() -> None:
    reader = dr.Rollouts(8, value="v/one", frame_stack={"image": 4}).reader(SCHEMA)
    dtypes = {leaf.path: (leaf.dtype.name, leaf.shape) for leaf in reader.leaves}
    assert dtypes["value",] == ("float32", ())
    assert dtypes["v", "one"] == ("float32", ())
    assert dtypes["obs", "image"] == ("uint8", (4, 2, 2))
    assert dtypes["hidden",] == ("float32", (3,))
    assert ("weight",) not in reader.paths


def test_every_step_behind_the_frontier_is_one_of_the_view() -> None:
    episodes = Columns.of([(10, 2, 4, 5, 1), (11, 2, 3, 3, 128)])
    runs = runs_of(dr.Rollouts(3), episodes, without(14, 0, np.array([2])))
    assert [(int(f), int(c)) for f, c in zip(runs.first, runs.count, strict=True)] == [(14, 2), (15, 1)]
