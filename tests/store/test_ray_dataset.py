"""A dataset of Ray Data against all of the store in memory: first what its tasks read, here; then by Ray."""

import dataclasses
import pickle

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.without import STORE, run_without

pytest.importorskip("ray.data", reason="needs ray[data]")

from diskreplay.store import ray_dataset
from diskreplay.store.ray_dataset import StoreDatasource, chosen_columns, segment_cuts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),  # of what Ray sets itself
]


@pytest.fixture(autouse=True)
def forgotten():
    """Close what tasks have opened in this process."""
    yield
    ray_dataset._follower.cache_clear()


@pytest.fixture
def store(tmp_store):
    schema = dr.Schema(
        obs={"image": dr.Field((2, 3), "uint8"), "room": dr.Field((), "int16")},
        action=dr.Field((2,), "float32"),
        reward=dr.Field((), "float64"),
        extra={"belief": {"mean": dr.Field((2,), "float64")}, "known": dr.Field((), "bool")},
    )
    rng = np.random.default_rng(0)

    def obs(rows):
        return {"image": rng.integers(0, 255, (rows, 2, 3), np.uint8), "room": rng.integers(0, 9, rows)}

    def rest(steps):
        return {"belief": {"mean": rng.random((steps, 2))}, "known": rng.random(steps) < 0.5}

    with dr.create(tmp_store, schema, segment_steps=30) as store, store.writer() as one, store.writer(2) as two:
        for number in range(12):
            steps, lane = int(rng.integers(1, 15)), number % 3
            values = obs(steps + (number % 4 > 0)), rng.random((steps, 2)), rng.random(steps)
            ends = {"terminated": number % 2 == 0, "truncated": number % 3 == 0}
            if lane == 2:
                one.append_episode(*values, **ends, **rest(steps))
            else:
                two.append_episode(lane, *values, **ends, **rest(steps))
        for _ in range(3):  # an episode that stays open
            (row,) = [{name: leaf[0] for name, leaf in obs(1).items()}]
            one.append(row, [0, 1], 0.5, False, belief={"mean": [1, 2]}, known=True)
        store.refresh()
        yield store


def source(store, where=None, fields=None):
    return StoreDatasource(store._root, store.snapshot, where, chosen_columns(store.schema, fields))


def columns(blocks):
    """Return the columns of blocks by name."""
    accessors = [ray_dataset.BlockAccessor.for_block(block) for block in blocks]
    return joined([accessor.to_numpy() for accessor in accessors])


def joined(batches):
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def read(store, parallelism=3, **kwargs):
    """Return the blocks of all tasks, which come out of a pickle as in a worker."""
    tasks = source(store, **kwargs).get_read_tasks(parallelism)
    return [block for task in tasks for block in pickle.loads(pickle.dumps(task))()]


def expected(store):
    """Return the columns as `to_numpy` has them."""
    found = store.to_numpy()
    del found["episodes"]
    obs, belief = found.pop("obs"), found.pop("belief")
    return {**found, **{f"obs.{name}": part for name, part in obs.items()}, "belief.mean": belief["mean"]}


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, column in wanted.items():
        np.testing.assert_array_equal(found[name], column, strict=True, err_msg=name)
    assert len(column) > 0


@pytest.mark.parametrize("parallelism", [1, 3, 50])
def test_tasks_have_every_step_once(store, parallelism):
    tasks = source(store).get_read_tasks(parallelism)
    assert len(tasks) == 1 if parallelism == 1 else len(tasks) > 2
    blocks = [block for task in tasks for block in task()]
    assert_same(columns(blocks), expected(store))
    assert sum(task.metadata.num_rows for task in tasks) == len(store)
    row_bytes = 8 * 4 + 3 + 6 + 2 + 8 + 8 + 16 + 1
    assert sum(task.metadata.size_bytes for task in tasks) == len(store) * row_bytes
    assert source(store).estimate_inmemory_data_size() == len(store) * row_bytes
    assert all(block.schema.equals(tasks[0].schema) for block in blocks)
    assert not source(store).supports_distributed_reads


def test_blocks_end_inside_of_episodes_where_they_are_full(store, monkeypatch):
    monkeypatch.setattr(ray_dataset, "BLOCK_BYTES", 4 * 80)
    blocks = read(store)
    assert max(len(block) for block in blocks) == 4
    assert_same(columns(blocks), expected(store))


