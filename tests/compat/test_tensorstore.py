"""TensorStore reads the arrays of a live and of a sealed store as zarr-python does."""

import json

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing.scripts import play
from tests.compat.test_zarr_python import (
    LANES,
    NESTED,
    PLAN,
    check_same,
    merged_store,
    read_while_nothing_is_sealed,
    read_with_zarr,
)
from tests.testing.support import quiet, serial_schema

tensorstore = pytest.importorskip("tensorstore")


def read_with_tensorstore(path):
    """Every array of a store; the attributes of its groups come from their JSON."""
    found = {}
    for metadata in path.rglob("zarr.json"):
        name = str(metadata.parent.relative_to(path)).removeprefix(".")
        if name.startswith("counters/"):
            continue  # inside an array: a segment that is being made, or one that is being removed
        document = json.loads(metadata.read_text())
        if document["node_type"] == "group":
            found[name] = document.get("attributes", {})
            continue
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(metadata.parent)}}
        found[name] = np.asarray(tensorstore.open(spec, read=True, open=True).result().read().result())
    return found


def check_equal(found, arrays):
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        if isinstance(x, np.ndarray):
            assert (found[name].dtype, found[name].shape) == (x.dtype, x.shape)
            assert found[name].tobytes() == x.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "plan", "segment_steps"),
    [(serial_schema(), PLAN, None), (NESTED, PLAN, "episode"), (NESTED, LANES, 40)],
    ids=["one segment", "nested episodes", "nested lanes in segments"],
)
def test_tensorstore_reads_what_zarr_python_reads(tmp_store, schema, plan, segment_steps):
    with (
        dr.create(tmp_store, schema, chunk_bytes=256, segment_steps=segment_steps) as store,
        store.writer(plan.num_envs) as writer,
    ):
        play(plan, schema, [quiet(writer)])
        check_equal(*read_while_nothing_is_sealed(store, read_with_tensorstore, read_with_zarr))

    found = read_with_tensorstore(tmp_store)
    check_equal(found, read_with_zarr(tmp_store))
    with dr.open(tmp_store) as reader:
        check_same(found, reader)


@pytest.mark.slow
def test_tensorstore_reads_packs_as_zarr_python_does(tmp_store):
    with merged_store(tmp_store, "zstd") as store:
        found = read_with_tensorstore(tmp_store)
        check_equal(found, read_with_zarr(tmp_store))
        check_same(found, store)
