"""Times and clocks in a segment's document that no writer has made."""

import pytest

import diskreplay as dr
from tests.testing.commands import verify
from tests.testing.on_disk import reseal, segment_of
from tests.testing.support import append_numbered, serial_schema

HOSTILE = [
    *(("times", value) for value in ([2, 1], [-1, 1], [1], [1, 1 << 63], [1.0, 2.0], [True, 2], 5)),
    *(("clock", value) for value in (None, {})),
    *(("clock", {"wall": wall}) for wall in (None, 1.5, True, 1 << 63, -(10**40))),
]


@pytest.mark.parametrize(
    ("name", "value"),
    [("times", "missing"), ("clock", "missing"), *(pytest.param(*case, marks=pytest.mark.slow) for case in HOSTILE)],
)
def test_hostile_times_and_clocks_are_damage(tmp_store, name, value):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    is_missing = value == "missing"

    def change(attributes):
        attributes.pop(name) if is_missing else attributes.update({name: value})

    reseal(segment_of(tmp_store) / "zarr.json", change)
    said = f"unusable attributes .KeyError.*{name}" if is_missing else "unusable attributes"
    with pytest.warns(dr.DamagedSegmentWarning, match=said), dr.open(tmp_store) as store:
        assert len(store) == 0
    assert "segments/00000000" in {problem.where.removesuffix("/zarr.json") for problem in verify(tmp_store)}
