"""Replay folders of Dreamer: which action and reward belong to which observation, in both kinds of files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop.dreamer import export_dataset, import_dataset
from tests.interop.round_trips import PLAIN, make_store

Rows = dict[str, Any]


def rows(count: int, seed: int = 0) -> Rows:
    """An episode as DreamerV2 writes it: the first row has no action and no reward."""
    rng = np.random.default_rng(seed)
    action = rng.normal(size=(count, 2)).astype(np.float32)
    reward = rng.normal(size=count).astype(np.float32)
    action[0] = reward[0] = 0
    at = np.arange(count)
    flags = {"is_first": at == 0, "is_last": at == count - 1, "is_terminal": (at == count - 1) & (seed % 2 == 1)}
    image = rng.integers(0, 256, (count, 8, 8, 3), np.uint8)
    discount = np.where(flags["is_terminal"], 0, 1).astype(np.float32)
    return {"image": image, "action": action, "reward": reward, "discount": discount, **flags}


def write(folder: Path, name: str, values: Rows) -> None:
    folder.mkdir(exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **values)


def files(folder: Path) -> list[dict[str, np.ndarray]]:
    found = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            found.append({name: file[name] for name in file.files})
    return found


def test_the_action_and_reward_of_a_step_are_in_the_row_after_its_observation(tmp_path: Path) -> None:
    episodes = [rows(5, seed) for seed in range(2)]
    for seed, values in enumerate(episodes):
        write(tmp_path / "replay", f"2026010{seed}T000000-abc{seed}-5", {**values, "log_success": np.arange(5)})
    import_dataset(tmp_path / "replay", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        assert [episode.ended for episode in store.episodes] == ["truncated", "terminated"]
        for episode, values in zip(store.episodes, episodes, strict=True):
            np.testing.assert_array_equal(episode.obs["image"], values["image"])
            np.testing.assert_array_equal(episode.action, values["action"][1:])
            np.testing.assert_array_equal(episode.reward, values["reward"][1:])
            np.testing.assert_array_equal(episode["success"], [1, 2, 3, 4])


def test_a_folder_of_dreamer_comes_back_equal(tmp_path: Path) -> None:
    for seed in range(3):
        write(tmp_path / "replay", f"2026010{seed}T000000-abc{seed}-{4 + seed}", rows(4 + seed, seed))
    import_dataset(tmp_path / "replay", tmp_path / "store")
    export_dataset(tmp_path / "store", tmp_path / "again")
    for before, after in zip(files(tmp_path / "replay"), files(tmp_path / "again"), strict=True):
        assert before.keys() == after.keys()
        for name in before:
            np.testing.assert_array_equal(before[name], after[name], name, strict=True)


def test_without_flags_the_discount_tells_how_an_episode_ended(tmp_path: Path) -> None:
    for number, last in enumerate([0.0, 1.0]):
        values = {name: rows(4)[name] for name in ("image", "action", "reward")}
        write(tmp_path / "replay", f"2026010{number}T000000-abc-4", {**values, "discount": np.array([1, 1, 1, last])})
    import_dataset(tmp_path / "replay", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        assert [episode.ended for episode in store.episodes] == ["terminated", "truncated"]


def test_other_discounts_than_0_and_1_are_an_extra_field(tmp_path: Path) -> None:
    write(tmp_path / "replay", "20260101T000000-abc-4", {**rows(4, 1), "discount": np.array([1, 0.9, 0.8, 0])})
    import_dataset(tmp_path / "replay", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.episodes[0]["step_discount"], [0.9, 0.8, 0])


def test_chunks_of_dreamer_3_are_joined_and_their_actions_were_taken_in_their_row(tmp_path: Path) -> None:
    # Two environments: episodes of 5, 4 and 3 rows, of which the last is not over, and one of 6 rows.
    stream = [rows(5, 0), rows(4, 1), rows(3, 2)]
    stream[2]["is_last"][:] = False
    joined = {name: np.concatenate([part[name] for part in stream]) for name in stream[0] if name != "discount"}
    joined["stepid"] = np.zeros((12, 20), np.uint8)
    for name, after, start, stop in (("aa", "bb", 0, 7), ("bb", "cc", 7, 11), ("cc", "00", 11, 12)):
        chunk = {key: values[start:stop] for key, values in joined.items()}
        write(tmp_path / "replay", f"20260101T00000{start % 10}F000000-{name}-{after}-{stop - start}", chunk)
    other = rows(6, 3) | {"stepid": np.zeros((6, 20), np.uint8)}
    del other["discount"]
    write(tmp_path / "replay", "20260101T000001F000000-dd-00-6", other)
    import_dataset(tmp_path / "replay", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        assert [(len(episode), episode.ended) for episode in store.episodes] == [
            (4, "truncated"),
            (3, "terminated"),
            (5, "terminated"),
            (2, "cut"),
        ]
        for episode, values in zip([*store.episodes[:2], store.episodes[3]], stream, strict=True):
            np.testing.assert_array_equal(episode.obs["image"], values["image"])
            np.testing.assert_array_equal(episode.action, values["action"][:-1])
            np.testing.assert_array_equal(episode.reward, values["reward"][1:])
        assert store.schema.obs.keys() == {"image"}


def test_discrete_actions_are_one_hot_in_the_files_or_as_they_are(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "vectors", PLAIN)
    export_dataset(tmp_path / "store", tmp_path / "one-hot")
    export_dataset(tmp_path / "store", tmp_path / "numbers", one_hot=False)
    with dr.open(tmp_path / "store") as store:
        action = store.episodes[0].action
    np.testing.assert_array_equal(files(tmp_path / "one-hot")[0]["action"][1:], np.eye(4, dtype=np.float32)[action])
    np.testing.assert_array_equal(files(tmp_path / "numbers")[0]["action"][1:], action)


def test_keys_that_are_taken_are_refused(tmp_path: Path) -> None:
    schema = dr.Schema({"is_first": dr.Field((), "bool")}, dr.Field((), "int64"))
    make_store(tmp_path / "store", "", PLAIN, schema=schema)
    with pytest.raises(dr.SchemaError, match="the key 'is_first' of obs/is_first is taken in a replay of Dreamer"):
        export_dataset(tmp_path / "store", tmp_path / "set")
    assert not (tmp_path / "set").exists()


@pytest.mark.parametrize(("extra", "path"), [((), "obs/action/mask"), (("action/mask",), "extra/action_mask")])
def test_a_key_below_that_of_the_actions_is_none_of_them(tmp_path: Path, extra: tuple[str, ...], path: str) -> None:
    values = {**rows(4), "action/mask": np.arange(4)}
    write(tmp_path / "replay", "20260101T000000-abc-4", values)
    import_dataset(tmp_path / "replay", tmp_path / "store", extra=extra)
    with dr.open(tmp_path / "store") as store:
        episode = store.episodes[0]
        assert store.schema.step_leaves.keys() == {"obs/image", "action", "reward", path}
        np.testing.assert_array_equal(episode.action, values["action"][1:])
        np.testing.assert_array_equal(episode.rows(path), [1, 2, 3] if extra else [0, 1, 2, 3])


def test_actions_are_nested_in_a_file_without_their_key(tmp_path: Path) -> None:
    values = rows(4)
    values |= {"action/arm/move": values.pop("action"), "action/grip": np.arange(4), "action/mask": np.arange(4)}
    write(tmp_path / "replay", "20260101T000000-abc-4", values)
    import_dataset(tmp_path / "replay", tmp_path / "store", extra=["action/mask"])
    with dr.open(tmp_path / "store") as store:
        episode = store.episodes[0]
        assert store.schema.step_leaves.keys() == {
            *("obs/image", "action/arm/move", "action/grip", "reward", "extra/action_mask")
        }
        np.testing.assert_array_equal(episode.action["arm"]["move"], values["action/arm/move"][1:])
        np.testing.assert_array_equal(episode.action["grip"], [1, 2, 3])
        np.testing.assert_array_equal(episode["action_mask"], [1, 2, 3])


@pytest.mark.parametrize("keys", [("action/x", "action/x/y"), ("action/x/y", "action/x"), ("x", "x/y"), ("x/y", "x")])
def test_a_key_below_another_field_is_refused(tmp_path: Path, keys: tuple[str, ...]) -> None:
    values = {key: array for key, array in rows(4).items() if key != "action"}
    nested = {"action/move": np.zeros(4), **dict.fromkeys(keys, np.zeros(4))}
    write(tmp_path / "replay", "20260101T000000-abc-4", {**values, **nested})
    with pytest.raises(
        dr.SchemaError, match=r"replay: \w+/x is a field, so \w+/x/y cannot be one inside of it; rename"
    ):
        import_dataset(tmp_path / "replay", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_what_is_no_replay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match="there is no such folder$"):
        import_dataset(tmp_path / "replay", tmp_path / "store")
    write(tmp_path / "replay", "20260101T000000-abc-1", rows(1))
    with pytest.raises(dr.StoreNotFound, match="no .npz file with two rows or more$"):
        import_dataset(tmp_path / "replay", tmp_path / "store")
    write(tmp_path / "replay", "20260101T000000-abc-1", {"image": np.zeros(3)})
    with pytest.raises(dr.FormatError, match="-1.npz has no reward$"):
        import_dataset(tmp_path / "replay", tmp_path / "store")
    write(tmp_path / "replay", "20260101T000000-abc-1", {**rows(4), "action": np.zeros((3, 2))})
    with pytest.raises(dr.FormatError, match="-1.npz has 3 rows of 'action' and 4 of reward$"):
        import_dataset(tmp_path / "replay", tmp_path / "short")
    write(tmp_path / "replay", "20260101T000000-abc-1", {**rows(4), "is_terminal": np.array([0, 0, 0, np.nan])})
    with pytest.raises(dr.FormatError, match="-1.npz: is_terminal is one truth value .*, not nan$"):
        import_dataset(tmp_path / "replay", tmp_path / "halves")
    write(tmp_path / "replay", "20260101T000000-abc-1", {**rows(4), "action": np.array([{}] * 4)})
    with pytest.raises(dr.FormatError, match="-1.npz: .* is an array of Python objects"):
        import_dataset(tmp_path / "replay", tmp_path / "store")
    (tmp_path / "replay/20260101T000000-abc-1.npz").write_bytes(b"PK\x03\x04")
    with pytest.raises(dr.FormatError, match="-1.npz cannot be read: "):
        import_dataset(tmp_path / "replay", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_keys_that_differ_between_files_are_named(tmp_path: Path) -> None:
    write(tmp_path / "replay", "20260101T000000-a-4", rows(4))
    write(tmp_path / "replay", "20260102T000000-b-4", {name: x for name, x in rows(4).items() if name != "image"})
    with pytest.raises(dr.FormatError, match="20260102T000000-b-4.npz has no 'image'; it has action, reward"):
        import_dataset(tmp_path / "replay", tmp_path / "store")
    with pytest.raises(dr.SchemaError, match="replay: 'move' in action is not a feature; its features are "):
        import_dataset(tmp_path / "replay", tmp_path / "other", action="move")
