"""Episodes as a user sees them."""

import collections.abc

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.support import append_numbered, serial_schema


@pytest.fixture
def store(tmp_store):
    schema = serial_schema(
        obs={"image": dr.Field((2,), "uint8"), "pair": (dr.Field((), "float32"), dr.Field((), "int16"))},
        extra={"belief": {"mean": dr.Field((2,), "float64")}},
        episode={"seed": dr.Field((), "int64"), "goal": {"at": dr.Field((2,), "float32")}},
    )
    with dr.create(tmp_store, schema) as store:
        yield store


def obs(count, first=0):
    steps = np.arange(first, first + count)
    return {"image": np.stack([steps, steps], 1), "pair": (steps, -steps)}


def write(store, writer, steps, first=0, *, final=True, terminated=True, truncated=False, episode=None):
    serial = np.arange(first, first + steps)
    writer.append_episode(
        obs(steps + final, first),
        serial,
        serial,
        terminated=terminated,
        truncated=truncated,
        episode=episode,
        serial=serial,
        belief={"mean": np.stack([serial, serial], 1)},
    )
    store.refresh()


def test_a_repr_says_how_many_episodes_there_are(store):
    assert repr(store.episodes) == "EpisodeList(0 episodes)"


def test_episodes_are_a_sequence_oldest_first(store):
    with store.writer() as writer:
        for i in range(5):
            write(store, writer, 3, 10 * i)
        episodes = store.episodes

        assert isinstance(episodes, collections.abc.Sequence)
        assert len(episodes) == store.num_episodes == 5
        assert [int(episode["serial"][0]) for episode in episodes] == [0, 10, 20, 30, 40]
        assert int(episodes[-1]["serial"][0]) == 40
        assert [int(episode["serial"][0]) for episode in episodes[1:3]] == [10, 20]
        assert [int(episode["serial"][0]) for episode in reversed(episodes)] == [40, 30, 20, 10, 0]


@pytest.mark.parametrize("index", [2, -3, 10**12])
def test_an_index_outside_is_an_index_error(store, index):
    with store.writer() as writer:
        write(store, writer, 3)
        write(store, writer, 3, 3)

        with pytest.raises(IndexError):
            store.episodes[index]


def test_an_index_that_is_none_says_what_is_meant(store):
    with store.writer() as writer:
        write(store, writer, 3)
        with pytest.raises(
            TypeError, match=r"^episodes are indexed by their number or a slice, not 'x': store.episodes\[0"
        ):
            store.episodes["x"]
        with pytest.raises(TypeError, match=r", not 1\.5: "):
            store.episodes[1.5]
        assert store.episodes[np.int64(0)].ids.tolist() == store.episodes[0].ids.tolist()
        with pytest.raises(dr.SchemaError, match=r"^an episode is indexed by the name of a field, not 3: episode.rewa"):
            store.episodes[0][3]


def test_an_episode_has_a_row_of_obs_more_with_a_final_observation(store):
    with store.writer() as writer:
        write(store, writer, 3)
        write(store, writer, 3, 3, final=False)
        with_final, without = store.episodes

        assert with_final.obs["image"].shape == (4, 2)
        assert with_final.obs["pair"]["1"].tolist() == [0, -1, -2, -3]
        assert without.obs["pair"]["0"].tolist() == [3, 4, 5]
        assert len(with_final) == len(without) == 3


def test_arrays_have_the_dtypes_of_the_schema(store):
    with store.writer() as writer:
        write(store, writer, 2, episode={"seed": 5, "goal": {"at": [1, 2]}})
        (episode,) = store.episodes

        assert episode.obs["image"].dtype == np.uint8
        assert episode.action.dtype == np.int64
        assert episode.reward.dtype == np.float32
        assert episode["belief"]["mean"].dtype == np.float64
        assert episode["goal"]["at"].tolist() == [1, 2]
        assert episode["seed"] == 5


def test_total_reward_is_the_undiscounted_return(store):
    with store.writer() as writer:
        write(store, writer, 5)

        assert store.episodes[0].total_reward == 0 + 1 + 2 + 3 + 4


