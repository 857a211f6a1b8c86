"""Data sets of RLDS: one that TFDS has made, and what is written for it, read without TensorFlow."""

import io
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import diskreplay as dr
from diskreplay.interop.rlds import export_dataset, import_dataset
from tests.interop.round_trips import PLAIN, check_held, check_round_trip, make_store, notes_of_episodes

SAMPLE = Path(__file__).parent / "rlds_sample"
"""Written by TFDS 4.9.10: episodes of 5, 6 and 7 rows in the split train, shuffled, and one of 5 in val."""


def sample_steps(episode: int) -> dict[str, np.ndarray]:
    """The random values that episodes of the sample were made of."""
    rng = np.random.default_rng(0)
    for rows in (5, 6, 7)[: episode + 1]:
        steps = [
            (rng.integers(0, 255, (8, 6, 3), np.uint8), rng.normal(size=4), rng.normal(size=2), rng.normal(size=2))
            for _ in range(rows)
        ]
    names = ("image", "state", "pos64", "action")
    return {name: np.array(values) for name, values in zip(names, zip(*steps, strict=True), strict=True)}


def test_a_data_set_of_tfds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorflow", "tensorflow_datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    assert import_dataset(SAMPLE, tmp_path / "all", last="final").episodes == 4
    assert import_dataset(SAMPLE, tmp_path / "store", splits="train", last="final").episodes == 3
    with dr.open(tmp_path / "store") as store:
        assert store.schema.obs["image"].dtype == np.uint8
        assert set(store.schema.extra) == {"step_discount", "cls", "z", "language_instruction"}
        for episode in sorted(store.episodes, key=len):
            number = len(episode) - 4
            steps = sample_steps(number)
            assert episode.ended == ("truncated" if number == 1 else "terminated")
            assert episode["seed"] == number
            np.testing.assert_array_equal(episode.obs["image"], steps["image"], strict=True)
            np.testing.assert_array_equal(episode.obs["state"], steps["state"].astype("f4"), strict=True)
            # TFDS itself keeps only the float32 of it.
            np.testing.assert_array_equal(episode.obs["pos64"], steps["pos64"].astype("f4").astype("f8"), strict=True)
            np.testing.assert_array_equal(episode.action, steps["action"][:-1].astype("f4"), strict=True)
            np.testing.assert_array_equal(episode.reward, np.arange(len(episode), dtype=np.float32), strict=True)
            np.testing.assert_array_equal(episode["z"], [[t, 1] for t in range(len(episode))])
            np.testing.assert_array_equal(episode["cls"], np.arange(len(episode)) % 5)
        assert notes_of_episodes(store) == {}
        assert store.texts["split"] == ["train"]
        for episode in store.episodes:
            assert store.texts["file_path"][episode["file_path"]] == f"ep{episode['seed']}"
            assert {store.texts["language_instruction"][k] for k in episode["language_instruction"]} == {"go"}
    with dr.open(tmp_path / "all") as store:
        assert [store.texts["split"][episode["split"]] for episode in store.episodes] == ["train"] * 3 + ["val"]


def test_the_last_row_is_a_step_where_that_is_said(tmp_path: Path) -> None:
    imported = import_dataset(SAMPLE, tmp_path / "store", splits="val", last="step")
    assert imported.steps == 5
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.episodes[0].action, sample_steps(0)["action"].astype("f4"))
        assert len(store.episodes[0].obs["state"]) == 5


def test_a_data_set_goes_through_a_store_but_for_what_the_export_names(tmp_path: Path) -> None:
    import_dataset(SAMPLE, tmp_path / "store", last="final")
    exported = export_dataset(tmp_path / "store", tmp_path / "set")
    of_episodes = {"episode/seed", "episode/file_path", "episode/split"}
    assert {name for name, _ in exported.not_held} == of_episodes | {"schema", "metadata"}
    import_dataset(tmp_path / "set", tmp_path / "back")
    check_held(tmp_path / "store", tmp_path / "back", of_episodes)


