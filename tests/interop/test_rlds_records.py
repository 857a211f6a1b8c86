"""Records of RLDS: the values that one has, and damage to it."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

import diskreplay as dr
from diskreplay.interop.rlds import export_dataset, import_dataset
from diskreplay.interop.rlds.records import example_class, make_example, parse_example, records, write_record
from tests.interop.round_trips import PLAIN, check_round_trip, make_store
from tests.interop.test_rlds import SAMPLE


def _sized(number: int, value: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(value)) + value


def _number(value: int) -> bytes:
    digits = [value >> 7 * digit & 0x7F for digit in range(max(1, -(-value.bit_length() // 7)))]
    return bytes([*(digit | 0x80 for digit in digits[:-1]), digits[-1]])


PACKED = st.one_of(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 200), max_size=20).map(
        lambda values: (3, _sized(1, b"".join(map(_number, values))))
    ),
    st.lists(st.integers(0, 2**64 - 1), max_size=5).map(
        lambda values: (3, b"".join(b"\x08" + _number(value) for value in values))
    ),
    st.lists(st.binary(min_size=4, max_size=4), max_size=5).map(lambda values: (2, _sized(1, b"".join(values)))),
    st.lists(st.binary(min_size=4, max_size=4), max_size=5).map(
        lambda values: (2, b"".join(b"\x0d" + v for v in values))
    ),
    st.lists(st.binary(max_size=200), max_size=4).map(lambda values: (1, b"".join(_sized(1, v) for v in values))),
    st.tuples(st.binary(min_size=1, max_size=200), st.integers(1, 4)).map(
        lambda made: (1, _sized(1, made[0]) * made[1])
    ),
)
UNKNOWN = st.sampled_from([b"", b"\x38\x96\x01", b"\x39" + b"8" * 8, b"\x3d" + b"4" * 4, b"\x3a\x02ab"])


@st.composite
def examples(draw: st.DrawFn) -> bytes:
    """Messages that protobuf allows and no library writes: repeated parts, other kinds before, unknown fields."""
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        lists = draw(st.lists(PACKED, min_size=1, max_size=3))
        feature = b"".join(draw(UNKNOWN) + _sized(number, values) for number, values in lists)
        parts.append(_sized(1, _sized(1, draw(st.sampled_from([b"a", b"b"]))) + _sized(2, feature)))
    at = draw(st.integers(0, len(parts)))
    return _sized(1, b"".join(parts[:at])) + draw(UNKNOWN) + _sized(1, draw(UNKNOWN) + b"".join(parts[at:]))


@given(examples())
def test_an_example_is_read_as_protobuf_reads_it(data: bytes) -> None:
    found, expected = parse_example(data), example_class().FromString(data).features.feature
    assert found.keys() == set(expected)
    for name, values in found.items():
        kind = expected[name].WhichOneof("kind") or "bytes_list"
        own = getattr(expected[name], kind).value
        if kind == "bytes_list":
            assert [*map(bytes, values)] == list(own)
        else:
            dtype = np.float32 if kind == "float_list" else np.int64
            assert np.asarray(values).tobytes() == np.array(own, dtype).tobytes()


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


def shards(folder: Path, counts: list[int]) -> tuple[Path, list[Path]]:
    """Make a data set with so many episodes in each file; episode n has 3 + n steps."""
    plain = [(3 + number, "terminated", True) for number in range(sum(counts))]
    export_dataset(make_store(folder / "plain", "vectors", plain), folder / "set", name="my")
    (whole,) = (folder / "set").glob("*.tfrecord-*")
    data = list(records(whole))
    whole.unlink()
    files = [folder / f"set/my-train.tfrecord-{k:05d}-of-{len(counts):05d}" for k in range(len(counts))]
    for file, count in zip(files, counts, strict=True):
        with open(file, "wb") as opened:
            for each in data[:count]:
                write_record(opened, each)
        data = data[count:]
    info = json.loads((folder / "set/dataset_info.json").read_text())
    info["splits"][0]["shardLengths"] = list(map(str, counts))
    (folder / "set/dataset_info.json").write_text(json.dumps(info))
    return folder / "set", files


def offsets(file: Path) -> list[int]:
    """Where the records of a file begin."""
    found, data, at = [], file.read_bytes(), 0
    while at < len(data):
        found.append(at)
        at += 16 + int.from_bytes(data[at : at + 8], "little")
    return found


@pytest.mark.parametrize(
    ("damage", "skipped", "why", "left"),
    [
        ("value", ["episode 4"], "does not have its checksum", [0, 1, 2, 3, 5, 6, 7, 8]),
        ("length", ["episodes 4 to 6"], "does not have its checksum", [0, 1, 2, 3, 7, 8]),
        (
            "cut",
            ["episodes 5 to 6"],
            "has 2 episodes, and dataset_info.json says 4",
            [0, 1, 2, 3, 4, 7, 8],
        ),
        ("cut inside", ["episodes 5 to 6"], "goes beyond the end of the file", [0, 1, 2, 3, 4, 7, 8]),
        ("gone", ["episodes 3 to 6"], "No such file", [0, 1, 2, 7, 8]),
        ("no example", ["episode 4"], "a record is not an example of TensorFlow", [0, 1, 2, 3, 5, 6, 7, 8]),
        ("first", ["episodes 0 to 2"], "does not have its checksum", [3, 4, 5, 6, 7, 8]),
    ],
)
def test_an_import_that_skips_leaves_out_the_records_that_are_damaged(
    tmp_path: Path, damage: str, skipped: list[str], why: str, left: list[int]
) -> None:
    data_set, files = shards(tmp_path, [3, 4, 2])
    file = files[0] if damage == "first" else files[1]
    at, whole = offsets(file), file.read_bytes()
    if damage == "value":
        file.write_bytes(whole[: at[1] + 40] + b"\xff\x00\xff" + whole[at[1] + 43 :])
    elif damage in ("length", "first"):
        begin = at[1] if damage == "length" else 0
        file.write_bytes(whole[:begin] + b"\x07" + whole[begin + 1 :])
    elif damage.startswith("cut"):
        file.write_bytes(whole[: at[2] + (20 if damage == "cut inside" else 0)])
    elif damage == "no example":
        with open(file, "wb") as opened:
            for number, start in enumerate(at):
                write_record(opened, b"\xff" if number == 1 else whole[start + 12 : [*at, len(whole)][number + 1] - 4])
    else:
        file.unlink()
    with pytest.raises(dr.FormatError):
        import_dataset(data_set, tmp_path / "store")
    done = import_dataset(data_set, tmp_path / "store", on_error="skip")
    assert [each.what for each in done.skipped] == skipped
    assert why in done.skipped[0].why
    with dr.open(tmp_path / "store") as store:
        assert [len(episode) for episode in store.episodes] == [3 + number for number in left]
        assert store.verify(deep=True) == []
    again = import_dataset(data_set, tmp_path / "store", on_error="skip")
    assert (again.resumed, [each.what for each in again.skipped]) == (len(left), skipped)


def test_values_that_cannot_be_decoded_cost_their_episode(tmp_path: Path) -> None:
    data_set, files = shards(tmp_path, [2, 2])
    for number in (0, 1):
        data = list(records(files[number]))
        with open(files[number], "wb") as opened:
            for place, each in enumerate(data):
                example: dict[str, Any] = parse_example(each)
                example["steps/observation"] = np.zeros(5, "f4") if place == number else example["steps/observation"]
                write_record(opened, make_example(example))
    done = import_dataset(data_set, tmp_path / "store", on_error="skip")
    assert [each.what for each in done.skipped] == ["episode 0", "episode 3"]
    with dr.open(tmp_path / "store") as store:
        assert [len(episode) for episode in store.episodes] == [4, 5]


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
