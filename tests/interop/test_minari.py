"""Data sets of Minari: its own come back as they were, and so do stores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

minari = pytest.importorskip("minari", reason="needs minari")

from gymnasium import spaces  # noqa: E402
from minari.data_collector import EpisodeBuffer  # noqa: E402
from minari.dataset.minari_storage import MinariStorage  # noqa: E402

from diskreplay.interop.minari import export_dataset, import_dataset  # noqa: E402
from tests.interop.round_trips import (  # noqa: E402
    CASES,
    EPISODES,
    PLAIN,
    SCHEMAS,
    StopAt,
    check_round_trip,
    content,
    make_store,
    write_side_folder,
)

SPACES = {
    "box": (spaces.Box(-1, 1, (5,), np.float64), spaces.Box(-2, 2, (2,), np.float32)),
    "dict": (
        spaces.Dict(
            {
                "mission": spaces.Text(20),
                "position": spaces.Box(-np.inf, np.inf, (2,), np.float32),
                "inner": spaces.Dict({"flags": spaces.MultiBinary(3), "kinds": spaces.MultiDiscrete([2, 3])}),
            }
        ),
        spaces.Discrete(4, start=1),
    ),
    "images": (
        spaces.Box(0, 255, (32, 40, 3), np.uint8),
        spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (), np.float32))),
    ),
}


def sampled(space: Any, count: int) -> Any:
    """``count`` values of a space, stacked as Minari has them."""
    if isinstance(space, spaces.Dict):
        return {key: sampled(inner, count) for key, inner in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(sampled(inner, count) for inner in space.spaces)
    values = [space.sample() for _ in range(count)]
    return values if isinstance(space, spaces.Text) else np.stack(values).astype(space.dtype)


def buffers(observation_space: Any, action_space: Any, in_arrow: bool) -> list[EpisodeBuffer]:
    """Episodes with seeds, options and infos: arrays, nested ones, texts, and one that only one episode has.

    Of an array of one axis, but not of a list, Minari makes a file of Arrow that it cannot read.
    """
    own: Any = list if in_arrow else np.asarray
    observation_space.seed(0)
    action_space.seed(1)
    rng = np.random.default_rng(2)
    made = []
    for number, steps in enumerate((3, 1, 7, 4)):
        infos: dict[str, Any] = {
            "success": own(rng.random(steps + 1) < 0.5),
            "state": {"velocity": rng.normal(size=(steps + 1, 2)).astype("f4"), "count": own(np.arange(steps + 1))},
            "phase": [f"phase {t % 2}" for t in range(steps + 1)],
        }
        if number == 2:
            infos["rare"] = own(rng.normal(size=steps + 1))
        flags = np.zeros((2, steps), bool)
        flags[number % 2, -1] = True
        if number == 3:
            flags[1, 0] = True  # not where an episode ends: some data sets have such
        made.append(
            EpisodeBuffer(
                seed=None if number == 1 else 10 + number,
                options={"level": number, "sizes": [1, 2]} if number % 2 else None,
                observations=sampled(observation_space, steps + 1),
                actions=sampled(action_space, steps),
                rewards=rng.normal(size=steps),
                terminations=flags[0],
                truncations=flags[1],
                infos=infos,
            )
        )
    return made


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The local folder of Minari."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


def make_data_set(name: str, kind: str, data_format: str) -> None:
    """Have Minari make a data set of its own."""
    observation_space, action_space = SPACES[kind]
    minari.create_dataset_from_buffers(
        name,
        buffers(observation_space, action_space, data_format != "hdf5"),
        env="CartPole-v1",
        eval_env="CartPole-v1",
        observation_space=observation_space,
        action_space=action_space,
        author={"Ada", "Bob"},
        author_email="ada@example.org",
        code_permalink="https://example.org",
        algorithm_name="random",
        description="For a test.",
        data_format=data_format,
        requirements=["numpy"],
        jpeg_encoding=False,
    )


def plain(value: Any) -> Any:
    """A value of Minari as what can be compared: arrays by dtype, shape and bytes."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OU":
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, tuple | list | np.ndarray):
        return [plain(item) for item in value]
    return value.decode() if isinstance(value, bytes) else value


