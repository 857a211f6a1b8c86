"""Writer: one environment's steps into episodes."""

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import diskreplay as dr
from diskreplay.testing import ModelStore, check_store
from diskreplay.testing.scripts import play
from diskreplay.testing.strategies import schemas, writer_plans
from tests.testing.support import append_numbered, quiet, scratch, serial_schema, serials


@pytest.fixture
def store(tmp_store):
    with dr.create(tmp_store, serial_schema(episode={"seed": dr.Field((), "int64")}), chunk_bytes=256) as store:
        yield store


def obs(value):
    return np.full(3, value, np.float32)


def lengths(store):
    store.refresh()
    return [len(episode) for episode in store.episodes]


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=list(HealthCheck), deadline=None)
@given(
    schemas(),
    st.lists(writer_plans(max_steps=30), min_size=1, max_size=3),
    st.sampled_from((256, 1024, 4096)),
    st.none() | st.integers(1, 100) | st.just("episode"),
)
def test_every_episode_equals_the_model_and_a_fresh_reader_finds_the_same(schema, plans, chunk_bytes, segment_steps):
    with scratch() as folder:
        path, model, writers, serial = Path(folder) / "store", ModelStore(), [], 0
        with dr.create(path, schema, chunk_bytes=chunk_bytes, segment_steps=segment_steps) as store:
            for plan in plans:
                writers.append((store.writer(plan.num_envs), model.writer(plan.num_envs)))
                serial = play(plan, schema, [quiet(writers[-1][0]), writers[-1][1]], serial)
            store.refresh()
            ids = check_store(store, model, length_cuts=segment_steps is not None)
            for pair in writers:
                for writer in pair:
                    writer.close()
        with dr.open(path) as reader:
            assert check_store(reader, model) == ids


def test_readers_see_at_once_that_an_episode_was_ended_without_a_final_observation(store):
    with store.writer() as writer:
        for i in range(3):
            writer.append(obs(i), 0, 1.0, False, serial=i)
        writer.end_episode()
        store.refresh()
        (episode,) = store.episodes
        assert (episode.cut, episode.truncated, len(episode), len(episode.obs)) == (True, True, 3, 3)
        append_numbered(writer, range(3, 5))
        store.refresh()
        assert lengths(store) == [3, 2]
    assert store.verify(deep=True) == []


def test_a_whole_episode_ends_the_open_one_at_once_though_it_goes_to_another_segment(tmp_path):
    with dr.create(tmp_path / "store", serial_schema(), segment_steps="episode") as store, store.writer() as writer:
        for i in range(3):
            writer.append(obs(i), 0, 1.0, False, serial=i)
        arrays = np.zeros((2, 3), np.float32), np.zeros(2, np.int64), np.ones(2, np.float32)
        writer.append_episode(*arrays, terminated=True, serial=np.arange(3, 5))
        store.refresh()
        assert [(len(episode), episode.cut) for episode in store.episodes] == [(3, True), (2, False)]


def test_an_observation_that_does_not_continue_cuts_the_episode_and_warns_once(store):
    with store.writer() as writer:
        append_numbered(writer, range(3), end="open")
        with pytest.warns(UserWarning, match=r"differs from the next_obs.*cut") as told:
            writer.append(obs(50), 0, 1.0, False, next_obs=obs(51), serial=3)
        assert [warning.filename for warning in told] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            writer.append(obs(60), 0, 1.0, True, next_obs=obs(61), serial=4)

        assert lengths(store) == [3, 1, 1]
        assert [episode.cut for episode in store.episodes] == [True, True, False]
        assert [episode.obs[-1, 0] for episode in store.episodes] == [3, 51, 61]


