"""zarr-python walks a store without a warning and reads the values that `store.episodes` has."""

import warnings
from contextlib import contextmanager

import numpy as np
import pytest
import zarr

import diskreplay as dr
from diskreplay.testing import ModelStore
from diskreplay.testing.nested import flat
from diskreplay.testing.scripts import EpisodePlan, WriterPlan, play
from tests.compat.decoder import decode
from tests.testing.support import quiet, serial_schema

NESTED = serial_schema(
    obs={"image": dr.Field((2, 3), "uint8"), "pair": (dr.Field((), "float16"), {"deep": dr.Field((2,), "bool")})},
    extra={"belief": {"mean": dr.Field((2,), "float64")}},
    episode={"seed": dr.Field((), "int64"), "goal": {"at": dr.Field((2,), "float32")}},
)
WIDE = dr.Field((300,), "uint8")
PLAN = WriterPlan(
    None,
    (
        (
            EpisodePlan(30, "terminated", values=True),
            EpisodePlan(17, "truncated", final=False),
            EpisodePlan(9, "cut", final=False, values=True),
            EpisodePlan(1, "both"),
            EpisodePlan(40, "truncated", whole=True, values=True),
            EpisodePlan(12, "cut", breaks=True),
            EpisodePlan(5, "open"),
        ),
    ),
    close=False,
)
LANES = WriterPlan(3, PLAN.lanes * 3, "sometimes", masked=True, close=False, seed=3, priority="sometimes")


def walk(group, path=""):
    """The attributes of every group and the values of every array below a group."""
    found = {path: dict(group.attrs)}
    for name, member in group.members():
        below = f"{path}/{name}" if path else name
        if isinstance(member, zarr.Group):
            found.update(walk(member, below))
        else:
            found[below] = np.asarray(member[...])
    return found