def test_episode_values_that_were_not_given_are_none(store):
    with store.writer() as writer:
        write(store, writer, 2)
        write(store, writer, 2, 2, episode={"seed": 1, "goal": {"at": [0, 0]}})

        assert [episode["seed"] is None for episode in store.episodes] == [True, False]
        assert store.episodes[0]["goal"] is None


def test_an_open_episode_has_not_ended(store):
    with store.writer() as writer:
        row = {"image": [0, 0], "pair": (0, 0)}
        writer.append(row, 0, 1.0, False, serial=0, belief={"mean": [0, 0]})
        store.refresh()
        (episode,) = store.episodes

        assert not (episode.terminated)
        assert not (episode.truncated)
        assert not (episode.cut)
        assert len(episode) == 1
        assert episode["seed"] is None


def test_an_unknown_field_is_refused_and_the_known_ones_are_listed(store):
    with store.writer() as writer:
        write(store, writer, 2)

        with pytest.raises(dr.SchemaError, match=r"'sed'.*serial.*seed"):
            store.episodes[0]["sed"]


def test_an_episode_in_one_chunk_is_not_copied(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
        store.refresh()
        episode = store.episodes[0]

        assert np.shares_memory(episode.obs, episode.obs)
        assert np.shares_memory(episode.reward, episode.reward)


def test_rows_of_one_leaf_are_read_alone(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64) as store, store.writer() as writer:
        append_numbered(writer, range(40))
    with dr.open(tmp_store) as store:
        episode = store.episodes[0]
        assert not store.snapshot.leaf("obs").holder
        np.testing.assert_array_equal(episode.rows("obs", 9, 11), np.repeat([[9], [10]], 3, 1))
        assert 0 < len(store.snapshot.leaf("obs").holder) <= 2
        assert not store.snapshot.leaf("reward").holder
        for path in ("obs", "action", "reward"):
            np.testing.assert_array_equal(episode.rows(path), episode[path])
        assert len(episode.rows("reward", 40)) == 0


def test_rows_that_are_not_there_are_refused(store):
    with store.writer() as writer:
        write(store, writer, 3)
    episode = store.episodes[0]
    assert episode.has_final_obs
    assert len(episode.rows("obs/image")) == 4
    for first, stop in ((0, 4), (-1, 2), (2, 1)):
        with pytest.raises(IndexError, match=f"^reward of this episode has the rows 0 to 2, not {first} to"):
            episode.rows("reward", first, stop)
    with pytest.raises(dr.SchemaError, match="^the steps of this store have no leaf 'obs'; they have obs/image, "):
        episode.rows("obs")


def test_arrays_of_an_episode_cannot_be_written(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
        store.refresh()

        with pytest.raises(ValueError, match="read-only"):
            store.episodes[0].reward[0] = 1


def test_an_episode_over_many_chunks_is_put_together(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64) as store, store.writer() as writer:
        append_numbered(writer, range(100))
        store.refresh()
        episode = store.episodes[0]

        assert episode.obs[:, 2].tolist() == list(range(101))
        assert episode.reward.tolist() == list(range(100))
        assert len(list((tmp_store / "segments" / "00000000" / "obs").glob("c.*"))) > 10


def test_arrays_outlive_the_store(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    reader = dr.open(tmp_store)
    reward = reader.episodes[0].reward
    reader.close()
    del reader

    assert reward.tolist() == [0, 1, 2, 3, 4]


def test_ids_of_lanes_interleave(tmp_store):
    with dr.create(tmp_store, serial_schema()) as store, store.writer(num_envs=3) as writer:
        for t in range(4):
            writer.append(np.zeros((3, 3)), np.zeros(3, int), np.zeros(3), [t == 3] * 3, [False] * 3, serial=[t] * 3)
        store.refresh()

        ids = np.stack([episode.ids for episode in store.episodes])
        assert len(np.unique(ids)) == 12
        assert (np.diff(ids, axis=1) == 3).all()
