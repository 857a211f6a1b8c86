"""Data sets of NumPy files: every value of a store goes there and comes back."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop.npz import export_dataset, import_dataset
from tests.interop.round_trips import content, make_store


def test_a_file_of_an_episode_is_read_by_numpy_alone(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "nested")
    export_dataset(tmp_path / "store", tmp_path / "set")
    with np.load(tmp_path / "set/episode-00000001.npz") as file, dr.open(tmp_path / "store") as store:
        episode = store.episodes[1]
        np.testing.assert_array_equal(file["obs/image"], episode.obs["image"])
        np.testing.assert_array_equal(file["episode/task/level"], episode["task"]["level"])
        assert (file["terminated"], file["truncated"]) == (True, False)
    assert json.loads((tmp_path / "set/dataset.json").read_text())["steps"] == 40


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match="^there is no file or folder .*set$"):
        import_dataset(tmp_path / "set", tmp_path / "store")
    (tmp_path / "above/set").mkdir(parents=True)
    with pytest.raises(dr.StoreNotFound, match=r"above lacks NumPy files \(.npz\)$"):
        import_dataset(tmp_path / "above", tmp_path / "store")
    np.savez(tmp_path / "above/set/a.npz", obs=np.zeros(2))
    with pytest.raises(dr.StoreNotFound, match=r"above lacks NumPy files \(.npz\); there are some in set$"):
        import_dataset(tmp_path / "above", tmp_path / "store")
    make_store(tmp_path / "store", "vectors")
    export_dataset(tmp_path / "store", tmp_path / "set")
    (tmp_path / "set/episode-00000002.npz").write_bytes(b"PK")
    with pytest.raises(dr.FormatError, match="episode-00000002.npz cannot be read: "):
        import_dataset(tmp_path / "set", tmp_path / "back")
    (tmp_path / "set/dataset.json").write_text("{")
    with pytest.raises(dr.FormatError, match="dataset.json is not JSON: "):
        import_dataset(tmp_path / "set", tmp_path / "other")
    assert not (tmp_path / "other").exists()
    assert content(tmp_path / "back") == content(tmp_path / "store")[:2]


# --- arrays that others made ------------------------------------------------------------------------------------------


def flat(rows: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    obs, actions = rng.random((rows, 3)), rng.integers(0, 5, rows)
    return {"obs": obs, "actions": actions, "rewards": rng.random((rows, 1)), "value": rng.random(rows)}


STARTS = np.isin(np.arange(9), (0, 4, 5))


@pytest.mark.parametrize(
    ("more", "options"),
    [
        ({"episode_starts": STARTS}, {}),
        ({"begin": STARTS.astype("f4")}, {"starts": "begin"}),
        ({"first": np.array([0, 4, 5])}, {"indices": "first"}),
        ({"stops": np.array([4, 5, 9])}, {"indices": "stops"}),
        ({"dones": np.isin(np.arange(9), (3, 4, 8))}, {}),
        ({"terminals": np.arange(9) == 3, "timeouts": np.arange(9) == 4}, {}),
    ],
)
def test_a_file_with_the_rows_of_all_episodes(tmp_path: Path, more: Any, options: dict[str, Any]) -> None:
    arrays = {**flat(), **more, "level": np.arange(3) * 10}
    np.savez(tmp_path / "set.npz", **arrays)
    done = import_dataset(tmp_path / "set.npz", tmp_path / "store", **options)
    assert (done.episodes, done.steps, done.not_kept) == (3, 9, [])
    with dr.open(tmp_path / "store") as store:
        assert store.schema.leaves.keys() == {"obs", "action", "reward", "extra/value", "episode/level"}
        for number, (episode, part) in enumerate(zip(store.episodes, ((0, 4), (4, 5), (5, 9)), strict=True)):
            rows = slice(*part)
            np.testing.assert_array_equal(episode.obs, arrays["obs"][rows], strict=True)
            np.testing.assert_array_equal(episode.action, arrays["actions"][rows], strict=True)
            np.testing.assert_array_equal(episode.reward, arrays["rewards"][rows, 0], strict=True)
            np.testing.assert_array_equal(episode["value"], arrays["value"][rows], strict=True)
            assert episode["level"] == number * 10
        ended = [episode.ended for episode in store.episodes]
    if "dones" in more:
        assert ended == ["terminated"] * 3
    elif "terminals" in more:
        assert ended == ["terminated", "truncated", "cut"]
    else:
        assert ended == ["truncated"] * 3


@pytest.mark.parametrize("name", ["next_obs", "obs_next"])
def test_next_observations_of_a_file_are_final_ones(tmp_path: Path, name: str) -> None:
    arrays = {**flat(), name: flat()["obs"] + 1, "episode_starts": STARTS}
    np.savez(tmp_path / "set.npz", **arrays)
    import_dataset(tmp_path / "set.npz", tmp_path / "store", ended="terminated")
    with dr.open(tmp_path / "store") as store:
        assert [len(episode.obs) for episode in store.episodes] == [5, 2, 5]
        np.testing.assert_array_equal(store.episodes[0].obs[-1], arrays[name][3])
        assert store.episodes[0].terminated


def test_a_folder_of_files_with_an_episode_each(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    lengths = 3, 1, 4
    for number, length in enumerate(lengths):
        rows = {"obs": np.arange(length + 1.0) + number, "actions": np.arange(length), "rewards": np.ones(length)}
        np.savez(tmp_path / f"runs/run-{number}.npz", **rows, success=number == 1, terminated=number != 0)
    done = import_dataset(tmp_path / "runs", tmp_path / "store")
    assert (done.episodes, done.steps) == (3, 8)
    with dr.open(tmp_path / "store") as store:
        for number, (episode, length) in enumerate(zip(store.episodes, lengths, strict=True)):
            np.testing.assert_array_equal(episode.obs, np.arange(length + 1.0) + number, strict=True)
            assert bool(episode["success"]) == (number == 1)
            assert episode.terminated == (number != 0)


def make_folder(folder: Path, count: int = 5) -> None:
    folder.mkdir()
    for number in range(count):
        rows = {"obs": np.full((4, 3), number), "act": np.arange(4), "rew": np.ones(4), "done": np.arange(4) == 3}
        np.savez(folder / f"run-{number}.npz", **rows)


def test_rewards_of_several_numbers_a_step_are_refused_by_the_name_of_the_file(tmp_path: Path) -> None:
    make_folder(tmp_path / "runs")
    np.savez(tmp_path / "runs/run-3.npz", obs=np.zeros((4, 3)), act=np.arange(4), rew=np.ones((4, 2)))
    said = r"^episode 3 \(run-3.npz\) of .* has rewards of shape \(4, 2\): a reward is one number a step$"
    with pytest.raises(dr.FormatError, match=said):
        import_dataset(tmp_path / "runs", tmp_path / "store")


@pytest.mark.parametrize("shape_at", [1, 4])
def test_files_of_a_folder_that_cannot_be_read_are_left_out_by_their_names(tmp_path: Path, shape_at: int) -> None:
    make_folder(tmp_path / "runs")
    whole = (tmp_path / "runs/run-0.npz").read_bytes()
    (tmp_path / "runs/run-0.npz").write_bytes(whole[: len(whole) // 2])
    at = whole.index(b"obs.npy") + 200  # inside of the rows: only their checksum tells
    (tmp_path / "runs/run-3.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    np.savez(tmp_path / f"runs/run-{shape_at}.npz", obs=np.zeros((4, 2)), act=np.arange(4), rew=np.ones(4))
    if shape_at == 1:  # the first file that can be read has the shape of all
        (tmp_path / "runs/run-1.npz").rename(tmp_path / "runs/run-9.npz")
    with pytest.raises(dr.FormatError, match="run-0.npz cannot be read: .*, and on_error='skip' .* such files$"):
        import_dataset(tmp_path / "runs", tmp_path / "refused")
    done = import_dataset(tmp_path / "runs", tmp_path / "store", on_error="skip")
    assert len(done.skipped) == 3
    found = {re.search(r"run-\d", each.what + each.why).group() for each in done.skipped}  # type: ignore[union-attr]
    assert found == {"run-0", "run-3", "run-9" if shape_at == 1 else "run-4"}
    assert "has obs of shape (2,), and not (3,)" in str(done.skipped)
    with dr.open(tmp_path / "store") as store:
        kept = [2, 4] if shape_at == 1 else [1, 2]
        assert [int(episode.obs[0, 0]) for episode in store.episodes] == kept
        assert all(episode.terminated and episode.total_reward == 4 for episode in store.episodes)


def test_a_folder_without_a_file_that_can_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/a.npz").write_bytes(b"PK")
    with pytest.raises(dr.FormatError, match="runs has no file that can be read: .*a.npz cannot be read"):
        import_dataset(tmp_path / "runs", tmp_path / "store", on_error="skip")


@pytest.mark.parametrize(
    ("name", "flags", "row"),
    [
        ("episode_starts", [1, 0, 1, 0], 2),
        ("done", [0, 1, 0, 1], 1),
        ("timeouts", [1, 0, 0, 0], 0),
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_a_file_of_several_episodes_in_a_folder_is_refused(
    tmp_path: Path, name: str, flags: list[int], row: int, number: int
) -> None:
    make_folder(tmp_path / "runs")
    flagged = {name: np.array(flags, bool)}
    np.savez(tmp_path / f"runs/run-{number}.npz", obs=np.zeros((4, 3)), act=np.arange(4), rew=np.ones(4), **flagged)
    with pytest.raises(dr.FormatError, match=f"run-{number}.npz has several episodes: {name} says so in row {row}. "):
        import_dataset(tmp_path / "runs", tmp_path / "store")


def test_a_flag_that_repeats_after_the_end_is_of_the_same_episode(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    rows = {"obs": np.zeros((4, 3)), "act": np.arange(4), "done": np.arange(4) > 1}
    np.savez(tmp_path / "runs/run-0.npz", **rows, episode_starts=np.arange(4) == 0)
    assert import_dataset(tmp_path / "runs", tmp_path / "store").episodes == 1


def test_arrays_that_end_episodes_have_the_names_that_options_give(tmp_path: Path) -> None:
    over, late = np.isin(np.arange(9), (3, 8)), np.arange(9) == 4
    np.savez(tmp_path / "set.npz", **flat(), over=over, late=late)
    (tmp_path / "runs").mkdir()
    for number, part in enumerate((slice(0, 4), slice(4, 5), slice(5, 9))):
        rows = {name: values[part] for name, values in flat().items()}
        np.savez(tmp_path / f"runs/{number}.npz", **rows, over=over[part], late=late[part])
    for place in ("set.npz", "runs"):
        done = import_dataset(tmp_path / place, tmp_path / f"{place}.store", terminated="over", truncated="late")
        assert (done.episodes, done.steps) == (3, 9)
        with dr.open(tmp_path / f"{place}.store") as store:
            assert [episode.ended for episode in store.episodes] == ["terminated", "truncated", "terminated"]
            assert list(store.schema.extra) == ["value"]
        with pytest.raises(dr.SchemaError, match="has no array 'end'; it has obs, .*, over, late$"):
            import_dataset(tmp_path / place, tmp_path / "refused", terminated="end")
    make_store(tmp_path / "store", "vectors")
    export_dataset(tmp_path / "store", tmp_path / "own")
    with pytest.raises(
        dr.SchemaError, match="terminated and truncated are for files of other programs, and .*own has none"
    ):
        import_dataset(tmp_path / "own", tmp_path / "refused", truncated="late")
    assert not (tmp_path / "refused").exists()


def test_an_array_of_objects_in_a_folder_can_be_left_out(tmp_path: Path) -> None:
    make_folder(tmp_path / "runs")
    rows = {"obs": np.zeros((4, 3)), "act": np.arange(4), "rew": np.ones(4)}
    np.savez(tmp_path / "runs/run-0.npz", **rows, meta=np.array({"a": 1}, dtype=object))
    with pytest.raises(dr.FormatError, match="'meta.npy' is an array of Python objects, .*; skip= .--skip NAME."):
        import_dataset(tmp_path / "runs", tmp_path / "store")
    done = import_dataset(tmp_path / "runs", tmp_path / "store", skip="meta")
    assert (done.episodes, done.not_kept) == (5, ["meta"])


def test_starts_of_a_folder_are_refused(tmp_path: Path) -> None:
    make_folder(tmp_path / "runs")
    with pytest.raises(dr.SchemaError, match="starts and indices are for one file with the rows of all episodes"):
        import_dataset(tmp_path / "runs", tmp_path / "store", starts="done")


def test_advice_for_arrays_with_other_names_has_the_rewards(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    rows = {"obs_t": np.zeros((4, 3)), "act_t": np.arange(4), "rew_t": np.ones(4)}
    np.savez(tmp_path / "runs/run-0.npz", **rows)
    said = (
        "obs='obs_t', action='act_t', reward='rew_t' .on the command line --obs obs_t --action act_t --reward rew_t.$"
    )
    with pytest.raises(dr.SchemaError, match=said):
        import_dataset(tmp_path / "runs", tmp_path / "store")
    import_dataset(tmp_path / "runs", tmp_path / "store", obs="obs_t", action="act_t", reward="rew_t")
    with dr.open(tmp_path / "store") as store:
        assert store.episodes[0].total_reward == 4


@pytest.mark.parametrize(
    ("changes", "options", "error", "said"),
    [
        (
            {},
            {},
            dr.SchemaError,
            "does not say where its episodes begin: name the array that does by starts= or indices=",
        ),
        ({}, {"starts": "first"}, dr.SchemaError, "has no array 'first'; it has obs, actions"),
        ({"s": ~STARTS}, {"starts": "s"}, dr.FormatError, "s is not true in the first row"),
        ({"i": np.array([4, 2, 9])}, {"indices": "i"}, dr.FormatError, "i does not have increasing numbers of rows"),
        ({"i": np.array([4, 8])}, {"indices": "i"}, dr.FormatError, "i ends with 8, and the actions have 9 rows"),
        ({"episode_starts": STARTS[:5]}, {}, dr.FormatError, "episode_starts has 5 rows and the actions have 9"),
        ({"actions": None, "moves": np.ones(9)}, {}, dr.SchemaError, "no feature is the action; its features are "),
        ({"episode_starts": STARTS}, {"ended": "done"}, dr.SchemaError, "ended must be terminated, truncated or cut"),
    ],
)
def test_arrays_that_tell_no_episodes_are_refused(
    tmp_path: Path, changes: Any, options: Any, error: type[Exception], said: str
) -> None:
    arrays = {name: rows for name, rows in {**flat(), **changes}.items() if rows is not None}
    np.savez(tmp_path / "set.npz", **arrays)
    with pytest.raises(error, match=said):
        import_dataset(tmp_path / "set.npz", tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()
