import numpy as np
import pytest

from diskreplay.testing import ModelStore, transition
from diskreplay.testing.model import ModelLane
from diskreplay.testing.nested import flat, pick, same_values


def lane_of(*rewards, terminated=False, truncated=False, next_obs=True):
    lane = ModelLane()
    for t, reward in enumerate(rewards):
        last = t == len(rewards) - 1
        given = {"next_obs": [t + 1.0]} if next_obs else {}
        lane.append([float(t)], t, reward, last and terminated, last and truncated, serial=t, **given)
    return lane


def test_flat_names_leaves_by_path_and_tuples_by_number():
    leaves = flat({"image": np.zeros(2), "pair": (1, {"x": 2})}, "obs")

    assert list(leaves) == ["obs/image", "obs/pair/0", "obs/pair/1/x"]
    assert leaves["obs/pair/1/x"] == 2


def test_flat_copies_so_that_a_reused_array_changes_nothing():
    array = np.zeros(2)
    leaves = flat(array, "obs")
    array[:] = 1

    assert leaves["obs"].sum() == 0


def test_pick_takes_a_row_of_every_leaf():
    assert pick({"a": [1, 2], "b": ([3, 4],)}, 1) == {"a": 2, "b": (4,)}


@pytest.mark.parametrize(("one", "other", "same"), [(np.nan, np.nan, True), (0.0, -0.0, True), (1.0, 2.0, False)])
def test_same_values_compares_values_and_not_bytes(one, other, same):
    assert same_values(flat(one, "obs"), flat(other, "obs")) is same


def test_a_terminated_episode_without_final_observation_keeps_all_its_windows():
    (episode,) = lane_of(1.0, 2.0, 3.0, terminated=True, next_obs=False).episodes

    assert episode.sampleable(2) == [0, 1, 2]
    assert transition(episode, 2, n_step=2, gamma=0.5) == {
        "obs": np.array([2.0]),
        "next_obs": np.array([0.0]),
        "action": 2,
        "serial": 2,
        "reward": 3.0,
        "discount": 0.0,
        "terminated": True,
        "truncated": False,
        "n_steps": 1,
    }


def test_a_truncated_episode_bootstraps_from_its_final_observation():
    (episode,) = lane_of(1.0, 2.0, 3.0, truncated=True).episodes
    row = transition(episode, 1, n_step=5, gamma=0.5)

    assert (row["reward"], row["discount"], row["n_steps"]) == (2.0 + 0.5 * 3.0, 0.25, 2)
    assert (row["terminated"], row["truncated"]) == (False, True)
    assert row["next_obs"] == [3.0]


def test_a_truncated_episode_without_final_observation_ends_its_windows_one_step_earlier():
    (episode,) = lane_of(1.0, 2.0, 3.0, truncated=True, next_obs=False).episodes
    row = transition(episode, 0, n_step=None, gamma=1.0)

    assert episode.sampleable(1) == [0, 1]
    assert (row["reward"], row["n_steps"], row["truncated"]) == (3.0, 2, False)
    assert row["next_obs"] == [2.0]


def test_a_single_truncated_step_without_final_observation_is_not_sampleable():
    (episode,) = lane_of(1.0, truncated=True, next_obs=False).episodes

    assert episode.sampleable(1) == []


def test_a_step_terminated_and_truncated_has_no_discount():
    (episode,) = lane_of(1.0, terminated=True, truncated=True).episodes
    row = transition(episode, 0)

    assert (row["terminated"], row["truncated"], row["discount"]) == (True, True, 0.0)


def test_an_open_episode_gives_full_windows_only():
    (with_next,) = lane_of(1.0, 2.0, 3.0).episodes
    (without,) = lane_of(1.0, 2.0, 3.0, next_obs=False).episodes

    assert with_next.sampleable(1) == [0, 1, 2]
    assert without.sampleable(1) == [0, 1]
    assert with_next.sampleable(3) == [0]
    assert with_next.sampleable(4) == with_next.sampleable(None) == []
    assert not transition(with_next, 0, n_step=3)["truncated"]