def test_cuts_are_told_to_whoever_wants_to_know_in_place_of_the_warning(store):
    class Owner:
        def __init__(self):
            self.lanes = []

        def note(self, lane):
            self.lanes.append((lane, store.refresh()))  # with how much is there that was not

    owner = Owner()
    with store.writer(2) as writer:
        writer.report_cuts_to(owner.note)
        pairs = [np.stack([obs(t), obs(t)]) for t in (0, 1, 2)]
        rest = {"action": [0, 0], "reward": [1.0, 1.0], "terminated": [False, False], "serial": [0, 1]}
        writer.append(pairs[0], next_obs=pairs[1], **rest)
        writer.append(np.stack([obs(1), obs(9)]), next_obs=pairs[2], **rest)
        assert owner.lanes == [(1, 2)]
        del owner  # the writer refers to it weakly, and warns again
        with pytest.warns(UserWarning, match="differs from the next_obs"):
            writer.append(np.stack([obs(8), obs(2)]), next_obs=pairs[2], **rest)
        assert sorted(lengths(store)) == [1, 1, 2, 2]


def test_info_counts_the_cuts(store):
    with store.writer() as writer:
        append_numbered(writer, range(3), end="open")
        append_numbered(quiet(writer), range(10, 12))
        store.refresh()

        assert store.info()["episodes"]["cut"] == 1


@pytest.mark.parametrize("lanes", [None, 3])
def test_a_continuation_is_compared_by_value_where_its_bytes_differ(tmp_store, lanes):
    other_nan = np.array([0x7FC00001], np.uint32).view(np.float32)[0]
    told, came = np.array([0.0, np.nan, 1.0], np.float32), np.array([-0.0, other_nan, 1.0], np.float32)
    assert told.tobytes() != came.tobytes()
    schema = dr.Schema({"a": dr.Field((3,), "float32"), "b": dr.Field((), "int64")}, dr.Field((), "int64"))
    shape = () if lanes is None else (lanes,)

    def pair(row, b=0):
        return {"a": np.broadcast_to(row, (*shape, 3)), "b": np.full(shape, b)}

    rest = np.zeros(shape, np.int64), np.zeros(shape), np.zeros(shape, bool)
    with dr.create(tmp_store, schema, segment_steps=12) as store, store.writer(lanes) as writer:
        for _ in range(9):  # on to a second segment
            writer.append(pair(came), *rest, next_obs=pair(told))
        with pytest.warns(UserWarning, match="differs from the next_obs"):
            writer.append(pair(told, 1), *rest, next_obs=pair(told))
        writer.end_episode(**({"final_obs": pair(came)} if lanes is None else {}))
        store.refresh()
        assert sum(lengths(store)) == 10 * (lanes or 1)
        kept = store.episodes[0].obs["a"]
        assert kept[0].tobytes() == came.tobytes()
        assert kept[1].tobytes() == told.tobytes()  # as `next_obs` came first


