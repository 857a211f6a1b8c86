"""Spaces of fields: a schema that came from spaces has them again."""

import inspect

import numpy as np
from gymnasium import spaces

import diskreplay as dr
from diskreplay.interop.exchange.field_trees import space_of

OBS = spaces.Dict(
    {
        "image": spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "wide": spaces.Box(np.int64(-(2**62) - 1), np.int64(2**62 + 1), (2,), np.int64),
        "tuple": spaces.Tuple([spaces.Discrete(3, start=-1), spaces.MultiBinary([2, 3]), spaces.MultiBinary(4)]),
        "bounds": spaces.Box(np.array([-np.inf, 0], np.float32), np.array([1, np.inf], np.float32)),
        "number": spaces.Box(-1, 1, (), np.float64),
    }
)
ACTION = spaces.MultiDiscrete([3, 2], start=[0, -1])


def test_spaces_come_back_equal() -> None:
    schema = dr.Schema.from_spaces(OBS, ACTION)
    assert space_of(schema.obs) == OBS
    assert space_of(schema.action) == ACTION


def test_a_field_without_a_space_takes_every_value_of_its_dtype() -> None:
    assert space_of(dr.Field((2,), "float16")) == spaces.Box(-np.inf, np.inf, (2,), np.float16)
    assert space_of(dr.Field((), "int8")) == spaces.Box(-128, 127, (), np.int8)
    assert space_of(dr.Field((2,), "bool")) == spaces.Box(0, 1, (2,), np.bool_)


def test_a_discrete_space_has_the_dtype_of_its_field_where_gymnasium_lets_it() -> None:
    space = space_of(dr.Field((), "int32", {"type": "Discrete", "n": 2, "start": 1}))
    is_new = "dtype" in inspect.signature(spaces.Discrete).parameters  # since 1.2.2
    assert (space.n, space.start, space.dtype) == (2, 1, np.dtype("int32" if is_new else "int64"))
