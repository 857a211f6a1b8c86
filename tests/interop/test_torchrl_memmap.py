"""Folders of TorchRL: read without it, from its own dumps and from files made by hand, and written for it to load."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop.torchrl_memmap import export_dataset, import_dataset
from tests.interop.round_trips import EPISODES, PLAIN, make_store

Rows = dict[str, np.ndarray]


def write(folder: Path, leaves: Rows, length: int | None = None, cursor: int = 0, batch_dims: int = 1) -> Path:
    """A dump as TorchRL writes it, of arrays by their keys."""
    storage = folder / "storage"
    metas: dict[str, dict[str, Any]] = {"": {}}
    shape = next(iter(leaves.values())).shape[:batch_dims]
    for key, rows in leaves.items():
        *above, name = key.split("/")
        for depth in range(len(above)):
            metas.setdefault("/".join(above[: depth + 1]), {})
            metas["/".join(above[:depth])][above[depth]] = {"type": "TensorDict"}
        said = {"device": "cpu", "shape": list(rows.shape), "dtype": f"torch.{rows.dtype}", "is_nested": False}
        metas["/".join(above)][name] = said
        (storage / "/".join(above)).mkdir(parents=True, exist_ok=True)
        rows.tofile(storage / f"{key}.memmap")
    for where, meta in metas.items():
        said = {**meta, "shape": list(shape), "device": "cpu", "_type": "<class 'tensordict._td.TensorDict'>"}
        (storage / where / "meta.json").write_text(json.dumps(said))
    count = int(np.prod(shape)) if length is None else length
    (storage / "storage_metadata.json").write_text(json.dumps({"metadata": {}, "is_pytree": False, "len": count}))
    (folder / "writer").mkdir()
    (folder / "writer/metadata.json").write_text(json.dumps({"cursor": cursor, "write_count": count}))
    return folder


def walk(steps: int, ends: list[int], start: float = 0.0, **flags: Any) -> Rows:
    """Transitions of one environment: the observation counts, and begins a hundred higher after an end."""
    done = np.zeros((steps, 1), bool)
    done[ends] = True
    obs = np.arange(start, start + steps, dtype=np.float32)[:, None] + 100 * (np.cumsum(done) - done[:, 0])[:, None]
    rng = np.random.default_rng(0)
    after = {"next/observation": obs + 1, "next/reward": rng.random((steps, 1), np.float32), "next/done": done}
    return {"observation": obs, "action": rng.integers(0, 4, steps), **after, **flags}


def episodes_of(path: Path) -> list[tuple[list[float], str]]:
    """The observations of each episode, and how it ended."""
    with dr.open(path) as store:
        return [(episode.obs[:, 0].tolist(), episode.ended) for episode in store.episodes]


def test_transitions_are_read_without_torchrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchrl", "tensordict", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    leaves = walk(10, [3, 7])
    extra = {"log_prob": np.arange(10.0), "index": np.arange(10), "next/success": leaves["next/done"]}
    write(tmp_path / "dump", leaves | extra)
    import_dataset(tmp_path / "dump", tmp_path / "store")
    assert episodes_of(tmp_path / "store") == [
        ([0, 1, 2, 3, 4], "terminated"),
        ([104, 105, 106, 107, 108], "terminated"),
        ([208, 209, 210], "cut"),
    ]
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.episodes[1]["log_prob"], [4, 5, 6, 7])
        np.testing.assert_array_equal(store.episodes[0].reward, leaves["next/reward"][:4, 0], strict=True)
        np.testing.assert_array_equal(store.episodes[0]["success"][:, 0], [False, False, False, True])
        assert set(store.schema.extra) == {"log_prob", "success"}


def test_the_flags_tell_how_episodes_ended(tmp_path: Path) -> None:
    ends = np.array([[0], [1], [0], [1], [0], [1]], bool)
    flags = {
        "next/terminated": ends & (np.arange(6)[:, None] < 2),
        "next/truncated": ends & (np.arange(6)[:, None] > 2),
    }
    for number, given in enumerate([flags, {"next/terminated": flags["next/terminated"]}]):
        write(tmp_path / f"{number}", walk(6, [1, 3, 5]) | given)
        import_dataset(tmp_path / f"{number}", tmp_path / f"{number}-store")
        assert [how for _, how in episodes_of(tmp_path / f"{number}-store")] == ["terminated", "truncated", "truncated"]


@pytest.mark.parametrize("dtype", ["float64", "int32", "-0.0"])
def test_next_observations_are_compared_by_value(tmp_path: Path, dtype: str) -> None:
    leaves = walk(10, [3, 7])
    after = leaves["next/observation"]
    expected = [([0, 1, 2, 3, 4], "terminated"), ([104, 105, 106, 107, 108], "terminated"), ([208, 209, 210], "cut")]
    if dtype == "-0.0":
        leaves["observation"][2], after[1], expected[0][0][2] = 0.0, -0.0, 0
    else:
        leaves["next/observation"] = after.astype(dtype)
    assert import_dataset(write(tmp_path / "dump", leaves), tmp_path / "store").cut == 0
    assert episodes_of(tmp_path / "store") == expected


def test_a_ring_begins_with_its_oldest_row_and_one_that_is_not_full_ends_early(tmp_path: Path) -> None:
    leaves = walk(8, [4])
    write(tmp_path / "full", {key: np.roll(rows, 3, 0) for key, rows in leaves.items()}, cursor=3)
    import_dataset(tmp_path / "full", tmp_path / "store")
    assert episodes_of(tmp_path / "store") == [([0, 1, 2, 3, 4, 5], "terminated"), ([105, 106, 107, 108], "cut")]
    write(tmp_path / "part", leaves, length=3, cursor=3)
    import_dataset(tmp_path / "part", tmp_path / "three")
    assert episodes_of(tmp_path / "three") == [([0, 1, 2, 3], "cut")]


def test_the_second_axis_has_environments_and_trajectories_join_what_took_turns(tmp_path: Path) -> None:
    lanes = [walk(6, [2]), walk(6, [5], start=1000.0)]
    both = {key: np.stack([lane[key] for lane in lanes], axis=1) for key in lanes[0]}
    expected = [
        ([0, 1, 2, 3], "terminated"),
        ([1000, 1001, 1002, 1003, 1004, 1005, 1006], "terminated"),
        ([103, 104, 105, 106], "cut"),
    ]
    write(tmp_path / "lanes", both, batch_dims=2)
    import_dataset(tmp_path / "lanes", tmp_path / "from-lanes")
    assert episodes_of(tmp_path / "from-lanes") == expected
    # A collector of two environments and three steps a batch, into one axis.
    turns = {key: np.concatenate([lane[key][i : i + 3] for i in (0, 3) for lane in lanes]) for key in lanes[0]}
    ids = np.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 1, 1, 1])
    write(tmp_path / "turns", turns | {"collector/traj_ids": ids})
    import_dataset(tmp_path / "turns", tmp_path / "from-turns")
    assert episodes_of(tmp_path / "from-turns") == expected
    write(tmp_path / "untold", turns)
    with pytest.warns(UserWarning, match="untold: 2 of 12 steps lead to another observation than the next row has"):
        import_dataset(tmp_path / "untold", tmp_path / "from-untold")
    assert [how for _, how in episodes_of(tmp_path / "from-untold")] == ["terminated", "cut", "cut", "terminated"]


def test_a_trajectory_may_have_several_turns(tmp_path: Path) -> None:
    """Its first and last rows may be as far apart as if they were consecutive."""
    lanes = [walk(6, [5]), walk(6, [5], start=1000.0)]
    turns = {key: np.concatenate([lane[key][i : i + 3] for i in (0, 3) for lane in lanes]) for key in lanes[0]}
    write(tmp_path / "turns", turns | {"collector/traj_ids": np.array([0, 0, 0, 1, 1, 1] * 2)})
    assert import_dataset(tmp_path / "turns", tmp_path / "store").cut == 0
    assert episodes_of(tmp_path / "store") == [
        ([0, 1, 2, 3, 4, 5, 6], "terminated"),
        ([1000, 1001, 1002, 1003, 1004, 1005, 1006], "terminated"),
    ]


def test_keys_are_chosen_and_left_out(tmp_path: Path) -> None:
    leaves = walk(4, [3])
    count = np.arange(4)[:, None]
    leaves |= {"step_count": count, "next/step_count": count + 1, "td_error": np.ones(4), "mask": np.ones(4)}
    write(tmp_path / "dump", leaves)
    import_dataset(tmp_path / "dump", tmp_path / "all", skip=["mask"])
    import_dataset(tmp_path / "dump", tmp_path / "chosen", obs="observation", skip=["mask", "td_error"])
    with dr.open(tmp_path / "all") as every, dr.open(tmp_path / "chosen") as chosen:
        assert (every.schema.obs.keys(), set(every.schema.extra)) == ({"observation", "step_count"}, {"td_error"})
        assert (chosen.schema.obs.shape, set(chosen.schema.extra)) == ((1,), {"step_count"})


def test_a_folder_of_torchrl_comes_back_equal(tmp_path: Path) -> None:
    leaves = walk(9, [2, 6])
    write(tmp_path / "dump", leaves)
    import_dataset(tmp_path / "dump", tmp_path / "store")
    export_dataset(tmp_path / "store", tmp_path / "again")
    for key, rows in leaves.items():
        again = np.fromfile(tmp_path / f"again/storage/{key}.memmap", rows.dtype).reshape(rows.shape)
        np.testing.assert_array_equal(again, rows, key)


@pytest.mark.slow
def test_a_buffer_of_torchrl_is_read_and_loads_what_was_written(tmp_path: Path) -> None:
    torch, data, tensordict = (pytest.importorskip(name) for name in ("torch", "torchrl.data", "tensordict"))

    def buffer(capacity: int, **options: Any) -> Any:
        storage = data.LazyMemmapStorage(capacity, **options)
        return data.TensorDictReplayBuffer(storage=storage, batch_size=4)

    def batch(leaves: Rows, size: list[int]) -> Any:
        found = tensordict.TensorDict({}, size)
        for key, rows in leaves.items():
            found[tuple(key.split("/"))] = torch.as_tensor(rows)
        return found

    lanes = [walk(6, [2]), walk(6, [5], start=1000.0)]
    both = {key: np.stack([lane[key] for lane in lanes]) for key in lanes[0]}
    for name, ndim, capacity in (("ring", 1, 8), ("lanes", 2, 20)):
        made = buffer(capacity, ndim=ndim)
        if ndim == 1:
            for start in (0, 4, 8):
                made.extend(batch({key: rows[start : start + 4] for key, rows in walk(12, [5]).items()}, [4]))
        else:
            made.extend(batch({key: rows[:, :4] for key, rows in both.items()}, [2, 4]))
            made.extend(batch({key: rows[:, 4:] for key, rows in both.items()}, [2, 2]))
        made.dumps(tmp_path / name)
        import_dataset(tmp_path / name, tmp_path / f"{name}-store")
    assert episodes_of(tmp_path / "ring-store") == [
        ([4, 5, 6], "terminated"),
        ([106, 107, 108, 109, 110, 111, 112], "cut"),
    ]
    assert [steps[0] for steps, _ in episodes_of(tmp_path / "lanes-store")] == [0, 1000, 103]

    store = make_store(tmp_path / "nested", "nested", PLAIN)
    export_dataset(store, tmp_path / "out", capacity=50)
    made = buffer(50)
    made.loads(tmp_path / "out")
    assert (len(made), made.writer._cursor) == (25, 25)
    with dr.open(store) as opened:
        first = opened.episodes[0]
        np.testing.assert_array_equal(made[:3]["image"].numpy(), first.obs["image"][:-1])
        np.testing.assert_array_equal(made[:3]["next", "image"].numpy(), first.obs["image"][1:])
        np.testing.assert_array_equal(made[:3]["next", "reward"][:, 0].numpy(), first.reward)
    assert made[:25]["next", "done"].sum() == len(PLAIN)
    assert made.sample().batch_size == torch.Size([256])
    made.extend(made[:4].clone())
    assert len(made) == 29


def test_capacities_and_keys_that_cannot_be_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "vectors")
    steps = sum(steps for steps, _, _ in EPISODES)
    with pytest.raises(dr.SchemaError, match=f"a storage of 5 rows does not hold {steps} steps"):
        export_dataset(tmp_path / "store", tmp_path / "set", capacity=5)
    schema = dr.Schema({"done": dr.Field((), "bool")}, dr.Field((), "int64"))
    make_store(tmp_path / "taken", "", PLAIN, schema=schema)
    with pytest.raises(dr.SchemaError, match="the key 'done' of obs/done is taken in a transition of TorchRL"):
        export_dataset(tmp_path / "taken", tmp_path / "set")
    assert not (tmp_path / "set").exists()


def change(folder: Path, file: str, **values: Any) -> None:
    said = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(said | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "storage/meta.json").write_text("{"), "meta.json is not JSON: "),
        (lambda f: (f / "storage/meta.json").write_text("[]"), "meta.json is not a JSON object$"),
        (lambda f: (f / "storage/next/reward.memmap").write_bytes(b"1234"), "reward.memmap cannot be read: "),
        (lambda f: (f / "storage/action.memmap").unlink(), "action.memmap cannot be read: "),
        (lambda f: change(f, "storage/meta.json", shape=[-1]), "does not tell the shape of a tensordict$"),
        (lambda f: change(f, "storage/meta.json", shape=None), "does not tell the shape of a tensordict$"),
        (lambda f: change(f, "storage/meta.json", shape=[7]), "has the shape .*, and the tensordict \\(7,\\)$"),
        (lambda f: change(f, "storage/meta.json", **{"../x": {"type": "TensorDict"}}), "'../x' cannot be a key$"),
        (
            lambda f: change(f, "storage/storage_metadata.json", len=100),
            "claims 100 rows and a cursor at row 0, of 4 rows$",
        ),
        (
            lambda f: change(f, "storage/storage_metadata.json", len="4"),
            "claims '4' rows and a cursor at row 0, of 4 rows$",
        ),
        (lambda f: change(f, "writer/metadata.json", cursor=-1), "claims 4 rows and a cursor at row -1, of 4 rows$"),
        (lambda f: change(f, "storage/storage_metadata.json", is_pytree=True), "has a pytree and no tensordict"),
    ],
)
def test_damage_is_one_error_and_nothing_is_written(tmp_path: Path, damage: Any, message: str) -> None:
    write(tmp_path / "dump", walk(4, [3]))
    damage(tmp_path / "dump")
    with pytest.raises(dr.FormatError, match=message):
        import_dataset(tmp_path / "dump", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_what_are_no_transitions_of_one_agent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match="dump is not a folder of TorchRL: there is no meta.json$"):
        import_dataset(tmp_path / "dump", tmp_path / "store")
    leaves = walk(4, [3])
    rest = {key: rows for key, rows in leaves.items() if not key.startswith("next/")}
    write(tmp_path / "states", rest)
    with pytest.raises(dr.FormatError, match="has no transitions: no reward and done below 'next'$"):
        import_dataset(tmp_path / "states", tmp_path / "store")
    write(tmp_path / "agents", leaves | {"next/reward": np.zeros((4, 3, 1))})
    with pytest.raises(dr.FormatError, match="'next' has reward of shape \\(3, 1\\) in each row, so rows are not the"):
        import_dataset(tmp_path / "agents", tmp_path / "store")
    write(tmp_path / "halves", leaves | {"next/done": np.full((4, 1), 0.5)})
    with pytest.raises(dr.FormatError, match="halves: next/done is one truth value a step, a bool or 0 or 1, not 0.5$"):
        import_dataset(tmp_path / "halves", tmp_path / "store")
    write(tmp_path / "passive", {key: rows for key, rows in leaves.items() if key != "action"})
    with pytest.raises(dr.SchemaError, match="passive: no feature is the action; its features are observation "):
        import_dataset(tmp_path / "passive", tmp_path / "store")
    write(tmp_path / "complex", leaves | {"wave": np.zeros(4, np.complex64)})
    with pytest.raises(dr.SchemaError, match="wave.memmap is of torch.complex64, which cannot be stored"):
        import_dataset(tmp_path / "complex", tmp_path / "store")
    import_dataset(tmp_path / "complex", tmp_path / "real", skip=["wave"])
    with pytest.raises(dr.FormatError, match="has no observations position both at its root and below 'next'"):
        import_dataset(tmp_path / "complex", tmp_path / "store", obs=["position"], skip=["wave"])
    assert not (tmp_path / "store").exists()
