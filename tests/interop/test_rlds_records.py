"""Records of RLDS: the values that one has, and damage to it."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import diskreplay as dr
from diskreplay.interop.rlds import export_dataset, import_dataset
from diskreplay.interop.rlds.records import make_example, parse_example, records, write_record
from tests.interop.round_trips import PLAIN, check_round_trip, make_store
from tests.interop.test_rlds import SAMPLE


def test_an_example_has_floats_integers_and_bytes(tmp_path: Path) -> None:
    features: dict[str, Any] = {"f": np.array([0.5, -1]), "i": np.array([-(2**63), 7]), "b": [b"", b"\xff"]}
    with open(tmp_path / "file", "wb") as file:
        for _ in range(2):
            write_record(file, make_example(features))
    for data in records(tmp_path / "file"):
        found = parse_example(data)
        np.testing.assert_array_equal(found["f"], np.float32([0.5, -1]), strict=True)
        np.testing.assert_array_equal(found["i"], np.int64([-(2**63), 7]), strict=True)
        assert found["b"] == [b"", b"\xff"]


def test_a_damaged_record_is_told_by_its_place(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "set")
    file = tmp_path / "set/my_rlds-val.tfrecord-00000-of-00001"
    whole = file.read_bytes()
    for damaged, message in [
        (whole[:-1], "the record at byte 0 does not have its checksum"),
        (whole[:700], "the record at byte 0 goes beyond the end of the file"),
        (whole[:5], "the record at byte 0 does not have its checksum"),
        (whole[:900] + b"\x00\x01" + whole[902:], "the record at byte 0 does not have its checksum"),
        (whole + b"\x01" * 20, f"the record at byte {len(whole)} does not have its checksum"),
    ]:
        file.write_bytes(damaged)
        with pytest.raises(dr.FormatError, match=f"my_rlds-val.*00001 is damaged: {message}$"):
            import_dataset(tmp_path / "set", tmp_path / "store", splits="val")
    with open(file, "wb") as opened:
        write_record(opened, b"\xff")
    with pytest.raises(dr.FormatError, match="a record is not an example of TensorFlow: "):
        import_dataset(tmp_path / "set", tmp_path / "store", splits="val")
    assert not (tmp_path / "store").exists()


def test_values_that_do_not_fit_their_feature_are_named(tmp_path: Path) -> None:
    shutil.copytree(SAMPLE, tmp_path / "set")
    file = tmp_path / "set/my_rlds-val.tfrecord-00000-of-00001"
    example: dict[str, Any] = parse_example(next(records(file)))
    for name, values in [
        ("steps/observation/image", [b"no image"] * 5),
        ("steps/observation/state", np.zeros(3, np.float32)),
        ("steps/z", [b"no zlib"] * 5),
        ("steps/action", [b"text"] * 10),
    ]:
        with open(file, "wb") as opened:
            write_record(opened, make_example({**example, name: values}))
        with pytest.raises(dr.FormatError, match=f"set: the values of {name} are damaged: "):
            import_dataset(tmp_path / "set", tmp_path / "store", splits="val")
    assert not (tmp_path / "store").exists()


def test_images_are_png_and_one_channel_stays_one(tmp_path: Path) -> None:
    schema = dr.Schema({"gray": dr.Field((4, 5, 1), "u1"), "alpha": dr.Field((4, 5, 4), "u1")}, dr.Field((), "int64"))
    store = make_store(tmp_path / "store", "", PLAIN, schema=schema)
    check_round_trip(store, tmp_path / "set", export_dataset, import_dataset)
    file = tmp_path / "set/replay-train.tfrecord-00000-of-00001"
    example = parse_example(next(records(file)))
    with Image.open(io.BytesIO(bytes(example["steps/observation/gray"][0]))) as image, dr.open(store) as opened:
        np.testing.assert_array_equal(np.asarray(image), opened.episodes[0].obs["gray"][0, ..., 0])
