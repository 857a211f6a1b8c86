"""The short ways of both writers write the very bytes that the long way writes."""

import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import diskreplay as dr
from diskreplay.testing.scripts import play
from diskreplay.testing.strategies import schemas, writer_plans
from tests.testing.calls import PACKAGE
from tests.testing.inner import real
from tests.testing.on_disk import POSITION_BITS
from tests.testing.support import append_numbered, digest, quiet, scratch, serial_schema
from tests.writing import inner
from tests.writing.inner import CLOSE_LANES, long_way


def rows_on_disk(path):
    """Checksums of all chunks and counters of the segments; what documents say of inodes and times aside."""
    return {name: sum_ for name, sum_ in digest(path / "segments").items() if name.rsplit("/", 1)[-1].startswith("c.")}


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """The same times for the rows of two stores, so that they have the same bytes."""
    return inner.CallClock(monkeypatch)


wide = st.just(dr.Field((4100,), "uint8"))  # written by position


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    schemas() | st.builds(serial_schema, st.fixed_dictionaries({"wide": wide, "x": st.just(dr.Field((), "float64"))})),
    st.lists(writer_plans(max_lanes=7, max_steps=30), min_size=1, max_size=2),
    st.sampled_from((64, 256, 4096, 1 << 15)),
    st.none() | st.integers(1, 100) | st.just("episode"),
)
def test_the_short_way_and_the_long_way_write_the_same_bytes(clock, schema, plans, chunk_bytes, segment_steps):
    # Without a capacity: what leaves goes by time, which begins again with each plan.
    kwargs = {"chunk_bytes": chunk_bytes, "segment_steps": segment_steps}
    with scratch() as folder:
        paths = [Path(folder) / name for name in ("short", "long")]
        for plan in plans:
            stores = [dr.create(path, schema, exist_ok=True, **kwargs) for path in paths]
            short, long = (store.writer(plan.num_envs) for store in stores)
            play(plan, schema, [clock.of(quiet(short)), clock.of(quiet(long_way(long)))])
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
def test_every_autoreset_mode_writes_what_lane_by_lane_writes(clock, tmp_path, autoreset, given, lanes, segment_steps):
    schema = serial_schema(episode={"seed": dr.Field((), "int64")})
    stores = [
        dr.create(tmp_path / name, schema, chunk_bytes=256 * lanes, segment_steps=segment_steps)
        for name in ("short", "long")
    ]
    short, long = (store.writer(num_envs=lanes) for store in stores)
    for writer in clock.of(quiet(short)), clock.of(quiet(long_way(long))):
        for call in vector_calls(np.random.default_rng(7), lanes, 60, autoreset, given):
            writer.append(**call)
    for store in stores:
        store.close()

    assert rows_on_disk(stores[0].path) == rows_on_disk(stores[1].path)
    assert len(list((tmp_path / "short" / "segments").glob("0*"))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("straggler", [0, 1])
def test_a_lane_that_leaves_the_older_segment_lets_the_newest_end_in_the_same_step(clock, tmp_path, straggler):
    stores = [dr.create(tmp_path / name, serial_schema(), segment_steps=64) for name in ("short", "long")]
    short, long = (store.writer(num_envs=2) for store in stores)
    writers = clock.of(quiet(short)), clock.of(quiet(long_way(long)))
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
def test_compiled_code_writes_what_numpy_writes(clock, tmp_path, monkeypatch, given):
    lanes, calls, kernel = 2 * CLOSE_LANES, [], inner.write_lanes()

    def counted(lanes, rows, *rest):
        calls.append(len(rows))
        kernel(lanes, rows, *rest)

    schema = serial_schema(episode={"seed": dr.Field((), "int64")})
    for name, way in {"compiled": counted, "numpy": None}.items():
        monkeypatch.setattr(*inner.IF_MADE, lambda _, way=way: way)
        with dr.create(tmp_path / name, schema, chunk_bytes=1 << 15, segment_steps=13 * lanes) as store:
            writer = clock.of(quiet(store.writer(num_envs=lanes)))
            for call in vector_calls(np.random.default_rng(3), lanes, 40, "next_step", given):
                writer.append(**call)

    assert rows_on_disk(tmp_path / "compiled") == rows_on_disk(tmp_path / "numpy")
    assert len(list((tmp_path / "numpy" / "segments").glob("0*"))) > 1
    assert lanes in calls
    assert min(calls) < lanes  # of some of them, too


@pytest.mark.parametrize("sampler_first", [False, True])
def test_a_process_that_samples_writes_many_lanes_with_compiled_code(tmp_store, sampler_first, monkeypatch):
    asked = []
    monkeypatch.setattr(*inner.COMPILE_ALL, asked.extend)
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
    real_append, real_write, real_make_room = map(real, (inner.APPEND_ROW, inner.WRITE_STEP, inner.MAKE_ROOM))

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
    monkeypatch.setattr(*inner.APPEND_ROW, append)
    monkeypatch.setattr(*inner.WRITE_STEP, write)
    monkeypatch.setattr(*inner.MAKE_ROOM, make_room)
    obs = np.zeros((4, 3), np.float32)
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as lone, store.writer(num_envs=4) as vector:
        for t in range(100):
            lone.append(obs[0], t, 0.0, False, next_obs=obs[0], serial=t)
            zeros = np.zeros(4, bool)
            vector.append(obs, zeros + t, zeros + 0.0, zeros, zeros, next_obs=obs, serial=zeros + t)

    assert taken == {"lone": 100, "lanes": 100}
    assert len(made_room) == 1 + 1  # the first of the lanes opens the segment and reserves rows for all


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


def interrupted_at(call, function):
    """Run a function, but raise an Interrupt as it enters that call of the package; return whether there was one."""
    left = call

    def count(frame, event, _):
        nonlocal left
        code = frame.f_code  # of a function: an error that ends a generator as it is collected is only printed
        if event == "call" and code.co_filename.startswith(PACKAGE) and code.co_name != "<genexpr>":
            left -= 1
            if left < 0:
                raise Interrupt

    sys.setprofile(count)
    try:
        function()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


@pytest.mark.filterwarnings("ignore:an appended obs differs")
@pytest.mark.parametrize("end", ["open", "terminated", "cut"])
def test_an_append_that_is_interrupted_in_a_call_is_not_written_or_closes_the_writer(tmp_store, end):
    outcomes = set()
    with dr.create(tmp_store, serial_schema()) as store:
        for call in range(1000):
            writer = store.writer()
            append_numbered(writer, range(3), end="open")
            store.refresh()
            before = len(store)
            if end == "cut":  # by an observation that does not continue the episode: a step that the cursor refuses
                rest = {"obs": np.full(3, 9.0), "action": 0, "reward": 0.0, "terminated": False, "serial": 3}
                step = partial(writer.append, **rest)
            else:
                step = partial(append_numbered, writer, [3], end=end)
            if not interrupted_at(call, step):
                break
            store.refresh()
            published = len(store) > before
            try:
                writer.append(np.full(3, 3.0), 0, 0.0, False, serial=4)
                outcomes.add((published, "open"))
            except dr.WriterClosed:
                outcomes.add((published, "closed"))
            with suppress(dr.ReplayError):
                writer.close()
        assert call > 5
    assert outcomes <= {(False, "open"), (False, "closed"), (True, "closed")}
    assert (False, "open") in outcomes