def test_stacks_repeat_the_first_frame():
    (episode,) = lane_of(1.0, 2.0, 3.0, terminated=True).episodes
    row = transition(episode, 1, n_step=2, frame_stack=4)

    assert row["obs"].tolist() == [[0.0], [0.0], [0.0], [1.0]]
    assert row["next_obs"].tolist() == [[0.0], [1.0], [2.0], [3.0]]


def test_stacks_show_frames_that_a_capacity_hides():
    (episode,) = lane_of(1.0, 2.0, 3.0, terminated=True).episodes
    episode.hidden = 1

    assert transition(episode, 2, frame_stack=4)["obs"].tolist() == [[0.0], [0.0], [1.0], [2.0]]
    assert episode.sampleable(1) == [1, 2]


def test_an_observation_that_does_not_continue_cuts_the_episode_with_the_one_given_before():
    lane = lane_of(1.0, 2.0)
    lane.append([7.0], 2, 1.0, terminated=False)
    cut, opened = lane.episodes

    assert (cut.ended, cut.cut, cut.truncated, cut.terminated) == (True, True, True, False)
    assert cut.final == {"obs": np.array([2.0])}
    assert (len(cut), len(opened), lane.discontinuities) == (2, 1, 1)


def test_without_next_obs_any_observation_continues():
    lane = lane_of(1.0, 2.0, next_obs=False)
    lane.append([7.0], 2, 1.0, terminated=True)

    assert [len(episode) for episode in lane.episodes] == [3]


def test_end_episode_keeps_the_newest_observation_as_final_one():
    lane = lane_of(1.0, 2.0)
    lane.end_episode()
    lane.end_episode()
    (episode,) = lane.episodes

    assert episode.final == {"obs": np.array([2.0])}
    assert episode.cut


def test_an_end_of_which_nothing_is_known_is_seen_at_once():
    lane = lane_of(1.0, 2.0, next_obs=False)
    lane.end_episode()
    (first,) = lane.episodes
    assert (first.ended, first.cut, first.truncated, lane.open) == (True, True, True, None)
    lane.append([0.0], 0, 0.0, False)
    _, second = lane.episodes
    assert not second.ended
    lane.close()
    assert second.cut


def test_append_episode_with_neither_flag_is_cut():
    lane = ModelLane()
    lane.append_episode(np.arange(4.0), np.arange(3), [1.0, 2.0, 3.0], terminated=False, episode={"seed": 5})
    (episode,) = lane.episodes

    assert (episode.cut, episode.final, episode.values) == (True, {"obs": 3.0}, {"seed": 5})


def test_a_vector_append_skips_masked_lanes():
    store = ModelStore()
    writer = store.writer(3)
    rows = np.arange(3.0)
    writer.append(rows, rows, rows, [False, True, False], mask=[True, True, False], serial=rows)
    writer.append(rows, rows, rows, False, mask=[True, False, False], serial=rows)
    writer.close()

    assert [len(episode) for episode in store.episodes] == [2, 1]
    assert [episode.terminated for episode in store.episodes] == [False, True]
    assert len(store) == 3


def test_trim_hides_the_steps_with_the_lowest_ids():
    store = ModelStore()
    lanes = store.writer(2).lanes
    for lane, first in zip(lanes, (0, 10), strict=True):
        for t in range(3):
            lane.append([0.0], 0, 0.0, t == 2, serial=first + t)
    store.trim(4, order={0: 0, 10: 1, 1: 2, 11: 3, 2: 4, 12: 5})

    assert [episode.hidden for episode in store.episodes] == [1, 1]
    assert len(store) == 4


def test_split_leaves_a_cut_episode_with_the_next_observation_and_its_continuation():
    (episode,) = lane_of(1.0, 2.0, 3.0, terminated=True).episodes
    rest = episode.split(2)

    assert (len(episode), episode.cut, episode.terminated) == (2, True, False)
    assert episode.final == {"obs": np.array([2.0])}
    assert (len(rest), rest.cut, rest.terminated) == (1, False, True)