def everything(folder: Path) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """All that Minari reads of a data set, but what its storage computes."""
    data_set = minari.MinariDataset(folder / "data")
    metadata = {key: value for key, value in data_set.storage.metadata.items() if key != "dataset_size"}
    # One by one: at once, Minari refuses episodes of different infos in Arrow.
    episodes = [plain(vars(data_set[number])) for number in range(len(data_set))]
    return metadata, episodes, [plain(each) for each in data_set.storage.get_episode_metadata(range(len(episodes)))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPACES)
@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_a_data_set_of_minari_comes_back_as_it_was(home: Path, tmp_path: Path, kind: str, data_format: str) -> None:
    make_data_set("tests/own-v0", kind, data_format)
    imported = import_dataset("tests/own-v0", tmp_path / "store")
    assert (imported.episodes, imported.steps) == (4, 15)
    with dr.open(tmp_path / "store") as store:
        assert [episode["seed"] for episode in store.episodes if len(episode) != 1] == [10, 12, 13]
        assert store.schema.reward.dtype == np.float64
        assert store.verify(deep=True) == []
        assert store.read_note("import")["metadata"]["author_email"] == ["ada@example.org"]
    exported = export_dataset(tmp_path / "store", tmp_path / "own-v0", data_format=data_format)  # type: ignore[arg-type]
    assert exported.not_held == []
    there, back = everything(home / "tests/own-v0"), everything(tmp_path / "own-v0")
    assert {**back[0], "dataset_id": "tests/own-v0"} == there[0]
    assert back[1:] == there[1:]


def as_info(path: str) -> str:
    """Where an import has an extra field. A seed that the first episode lacks is in the notes."""
    return "" if path == "episode/seed" else path.replace("extra/", "extra/infos/")


@pytest.mark.parametrize("case", CASES)
def test_a_store_comes_back_but_for_what_the_export_names(tmp_path: Path, case: str) -> None:
    store = make_store(tmp_path / "store", case, priorities=True)
    exported = check_round_trip(store, tmp_path / "set", export_dataset, import_dataset, as_info)
    assert {"priority", "cut", "no_final_obs"} <= {name for name, _ in exported.not_held}
    data_set = minari.MinariDataset(tmp_path / "set/data")
    assert [len(episode) for episode in data_set] == [steps for steps, *_ in EPISODES]


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
@pytest.mark.parametrize("case", ["vectors", "nested", "images"])
def test_so_it_does_in_other_files(tmp_path: Path, case: str, data_format: str) -> None:
    store = make_store(tmp_path / "store", case)
    check_round_trip(store, tmp_path / "set", export_dataset, import_dataset, as_info, data_format=data_format)


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("case", ["vectors", "doubles", "images"])
def test_spaces_and_plain_episodes_are_held_whole(tmp_path: Path, case: str, data_format: str) -> None:
    store = make_store(tmp_path / "store", case, PLAIN)
    exported = check_round_trip(store, tmp_path / "set", export_dataset, import_dataset, data_format=data_format)
    assert exported.not_held == []


def test_data_in_another_dtype_than_its_space_keep_it_in_all_files(home: Path, tmp_path: Path) -> None:
    space, actions = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)
    rows = np.random.default_rng(0).uniform(-1, 1, (4, 2))
    ends = np.array([False, False, True])
    episode = EpisodeBuffer(
        observations=rows, actions=np.zeros(3, int), rewards=np.ones(3), terminations=ends, truncations=~ends & False
    )
    (home / "own-v0").mkdir(parents=True)
    storage = MinariStorage.new(home / "own-v0/data", space, actions, jpeg_encoding=False)
    storage.update_metadata({"dataset_id": "own-v0", "minari_version": minari.__version__})
    storage.update_episodes([episode])
    import_dataset("own-v0", tmp_path / "store")
    for data_format in ("hdf5", "arrow"):
        export_dataset(tmp_path / "store", tmp_path / data_format, data_format=data_format)  # type: ignore[arg-type]
        import_dataset(tmp_path / data_format, tmp_path / f"{data_format}-back")
        assert content(tmp_path / f"{data_format}-back") == content(tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.episodes[0].obs, rows)


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_an_episode_without_a_final_observation_keeps_its_last_step(
    home: Path, tmp_path: Path, data_format: Any
) -> None:
    space, actions = spaces.Dict({"x": spaces.Box(-99, 99, (2,), np.float32)}), spaces.Discrete(9)
    episodes = [
        EpisodeBuffer(
            observations={"x": np.arange(2 * rows, dtype="f4").reshape(rows, 2)},
            actions=np.arange(3),
            rewards=np.arange(3) + 1.0,
            terminations=np.arange(3) == 2,
            truncations=np.zeros(3, bool),
            infos={"phase": [f"phase {t}" for t in range(rows)], "v": {"y": np.ones((rows, 2), "f4")}},
        )
        for rows in (3, 4, 3)
    ]
    (home / "short-v0").mkdir(parents=True)
    storage = MinariStorage.new(home / "short-v0/data", space, actions, data_format=data_format, jpeg_encoding=False)
    storage.update_metadata({"dataset_id": "short-v0", "minari_version": minari.__version__})
    storage.update_episodes(episodes)
    assert import_dataset("short-v0", tmp_path / "store").steps == 9
    with dr.open(tmp_path / "store") as store:
        for episode, rows in zip(store.episodes, (3, 4, 3), strict=True):
            assert (episode.ended, episode.action.tolist(), episode.reward.tolist()) == (
                "terminated",
                [0, 1, 2],
                [1, 2, 3],
            )
            np.testing.assert_array_equal(episode.obs["x"], np.arange(2 * rows).reshape(rows, 2))
        np.testing.assert_array_equal(store.episodes[0]["infos"]["v"]["y"], np.ones((3, 2)))


