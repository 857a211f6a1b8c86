"""Frames that travel once, and stacks that are made of them at the other end, are the stacks of the plain reader."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from tests.views.fakes import Snapshot, fields_of
from tests.views.strategies import snapshots

FIELDS = (None, ("obs", "next_obs"), ("obs/image", "next_obs/image", "reward"), ("obs/state", "next_obs/state"))
STACKS = (2, 4, {"image": 3}, {"image": 5, "state": 2})


@pytest.mark.slow
@given(snapshots(), st.integers(1, 4), st.sampled_from(STACKS), st.sampled_from(FIELDS), st.integers(0, 2**32 - 1))
def test_batches_are_those_of_the_plain_reader(
    snapshot: Snapshot, n_step: int, stack: Any, fields: Any, seed: int
) -> None:
    view = dr.Transitions(n_step=n_step, frame_stack=stack, gamma=0.9)
    plain = view.reader(snapshot.schema, fields)
    later = plain.for_device()
    there = sorted(snapshot.sampleable(n_step))
    if later is plain or not there:
        return
    ids = np.random.default_rng(seed).choice(np.array(there, np.int64), 15)
    want, found = fields_of(plain, snapshot, ids), fields_of(later, snapshot, ids)
    assert list(want) == list(found)
    for path, array in want.items():
        assert array.dtype == found[path].dtype
        np.testing.assert_array_equal(array, found[path], err_msg=path)


DEPTHS = dr.Schema(obs=dr.Field((3,), "uint16"), action=dr.Field((), "int64"))


@pytest.mark.slow
@given(snapshots(DEPTHS))
def test_frames_of_a_dtype_with_few_operations(snapshot: Snapshot) -> None:
    view = dr.Transitions(n_step=1, frame_stack=2)
    plain = view.reader(DEPTHS)
    later = plain.for_device()
    there = sorted(snapshot.sampleable(1))
    if not there:
        return
    want, found = (fields_of(reader, snapshot, there) for reader in (plain, later))
    for path, array in want.items():
        np.testing.assert_array_equal(array, found[path])


SCHEMA = dr.Schema(obs=dr.Field((84, 84), "uint8"), action=dr.Field((), "int64"))


def nbytes(reader: Any) -> int:
    return sum(leaf.nbytes for leaf in reader.leaves)


@pytest.mark.parametrize(("n_step", "frames"), [(1, 5), (3, 7)])
def test_fewer_bytes_travel(n_step: int, frames: int) -> None:
    view = dr.Transitions(n_step=n_step, frame_stack=4)
    later = view.reader(SCHEMA).for_device()
    assert frames * 7056 < nbytes(later) < (frames + 0.1) * 7056


@pytest.mark.parametrize(
    ("view", "fields"),
    [
        (dr.Transitions(n_step=4, frame_stack=4), None),
        (dr.Transitions(n_step=None, frame_stack=4), None),
        (dr.Transitions(n_step=1), None),
        (dr.Transitions(n_step=1, frame_stack=4), ("obs", "action")),
        (dr.Sequences(length=4, overlap=2, frame_stack=4), None),
    ],
    ids=str,
)
def test_where_no_frame_would_be_saved_stacks_are_made_before(view: Any, fields: Any) -> None:
    reader = view.reader(SCHEMA, fields)
    assert reader.for_device() is reader


@pytest.mark.slow
def test_an_id_that_cannot_be_sampled_is_refused() -> None:
    view = dr.Transitions(n_step=1, frame_stack=2)

    @given(snapshots())
    def check(snapshot: Snapshot) -> None:
        reader = view.reader(snapshot.schema)
        later = reader.for_device()
        assert later is not reader
        for use in (lambda ids: fields_of(later, snapshot, ids), lambda ids: later.check(snapshot, ids)):
            with pytest.raises(dr.InvalidIndex, match=f"^id {1 << 62} "):
                use(np.array([1 << 62]))

    check()
