"""VectorWriter: lanes that advance on their own."""

import inspect
import tracemalloc

import numpy as np
import pytest
import torch
import zarr

import diskreplay as dr
from tests.testing.support import quiet, serial_schema

LANES = 4


def test_whole_episodes_are_appended_by_the_arguments_of_a_writer_and_a_lane():
    one, many = (inspect.signature(kind.append_episode).parameters for kind in (dr.Writer, dr.VectorWriter))
    assert list(many) == ["self", "lane", *list(one)[1:]]
    assert {name: many[name] for name in one} == dict(one)


FIRST, CUT = 4, 16


def first_flags(store, lane):
    """The flags of the first row of each of a lane's episodes, oldest first."""
    store.refresh()
    flags = []
    for episode in store.episodes:
        if episode.lane == lane:
            done = zarr.open_group(store.path, mode="r")[f"segments/{episode.segment:08d}/done"]
            flags.append(int(done[lane, int(episode.ids[0] & (2**35 - 1)) // done.shape[0]]))
    return flags


def cut_for_room(store, writer):
    """Open an episode in lane 0, and fill two segments through lane 1, so that lane 0 has to leave the first."""
    rows = np.zeros((2, 3), np.float32)
    common = {"action": [0, 0], "reward": [0.0, 0.0], "terminated": [False] * 2, "truncated": [False] * 2}
    writer.append(rows, **common, next_obs=rows + 1, mask=[True, False], serial=[0, 0])
    first = 100
    store.refresh()
    while not any(episode.cut for episode in store.episodes):
        assert first < 3000, "the first segment is never given up"
        block = {"action": np.zeros(3, int), "reward": np.zeros(3), "serial": np.arange(first, first + 3)}
        writer.append_episode(1, np.zeros((4, 3)), **block, terminated=True)
        first += 3
        store.refresh()

    def go_on(obs):
        """Append a step of lane 0 that starts from `obs`."""
        obs = np.full((2, 3), obs, np.float32)
        quiet(writer).append(obs, **common, next_obs=obs + 1, mask=[True, False], serial=[1, 1])

    return go_on


@pytest.fixture
def rolling(tmp_store):
    with dr.create(tmp_store, serial_schema(), segment_steps=8) as store:
        yield store


def test_an_episode_that_was_cut_for_room_goes_on_as_a_continuation(rolling):
    with rolling.writer(num_envs=2) as writer:
        cut_for_room(rolling, writer)(1)

        assert first_flags(rolling, 0) == [FIRST, FIRST | CUT]


def test_an_observation_that_does_not_continue_an_episode_cut_for_room_starts_another(rolling):
    with rolling.writer(num_envs=2) as writer:
        cut_for_room(rolling, writer)(50)

        assert first_flags(rolling, 0) == [FIRST, FIRST]


def test_what_follows_end_episode_is_no_continuation(rolling):
    with rolling.writer(num_envs=2) as writer:
        go_on = cut_for_room(rolling, writer)
        writer.end_episode(mask=[True, False])
        go_on(1)

        assert first_flags(rolling, 0) == [FIRST, FIRST]


def test_an_end_that_comes_after_an_episode_was_cut_for_room_warns_of_what_it_cannot_store(tmp_store):
    schema = serial_schema(episode={"seed": dr.Field((), "int64")})
    with dr.create(tmp_store, schema, segment_steps=8) as store, store.writer(num_envs=2) as writer:
        go_on = cut_for_room(store, writer)
        with pytest.warns(UserWarning, match="the episode of lane 0 had been cut already") as told:
            writer.end_episode(mask=[True, False], episode={"seed": [7, 7]})
        assert [warning.filename for warning in told] == [__file__]
        writer.end_episode(mask=[True, False], episode={"seed": [7, 7]})  # now there is none, as at any other time
        go_on(1)

        assert first_flags(store, 0) == [FIRST, FIRST]
        assert [episode.cut for episode in store.episodes if episode.lane == 0] == [True, False]


def test_an_end_with_the_observation_that_is_known_does_not_warn(rolling):
    with rolling.writer(num_envs=2) as writer:
        cut_for_room(rolling, writer)
        writer.end_episode(np.ones((2, 3)), mask=[True, False])
        rolling.refresh()

        assert [len(episode.obs) for episode in rolling.episodes if episode.lane == 0] == [2]


@pytest.mark.parametrize("lanes", [7, 8, 16])
def test_a_segment_with_one_row_a_lane_opens(tmp_store, lanes):
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
    with dr.create(tmp_store, schema) as store, store.writer(lanes) as writer:
        zeros = np.zeros(lanes)
        writer.append(zeros, zeros.astype(int), zeros, np.ones(lanes, bool), zeros.astype(bool))
    with dr.open(tmp_store) as store:
        assert len(store) == lanes


def test_a_lane_whose_observation_does_not_continue_warns_of_the_line_that_appended(tmp_store):
    ones, no = np.ones((2, 3), np.float32), [False, False]
    with dr.create(tmp_store, serial_schema()) as store, store.writer(num_envs=2) as writer:
        writer.append(ones, [0, 0], [0.0, 0.0], no, next_obs=ones, serial=[0, 1])
        with pytest.warns(UserWarning, match=r"differs from the next_obs.*cut") as told:
            writer.append(ones * [[1], [2]], [0, 0], [0.0, 0.0], no, next_obs=ones, serial=[2, 3])
        assert [warning.filename for warning in told] == [__file__]


@pytest.mark.slow
@pytest.mark.parametrize("segment_steps", [None, 8, "episode"])
@pytest.mark.parametrize("lanes", [None, 3])
def test_the_ids_of_the_newest_steps_are_known(tmp_store, segment_steps, lanes):
    rng, compared, serial = np.random.default_rng(0), 0, 0
    with dr.create(tmp_store, serial_schema(), segment_steps=segment_steps) as store, store.writer(lanes) as writer:
        newest = np.full(lanes or 1, -1)
        np.testing.assert_array_equal(writer.last_id if lanes is None else writer.last_ids, newest)
        for _ in range(120):
            mask = rng.random(lanes or 1) < (1 if lanes is None else 0.8)
            ends, cuts = rng.random((2, lanes or 1)) < 0.15
            serials = serial + np.arange(lanes or 1)
            serial += lanes or 1
            obs = np.zeros((lanes or 1, 3), np.float32)
            next_obs = obs if rng.random() < 0.6 else None
            given = [obs, serials, serials.astype(float), ends, cuts, next_obs]
            if lanes is None:
                writer.append(*(value if value is None else value[0] for value in given), serial=serials[0])
            else:
                writer.append(*given, mask=mask, serial=serials)
            newest[mask] = serials[mask]
            if rng.random() < 0.1:
                writer.end_episode(**({} if lanes is None else {"mask": mask}))
            store.refresh()
            known = {n: i for episode in store.episodes for n, i in zip(episode["serial"], episode.ids, strict=True)}
            told = np.atleast_1d(writer.last_id if lanes is None else writer.last_ids)
            for lane in np.flatnonzero(newest >= 0):
                # A lane that waits for its next episode may have been moved to a new segment.
                assert told[lane] == known[newest[lane]] or (told[lane] == -1 and not mask[lane])
                compared += told[lane] >= 0
    assert compared > (100 if lanes is None else 250)


def test_tensors_of_the_cpu_are_written_without_a_copy(tmp_store):
    width = 1 << 16
    observations = torch.arange(LANES * width, dtype=torch.float32).reshape(LANES, width)
    rest = torch.arange(LANES), torch.zeros(LANES), torch.zeros(LANES, dtype=torch.bool)

    def allocated(writer, obs):
        """Return how many bytes a call allocates at most, as a part of those of the observations."""
        tracemalloc.start()
        try:
            writer.append(obs, *rest)
            return tracemalloc.get_traced_memory()[1] / (4 * LANES * width)
        finally:
            tracemalloc.stop()

    with dr.create(tmp_store, dr.Schema(dr.Field((width,), "float32"), dr.Field((), "int64"))) as store:
        with store.writer(num_envs=LANES) as writer:
            writer.append(observations, *rest)  # which makes files
            assert allocated(writer, observations) < 0.5
            assert allocated(writer, observations.T.contiguous().T) >= 1  # is not an array of rows
        store.refresh()
        for lane, episode in enumerate(store.episodes):
            np.testing.assert_array_equal(episode.obs[1], observations[lane])