def test_a_file_of_other_rows_than_its_episode_has_steps_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors", PLAIN)
    export_dataset(store, tmp_path / "set", data_format="arrow")
    path = tmp_path / "set/data/1/metadata.json"
    for steps, said in ((9, "1 has 2 observations, and its metadata.json says 9 steps$"), ("2", "total_steps '2'$")):
        path.write_text(json.dumps({**json.loads(path.read_text()), "total_steps": steps}))
        with pytest.raises(dr.FormatError, match=said):
            import_dataset(tmp_path / "set", tmp_path / "back")


def test_images_of_a_data_set_with_jpeg_are_those_that_minari_shows(home: Path, tmp_path: Path) -> None:
    space, actions = spaces.Box(0, 255, (32, 32, 3), np.uint8), spaces.Discrete(2)
    for data_format in ("hdf5", "arrow"):
        made = minari.create_dataset_from_buffers(
            f"{data_format}-v0",
            [
                EpisodeBuffer(
                    observations=sampled(space, 4),
                    actions=sampled(actions, 3),
                    rewards=np.ones(3),
                    terminations=np.array([False, False, True]),
                    truncations=np.zeros(3, bool),
                )
            ],
            observation_space=space,
            action_space=actions,
            data_format=data_format,
            author="a",
            author_email="a",
            code_permalink="a",
            algorithm_name="a",
            description="a",
            env="CartPole-v1",
            eval_env="CartPole-v1",
        )
        import_dataset(f"{data_format}-v0", tmp_path / data_format)
        with dr.open(tmp_path / data_format) as store:
            np.testing.assert_array_equal(store.episodes[0].obs, made[0].observations)


def test_names_are_in_the_folder_of_minari(home: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "store", "vectors", PLAIN)
    done = export_dataset(tmp_path / "store", "mine/walk-v3")
    assert done.path == str(home / "mine/walk-v3")
    assert minari.load_dataset("mine/walk-v3").total_steps == 25
    assert "mine/walk-v3" in minari.list_local_datasets()
    import_dataset("mine/walk-v3", tmp_path / "back")
    assert content(tmp_path / "back") == content(tmp_path / "store")
    with pytest.raises(dr.StoreExists, match="walk-v3 exists already"):
        export_dataset(tmp_path / "store", "mine/walk-v3")


@pytest.mark.parametrize("stops_at", [10, 25])
def test_an_import_that_an_earlier_release_began_is_repeated(tmp_path: Path, stops_at: int) -> None:
    store = make_store(tmp_path / "store", "vectors", PLAIN)
    export_dataset(store, tmp_path / "set")
    with pytest.raises(KeyboardInterrupt):
        import_dataset(tmp_path / "set", tmp_path / "back", progress=StopAt(stops_at))
    with dr.open(tmp_path / "back", "a") as back:
        back.write_note("import", {**back.read_note("import"), "source": str(tmp_path / "set/data")})
    import_dataset(tmp_path / "set", tmp_path / "back")
    assert content(tmp_path / "back") == content(store)


