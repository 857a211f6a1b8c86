"""States of samplers on disk: what is read is what was saved, whole, whatever happens meanwhile."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from crc32c import crc32c
from hypothesis import example, given, settings, strategies as st
from hypothesis.extra import numpy as arrays

import diskreplay as dr
from tests.testing.on_disk import reseal, write_document
from tests.testing.support import REPOSITORY, serial_schema

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = st.one_of(TEXTS, st.sampled_from(["zarr.json", "zarr", "json", "a.b", "A", "a", '["transitions"]', "x" * 300]))
KEYS = KEYS.filter(lambda key: key not in ("@array", "diskreplay_crc32c"))  # which are refused
ARRAYS = arrays.arrays(
    st.sampled_from(["bool", "<i8", ">i8", "<f4", "<f8"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    elements={"allow_nan": True},
)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS, ARRAYS
)
TREES = st.dictionaries(
    KEYS, st.recursive(LEAVES, lambda t: st.lists(t, max_size=3) | st.dictionaries(KEYS, t, max_size=3)), max_size=4
)
PLAIN = {"weights": np.arange(6.0).reshape(2, 3), "counts": [np.arange(3), {"none": np.zeros((0, 2))}], "text": "ü"}


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    with dr.create(tmp_store, serial_schema(), chunk_bytes=1 << 16) as store:
        yield store


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        native = one.astype(one.dtype.newbyteorder("="))
        good = isinstance(other, np.ndarray) and (native.dtype, native.shape) == (other.dtype, other.shape)
        return good and native.tobytes() == other.tobytes() and other.flags.writeable
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def leaves(tree: Any) -> list[np.ndarray]:
    if isinstance(tree, np.ndarray):
        return [tree]
    below = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [leaf for part in below for leaf in leaves(part)]


def names(store: dr.Store) -> list[str]:
    return sorted(folder.name for folder in (store.path / "samplers").iterdir() if folder.is_dir())


def left_over(store: dr.Store) -> list[str]:
    """What lies beside the counters, and states that do not count."""
    found = sorted(set(os.listdir(store.path / "counters")) - {"c.0", "lock", "zarr.json"})
    for name in names(store):
        found += sorted(os.listdir(store.path / "samplers" / name))[:-2]  # one state and zarr.json
    return found


@pytest.mark.slow
def test_any_tree_comes_back_and_zarr_reads_its_arrays(store: dr.Store) -> None:
    @settings(max_examples=80)
    @given(TREES)
    @example({"zarr": {"json": np.arange(2)}, "zarr.json": np.arange(3)})
    @example({"a": {"b": np.arange(1)}, "a.b": np.arange(2), "A.B": np.arange(3)})
    def check(tree: dict[str, Any]) -> None:
        store.save_sampler_state("any", tree)
        assert same(tree, store.load_sampler_state("any"))
        assert left_over(store) == []
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            group = zarr.open_group(store.path, mode="r")["samplers/any"]
            found = [np.asarray(array[...]) for _, array in group[str(group.attrs["current"])].arrays()]
        expected = [array.astype(array.dtype.newbyteorder("=")) for array in leaves(tree)]
        assert sorted((a.dtype.name, a.shape, a.tobytes()) for a in found) == sorted(
            (a.dtype.name, a.shape, a.tobytes()) for a in expected
        )

    check()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": np.zeros(2, "int32")}, "an array of int32 at a cannot be saved"),
        ({"a": {"b": object()}}, "object at a/b cannot be saved"),
        ({"a": np.float32(2)}, "float32 at a cannot be saved"),
        ({"a": [1.0, float("nan")]}, "nan at a/1 cannot be saved"),
        ({3: 4}, "keys at the top must be str"),
        ({"a": {"@array": 4}}, "keys at a must be str and not one of"),
        ({"diskreplay_crc32c": "00000000"}, "keys at the top must be str and not one of"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_changes_nothing(store: dr.Store, tree: Any, message: str) -> None:
    store.save_sampler_state("one", PLAIN)
    with pytest.raises(ValueError, match=message):
        store.save_sampler_state("one", tree)
    assert same(PLAIN, store.load_sampler_state("one"))
    assert left_over(store) == []


def test_a_new_state_takes_the_place_of_the_old_one_alone(store: dr.Store) -> None:
    store.save_sampler_state("other", PLAIN)
    for i in range(5):
        store.save_sampler_state("one", {"i": i, "a": np.full(3, i)})
        assert same({"i": i, "a": np.full(3, i)}, store.load_sampler_state("one"))
        assert len(os.listdir(store.path / "samplers" / "one")) == 2
    assert names(store) == ["one", "other"]
    assert same(PLAIN, store.load_sampler_state("other"))
    assert left_over(store) == []


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    match how:
        case "a bit":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        case "short":
            path.write_bytes(data[:-1])
        case "long":
            path.write_bytes(data + b" ")
        case "gone":
            path.unlink()
        case "a folder":
            path.unlink()
            path.mkdir()
        case "a link":
            kept = path.with_name("elsewhere")
            path.rename(kept)
            path.symlink_to(kept)
        case "a pipe":
            path.unlink()
            os.mkfifo(path)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a bit", "short", "long", "gone", "a folder", "a link", "a pipe"])
@pytest.mark.parametrize("file", ["zarr.json", "1/zarr.json", "1/weights/zarr.json", "1/weights/c.0.0"])
def test_damage_is_found_and_saving_again_mends_it(store: dr.Store, file: str, how: str) -> None:
    store.save_sampler_state("one", PLAIN)
    spoil(store.path / "samplers" / "one" / file, how)
    with pytest.raises(dr.FormatError, match=r"samplers/one"):
        store.load_sampler_state("one")
    if file == "zarr.json" and how == "a folder":
        return  # which nothing can be renamed over
    store.save_sampler_state("one", PLAIN)
    assert same(PLAIN, store.load_sampler_state("one"))


def rewrite_array(state: Path, document: dict[str, Any]) -> None:
    """Replace the document of the array `weights`, with checksums that fit, and make its chunk as long as it says."""
    weights = state / "weights"
    data = json.dumps(weights_document := json.loads((weights / "zarr.json").read_bytes()) | document).encode()
    (weights / "zarr.json").write_bytes(data)
    group = json.loads((state / "zarr.json").read_bytes())
    group["attributes"]["state"]["weights"]["crc32c"] = crc32c(data)
    write_document(state / "zarr.json", group)
    if 0 < math.prod(weights_document["shape"]) < 1 << 40:
        with open(weights / ".".join(["c", *("0" for _ in weights_document["shape"])]), "ab") as chunk:
            chunk.truncate(8 * math.prod(weights_document["shape"]) + 4)


@pytest.mark.parametrize(
    "document",
    [
        *({"shape": shape} for shape in ([0, 1 << 62], [1 << 62, 0], [10**300, 0], [0] * 70, [1] * 70, [1 << 36])),
        *({"data_type": data_type} for data_type in (["float64"], {}, None, "object")),
    ],
    ids=lambda document: "-".join(map(str, document.items()))[:40],
)
def test_an_array_that_nobody_could_have_is_refused_in_one_line(store: dr.Store, document: dict[str, Any]) -> None:
    store.save_sampler_state("one", PLAIN)
    rewrite_array(store.path / "samplers/one/1", document)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, hard))  # a sparse file claims half a TiB
    try:
        with pytest.raises(
            dr.FormatError, match=r"samplers/one/1/weights.* is (not )?an array of .* save again$"
        ) as told:
            store.load_sampler_state("one")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert "\n" not in str(told.value)
    if document != {"shape": [1 << 36]}:
        assert "samplers/one/1/weights/zarr.json" in {problem.where for problem in store.verify(deep=True)}


@pytest.mark.parametrize(
    ("key", "value"), [("current", 10**300), ("current", -1), ("@array", "x" * 300)], ids=["huge", "negative", "long"]
)
def test_a_name_that_no_file_has_is_refused_in_one_line(store: dr.Store, key: str, value: object) -> None:
    store.save_sampler_state("one", PLAIN)
    name = "zarr.json" if key == "current" else "1/zarr.json"
    changed = {key: value} if key == "current" else {"state": {"weights": {key: value, "crc32c": 0}}}
    reseal(store.path / "samplers/one" / name, lambda attributes: attributes.update(changed))
    with pytest.raises(dr.FormatError, match="samplers/one"):
        store.load_sampler_state("one")
    assert store.verify(deep=True)


def test_a_link_in_place_of_a_state_is_not_followed(store: dr.Store, tmp_path: Path) -> None:
    store.save_sampler_state("one", PLAIN)
    shutil.move(store.path / "samplers" / "one", tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", store.path / "samplers" / "one")
    before = sorted(os.listdir(tmp_path / "elsewhere"))
    with pytest.raises(dr.StoreNotFound):
        store.load_sampler_state("one")
    with pytest.raises(dr.FormatError, match="is a symbolic link"):
        store.save_sampler_state("one", {})
    assert sorted(os.listdir(tmp_path / "elsewhere")) == before
    assert left_over(store) == []


def test_opening_for_writing_removes_states_that_do_not_count_and_never_the_one_that_does(store: dr.Store) -> None:
    for name in ("good", "damaged"):
        store.save_sampler_state(name, PLAIN)
        shutil.copytree(store.path / "samplers" / name / "1", store.path / "samplers" / name / "7")
    spoil(store.path / "samplers" / "damaged" / "zarr.json", "a bit")
    for _ in range(2):
        dr.open(store.path).close()
        assert len(left_over(store)) == 2
    dr.open(store.path, "a").close()
    assert same(PLAIN, store.load_sampler_state("good"))
    assert sorted(os.listdir(store.path / "samplers" / "good")) == ["1", "zarr.json"]
    assert sorted(os.listdir(store.path / "samplers" / "damaged")) == ["1", "7", "zarr.json"]


@pytest.mark.parametrize("call", ["rename", "replace", "mkdir", "fsync"])
@pytest.mark.parametrize("first", [True, False])
def test_a_full_disk_leaves_the_old_state(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch, call: str, first: bool
) -> None:
    if not first:
        store.save_sampler_state("one", PLAIN)
    real, left = getattr(os, call), [0]

    def refuse(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    new, refused = {"a": np.arange(9)}, 0
    monkeypatch.setattr(os, call, refuse)
    for n in range(1, 20):
        left[0] = n
        try:
            store.save_sampler_state("one", new)
            break
        except dr.StorageFull:
            refused += 1
            assert [name for name in left_over(store) if not name.isdecimal()] == []
            if names(store):
                found = store.load_sampler_state("one")
                assert same(found, new) or (not first and same(found, PLAIN))
    assert refused or (first and call == "replace")
    assert same(new, store.load_sampler_state("one"))
    assert left_over(store) == []


REPLACE = """
import sys
import numpy as np
import diskreplay as dr

store = dr.open(sys.argv[1], "a")
for i in range(1, 1 << 30):
    store.save_sampler_state("one", {"i": i, "arrays": [np.full(n, i) for n in (1, 100, 5000)]})
    print(i, flush=True)
"""


def test_a_reader_always_finds_one_whole_state_while_another_process_replaces_it(store: dr.Store) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", REPLACE, str(store.path)], stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            newest = 0
            while newest < 60:
                state = store.load_sampler_state("one")
                assert all((array == state["i"]).all() for array in state["arrays"])
                assert [len(array) for array in state["arrays"]] == [1, 100, 5000]
                assert state["i"] >= newest
                newest = state["i"]
        finally:
            child.send_signal(signal.SIGKILL)


def test_a_draft_of_a_living_process_is_left_alone(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = os.fsync, []

    def open_meanwhile(fd: int) -> None:
        monkeypatch.setattr(os, "fsync", real)
        with dr.open(store.path, "a"):
            seen.extend(left_over(store))
        real(fd)

    monkeypatch.setattr(os, "fsync", open_meanwhile)
    store.save_sampler_state("one", PLAIN)
    assert len(seen) == 1
    assert same(PLAIN, store.load_sampler_state("one"))
    assert left_over(store) == []
