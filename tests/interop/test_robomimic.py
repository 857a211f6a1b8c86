"""Demonstrations in HDF5: files as robosuite, robomimic and Isaac Lab record them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

h5py = pytest.importorskip("h5py")

from diskreplay.interop.robomimic import export_dataset, import_dataset  # noqa: E402
from tests.interop.round_trips import check_held, make_store  # noqa: E402

LENGTHS = 3, 5, 2, 4, 1, 2, 3, 4, 2, 3, 6  # the last one is demo_10


def write_robomimic(path: Path) -> list[dict[str, np.ndarray]]:
    """Write demonstrations with observations; every second one is done, and two lists overlap."""
    rng, demos = np.random.default_rng(0), []
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs.update({"total": sum(LENGTHS), "env_args": json.dumps({"env_name": "Lift"})})
        for number, length in enumerate(LENGTHS):
            eef, image = rng.random((length + 1, 3)), rng.integers(0, 255, (length + 1, 4, 4, 3), np.uint8)
            found = {"eef": eef, "image": image, "actions": rng.random((length, 7)), "rewards": rng.random(length)}
            demo = data.create_group(f"demo_{number}")
            for name in ("eef", "image"):
                demo[f"obs/{name}"], demo[f"next_obs/{name}"] = found[name][:-1], found[name][1:]
            demo["actions"], demo["rewards"], demo["states"] = found["actions"], found["rewards"], np.ones((length, 9))
            demo["dones"] = np.arange(length) == (length - 1 if number % 2 else -1)
            demo.attrs.update({"num_samples": length, "model_file": f"<mujoco {number}>"})
            demos.append(found)
        file["mask/train"] = np.array(["demo_0", "demo_10"], "S")
        file["mask/small"] = np.array(["demo_10"], "S")
    return demos


def test_rewards_of_several_numbers_a_step_are_refused_and_nothing_is_made(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "set.hdf5")
    with h5py.File(tmp_path / "set.hdf5", "a") as file:
        for demo in file["data"].values():
            del demo["rewards"]
            demo["rewards"] = np.zeros((len(demo["actions"]), 3))
    for on_error in ("raise", "skip"):
        with pytest.raises(dr.FormatError, match=r"rewards of shape \(\d+, 3\): a reward is one number a step$"):
            import_dataset(tmp_path / "set.hdf5", tmp_path / "store", on_error=on_error)
    assert [path.name for path in tmp_path.iterdir()] == ["set.hdf5"]


def write_isaac(path: Path, *, obs: bool = True) -> list[dict[str, np.ndarray]]:
    """Write demonstrations with nested groups, and states after each step behind an initial one."""
    rng, demos = np.random.default_rng(1), []
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Isaac-Stack", "type": 2})
        for number, length in enumerate((4, 3)):
            pose = rng.random((length + 1, 7)).astype("f4")
            found = {"pose": pose, "actions": rng.random((length, 2)).astype("f4")}
            demo = data.create_group(f"demo_{number}")
            demo["actions"] = found["actions"]
            demo["initial_state/articulation/robot/root_pose"] = pose[:1]
            demo["states/articulation/robot/root_pose"] = pose[1:]
            if obs:
                demo["obs/policy/joints"] = pose[:-1] * 2
            demo.attrs.update({"num_samples": length, "seed": number + 5, "success": bool(number)})
            demos.append(found)
    return demos


def test_demonstrations_of_robomimic(tmp_path: Path) -> None:
    demos = write_robomimic(tmp_path / "set.hdf5")
    done = import_dataset(tmp_path / "set.hdf5", tmp_path / "store")
    assert (done.episodes, done.steps) == (len(LENGTHS), sum(LENGTHS))
    with dr.open(tmp_path / "store") as store:
        assert store.schema.step_leaves.keys() == {"obs/eef", "obs/image", "action", "reward", "extra/states"}
        for number, (episode, found) in enumerate(zip(store.episodes, demos, strict=True)):
            for name in ("eef", "image"):
                np.testing.assert_array_equal(episode.obs[name], found[name], strict=True)
            np.testing.assert_array_equal(episode.action, found["actions"], strict=True)
            np.testing.assert_array_equal(episode.reward, found["rewards"], strict=True)
            assert episode.ended == ("terminated" if number % 2 else "truncated")
            assert (bool(episode["mask_train"]), bool(episode["mask_small"])) == (number in (0, 10), number == 10)


def test_a_file_of_robomimic_comes_back_equal(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "set.hdf5")
    import_dataset(tmp_path / "set.hdf5", tmp_path / "store")
    exported = export_dataset(tmp_path / "store", tmp_path / "again.hdf5")
    assert {name for name, _ in exported.not_held} <= {"schema", "notes"}
    with h5py.File(tmp_path / "set.hdf5") as before, h5py.File(tmp_path / "again.hdf5") as after:
        assert dict(after["data"].attrs) == dict(before["data"].attrs)
        assert set(after["mask/train"][()]) == {b"demo_0", b"demo_10"}
        for name in [*before["data/demo_3"], *before["data/demo_3/obs"]]:
            for key in before["data"]:
                there = before[f"data/{key}"]
                place = name if name in there else f"obs/{name}"
                if isinstance(there[place], h5py.Dataset):
                    np.testing.assert_array_equal(after[f"data/{key}/{place}"][()], there[place][()])
        assert after["data/demo_3"].attrs["model_file"] == "<mujoco 3>"


def test_demonstrations_of_isaac_lab(tmp_path: Path) -> None:
    demos = write_isaac(tmp_path / "set.hdf5")
    import_dataset(tmp_path / "set.hdf5", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        for number, (episode, found) in enumerate(zip(store.episodes, demos, strict=True)):
            np.testing.assert_array_equal(episode.obs["policy"]["joints"], found["pose"][:-1] * 2)
            np.testing.assert_array_equal(
                episode["states"]["articulation"]["robot"]["root_pose"], found["pose"][1:], strict=True
            )
            initial = episode["initial_state"]["articulation"]["robot"]["root_pose"]
            np.testing.assert_array_equal(initial, found["pose"][0])
            assert (int(episode["seed"]), bool(episode["success"])) == (number + 5, bool(number))
            assert episode.reward.tolist() == [0.0] * len(episode)


def test_an_export_has_the_initial_states_where_isaac_lab_looks_for_them(tmp_path: Path) -> None:
    demos = write_isaac(tmp_path / "set.hdf5")
    import_dataset(tmp_path / "set.hdf5", tmp_path / "store")
    names = {name for name, _ in export_dataset(tmp_path / "store", tmp_path / "again.hdf5").not_held}
    assert names == {"no_final_obs", "schema"}
    with h5py.File(tmp_path / "set.hdf5") as before, h5py.File(tmp_path / "again.hdf5") as after:
        for number in range(len(demos)):
            name = f"data/demo_{number}/initial_state/articulation/robot/root_pose"
            np.testing.assert_array_equal(after[name][()], before[name][()], strict=True)
            assert not [key for key in after[f"data/demo_{number}"].attrs if key.startswith("initial_state")]
    import_dataset(tmp_path / "again.hdf5", tmp_path / "back")
    check_held(tmp_path / "store", tmp_path / "back", names)


def test_states_of_isaac_lab_are_not_those_before_their_steps(tmp_path: Path) -> None:
    demos = write_isaac(tmp_path / "set.hdf5", obs=False)
    with pytest.warns(UserWarning, match="has no obs: its states are the observations"):
        import_dataset(tmp_path / "set.hdf5", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        for episode, found in zip(store.episodes, demos, strict=True):
            pose = episode.obs["articulation"]["robot"]["root_pose"]
            np.testing.assert_array_equal(pose, found["pose"], strict=True)


def short(file: Any) -> None:
    del file["data/demo_3/obs/eef"]
    file["data/demo_3/obs/eef"] = np.zeros((1, 3))


def other_next(file: Any) -> None:
    file["data/demo_3/next_obs/eef"][0] = 5.0


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda file: file.move("data", "date"), "has no demonstrations: there is no group data/demo_0$"),
        (lambda file: file.move("data/demo_3/actions", "data/demo_3/act"), "data/demo_3 has no actions"),
        (
            lambda file: file.move("data/demo_3/rewards", "data/demo_3/r"),
            "data/demo_3 has no rewards, which demo_0 has",
        ),
        (short, r"data/demo_3/obs/eef has the shape \(1, 3\) and 4 actions"),
        (other_next, "next_obs/eef differs from the observations one row later; skip='next_obs' leaves out next_obs"),
    ],
)
def test_a_demonstration_that_does_not_fit_is_named(tmp_path: Path, edit: Any, said: str) -> None:
    write_robomimic(tmp_path / "set.hdf5")
    with h5py.File(tmp_path / "set.hdf5", "a") as file:
        edit(file)
    with pytest.raises(dr.FormatError, match=said):
        import_dataset(tmp_path / "set.hdf5", tmp_path / "store")


def test_next_observations_may_be_left_out(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "set.hdf5")
    with h5py.File(tmp_path / "set.hdf5", "a") as file:
        other_next(file)
    done = import_dataset(tmp_path / "set.hdf5", tmp_path / "store", skip="next_obs")
    assert done.steps == sum(LENGTHS)
    with dr.open(tmp_path / "store") as store:
        assert [len(episode.obs["eef"]) for episode in store.episodes] == list(LENGTHS)


def test_names_of_the_format_are_taken(tmp_path: Path) -> None:
    schema = dr.Schema(dr.Field((2,), "f4"), dr.Field((), "i8"), extra={"dones": dr.Field((), "bool")})
    store = make_store(tmp_path / "store", "", schema=schema)
    named = dict(export_dataset(store, tmp_path / "set.hdf5").not_held)
    assert named["extra/dones"] == "the name is taken"
    with h5py.File(tmp_path / "set.hdf5") as file:
        assert file["data/demo_0/dones"].dtype == np.int64


def test_masks_are_truth_values_and_wide_fields_are_no_attributes(tmp_path: Path) -> None:
    fields = {"mask_level": dr.Field((), "i8"), "mask_v": dr.Field((3,), "f4"), "wide": dr.Field((20_000,), "f4")}
    with dr.create(tmp_path / "store", dr.Schema(dr.Field((), "f4"), dr.Field((), "i8"), episode=fields)) as store:
        given = {"mask_level": 7, "mask_v": np.ones(3, "f4"), "wide": np.ones(20_000, "f4")}
        with store.writer() as writer:
            writer.append_episode(
                np.zeros(4, "f4"), np.zeros(3, "i8"), np.zeros(3, "f4"), terminated=True, episode=given
            )
    named = dict(export_dataset(tmp_path / "store", tmp_path / "set.hdf5").not_held)
    assert named["episode/wide"] == "an attribute has at most 60000 bytes"
    import_dataset(tmp_path / "set.hdf5", tmp_path / "again")
    with dr.open(tmp_path / "again") as again:
        assert (int(again.episodes[0]["mask_level"]), again.episodes[0]["mask_v"].tolist()) == (7, [1, 1, 1])
        assert again.schema.episode.keys() == {"mask_level", "mask_v"}


def edited(tmp_path: Path, edit: Any) -> Path:
    write_robomimic(tmp_path / "set.hdf5")
    with h5py.File(tmp_path / "set.hdf5", "a") as file:
        edit(file)
    return tmp_path / "set.hdf5"


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda file: file["data"].attrs.update({"a": h5py.Empty("f4")}), "a"),
        (lambda file: file["data"].attrs.update({"a": 1 + 2j}), "a"),
        (lambda file: file["data"].attrs.update({"a": np.nan}), "a"),
        (lambda file: file["data"].attrs.update({"a": np.void(b"abc")}), "a"),
        (lambda file: file.create_dataset("mask/numbers", data=np.arange(3)), "mask/numbers"),
        (lambda file: file.create_group("mask/group"), "mask/group"),
        (lambda file: file.create_dataset("data/demo_3/late", data=np.zeros(4)), "late"),
        (lambda file: file.create_dataset("data/demo_0/text", data=np.array(["a"] * 3, "S")), "text"),
        (lambda file: file.copy("data/demo_3", "data/episode_3"), "data/episode_3"),
    ],
)
def test_what_no_leaf_takes_is_named(tmp_path: Path, edit: Any, named: str) -> None:
    done = import_dataset(edited(tmp_path, edit), tmp_path / "store")
    assert (done.episodes, done.not_kept) == (len(LENGTHS), [named])


def test_a_number_of_any_length_and_links_to_arrays(tmp_path: Path) -> None:
    def edit(file: Any) -> None:
        file.move("data/demo_10", "data/demo_" + "9" * 30)
        file.move("data/demo_0/obs/eef", "eef")
        file["data/demo_0/obs/eef"] = h5py.SoftLink("/eef")

    assert import_dataset(edited(tmp_path, edit), tmp_path / "store").episodes == len(LENGTHS)
    with dr.open(tmp_path / "store") as store:
        assert ([len(episode) for episode in store.episodes], store.schema.obs.keys()) == ([*LENGTHS], {"eef", "image"})


@pytest.mark.parametrize("rows", [np.zeros((0, 7)), np.zeros((4, 5)), np.zeros(()), np.array(["a"] * 4, "S")])
def test_a_demonstration_that_does_not_fit_may_be_left_out(tmp_path: Path, rows: np.ndarray) -> None:
    def edit(file: Any) -> None:
        del file["data/demo_3/actions"]
        file["data/demo_3/actions"] = rows

    path = edited(tmp_path, edit)
    with pytest.raises((dr.FormatError, dr.SchemaError), match=r"demo_3|episode 3 of .* has action of shape \(5,\)"):
        import_dataset(path, tmp_path / "refused")
    done = import_dataset(path, tmp_path / "store", on_error="skip")
    assert (done.episodes, [what for what, _ in done.skipped]) == (len(LENGTHS) - 1, ["episode 3"])


def test_a_text_whose_name_is_not_utf_8_is_read(tmp_path: Path) -> None:
    def edit(file: Any) -> None:
        file["data/demo_0"].attrs[b"\xff"] = "text"

    assert import_dataset(edited(tmp_path, edit), tmp_path / "store").episodes == len(LENGTHS)


def test_attributes_masks_and_dones_may_be_left_out(tmp_path: Path) -> None:
    def edit(file: Any) -> None:
        file["data/demo_0"].attrs["seed"] = 3
        file["data/demo_1/dones"][...] = True
        del file["data/demo_3/dones"]
        file["data/demo_3/dones"] = np.full(4, 7)

    path, skip = edited(tmp_path, edit), ["seed", "mask_small", "dones", "model_file"]
    with pytest.raises(dr.FormatError, match="demo_3/dones is one truth value a step"):
        import_dataset(path, tmp_path / "refused")
    done = import_dataset(path, tmp_path / "store", skip=skip)
    assert done.not_kept == sorted(skip)
    with dr.open(tmp_path / "store") as store:
        assert (store.schema.episode.keys(), {episode.ended for episode in store.episodes}) == (
            {"mask_train"},
            {"truncated"},
        )


@pytest.mark.parametrize("others", [False, True])
def test_states_of_isaac_lab_that_are_named_as_observations_are_shifted(tmp_path: Path, others: bool) -> None:
    demos = write_isaac(tmp_path / "set.hdf5")
    options: dict[str, Any] = {} if others else {"skip": "obs"}
    import_dataset(tmp_path / "set.hdf5", tmp_path / "store", obs="states", **options)
    with dr.open(tmp_path / "store") as store:
        for episode, found in zip(store.episodes, demos, strict=True):
            pose = episode.obs["articulation"]["robot"]["root_pose"]
            np.testing.assert_array_equal(pose, found["pose"][:-1] if others else found["pose"])


def test_a_demonstration_is_not_left_out_for_another_one_of_the_same_number(tmp_path: Path) -> None:
    write_robomimic(tmp_path / "set.hdf5")
    import_dataset(tmp_path / "set.hdf5", tmp_path / "whole")
    with h5py.File(tmp_path / "set.hdf5", "a") as file:
        file.move("data/demo_0", "data/demo_01")  # the number of demo_1, and before it in the file
        file["data/demo_01/rewards"][0] = np.inf
    with dr.open(tmp_path / "whole") as store:
        count = store.num_episodes
        dr.create(tmp_path / "store", store.schema, validate="finite").close()
    done = import_dataset(tmp_path / "set.hdf5", tmp_path / "store", on_error="skip")
    assert (done.episodes, [what for what, _ in done.skipped]) == (count - 1, ["episode 1"])