@pytest.mark.parametrize("where", ["set/diskreplay", "set.diskreplay"])
def test_a_side_folder_is_where_the_data_set_was_exported_to(tmp_path: Path, where: str) -> None:
    store = make_store(tmp_path / "store", "vectors", PLAIN)
    export_dataset(store, tmp_path / "set")
    write_side_folder(tmp_path / where, SCHEMAS["vectors"], not_held=["priority"])
    with pytest.warns(UserWarning, match=f"^{tmp_path / where} is from an export .* the store lacks priority of"):
        import_dataset(tmp_path / "set", tmp_path / "back")


@pytest.mark.parametrize("data_format", ["arrow", "parquet"])
def test_a_file_that_is_damaged_or_missing_is_named(tmp_path: Path, data_format: Any) -> None:
    store = make_store(tmp_path / "store", "vectors", PLAIN)
    export_dataset(store, tmp_path / "set", data_format=data_format)
    (file,) = (tmp_path / "set/data/1").glob(f"*.{data_format}")
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(dr.FormatError, match="set/data/1 cannot be read: "):
        import_dataset(tmp_path / "set", tmp_path / "back")
    file.unlink()
    with pytest.raises(dr.FormatError, match="set/data/1 cannot be read: "):
        import_dataset(tmp_path / "set", tmp_path / "back")


def test_what_cannot_be_imported_is_said(home: Path, tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match=r"at .*minari/x-v0 and .*x-v0; `minari download x-v0` gets one of"):
        import_dataset("x-v0", tmp_path / "store")
    make_data_set("own-v0", "box", "hdf5")
    path = home / "own-v0/data/metadata.json"
    metadata = json.loads(path.read_text())
    text = json.dumps({"type": "Text", "max_length": 5, "min_length": 1, "charset": "ab"})
    path.write_text(json.dumps({**metadata, "observation_space": text}))
    with pytest.raises(dr.SchemaError, match="own-v0/data: obs: a Text space with only texts cannot be stored$"):
        import_dataset("own-v0", tmp_path / "store")
    path.write_text("{")
    with pytest.raises(dr.FormatError, match="own-v0/data/metadata.json is not JSON: "):
        import_dataset("own-v0", tmp_path / "store")
    with pytest.raises(ValueError, match="^data_format must be hdf5, arrow or parquet, not 'csv'$"):
        export_dataset(make_store(tmp_path / "a", "vectors"), tmp_path / "set", data_format="csv")  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("lacking", ["observation_space", "action_space"])
def test_no_environment_of_a_data_set_is_made(home: Path, tmp_path: Path, lacking: str) -> None:
    """Its entry point is any function, called with arguments of the data set's."""
    make_data_set("own-v0", "box", "hdf5")
    file = home / "own-v0/data/metadata.json"
    metadata = json.loads(file.read_text())
    del metadata[lacking]
    spec = json.loads(metadata["env_spec"])
    spec |= {"entry_point": "os:mkdir", "kwargs": {"path": str(tmp_path / "ran")}}
    file.write_text(json.dumps(metadata | {"env_spec": json.dumps(spec)}))
    with pytest.raises(dr.FormatError, match=f"has no {lacking}, and making the environment .* could run code; add it"):
        import_dataset("own-v0", tmp_path / "store")
    assert not (tmp_path / "ran").exists()


def test_an_hdf5_file_that_leads_to_another_one_is_refused(home: Path, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    make_data_set("own-v0", "box", "hdf5")
    make_data_set("secret-v0", "box", "hdf5")
    with h5py.File(home / "own-v0/data/main_data.hdf5", "a") as file:
        del file["episode_1"]
        file["episode_1"] = h5py.ExternalLink(str(home / "secret-v0/data/main_data.hdf5"), "/episode_0")
    with pytest.raises(dr.FormatError, match="episode_1 is a link to another file; copy its data into this file$"):
        import_dataset("own-v0", tmp_path / "store")


@pytest.mark.parametrize("name", ["total_episodes", "total_steps"])
@pytest.mark.parametrize("value", [None, ".", -1, 1.5, True])
def test_a_count_that_is_no_number_is_refused(home: Path, tmp_path: Path, name: str, value: Any) -> None:
    make_data_set("own-v0", "dict", "hdf5")
    file = home / "own-v0/data/metadata.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises(dr.FormatError, match=f"metadata.json has no number in {name}, but "):
        import_dataset(home / "own-v0", tmp_path / "imported")
