"""Data sets of LeRobot: versions 2.1 and 3.0 are read, and 3.0 is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr

pa = pytest.importorskip("pyarrow")
pytest.importorskip("av")
import pyarrow.parquet as pq  # noqa: E402

from diskreplay.interop.lerobot import export_dataset, import_dataset  # noqa: E402
from tests.interop.lerobot import data_sets  # noqa: E402
from tests.interop.lerobot.data_sets import FPS, LENGTHS, write_v21, write_v30  # noqa: E402
from tests.interop.round_trips import (  # noqa: E402
    PLAIN,
    StopAt,
    check_round_trip,
    content,
    make_store,
)

LAYOUTS = {"2.1": write_v21, "3.0": write_v30}


# --- a store there and back ------------------------------------------------------------------------------------------


def test_images_of_every_layout_are_exact(tmp_path: Path) -> None:
    sizes = {
        "rgb": (9, 10, 3),
        "chw": (3, 9, 10),
        "gray": (9, 10, 1),
        "stack": (4, 9, 10),
        "small": (4, 4, 3),
        "flat": (9, 10),
    }
    obs = {name: dr.Field(shape, "u1") for name, shape in sizes.items()}
    store = make_store(
        tmp_path / "store", "", schema=dr.Schema(obs, dr.Field((), "i8"), extra={"view": dr.Field((8, 8, 3), "u1")})
    )
    images = {f"obs/{name}": f"obs/images/{name}" for name in ("rgb", "chw", "gray", "stack")}
    check_round_trip(store, tmp_path / "set", export_dataset, import_dataset, lambda path: images.get(path, path))
    features = read_info(tmp_path / "set")["features"]
    kinds = {key: feature["dtype"] for key, feature in features.items() if feature["dtype"] in ("image", "uint8")}
    assert kinds == {
        "observation.images.rgb": "image",
        "observation.images.chw": "image",
        "observation.images.gray": "image",
        "observation.images.stack": "image",
        "observation.small": "uint8",
        "observation.flat": "uint8",
        "view": "image",
    }
    assert features["observation.images.chw"] == {
        "dtype": "image",
        "shape": [3, 9, 10],
        "names": ["channels", "height", "width"],
    }


def test_plain_values_are_whole_in_the_data_set_alone(tmp_path: Path) -> None:
    obs = {"image": dr.Field((8, 8, 3), "u1"), "state": {"a": dr.Field((2,), "f4"), "b": dr.Field((2, 3, 4), "f2")}}
    schema = dr.Schema(obs, dr.Field((1,), "f8"), extra={"x": dr.Field((), "i4")}, episode={"seed": dr.Field((), "u1")})
    ends = [(steps, how, False) for steps, how, _ in PLAIN]
    store = make_store(tmp_path / "store", "", ends, schema=schema)
    exported = check_round_trip(store, tmp_path / "set", export_dataset, import_dataset)
    assert exported.not_held == []


def test_names_that_are_taken_are_not_held(tmp_path: Path) -> None:
    extra = {name: dr.Field((), "f4") for name in ("frame_index", "task", "next.done", "timestamp", "action")[:4]}
    schema = dr.Schema(dr.Field((2,), "f4"), dr.Field((2,), "f4"), extra=extra, episode={"length": dr.Field((), "i4")})
    store = make_store(tmp_path / "store", "", schema=schema)
    exported = check_round_trip(store, tmp_path / "set", export_dataset, import_dataset)
    named = {name for name, _ in exported.not_held}
    assert named == {"extra/frame_index", "extra/task", "extra/next.done", "episode/length", "schema", "final_obs"}


# --- a data set there and back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("video", [False, True], ids=["images", "video"])
def test_every_layout_is_read(tmp_path: Path, layout: str, video: bool) -> None:
    LAYOUTS[layout](tmp_path / "set", video=video)
    imported = import_dataset(tmp_path / "set", tmp_path / "store")
    assert (imported.episodes, imported.steps) == (3, 16)
    with dr.open(tmp_path / "store") as store:
        assert [episode.ended for episode in store.episodes] == ["terminated", "cut", "terminated"]
        for number, episode in enumerate(store.episodes):
            expected = data_sets.columns(number)
            np.testing.assert_array_equal(episode.obs["state"], expected["observation.state"])
            error = np.abs(episode.obs["images"]["top"].astype(int) - expected["observation.images.top"])
            assert error.max() <= (4 if video else 0)
            np.testing.assert_array_equal(episode.action, expected["action"])
            np.testing.assert_array_equal(episode.reward, expected["next.reward"])
            np.testing.assert_array_equal(episode["next.success"], expected["next.success"])
            np.testing.assert_array_equal(episode["matrix"], expected["matrix"])
            np.testing.assert_array_equal(episode["task_index"], expected["task_index"])
            assert episode["level"] == number * 0.5
        noted = store.read_note("import")["metadata"]
        assert noted["tasks"] == {"0": "pick", "1": "place"}
        assert [noted["texts"]["words"][code] for code in store.episodes[2]["words"]] == data_sets.columns(2)["words"]
        assert "timestamp" not in store.schema.extra


def test_all_layouts_make_equal_stores_and_the_same_data_set_again(tmp_path: Path) -> None:
    import_dataset(write_v21(tmp_path / "old"), tmp_path / "a")
    import_dataset(write_v30(tmp_path / "new", files=2), tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    export_dataset(tmp_path / "a", tmp_path / "set")
    found = pq.read_table(tmp_path / "set/data/chunk-000/file-000.parquet")
    expected = pa.concat_tables([data_sets.table(number, video=False) for number in range(3)])
    images = "observation.images.top"
    assert set(found.column_names) == set(expected.column_names)
    assert found.select(expected.column_names).drop(images).to_pylist() == expected.drop(images).to_pylist()
    assert found.schema.field("observation.state").type == pa.list_(pa.float32(), 3)
    described, original = read_info(tmp_path / "set"), read_info(tmp_path / "new")
    for name in ("fps", "robot_type", "features", "splits", "total_episodes", "total_frames", "total_tasks"):
        assert described[name] == original[name], name
    episodes = pq.read_table(tmp_path / "set/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [line["tasks"] for line in episodes] == [["pick"], ["place"], ["pick"]]
    assert [(line["dataset_from_index"], line["dataset_to_index"], line["level"]) for line in episodes] == [
        (0, 5, 0.0),
        (5, 12, 0.5),
        (12, 16, 1.0),
    ]
    tasks = pq.read_table(tmp_path / "set/meta/tasks.parquet")
    (index,) = tasks.schema.pandas_metadata["index_columns"]
    assert (tasks[index].to_pylist(), tasks["task_index"].to_pylist()) == (["pick", "place"], [0, 1])
    import_dataset(tmp_path / "set", tmp_path / "c")
    assert content(tmp_path / "c") == content(tmp_path / "a")


def test_an_only_observation_is_the_observation_and_keeps_its_name(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set")
    change(root, lambda described: described["features"].pop("observation.state"))
    import_dataset(root, tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        assert store.schema.obs == dr.Field((16, 16, 3), "uint8")
    export_dataset(tmp_path / "store", tmp_path / "again")
    assert "observation.images.top" in read_info(tmp_path / "again")["features"]


def test_irregular_times_and_early_dones_are_kept(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set")
    rewrite(root, "timestamp", lambda times: pa.array(times.to_numpy() * np.float32(1.5)))
    rewrite(root, "next.done", lambda flags: pa.array([True] * len(flags)))
    import_dataset(root, tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        assert store.episodes[0]["timestamp"][2] == np.float32(0.2) * np.float32(1.5)
        assert store.episodes[1]["next.done"].all()
        assert store.episodes[1].terminated
    export_dataset(tmp_path / "store", tmp_path / "again")
    made, given = (pq.read_table(path / "data/chunk-000/file-000.parquet") for path in (tmp_path / "again", root))
    assert made["timestamp"].to_pylist() == given["timestamp"].to_pylist()
    assert made["next.done"].to_pylist() == given["next.done"].to_pylist()
    with pytest.raises(dr.SchemaError, match="^the store has a timestamp of each step, and a video has a fixed rate"):
        export_dataset(tmp_path / "store", tmp_path / "video", video=True)


def test_a_data_set_without_rewards_and_flags_gets_none(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set")
    for name in ("next.reward", "next.done"):
        change(root, lambda described, name=name: described["features"].pop(name))
    import_dataset(root, tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        assert [(episode.ended, episode.total_reward) for episode in store.episodes] == [("cut", 0.0)] * 3
    export_dataset(tmp_path / "store", tmp_path / "again")
    assert read_info(tmp_path / "again")["features"].keys() == read_info(root)["features"].keys()
    import_dataset(tmp_path / "again", tmp_path / "back")
    assert content(tmp_path / "back") == content(tmp_path / "store")


def test_statistics_are_kept_while_they_are_those_of_the_steps(tmp_path: Path) -> None:
    import_dataset(write_v30(tmp_path / "set"), tmp_path / "a")
    export_dataset(tmp_path / "a", tmp_path / "first")
    stats = json.loads((tmp_path / "first/meta/stats.json").read_text())
    every = np.concatenate([data_sets.columns(number)["action"] for number in range(3)])
    np.testing.assert_allclose(stats["action"]["mean"], every.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["action"]["std"], every.std(0), rtol=1e-5)
    np.testing.assert_array_equal(stats["action"]["min"], every.min(0))
    assert stats["action"]["count"] == [16]
    assert np.shape(stats["observation.images.top"]["mean"]) == (3, 1, 1)
    assert 0 < stats["observation.images.top"]["mean"][0][0][0] < 1
    stats["action"]["q50"] = [0.0, 0.0]
    (tmp_path / "first/meta/stats.json").write_text(json.dumps(stats))
    import_dataset(tmp_path / "first", tmp_path / "b")
    export_dataset(tmp_path / "b", tmp_path / "second")
    assert json.loads((tmp_path / "second/meta/stats.json").read_text()) == stats
    export_dataset(tmp_path / "b", tmp_path / "some", where=lambda episode: len(episode) > 4)
    assert "q50" not in json.loads((tmp_path / "some/meta/stats.json").read_text())["action"]


# --- video -----------------------------------------------------------------------------------------------------------


def test_images_become_frames_of_videos_where_that_is_asked_for(tmp_path: Path) -> None:
    import_dataset(write_v30(tmp_path / "set"), tmp_path / "store")
    exported = export_dataset(tmp_path / "store", tmp_path / "made", video=True)
    assert [tuple(each) for each in exported.lossy] == [("obs/images/top", "frames of H.264 video lose detail")]
    feature = read_info(tmp_path / "made")["features"]["observation.images.top"]
    assert (feature["dtype"], feature["info"]["video.codec"], feature["info"]["video.fps"]) == ("video", "h264", FPS)
    line = pq.read_table(tmp_path / "made/meta/episodes/chunk-000/file-000.parquet").to_pylist()[2]
    assert line["videos/observation.images.top/from_timestamp"] == 12 / FPS
    assert line["videos/observation.images.top/to_timestamp"] == 16 / FPS
    import_dataset(tmp_path / "made", tmp_path / "back")
    with dr.open(tmp_path / "back") as back:
        for number, episode in enumerate(back.episodes):
            top = episode.obs["images"]["top"]
            assert np.abs(top.astype(int) - data_sets.frames(number)).max() <= 4
            np.testing.assert_array_equal(episode.action, data_sets.columns(number)["action"])


def test_videos_of_odd_sizes_and_other_than_three_channels(tmp_path: Path) -> None:
    obs = {"odd": dr.Field((9, 11, 3), "u1"), "chw": dr.Field((3, 8, 10), "u1"), "gray": dr.Field((9, 11, 1), "u1")}
    store = make_store(tmp_path / "store", "", schema=dr.Schema(obs, dr.Field((), "i8")))
    exported = export_dataset(store, tmp_path / "set", video=True)
    assert {name for name, _ in exported.lossy} == {"obs/odd", "obs/chw"}
    import_dataset(tmp_path / "set", tmp_path / "back")
    with dr.open(tmp_path / "back") as back, dr.open(store) as original:
        for found, expected in zip(back.episodes, original.episodes, strict=True):
            images, wanted = found.obs["images"], {name: rows[: len(expected)] for name, rows in expected.obs.items()}
            np.testing.assert_array_equal(images["gray"], wanted["gray"])
            assert {name: rows.shape for name, rows in images.items()} == {n: rows.shape for n, rows in wanted.items()}
            assert np.abs(images["odd"].astype(int).mean() - wanted["odd"].mean()) < 8


def test_a_frame_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    root = write_v30(tmp_path / "set", video=True)
    data_sets.write_video(root / "videos/observation.images.top/chunk-000/file-000.mp4", [0, 1])
    with pytest.raises(dr.FormatError, match=r"file-000.mp4 has no frame at 1.2\d+ s$"):
        import_dataset(root, tmp_path / "store")
    (root / "videos/observation.images.top/chunk-000/file-000.mp4").write_bytes(b"PK")
    with pytest.raises(dr.FormatError, match="file-000.mp4 cannot be read as a video: "):
        import_dataset(root, tmp_path / "other")


# --- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("files", [1, 2])
def test_an_import_continues_at_any_episode(tmp_path: Path, files: int) -> None:
    root = write_v30(tmp_path / "set", video=True, files=files)
    import_dataset(root, tmp_path / "whole")
    for number, steps in enumerate(np.cumsum(LENGTHS), 1):
        with pytest.raises(KeyboardInterrupt):
            import_dataset(root, tmp_path / f"{number}", progress=StopAt(steps))
        assert import_dataset(root, tmp_path / f"{number}").resumed == number
        assert content(tmp_path / f"{number}") == content(tmp_path / "whole")


# --- what is refused -------------------------------------------------------------------------------------------------


def read_info(root: Path) -> dict[str, Any]:
    return json.loads((root / "meta/info.json").read_text())


def change(root: Path, edit: Any) -> None:
    described = read_info(root)
    edit(described)
    (root / "meta/info.json").write_text(json.dumps(described))


def rewrite(root: Path, name: str, edit: Any) -> None:
    """Change a column of the steps; None removes it."""
    path = root / "data/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    made = edit(table[name])
    at = table.column_names.index(name)
    pq.write_table(table.remove_column(at) if made is None else table.set_column(at, name, made), path)


def ragged(_: Any) -> Any:
    return pa.array([[1.0, 2.0]] * 15 + [[1.0]], pa.list_(pa.float32()))


@pytest.mark.parametrize(
    ("name", "edit", "said"),
    [
        ("action", lambda _: None, "file-000.parquet has no column 'action', which info.json names$"),
        ("next.done", lambda _: None, "file-000.parquet has no column 'next.done', which info.json names$"),
        ("action", ragged, r": 'action' has rows that are not of the shape \(2,\), which info.json says$"),
        (
            "action",
            lambda c: c.cast(pa.list_(pa.float64(), 2)),
            "'action' is of type fixed_size_list.*, but info.json says float32",
        ),
        (
            "action",
            lambda c: pa.array(range(16)),
            r"'action' is of type int64, but info.json says float32 of the shape \(2,\)$",
        ),
        (
            "next.reward",
            lambda c: pa.array([None, *[0.5] * 15], pa.float32()),
            "'next.reward' has rows without a value$",
        ),
        (
            "observation.images.top",
            lambda c: pa.array([{"bytes": b"PK"}] * 16),
            "images.top' has a row that is not an image: ",
        ),
        (
            "observation.images.top",
            lambda c: pa.array([{"bytes": None}] * 16),
            "images.top' has a row without an image$",
        ),
        (
            "observation.images.top",
            lambda c: pa.array([{"bytes": data_sets.png(np.zeros((8, 16, 3), "u1"))}] * 16),
            r"has an image of the shape \(8, 16, 3\), but info.json says \(16, 16, 3\)$",
        ),
        (
            "next.done",
            lambda c: pa.array([*[False] * 15, None]),
            "next.done is one truth value a step, a bool or 0 or 1, not object$",
        ),
        (
            "episode_index",
            lambda c: pa.array([0] * 16),
            "does not have the steps that the table of episodes says, in order$",
        ),
    ],
)
def test_a_damaged_column_is_an_error_of_one_line(tmp_path: Path, name: str, edit: Any, said: str) -> None:
    root = write_v30(tmp_path / "set")
    rewrite(root, name, edit)
    with pytest.raises(dr.FormatError, match=said) as caught:
        import_dataset(root, tmp_path / "store")
    assert "\n" not in str(caught.value)


def other_feature(**changes: Any) -> Any:
    return lambda described: described["features"]["action"].update(changes)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda d: d.update(codebase_version="v1.6"),
            "is of version v1.6, and v2.0, v2.1 and v3.0 are read: convert it",
        ),
        (lambda d: d.pop("codebase_version"), "info.json has no codebase_version$"),
        (lambda d: d.update(fps=0), "info.json: fps must be a number of frames a second, not 0$"),
        (lambda d: d.update(features=[]), "info.json: features are not objects with a dtype and a shape of integers$"),
        (other_feature(shape=[0]), "info.json: features are not objects with a dtype and a shape of integers$"),
        (
            other_feature(dtype="language"),
            "the feature 'action': a field's dtype is one of .*, not 'language'; skip= leaves a feature out$",
        ),
        (lambda d: d["features"].pop("action"), "set: no feature is the action; its features are observation"),
        (
            lambda d: d.update(data_path="../{file_index}"),
            "'data_path' is '../{file_index}', which leads out of the data set$",
        ),
        (lambda d: d.update(data_path="{other}"), "'data_path' is '{other}', which makes no path: 'other'$"),
        (lambda d: d.update(data_path="{file_index.__class__}"), "makes no path: a part in braces is not a name"),
        (lambda d: d.update(data_path="{file_index:999999999d}"), "makes no path: a part in braces is not a name"),
        (lambda d: d.update(data_path="{file_index!r:>9}"), "makes no path: a part in braces is not a name"),
        (lambda d: d.update(data_path=["x"]), "'data_path' is .* which makes no path: expected string"),
        (lambda d: d.update(data_path="x.parquet"), "there is no file .*x.parquet, which the table of episodes names$"),
    ],
)
def test_a_strange_description_is_an_error_of_one_line_and_nothing_is_made(
    tmp_path: Path, edit: Any, said: str
) -> None:
    root = write_v30(tmp_path / "set")
    change(root, edit)
    with pytest.raises((dr.FormatError, dr.SchemaError), match=said) as caught:
        import_dataset(root, tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_files_that_are_missing_or_no_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(dr.StoreNotFound, match="set is not a data set of LeRobot: there is no meta/info.json$"):
        import_dataset(tmp_path / "set", tmp_path / "store")
    root = write_v30(tmp_path / "set")
    (root / "data/chunk-000/file-000.parquet").write_bytes(b"PK")
    with pytest.raises(dr.FormatError, match="file-000.parquet cannot be read: "):
        import_dataset(root, tmp_path / "store")
    old = write_v21(tmp_path / "old")
    (old / "meta/episodes.jsonl").write_text("{")
    with pytest.raises(dr.FormatError, match="episodes.jsonl is not JSON, line by line: "):
        import_dataset(old, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_number_of_frames_a_second_must_be_one(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors")
    with pytest.raises(ValueError, match="^fps must be more than 0, not 0$"):
        export_dataset(store, tmp_path / "set", fps=0)
    export_dataset(store, tmp_path / "set", fps=12.5, task="walk")
    assert read_info(tmp_path / "set")["fps"] == 12.5
    times = pq.read_table(tmp_path / "set/data/chunk-000/file-000.parquet")["timestamp"].to_numpy()
    assert times[2] == np.float32(2 / 12.5)
    assert len(LENGTHS) == 3