def test_plain_episodes_come_back_with_their_discounts(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "images", PLAIN)
    export_dataset(tmp_path / "store", tmp_path / "set")
    import_dataset(tmp_path / "set", tmp_path / "back")
    with dr.open(tmp_path / "store") as store, dr.open(tmp_path / "back") as back:
        for before, after in zip(store.episodes, back.episodes, strict=True):
            discount = np.ones(len(before))
            discount[-1] = not before.terminated
            np.testing.assert_array_equal(after["step_discount"], discount)


def test_large_exports_have_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diskreplay.interop.rlds.folders._SHARD_BYTES", 3000)
    store = make_store(tmp_path / "store", "images")
    check_round_trip(store, tmp_path / "set", export_dataset, import_dataset)
    files = sorted(path.name for path in (tmp_path / "set").glob("replay-train*"))
    assert len(files) > 2
    assert files[0].endswith(f"-00000-of-{len(files):05d}")
    info = json.loads((tmp_path / "set/dataset_info.json").read_text())
    assert sum(map(int, info["splits"][0]["shardLengths"])) == 8


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "store"
    with pytest.raises(dr.StoreNotFound, match="there is no features.json; there is one in rlds_sample$"):
        import_dataset(SAMPLE.parent, target)
    with pytest.raises(dr.StoreNotFound, match="rlds_sample has no split 'test'; it has train, val$"):
        import_dataset(SAMPLE, target, splits="test")
    with pytest.raises(dr.SchemaError, match="last must be final or step, not 'row'$"):
        import_dataset(SAMPLE, target, last="row")  # type: ignore[arg-type]
    shutil.copytree(SAMPLE, tmp_path / "set")
    info = json.loads((SAMPLE / "dataset_info.json").read_text())
    (tmp_path / "set/dataset_info.json").write_text(json.dumps({**info, "fileFormat": "array_record"}))
    with pytest.raises(dr.FormatError, match="has files of array_record, and only tfrecord is read: convert them"):
        import_dataset(tmp_path / "set", target)
    (tmp_path / "set/dataset_info.json").write_text(json.dumps({**info, "name": "other"}))
    with pytest.raises(dr.StoreNotFound, match=r"set has no files other-train.tfrecord-\*$"):
        import_dataset(tmp_path / "set", target)
    (tmp_path / "set/dataset_info.json").write_text("[]")
    with pytest.raises(dr.FormatError, match="dataset_info.json cannot be used: "):
        import_dataset(tmp_path / "set", target)
    features = (SAMPLE / "features.json").read_text()
    for changed, error, message in [
        (features.replace('"image": {', '"video": {'), dr.SchemaError, "steps/observation/video is a Image, which"),
        (features.replace('"float64"', '"bfloat16"'), dr.SchemaError, "pos64 is of bfloat16, which cannot be stored"),
        (features.replace('"is_first"', '"first"'), dr.FormatError, "features.json names no steps/is_first$"),
        ("{", dr.FormatError, "features.json cannot be used: "),
    ]:
        (tmp_path / "set/features.json").write_text(changed)
        with pytest.raises(error, match=message):
            import_dataset(tmp_path / "set", target)
    assert not target.exists()


def test_names_that_are_taken_are_refused(tmp_path: Path) -> None:
    schema = dr.Schema(dr.Field((), "f4"), dr.Field((), "int64"), extra={"is_last": dr.Field((), "bool")})
    store = make_store(tmp_path / "store", "", PLAIN, schema=schema)
    with pytest.raises(dr.SchemaError, match="the name of extra/is_last is taken in a step of RLDS"):
        export_dataset(store, tmp_path / "set")
    with pytest.raises(
        dr.SchemaError, match="name must have only lower-case letters, digits and underscores, not 'My set'$"
    ):
        export_dataset(store, tmp_path / "set", name="My set")
    assert not (tmp_path / "set").exists()