def test_only_what_was_visible_is_read(store):
    wanted, tasks = expected(store), source(store).get_read_tasks(2)
    with dr.open(store.path, "a") as again, again.writer() as writer:
        for _ in range(3):
            obs = {"image": np.zeros((2, 3), np.uint8), "room": 1}
            writer.append(obs, [0, 1], 0.5, True, belief={"mean": [1, 2]}, known=True)
        assert_same(columns([block for task in tasks for block in task()]), wanted)


def test_episodes_are_whole_where_a_capacity_hides_steps(store):
    whole = sum(episode.length for episode in store.episodes)
    store.resize(capacity=len(store) - 3)
    found = columns(read(store))
    assert_same(found, expected(store))
    hidden = np.count_nonzero(found["hidden"])
    assert 0 < hidden <= 3
    assert len(found["hidden"]) == len(store) + hidden <= whole


def test_where_chooses_episodes_and_fields_columns(store):
    wanted = expected(store)
    lengths = np.bincount(wanted["episode"])
    rows = lengths[wanted["episode"]] > 6
    assert 0 < rows.sum() < len(rows)
    found = columns(read(store, where=longer_than_six, fields=["obs", "reward", "episode"]))
    names = ("episode", "obs.image", "obs.room", "reward")
    assert_same(found, {name: wanted[name][rows] for name in names})
    assert [task.metadata.num_rows for task in source(store, where=longer_than_six).get_read_tasks(1)] == [None]


def longer_than_six(episode):
    return len(episode) > 6


def test_next_observations_are_there_on_request_for_the_steps_that_have_one(store):
    wanted, nexts, kept = expected(store), [], []
    for episode in store.episodes:
        steps = min(len(episode), len(episode.obs["room"]) - 1)
        nexts.append(episode.obs["image"][1 : steps + 1])
        kept.append(np.arange(len(episode)) < steps)
    kept = np.concatenate(kept)
    assert 0 < (~kept).sum() < 8
    found = columns(read(store, fields=["...", "next_obs.image"]))
    rows = {name: column[kept] for name, column in wanted.items()}
    assert_same(found, {**rows, "next_obs.image": np.concatenate(nexts)})
    rows = sum(task.metadata.num_rows for task in source(store, fields=["next_obs"]).get_read_tasks(3))
    assert rows == kept.sum()


def test_tasks_are_cut_between_segments_and_inside_of_large_ones():
    segments, steps = np.array([0, 0, 1, 2, 2, 2, 2, 3]), np.array([5, 5, 10, 20, 20, 20, 20, 1])
    assert segment_cuts(segments, steps, 1) == [0, 8]
    assert segment_cuts(segments, steps, 5) == [0, 4, 6, 8]
    assert segment_cuts(segments, steps, 10) == [0, 3, 4, 5, 6, 7, 8]
    assert segment_cuts(segments[:0], steps[:0], 4) == [0]
    for parts in range(1, 40):
        cuts = segment_cuts(segments, steps, parts)
        assert cuts == sorted(set(cuts))
        assert (cuts[0], cuts[-1]) == (0, 8)


def test_an_empty_store_has_no_tasks(tmp_store):
    with dr.create(tmp_store, dr.Schema(obs=dr.Field((), "int8"), action=dr.Field((), "int8"))) as store:
        assert source(store).get_read_tasks(4) == []
        assert source(store).estimate_inmemory_data_size() == 0


def test_what_is_wrong_is_said_before_anything_is_read(store, tmp_path):
    with pytest.raises(dr.SchemaError, match="there is no column 'obs.sound'; the dataset has episode, step, id, time"):
        store.to_ray_dataset(fields=["obs.sound"])
    with pytest.raises(ValueError, match="fields must be a sequence of columns, such as .* not 'obs'"):
        store.to_ray_dataset(fields="obs")
    with pytest.raises(
        ValueError,
        match="where must be a function of an episode, .*, not 'length > 6'",
    ):
        store.to_ray_dataset(where="length > 6")
    (task,) = source(store).get_read_tasks(1)
    dr.create(tmp_path / "other", store.schema).close()
    read_another = dataclasses.replace(task.read_fn, path=str(tmp_path / "other"))
    with pytest.raises(dr.StoreNotFound, match="was replaced since the dataset was made"):
        list(read_another())


def test_without_ray_it_says_which_extra_has_it(tmp_path):
    code = f"{STORE}\nprint(message(dr.open(path).to_ray_dataset))"
    assert run_without(["ray"], code, tmp_path / "store") == (
        "a dataset of Ray needs a library that cannot be imported (No module named 'ray'): "
        'pip install "diskreplay[ray]"'
    )
