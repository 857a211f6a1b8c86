"""Casters of writers give what fields give."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import diskreplay as dr
from diskreplay.testing.scripts import random_values
from diskreplay.testing.strategies import DTYPES, schemas
from diskreplay.writing.casting import leaf_caster, part_caster

NUMBERS = st.one_of(
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 127, 128, 255, 256, 65504, 65519, 65520, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 10**400]),
    st.floats(),
    st.sampled_from([3.4028234663852886e38, 3.4028235677973366e38, 1e300, -0.0, 5e-324, np.inf, np.nan]),
    st.just("text"),
    st.none(),
    st.lists(st.integers(0, 3), max_size=2),
)


@st.composite
def values(draw):
    """A Python value, or the same as a scalar or array of some dtype of numpy."""
    value, dtype, kind = draw(NUMBERS), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 3))
    try:
        with np.errstate(all="ignore"):
            array = np.asarray(value).astype(dtype)
    except (TypeError, ValueError, OverflowError):
        return value
    return (value, array, array[()], np.broadcast_to(array, (2, *array.shape))[..., None])[kind]


def outcome(call):
    """The bytes that come out, or the error's words."""
    try:
        return call().tobytes()
    except dr.SchemaError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@settings(max_examples=300, deadline=None)
@given(st.sampled_from(DTYPES), st.sampled_from([(), (1,), (2,), (2, 1)]), values(), st.sampled_from(["obs", "action"]))
def test_a_caster_gives_what_the_field_gives(dtype, shape, value, path):
    field = dr.Field(shape, dtype)

    def cast():
        (item,) = leaf_caster(field, path).items(value)
        # As it enters the chunk: bytes as they are, a number by assignment to a memoryview, if there is one.
        chunk = np.zeros(1, f"V{field.row_bytes}" if type(item) is bytes else field.dtype)
        (chunk if chunk.dtype.char in "Ve" else chunk.data)[0] = item
        return chunk

    assert outcome(cast) == outcome(lambda: field.cast(value, path))


@settings(max_examples=50, deadline=None)
@given(schemas(), st.integers(0, 2**32 - 1))
def test_the_items_of_a_part_are_its_leaves_in_order(schema, seed):
    rng = np.random.default_rng(seed)
    for part, tree in (("obs", schema.obs), ("action", schema.action), ("extra", schema.extra)):
        value = random_values(tree, rng)
        plain = [np.asarray(x).tobytes() for _, x in schema.flatten(part, value)]
        items = part_caster(schema, part).items(value)
        assert [item if type(item) is bytes else np.asarray(item).tobytes() for item in items] == plain
        if isinstance(value, dict):
            shuffled = dict(reversed(value.items()))
            assert part_caster(schema, part).items(shuffled) == items or any(item != item for item in items)