def test_what_the_last_row_is_shows_in_the_actions_of_a_split(tmp_path: Path) -> None:
    """The sample's last rows have actions; an export of a store has a row with zeros behind the last step."""
    done = import_dataset(SAMPLE, tmp_path / "steps")
    assert done.steps == sum((5, 6, 7, 5))
    make_store(tmp_path / "store", "vectors", PLAIN)
    export_dataset(tmp_path / "store", tmp_path / "set")
    with dr.open(tmp_path / "store") as store:
        assert import_dataset(tmp_path / "set", tmp_path / "finals").steps == len(store)


def test_splits_are_told_apart_and_a_mixed_one_is_refused(tmp_path: Path) -> None:
    mixed = mixed_set(tmp_path / "set")
    with pytest.raises(dr.SchemaError, match="in train, the last row of episode 1 has an action.* of episode 0 has no"):
        import_dataset(mixed, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    with pytest.raises(
        dr.FormatError, match="set: episode 2 has no steps: its only row is a final observation; on_err"
    ):
        import_dataset(mixed, tmp_path / "finals", last="final")
    done = import_dataset(mixed, tmp_path / "finals", last="final", on_error="skip")
    assert (done.episodes, done.skipped) == (2, [("episode 2", "its only row is a final observation")])
    assert import_dataset(mixed, tmp_path / "steps", last="step").episodes == 3


def mixed_set(path: Path) -> Path:
    """Write episodes of two and three rows, the second of them with an action in its last row, and one of one row."""
    from diskreplay.interop.rlds.records import make_example, write_record

    make_store(path.with_name("made"), "vectors", PLAIN)
    export_dataset(path.with_name("made"), path)
    with dr.open(path.with_name("made")) as store:
        leaves = {name: leaf for name, leaf in store.schema.step_leaves.items() if name in ("obs", "action")}
    info = json.loads((path / "dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = ["3"]
    (path / "dataset_info.json").write_text(json.dumps(info))
    (file,) = path.glob("*.tfrecord-*")
    with file.open("wb") as opened:
        for rows, last in ((2, 0.0), (3, 1.0), (1, 1.0)):
            values = {name: np.ones((rows, *leaf.shape), leaf.dtype) for name, leaf in leaves.items()}
            values["action"][-1] = last
            features = {f"steps/{'observation' if name == 'obs' else name}": rows_ for name, rows_ in values.items()}
            features |= {"steps/reward": np.arange(rows, 0, -1) * (np.arange(rows) < rows - 1).astype("f4")}
            for flag in ("is_first", "is_last", "is_terminal"):
                features[f"steps/{flag}"] = np.zeros(rows, np.int64)
            features["steps/discount"] = np.ones(rows, np.float32)
            write_record(opened, make_example(features))
    return path


def test_an_incomplete_download_is_refused(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "set")
    info = json.loads((SAMPLE / "dataset_info.json").read_text())
    (train, *_) = sorted((tmp_path / "set").glob("*train*"))
    whole = train.read_bytes()
    train.write_bytes(b"")
    with pytest.raises(dr.FormatError, match="has 0 episodes, and dataset_info.json says .*: the download is"):
        import_dataset(tmp_path / "set", tmp_path / "store")
    train.unlink()
    with pytest.raises(
        dr.FormatError, match=f"{train.name} is missing; fetch it, or choose another split with splits="
    ):
        import_dataset(tmp_path / "set", tmp_path / "store")
    assert not (tmp_path / "store").exists()
    assert import_dataset(tmp_path / "set", tmp_path / "val", splits=["val"]).episodes == 1
    train.write_bytes(whole)
    info["splits"][0].pop("shardLengths")
    (tmp_path / "set/dataset_info.json").write_text(json.dumps(info))
    assert import_dataset(tmp_path / "set", tmp_path / "all").episodes == 4


IMAGES = Path(__file__).parent / "own_libraries/rlds_images"
"""Written by TFDS 4.9.10 with TensorFlow 2.21: two rows of images of many kinds, and their pixels as it reads them."""


def test_pixels_are_those_of_tensorflow(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    import_dataset(IMAGES, tmp_path / "store")
    with dr.open(tmp_path / "store") as store, np.load(IMAGES / "read_by_tfds.npz") as expected:
        (episode,) = store.episodes
        assert episode.obs.keys() == expected.keys()
        for name, pixels in expected.items():
            np.testing.assert_array_equal(episode.obs[name], pixels, name, strict=True)


def with_image(path: Path, name: str, *, to: bytes | None = None, insert: bytes = b"", cut: int = 0) -> Path:
    """Copy the set of images with other bytes of one kind: replaced, cut, or with some before its last two."""
    from diskreplay.interop.rlds.records import make_example, parse_example, records, write_record

    shutil.copytree(IMAGES, path)
    (file,) = path.glob("*.tfrecord-*")
    (data,) = records(file)
    features = parse_example(data)
    rows = features[f"steps/observation/{name}"]
    packed = [(to or bytes(row))[: -2 - cut] + insert + (to or bytes(row))[-2:] for row in rows]
    with file.open("wb") as opened:
        write_record(opened, make_example({**features, f"steps/observation/{name}": packed}))
    return path


def test_stray_bytes_in_a_jpeg_change_no_pixel_and_a_cut_one_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("simplejpeg")
    import_dataset(with_image(tmp_path / "stray", "jpeg", insert=b"\x00\x00\x00"), tmp_path / "store")
    with dr.open(tmp_path / "store") as store, np.load(IMAGES / "read_by_tfds.npz") as expected:
        np.testing.assert_array_equal(store.episodes[0].obs["jpeg"], expected["jpeg"], strict=True)
    with pytest.raises(dr.FormatError, match="the values of steps/observation/jpeg are damaged: "):
        import_dataset(with_image(tmp_path / "cut", "jpeg", cut=200), tmp_path / "none")


def test_images_whose_values_would_be_other_ones_are_refused(tmp_path: Path) -> None:
    deep, plain = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.full((8, 8), 70_00, np.uint16)).save(deep, "png")
    Image.fromarray(np.full((16, 8), 70, np.uint8)).save(plain, "png")
    for name, data, reason in [
        ("any", deep.getvalue(), r"an image of Pillow's mode I\S* cannot be read as bytes with 3 channels"),
        ("depth", plain.getvalue(), r"an image of Pillow's mode L cannot be read as uint16 of shape \(16, 8, 1\)"),
    ]:
        made = with_image(tmp_path / name, name, to=data)
        with pytest.raises(dr.FormatError, match=f"the values of steps/observation/{name} are damaged: {reason}"):
            import_dataset(made, tmp_path / "store", obs=[f"observation/{name}"], skip=_others(name))


def _others(name: str) -> list[str]:
    with np.load(IMAGES / "read_by_tfds.npz") as images:
        return [f"observation/{each}" for each in images if each != name]


def test_a_jpeg_needs_a_library_of_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    with pytest.raises(dr.MissingExtra, match=r'a JPEG image of RLDS needs a library .* "diskreplay\[rlds\]"$'):
        import_dataset(IMAGES, tmp_path / "store")
    assert import_dataset(SAMPLE, tmp_path / "png").episodes == 4


def test_integers_that_tfds_cannot_read_packed_are_not_packed(tmp_path: Path) -> None:
    fields = {name: dr.Field((20,), name) for name in ("uint16", "uint32", "uint64", "int64")}
    store = make_store(tmp_path / "store", "", PLAIN, schema=dr.Schema(fields, dr.Field((2,), "float32")))
    check_round_trip(store, tmp_path / "set", export_dataset, import_dataset)
    features = json.loads((tmp_path / "set/features.json").read_text())["featuresDict"]["features"]
    observed = features["steps"]["sequence"]["feature"]["featuresDict"]["features"]["observation"]
    encodings = {name: each["tensor"]["encoding"] for name, each in observed["featuresDict"]["features"].items()}
    assert encodings == {"uint16": "bytes", "uint32": "none", "uint64": "none", "int64": "bytes"}