def read_with_zarr(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return walk(zarr.open_group(path, mode="r"))


def sealed_segments(path):
    return [group.attrs["sealed"] for _, group in sorted(zarr.open_group(path, mode="r")["segments"].groups())]


def read_while_nothing_is_sealed(store, *readers):
    """Refresh and read; again when a segment was sealed meanwhile, as the end of a lane may follow from that."""
    while True:
        before = sealed_segments(store.path)
        store.refresh()
        found = [read(store.path) for read in readers]
        if sealed_segments(store.path) == before:
            return found


def check_same(arrays, store):
    """The episodes that the arrays hold by the rules of docs/format.md are those of the store."""
    decoded = {episode.ids[0]: episode for episode in decode(arrays, store.schema)}
    assert len(store.episodes) == len(decoded) > 0
    for real in store.episodes:
        other = decoded[int(real.ids[0])]
        assert other.ids == real.ids.tolist()
        assert (other.terminated, other.truncated, other.cut) == (real.terminated, real.truncated, real.cut)
        parts = {"obs": real.obs, "action": real.action, "reward": real.reward}
        parts |= {f"extra/{name}": real[name] for name in store.schema.extra}
        for name, value in parts.items():
            for leaf, x in flat(value, name).items():
                assert x.dtype == other.values[leaf].dtype
                assert x.tobytes() == other.values[leaf].tobytes(), leaf
        for name in store.schema.episode:
            for leaf, x in flat(real[name], f"episode/{name}").items() if real[name] is not None else ():
                assert x.tobytes() == other.values[leaf].tobytes(), leaf
            assert (real[name] is None) is not any(leaf.startswith(f"episode/{name}") for leaf in other.values)


@pytest.mark.slow
@pytest.mark.parametrize("segment_steps", [None, 40, "episode"], ids=["one segment", "several", "episodes"])
@pytest.mark.parametrize(("schema", "plan"), [(serial_schema(), PLAN), (NESTED, LANES)], ids=["plain", "nested lanes"])
@pytest.mark.parametrize("sealed", [False, True], ids=["being written", "sealed"])
def test_zarr_reads_the_values_of_every_episode(tmp_store, schema, segment_steps, plan, sealed):
    with (
        dr.create(tmp_store, schema, chunk_bytes=256, segment_steps=segment_steps) as store,
        store.writer(plan.num_envs) as writer,
    ):
        play(plan, schema, [quiet(writer), ModelStore().writer(plan.num_envs)])
        if sealed:
            writer.close()
        check_same(*read_while_nothing_is_sealed(store, read_with_zarr), store)

    with dr.open(tmp_store) as reader:
        check_same(read_with_zarr(tmp_store), reader)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_zarr_reads_the_values_of_every_episode_from_packs(tmp_store, compression):
    with merged_store(tmp_store, compression) as store:
        check_same(read_with_zarr(tmp_store), store)
    arrays = dict(zarr.open_group(tmp_store, mode="r")["segments"].groups())
    packs = [group for group in arrays.values() if "packed" in group.attrs]
    assert packs
    for pack in packs:
        assert pack["members"].shape == (pack.attrs["packed"]["members"], 4)
        assert pack["runs"].shape == (pack.attrs["packed"]["runs"], 5)
        assert pack["members"].metadata.dimension_names == ("members", "column")
        assert pack["done"].shape == (1, int(pack["committed"][0]))
        assert (pack["extra/wide"].shards is None) == (compression is None)


@contextmanager
def merged_store(path, compression):
    """Give a store of two packs, one merged out of another, and of segments that are not in a pack."""
    schema = dr.Schema(NESTED.obs, NESTED.action, NESTED.reward, {**NESTED.extra, "wide": WIDE}, NESTED.episode)
    with dr.create(
        path, schema, chunk_bytes=4096, segment_steps=40, compaction="manual", compression=compression
    ) as store:
        for plan in (LANES, PLAN, PLAN):
            with store.writer(plan.num_envs) as writer:
                play(plan, schema, [quiet(writer)])
            store.compact()
        with store.writer() as writer:
            play(PLAN, schema, [quiet(writer)])
        store.refresh()
        yield store


def test_zarr_finds_the_groups_and_arrays_of_the_format_and_no_others(tmp_store):
    with (
        dr.create(tmp_store, serial_schema(episode={"seed": dr.Field((), "int64")})) as store,
        store.writer() as writer,
    ):
        writer.append(np.zeros(3), 0, 1.0, True, serial=0)

    segment = "segments/00000000"
    assert set(read_with_zarr(tmp_store)) == {
        "",
        "counters",
        "evictions",
        "limiters",
        "segments",
        "samplers",
        segment,
        *(
            f"{segment}/{name}"
            for name in ("obs", "action", "reward", "done", "time", "committed", "observed", "durable")
        ),
        *(f"{segment}/{name}" for name in ("extra", "extra/serial", "episode", "episode/seed")),
    }


def test_arrays_are_what_the_format_says(tmp_store):
    with dr.create(tmp_store, NESTED, chunk_bytes=256) as store, store.writer(num_envs=3) as writer:
        play(LANES, NESTED, [quiet(writer)])
        live = zarr.open_group(tmp_store, mode="r")["segments/00000000"]
        assert live["obs/image"].shape[1] % live["obs/image"].chunks[1] == 0
        writer.close()
    segment = zarr.open_group(tmp_store, mode="r")["segments/00000000"]
    rows = int(segment["committed"][:].max())

    for name, array in segment.arrays():
        assert array.compressors == ()
        if name in ("committed", "observed", "durable"):
            assert (array.shape, array.dtype) == ((3,), np.int64)
    assert segment["obs/image"].shape == (3, rows, 2, 3)
    assert segment["obs/pair/1/deep"].shape == (3, rows, 2)
    assert segment["done"].dtype == np.uint8
    assert segment.attrs["sealed"] is True


def test_a_walk_while_another_writer_is_open_sees_only_committed_rows(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=256) as store, store.writer() as writer:
        for serial in range(100):
            row = np.full(3, serial, np.float32)
            writer.append(row, serial, 0.0, serial % 7 == 6, next_obs=row + 1, serial=serial)
            if serial % 10 == 0:
                store.refresh()
                check_same(read_with_zarr(tmp_store), store)
        assert len(store) > 0


def test_an_empty_store_can_be_walked(tmp_store):
    dr.create(tmp_store, serial_schema()).close()

    assert "segments" in read_with_zarr(tmp_store)
