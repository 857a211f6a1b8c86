"""The short ways of both writers write the very bytes that the long way writes, and cast by the very same rules."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import diskreplay as dr
from diskreplay.ids import POSITION_BITS
from diskreplay.kernels.table import chosen
from diskreplay.segments.documents.layout import CLOSE_LANES
from diskreplay.testing.scripts import play, random_values
from diskreplay.testing.strategies import DTYPES, schemas, writer_plans
from diskreplay.writing.append_cursor import AppendCursor, Lane
from diskreplay.writing.casting import PartCaster, leaf_caster
from diskreplay.writing.episode_writer import EpisodeWriter
from diskreplay.writing.vector_writer import VectorSteps, as_item
from tests.testing.support import append_numbered, digest, quiet, scratch, serial_schema


class BlocksOfOne(EpisodeWriter):
    """Makes room for every step of a lone lane, and writes it as a block of one."""

    def append(self, items, next_obs, terminated, truncated, episode):
        self.read_clock()
        rows = 2 if terminated or truncated or next_obs is not None else 1
        self.make_room(self.lanes[0], items, rows, values=bool(episode))
        self._append_block_of_one(self.lanes[0], items, next_obs, terminated, truncated, episode)


class LaneByLane(VectorSteps):
    """Makes room for every lane of a step by itself, and writes a block of one in each."""

    def __init__(self, episode_writer):
        super().__init__(episode_writer)
        episode_writer.lanes[:] = [Lane(i) for i in range(len(episode_writer.lanes))]

    def append(self, step):
        episode_writer = self._episode_writer
        episode_writer.read_clock()
        self._make_room(step)
        for i in self._lanes_that_need_more(step).tolist():
            ends, cuts = bool(step.ends[i]), bool(step.cuts[i])
            next_obs = None if step.next_obs is None else self._items(step.next_obs, i)
            episode = step.episode if step.episode and (ends or cuts) else {}
            values = {leaf: as_item(leaf, value[i]) for leaf, value in episode.items()}
            episode_writer._append_block_of_one(
                episode_writer.lanes[i], self._items(step.values, i), next_obs, ends, cuts, values
            )

    def _needs_only_writing(self, newest, step):
        return False

    def _lanes_that_need_more(self, step):
        return self._every if step.lanes is None else step.lanes


def long_way(writer):
    """Make a fresh writer do without its short ways."""
    writer._episode_writer.__class__ = BlocksOfOne
    if isinstance(writer, dr.VectorWriter):
        writer._steps = LaneByLane(writer._episode_writer)
    return writer


def rows_on_disk(path):
    """Checksums of all chunks and counters of the segments; what documents say of inodes and times aside."""
    return {name: sum_ for name, sum_ in digest(path / "segments").items() if name.rsplit("/", 1)[-1].startswith("c.")}


@pytest.fixture(autouse=True)
def still_clock(monkeypatch):
    """One time for all rows, so that those of two stores have the same bytes."""
    monkeypatch.setattr("diskreplay.writing.append_cursor.clock_gettime_ns", lambda clock: 5)
    monkeypatch.setattr("diskreplay.writing.episode_writer.clock_ns", lambda: 5)
    monkeypatch.setattr("diskreplay.segments.sealing.clock_ns", lambda: 5)


wide = st.just(dr.Field((4100,), "uint8"))  # written by position


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    schemas() | st.builds(serial_schema, st.fixed_dictionaries({"wide": wide, "x": st.just(dr.Field((), "float64"))})),
    st.lists(writer_plans(max_lanes=7, max_steps=30), min_size=1, max_size=2),
    st.sampled_from((64, 256, 4096, 1 << 15)),
    st.none() | st.integers(1, 100) | st.just("episode"),
)
def test_the_short_way_and_the_long_way_write_the_same_bytes(schema, plans, chunk_bytes, segment_steps):
    # Without a capacity: what leaves goes by time, which stands still.
    kwargs = {"chunk_bytes": chunk_bytes, "segment_steps": segment_steps}
    with scratch() as folder:
        paths = [Path(folder) / name for name in ("short", "long")]
        for plan in plans:
            stores = [dr.create(path, schema, exist_ok=True, **kwargs) for path in paths]
            short, long = (store.writer(plan.num_envs) for store in stores)
            play(plan, schema, [quiet(short), quiet(long_way(long))])
            for store in stores:
                store.close()
        assert rows_on_disk(paths[0]) == rows_on_disk(paths[1])
        ids = []
        for path in paths:
            with dr.open(path) as store:
                ids.append([episode.ids.tolist() for episode in store.episodes])
        assert ids[0] == ids[1]


AUTORESETS = ("next_step", "same_step", "disabled")


def vector_calls(rng, lanes, steps, autoreset, given):
    """Steps of environments that end at random, as a vector with this autoreset mode gives them."""
    obs, over = rng.standard_normal((lanes, 3)).astype(np.float32), np.zeros(lanes, bool)
    for t in range(steps):
        following = rng.standard_normal((lanes, 3)).astype(np.float32)
        mask = None
        if autoreset == "next_step":  # an ended lane only resets in the step after
            mask, over = ~over, np.zeros(lanes, bool)
        ends = rng.random((2, lanes)) < 0.15
        if mask is not None:
            ends &= mask
        yield {
            "obs": obs,
            "action": rng.integers(0, 9, lanes),
            "reward": rng.standard_normal(lanes).astype(np.float32),
            "terminated": ends[0],
            "truncated": ends[1],
            "next_obs": following if given == "always" or (given == "sometimes" and t % 3) else None,
            "mask": mask,
            "episode": {"seed": np.arange(lanes) + t} if t % 2 and ends.any() else None,
            "serial": np.arange(lanes) * 1000 + t,
        }
        over = ends.any(0)
        reset = rng.standard_normal((lanes, 3)).astype(np.float32)
        obs = np.where(over[:, None], reset, following).astype(np.float32)
        if rng.random() < 0.05:  # a bug of the caller: this observation comes from nowhere
            obs[rng.integers(lanes)] = 99


@pytest.mark.slow
@pytest.mark.parametrize("autoreset", AUTORESETS)
@pytest.mark.parametrize("given", ["always", "never", "sometimes"])
@pytest.mark.parametrize(("lanes", "segment_steps"), [(1, 24), (5, 60), (64, 700)])
def test_every_autoreset_mode_writes_what_lane_by_lane_writes(tmp_path, autoreset, given, lanes, segment_steps):
    schema = serial_schema(episode={"seed": dr.Field((), "int64")})
    stores = [
        dr.create(tmp_path / name, schema, chunk_bytes=256 * lanes, segment_steps=segment_steps)
        for name in ("short", "long")
    ]
    writers = [quiet(stores[0].writer(num_envs=lanes)), quiet(long_way(stores[1].writer(num_envs=lanes)))]
    for writer in writers:
        for call in vector_calls(np.random.default_rng(7), lanes, 60, autoreset, given):
            writer.append(**call)
    for store in stores:
        store.close()

    assert rows_on_disk(stores[0].path) == rows_on_disk(stores[1].path)
    assert len(list((tmp_path / "short" / "segments").glob("0*"))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("straggler", [0, 1])
def test_a_lane_that_leaves_the_older_segment_lets_the_newest_end_in_the_same_step(tmp_path, straggler):
    stores = [dr.create(tmp_path / name, serial_schema(), segment_steps=64) for name in ("short", "long")]
    writers = [quiet(stores[0].writer(num_envs=2)), quiet(long_way(stores[1].writer(num_envs=2)))]
    for t in range(210):
        mask = np.ones(2, bool)
        mask[straggler] = t in (0, 204, 205)  # its episode stays open, and keeps the first segment open
        ends = np.zeros(2, bool)
        ends[1 - straggler] = t == 70
        obs = np.full((2, 3), t, np.float32)
        for writer in writers:
            writer.append(obs, np.zeros(2, int), np.zeros(2), ends, np.zeros(2, bool), mask=mask, serial=[t, t])
    for store in stores:
        store.close()

    assert rows_on_disk(stores[0].path) == rows_on_disk(stores[1].path)
    with dr.open(stores[0].path) as store:
        # Both are cut by the step in which the straggler leaves the first segment, and go on in one segment.
        assert len({episode.ids[0] >> POSITION_BITS for episode in store.episodes if 205 in episode["serial"]}) == 1


@pytest.mark.parametrize("given", ["always", "sometimes"])
def test_compiled_code_writes_what_numpy_writes(tmp_path, monkeypatch, given):
    lanes, calls, kernel = 2 * CLOSE_LANES, [], chosen("write_lanes")

    def counted(lanes, rows, *rest):
        calls.append(len(rows))
        kernel(lanes, rows, *rest)

    schema = serial_schema(episode={"seed": dr.Field((), "int64")})
    for name, way in {"compiled": counted, "numpy": None}.items():
        monkeypatch.setattr("diskreplay.writing.vector_writer.if_made", lambda _, way=way: way)
        with dr.create(tmp_path / name, schema, chunk_bytes=1 << 15, segment_steps=13 * lanes) as store:
            writer = quiet(store.writer(num_envs=lanes))
            for call in vector_calls(np.random.default_rng(3), lanes, 40, "next_step", given):
                writer.append(**call)

    assert rows_on_disk(tmp_path / "compiled") == rows_on_disk(tmp_path / "numpy")
    assert len(list((tmp_path / "numpy" / "segments").glob("0*"))) > 1
    assert lanes in calls
    assert min(calls) < lanes  # of some of them, too


@pytest.mark.parametrize("sampler_first", [False, True])
def test_a_process_that_samples_writes_many_lanes_with_compiled_code(tmp_store, sampler_first, monkeypatch):
    asked = []
    monkeypatch.setattr("diskreplay.store.store.compile_all", asked.extend)
    with dr.create(tmp_store, serial_schema()) as store:
        writers = [] if sampler_first else [store.writer(num_envs=CLOSE_LANES + 1)]
        assert asked == []
        store.follow_compiled()
        writers += [store.writer(), store.writer(num_envs=CLOSE_LANES)]
        assert asked.count("write_lanes") == (not sampler_first)
        writers.append(store.writer(num_envs=CLOSE_LANES + 1))
        assert asked.count("write_lanes") == 1 + (not sampler_first)


def test_the_short_way_is_taken(tmp_store, monkeypatch):
    """Otherwise the tests above compare the long way with itself."""
    taken = {"lone": 0, "lanes": 0}
    real_append, real_write, real_make_room = AppendCursor.append, VectorSteps._write, EpisodeWriter.make_room

    def append(self, *args):
        done = real_append(self, *args)
        taken["lone"] += done
        return done

    def write(self, *args):
        taken["lanes"] += 1
        return real_write(self, *args)

    def make_room(self, *args, **kwargs):
        made_room.append(1)
        return real_make_room(self, *args, **kwargs)

    made_room = []
    monkeypatch.setattr(AppendCursor, "append", append)
    monkeypatch.setattr(VectorSteps, "_write", write)
    monkeypatch.setattr(EpisodeWriter, "make_room", make_room)
    obs = np.zeros((4, 3), np.float32)
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as lone, store.writer(num_envs=4) as vector:
        for t in range(100):
            lone.append(obs[0], t, 0.0, False, next_obs=obs[0], serial=t)
            zeros = np.zeros(4, bool)
            vector.append(obs, zeros + t, zeros + 0.0, zeros, zeros, next_obs=obs, serial=zeros + t)

    assert taken == {"lone": 100, "lanes": 100}
    assert len(made_room) == 1 + 1  # the first of the lanes opens the segment and reserves rows for all


# --- casts -----------------------------------------------------------------------------------------------------------

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
        item = leaf_caster(field, path).item(value)
        # As it enters the chunk: bytes as they are, a number by assignment.
        chunk = np.zeros(1, f"V{field.row_bytes}" if type(item) is bytes else field.dtype)
        chunk[0] = item
        return chunk

    assert outcome(cast) == outcome(lambda: field.cast(value, path))


@settings(max_examples=50, deadline=None)
@given(schemas(), st.integers(0, 2**32 - 1))
def test_the_items_of_a_part_are_its_leaves_in_order(schema, seed):
    rng = np.random.default_rng(seed)
    for part, tree in (("obs", schema.obs), ("action", schema.action), ("extra", schema.extra)):
        value = random_values(tree, rng)
        plain = [np.asarray(x).tobytes() for _, x in schema.flatten(part, value)]
        items = PartCaster(schema, part).items(value)
        assert [item if type(item) is bytes else np.asarray(item).tobytes() for item in items] == plain
        if isinstance(value, dict):
            shuffled = dict(reversed(value.items()))
            assert PartCaster(schema, part).items(shuffled) == items or any(item != item for item in items)


# --- interruptions ---------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What a signal handler may raise anywhere."""


class Raises:
    """A target that a signal comes in the middle of writing to."""

    def __setitem__(self, at, item):
        raise Interrupt


@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "end"),
    [("_done", ""), ("_committed", ""), ("_observed", ""), ("_done", "terminated"), ("_committed", "terminated")],
)
def test_a_writer_that_is_interrupted_on_the_short_way_closes_and_keeps_what_was_published(tmp_store, at, end):
    with dr.create(tmp_store, serial_schema()) as store:
        writer = store.writer()
        append_numbered(writer, range(3), end="open")
        setattr(writer._episode_writer.lanes[0].cursor, at, Raises())
        with pytest.raises(Interrupt):
            append_numbered(writer, [3], end=end)
        with pytest.raises(dr.WriterClosed):
            append_numbered(writer, [4])
    with dr.open(tmp_store) as reader:
        (episode,) = reader.episodes
        # Counters are stored last, that of the observation after that of the row.
        assert episode["serial"].tolist() == list(range(4 if at == "_observed" else 3))
        assert episode.cut
        assert episode.obs[:, 0].tolist() == [0, 1, 2, 3]
