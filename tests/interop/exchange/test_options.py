"""The options that all imports share, by data sets whose features have names of their own."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop.dreamer import import_dataset as import_dreamer
from diskreplay.interop.npz import export_dataset, import_dataset
from diskreplay.interop.zarr_episodes import import_dataset as import_zarr
from tests.interop.round_trips import make_store

STEPS = 10


def pixels(path: Path, **more: np.ndarray) -> dict[str, np.ndarray]:
    """Write a data set whose features have the names of openpi."""
    zarr = pytest.importorskip("zarr")
    rng = np.random.default_rng(0)
    found = {
        "state": rng.random((STEPS, 5)).astype("f4"),
        "image": rng.integers(0, 255, (STEPS, 8, 8, 3)).astype("f4"),
        "actions": rng.random((STEPS, 2)).astype("f4"),
        "score": np.arange(STEPS, dtype="f4"),
        **more,
    }
    root = zarr.create_group(path)
    for name, rows in found.items():
        root.create_array(f"data/{name}", data=rows)
    root.create_array("meta/episode_ends", data=np.array([4, STEPS]))
    return found


ROLES: dict[str, Any] = {"obs": ["state", "image"], "action": "actions", "reward": "score"}


def imported(tmp_path: Path, name: str = "store", **options: Any) -> dr.Schema:
    import_zarr(tmp_path / "set", tmp_path / name, **options)
    with dr.open(tmp_path / name) as store:
        return store.schema


def test_a_data_set_without_known_names_is_refused_with_the_call_that_works(tmp_path: Path) -> None:
    pixels(tmp_path / "set")
    with pytest.raises(dr.SchemaError) as caught:
        import_zarr(tmp_path / "set", tmp_path / "store")
    said = str(caught.value)
    assert "no feature is the action; its features are actions float32[2], image float32[8, 8, 3], score" in said
    assert "obs=['image', 'state'], action='actions' (on the command line --obs image,state --action actions)" in said
    assert not (tmp_path / "store").exists()
    assert imported(tmp_path, obs=["image", "state"], action="actions").obs.keys() == {"image", "state"}


def test_features_become_the_parts_that_are_named(tmp_path: Path) -> None:
    found = pixels(tmp_path / "set")
    done = import_zarr(tmp_path / "set", tmp_path / "store", **ROLES)
    assert (done.episodes, done.steps, done.skipped, done.not_kept) == (2, STEPS, [], [])
    with dr.open(tmp_path / "store") as store:
        assert store.schema.step_leaves.keys() == {"obs/state", "obs/image", "action", "reward"}
        episode = store.episodes[1]
        np.testing.assert_array_equal(episode.obs["image"], found["image"][4:], strict=True)
        np.testing.assert_array_equal(episode.action, found["actions"][4:], strict=True)
        np.testing.assert_array_equal(episode.reward, found["score"][4:], strict=True)


@pytest.mark.parametrize(
    ("options", "leaves"),
    [
        ({"obs": "state"}, {"obs", "action", "reward", "extra/image"}),
        ({"obs": {"eye/top": "image", "arm": "state"}}, {"obs/eye/top", "obs/arm", "action", "reward"}),
        ({"rename": {"image": "top"}}, {"obs/state", "obs/top", "action", "reward"}),
        ({"rename": {"image": "extra/top"}}, {"obs/state", "extra/top", "action", "reward"}),
        ({"skip": "image", "obs": ["state"]}, {"obs/state", "action", "reward"}),
        ({"action": ["actions"]}, {"obs/state", "obs/image", "action/actions", "reward"}),
        ({"reward": None}, {"obs/state", "obs/image", "action", "reward", "extra/score"}),
        ({"reward": None, "extra": []}, {"obs/state", "obs/image", "action", "reward"}),
        (
            {"reward": None, "extra": {"points": "score"}},
            {"obs/state", "obs/image", "action", "reward", "extra/points"},
        ),
    ],
)
def test_each_option_moves_features(tmp_path: Path, options: dict[str, Any], leaves: set[str]) -> None:
    pixels(tmp_path / "set")
    # Without roles all arrays are observations: the others are to be extra fields.
    given = {**ROLES, **options}
    if given["reward"] is None:
        given["rename"] = {"score": "extra/score"} if given.get("extra") is None else given.get("rename")
    assert imported(tmp_path, **given).step_leaves.keys() == leaves


def test_what_no_leaf_takes_is_named(tmp_path: Path) -> None:
    pixels(tmp_path / "set")
    done = import_zarr(tmp_path / "set", tmp_path / "store", obs="state", action="actions", extra=[], skip=["image"])
    assert done.not_kept == ["image", "score"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"obs": "stat"}, "'stat' in obs is not a feature; its features are actions"),
        ({"skip": ["depth"]}, "'depth' in skip is not a feature"),
        ({"rename": {"depth": "top"}}, "'depth' in rename is not a feature"),
        ({"rename": {"image": "state"}}, "'state' and 'image' would both be obs/state; rename one"),
        ({"obs": ["state", "actions"]}, "'actions' is taken twice, as obs/actions and action"),
        ({"skip": ["state"]}, "'state' in obs is not a feature"),
        ({"rename": {"image": "episode/image"}}, "each step has a value of 'image', so it cannot be episode/image"),
        ({"dtype": {"obs/depth": "uint8"}}, "dtype names 'obs/depth', but the store's leaves are action, obs/image"),
        ({"dtype": {"obs/image": "complex64"}}, "set: obs/image: a field's dtype is one of .*, not complex64"),
        ({"obs": 3}, "obs must be names of features, not 3"),
        ({"rename": ["image"]}, "rename must be a dict, not"),
        ({"on_error": "ignore"}, "on_error must be raise or skip, not 'ignore'"),
        (
            {"where": "length > 3"},
            "where must be a function of an episode, such as lambda episode: episode.total_reward > 20",
        ),
    ],
)
def test_an_option_that_does_not_fit_is_refused_before_anything_is_made(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    pixels(tmp_path / "set")
    with pytest.raises(dr.SchemaError, match=said):
        import_zarr(tmp_path / "set", tmp_path / "store", **{**ROLES, **options})
    assert not (tmp_path / "store").exists()


def test_episodes_that_the_options_refuse_do_not_make_others_be_read_again(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "set").mkdir()
    for number in range(20):
        rows = np.full((2, 3), 300.0 if number % 3 else 1.0, "f4")
        np.savez(tmp_path / f"set/{number:02}.npz", obs=rows, action=np.zeros(2, "f4"))
    opened, real = Counter[str](), open

    def counting(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened[str(file)] += 1
        return real(file, *args, **kwargs)

    monkeypatch.setattr("builtins.open", counting)
    done = import_dataset(tmp_path / "set", tmp_path / "store", dtype={"obs": "uint8"}, on_error="skip")
    assert (done.episodes, len(done.skipped)) == (7, 13)
    times = {opened[str(tmp_path / f"set/{number:02}.npz")] for number in range(1, 20)}
    assert len(times) == 1


def test_a_feature_with_the_name_of_the_placeholder_is_in_the_advice(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    np.savez(tmp_path / "set/0.npz", **{"...": np.zeros((4, 2)), "x": np.zeros(4)})
    with pytest.raises(dr.SchemaError, match=r"for example obs=\['\.\.\.', 'x'\], action='\.\.\.' "):
        import_dataset(tmp_path / "set", tmp_path / "store")


def test_a_name_that_is_no_option_is_a_type_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="observation"):
        import_zarr(tmp_path / "set", tmp_path / "store", observation="state")  # type: ignore[call-arg]


def test_a_dtype_keeps_every_value_or_refuses_it(tmp_path: Path) -> None:
    found = pixels(tmp_path / "set")
    assert imported(tmp_path, **ROLES, dtype={"obs/image": "uint8"}).obs["image"].dtype == np.uint8
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.episodes[0].obs["image"], found["image"][:4])
    with pytest.raises(dr.SchemaError, match=r"episode 0 has 0\.\d+ in obs/state, which uint8 cannot hold; choose"):
        imported(tmp_path, "other", **ROLES, dtype={"obs/state": "uint8"})
    assert imported(tmp_path, "third", **ROLES, dtype={"obs/state": "uint8:unsafe"}).obs["state"].dtype == np.uint8
    with dr.open(tmp_path / "third") as store:
        np.testing.assert_array_equal(store.episodes[0].obs["state"], np.rint(found["state"][:4]))


def test_episodes_are_chosen_by_a_predicate_and_an_interrupted_import_goes_on(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "nested")
    export_dataset(store, tmp_path / "set")
    with dr.open(store) as before:
        lengths = [len(episode) for episode in before.episodes]
        rewards = [episode.total_reward for episode in before.episodes]
    wanted = [number for number, length in enumerate(lengths) if length > min(lengths)]
    assert 1 < len(wanted) < len(lengths)
    seen = list[float]()

    class Stopped(Exception):
        pass

    def stop(done: int, total: int) -> None:
        if done > sum(lengths[: wanted[1]]):
            raise Stopped

    def long(episode: Any) -> bool:
        seen.append(episode.total_reward)
        return len(episode) > min(lengths) and episode.ended in ("terminated", "truncated", "cut")

    with pytest.raises(Stopped):
        import_dataset(tmp_path / "set", tmp_path / "b", where=long, progress=stop)
    with pytest.raises(dr.StoreExists, match="was imported with other options"):
        import_dataset(tmp_path / "set", tmp_path / "b")
    done = import_dataset(tmp_path / "set", tmp_path / "b", where=long)
    assert done.resumed > 0
    assert done.episodes + done.resumed == len(wanted)
    np.testing.assert_allclose(seen[-len(lengths) :], rewards, rtol=1e-6)
    with dr.open(tmp_path / "b") as after:
        assert [len(episode) for episode in after.episodes] == [lengths[number] for number in wanted]


def test_a_predicate_that_fails_leaves_no_store(tmp_path: Path) -> None:
    export_dataset(make_store(tmp_path / "a", "vectors"), tmp_path / "set")
    with pytest.raises(ZeroDivisionError):
        import_dataset(tmp_path / "set", tmp_path / "b", where=lambda episode: len(episode) < 1 / 0)
    assert not (tmp_path / "b").exists()


def test_episodes_that_cannot_be_read_are_left_out_and_named(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "nested")
    export_dataset(store, tmp_path / "set")
    with dr.open(store) as before:
        count = len(before.episodes)
    for number in (1, count - 1):
        (tmp_path / f"set/episode-{number:08d}.npz").write_bytes(b"")
    with pytest.raises(dr.FormatError, match="episode-00000001.npz"):
        import_dataset(tmp_path / "set", tmp_path / "b")
    done = import_dataset(tmp_path / "set", tmp_path / "c", on_error="skip")
    assert done.episodes == count - 2
    assert [what for what, _ in done.skipped] == ["episode 1", f"episode {count - 1}"]
    assert "episode-00000001.npz" in done.skipped[0].why
    again = import_dataset(tmp_path / "set", tmp_path / "c", on_error="skip")
    assert (again.resumed, again.skipped) == (count - 2, done.skipped)


def test_compression_is_that_of_the_store(tmp_path: Path) -> None:
    pixels(tmp_path / "set")
    import_zarr(tmp_path / "set", tmp_path / "store", **ROLES, compression=("zstd", 5))
    document = json.loads((tmp_path / "store/zarr.json").read_text())
    assert document["attributes"]["compression"] == {"zstd": 5}


def test_the_rows_of_a_key_are_those_of_its_role(tmp_path: Path) -> None:
    """In a replay of Dreamer an action is in the row after its observation, whatever the key is called."""
    (tmp_path / "replay").mkdir()
    rows = {"image": np.arange(4.0), "move": np.arange(4) * 10, "reward": np.zeros(4, "f4")}
    np.savez(tmp_path / "replay/20260101T000000-a-4.npz", **rows)
    import_dreamer(tmp_path / "replay", tmp_path / "store", obs="image", action="move")
    with dr.open(tmp_path / "store") as store:
        assert store.episodes[0].obs.tolist() == [0, 1, 2, 3]
        assert store.episodes[0].action.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("values", "dtype", "shown"),
    [
        (np.array([3, -1], "i1"), "uint8", "-1"),
        (np.array([3, 200], "u1"), "int8", "200"),
        (np.array([3, -1]), "uint64", "-1"),
        (np.array([np.nan, 0.1]), "float16", "0.1"),
    ],
)
def test_a_value_that_wraps_is_refused(tmp_path: Path, values: np.ndarray, dtype: str, shown: str) -> None:
    pixels(tmp_path / "set", depth=np.resize(values, STEPS))
    with pytest.raises(dr.SchemaError, match=f"has {shown} in extra/depth, which {dtype} cannot hold"):
        imported(tmp_path, **ROLES, rename={"depth": "extra/depth"}, dtype={"extra/depth": dtype})


@pytest.mark.parametrize(
    ("values", "dtype", "stored"),
    [
        ([2.7, -2.7, 300.0, -1e30, np.inf, np.nan], "int8", [3, -3, 127, -128, 127, 0]),
        ([2.5, -0.4, 255.4, 255.6, 256.0, -1.0], "uint8", [2, 0, 255, 255, 255, 0]),
        ([2.0**63, -(2.0**63), 1e300, -np.inf, 0.5, 1.5], "int64", [2**63 - 1, -(2**63), 2**63 - 1, -(2**63), 0, 2]),
        (np.array([300, -1, 7, 255, 256, -300]), "uint8", [255, 0, 7, 255, 255, 0]),
        (np.array([2**64 - 1, 0, 1, 2, 3, 2**63], "u8"), "int64", [2**63 - 1, 0, 1, 2, 3, 2**63 - 1]),
        ([0.1, 1e300, np.nan, 1.0, 2.0, -np.inf], "float16", np.float16([0.1, np.inf, np.nan, 1, 2, -np.inf])),
    ],
)
def test_an_unsafe_dtype_takes_the_nearest_values(tmp_path: Path, values: Any, dtype: str, stored: Any) -> None:
    pixels(tmp_path / "set", depth=np.resize(values, STEPS))
    imported(tmp_path, **ROLES, rename={"depth": "extra/depth"}, dtype={"extra/depth": f"{dtype}:unsafe"})
    with dr.open(tmp_path / "store") as store:
        found = np.concatenate([episode["depth"] for episode in store.episodes])
    np.testing.assert_array_equal(found, np.resize(np.array(stored, dtype), STEPS)[: len(found)])


def stopping(after: int) -> Any:
    """A progress that interrupts an import when more than so many steps are done."""

    def progress(done: int, total: int) -> None:
        if done > after:
            raise InterruptedError

    return progress


def equal_lengths(tmp_path: Path, count: int = 6) -> Path:
    """Write a data set of episodes of 3 steps, whose actions are the number of their episode."""
    with (
        dr.create(tmp_path / "a", dr.Schema(dr.Field((), "f4"), dr.Field((), "i8"))) as store,
        store.writer() as writer,
    ):
        for number in range(count):
            writer.append_episode(np.zeros(4, "f4"), np.full(3, number), np.zeros(3, "f4"), terminated=True)
    export_dataset(tmp_path / "a", tmp_path / "set")
    return tmp_path / "set"


def test_an_import_with_other_episodes_than_before_is_not_resumed(tmp_path: Path) -> None:
    """Episode 1 can be read when the import is repeated: what is in the store is not what would be now."""
    root = equal_lengths(tmp_path)
    file = root / "episode-00000001.npz"
    data = file.read_bytes()
    file.write_bytes(b"")
    with pytest.raises(InterruptedError):
        import_dataset(root, tmp_path / "b", on_error="skip", progress=stopping(9))
    file.write_bytes(data)
    with pytest.raises(dr.StoreExists, match="episode 1 has other values of action in .* cannot be resumed"):
        import_dataset(root, tmp_path / "b", on_error="skip")


def test_damage_of_a_chunk_costs_its_episode_and_moves_no_rows(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    count, rows = 200, 1000  # more than a block of 32 MiB
    state = np.arange(count * rows * 50, dtype="f4").reshape(-1, 50)
    root = zarr.create_group(tmp_path / "set")
    root.create_array("data/state", data=state, chunks=(rows, 50))
    root.create_array("data/action", data=np.repeat(np.arange(count), rows), chunks=(rows,))
    root.create_array("meta/episode_ends", data=np.arange(1, count + 1) * rows)
    (tmp_path / "set/data/state/c/190/0").write_bytes(b"damage")
    done = import_zarr(tmp_path / "set", tmp_path / "store", on_error="skip")
    assert [what for what, _ in done.skipped] == ["episode 190"]
    with dr.open(tmp_path / "store") as store:
        for episode in store.episodes:
            first = int(episode.action[0]) * rows
            np.testing.assert_array_equal(episode.obs["state"], state[first : first + rows])