def test_a_nan_continues_itself(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        for t in range(3):
            writer.append(obs(np.nan), 0, 0.0, False, next_obs=obs(np.nan), serial=t)

        assert lengths(store) == [3]


def test_an_array_that_the_caller_reuses_does_not_change_what_was_stored(store):
    buffer = np.zeros(3, np.float32)
    with store.writer() as writer:
        for t in range(4):
            buffer[:] = t
            writer.append(buffer, t, float(t), t == 3, serial=t)
        store.refresh()

        assert store.episodes[0].obs[:, 0].tolist() == [0, 1, 2, 3]


def test_a_reused_next_obs_array_that_changed_in_between_does_not_pass_as_its_continuation(store):
    buffer = np.ones(3, np.float32)
    with store.writer() as writer:
        writer.append(obs(0), 0, 1.0, False, next_obs=buffer, serial=0)
        buffer[:] = 7
        quiet(writer).append(buffer, 0, 1.0, True, serial=1)
        store.refresh()

        assert [episode.obs[:, 0].tolist() for episode in store.episodes] == [[0, 1], [7]]


def test_values_enter_by_the_casting_rules(store):
    torch = pytest.importorskip("torch")
    with store.writer() as writer:
        writer.append([0, 1, 2], np.uint8(3), 1, np.bool_(False), next_obs=torch.ones(3, requires_grad=True), serial=0)
        writer.append(torch.ones(3), torch.tensor(4), torch.tensor(2.0, requires_grad=True), True, serial=np.int8(1))
        store.refresh()
        (episode,) = store.episodes

        assert episode.obs.tolist() == [[0, 1, 2], [1, 1, 1]]
        assert episode.action.tolist() == [3, 4]
        assert episode.reward.tolist() == [1, 2]


def test_an_endless_episode_is_cut_so_that_segments_end(tmp_store):
    with dr.create(tmp_store, serial_schema(), segment_steps=20, chunk_bytes=64) as store, store.writer() as writer:
        append_numbered(writer, range(300), end="open")
        store.refresh()

        assert serials(store) == list(range(300))
        assert all(episode.cut for episode in store.episodes[:-1])
        assert len(store.episodes) > 3
        # Every cut kept the observation it goes on from: all steps are sampleable.
        with dr.Sampler(store, dr.Transitions()) as sampler:
            assert sampler.sampleable > 0.7 * 300
        assert all(len(episode.obs) == len(episode) + 1 for episode in store.episodes)


def test_one_group_an_episode(tmp_store):
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        with store.writer() as writer:
            for first in range(0, 60, 3):
                append_numbered(writer, range(first, first + 3))
        store.refresh()

        assert len({int(episode.ids[0]) >> 35 for episode in store.episodes}) == 20
        assert lengths(store) == [3] * 20


@pytest.mark.parametrize("durability", ["none", "episode", 0.01])
def test_every_durability_stores_the_same(tmp_store, durability):
    with dr.create(tmp_store, serial_schema()) as store, store.writer(durability=durability) as writer:
        append_numbered(writer, range(5))
        append_numbered(writer, range(5, 8))

        assert lengths(store) == [5, 3]


def test_close_may_be_repeated_and_the_store_can_be_closed_first(tmp_store):
    store = dr.create(tmp_store, serial_schema())
    writer = store.writer()
    append_numbered(writer, range(3), end="open")
    store.close()
    writer.close()
    writer.close()

    with dr.open(tmp_store) as reader:
        assert [len(episode) for episode in reader.episodes] == [3]
        assert reader.episodes[0].cut


@pytest.mark.parametrize("reward", [1e39, np.float64(-1e39), np.array(1e39)])
def test_a_number_that_would_become_infinite_is_refused_and_the_episode_goes_on(store, reward):
    with store.writer() as writer, store.writer(num_envs=2) as vector:
        writer.append(obs(0), 0, 1.0, False, serial=0)
        with pytest.raises(dr.SchemaError, match=r"^reward: -?1e\+39 does not fit float32$"):
            writer.append(obs(1), 0, reward, False, serial=1)
        with pytest.raises(dr.SchemaError, match=r"^obs: 1e\+39 does not fit float32$"):
            writer.append(np.full(3, 1e39), 0, 1.0, False, serial=1)
        writer.append(obs(1), 0, 1.0, True, next_obs=obs(2), serial=1)
        with pytest.raises(dr.SchemaError, match=r"^reward: -?1e\+39 does not fit float32$"):
            writer.append_episode(
                np.zeros((3, 3), np.float32), [0, 0], [0.0, float(reward)], terminated=True, serial=[2, 3]
            )
        with pytest.raises(dr.SchemaError, match=r"^reward: -?1e\+39 does not fit float32$"):
            vector.append(np.zeros((2, 3), np.float32), [0, 0], [0.0, float(reward)], [False, False], serial=[4, 5])
        vector.append(np.zeros((2, 3), np.float32), [0, 0], [0.0, 1.0], [False, False], serial=[4, 5])

    assert lengths(store) == [2, 1, 1]


def test_a_repr_says_how_many_environments_it_writes_and_whether_it_is_open(store):
    writer, vector = store.writer(), store.writer(num_envs=3)
    assert (repr(writer), repr(vector)) == ("Writer(open, num_envs=1)", "VectorWriter(open, num_envs=3)")
    writer.close(), vector.close()
    assert (repr(writer), repr(vector)) == ("Writer(closed, num_envs=1)", "VectorWriter(closed, num_envs=3)")
