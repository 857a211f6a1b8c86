"""Files that others made: regular ones alone, sizes before they are believed, and one class of error."""

import errno
import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import dreamer, npz, sb3_pickle, torchrl_memmap, zarr_episodes
from diskreplay.interop.exchange.foreign import check_claim, check_files, check_memory, read_npz, reading
from diskreplay.interop.exchange.inert_pickle import load
from tests.interop.round_trips import PLAIN


def make_set(folder: Path) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "inner/data").write_bytes(bytes(10))
    (folder / "info.json").write_bytes(b"{}")
    return folder


def test_a_folder_of_regular_files_is_counted(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    assert check_files(folder) == 12
    assert check_files(folder / "inner/data") == 10
    assert check_files(tmp_path / "nothing") == check_files(folder / "info.json/x") == 0
    (folder / "again").symlink_to("inner/data")
    (folder / "folder").symlink_to("inner")
    (folder / "nowhere").symlink_to("inner/nothing")
    (folder / "inner/whole").symlink_to("..")
    (tmp_path / "link").symlink_to(folder)
    assert check_files(tmp_path / "link") == 22


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def elsewhere(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def upwards(path: Path) -> None:
    path.symlink_to("../../..")


def folder_elsewhere(path: Path) -> None:
    path.symlink_to("/etc")


STRANGE: list[tuple[Callable[[Path], None], str]] = [
    (pipe, "is not a regular file; remove it from the data set$"),
    (device, "is a link that leads out of the data set; copy the data set with `cp -rL` first$"),
    (elsewhere, "is a link that leads out of the data set"),
    (upwards, "is a link that leads out of the data set"),
    (folder_elsewhere, "is a link that leads out of the data set"),
]


@pytest.mark.parametrize(("make", "message"), STRANGE)
def test_what_is_no_regular_file_of_the_data_set_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    folder = make_set(tmp_path / "set")
    make(folder / "inner/strange")
    with pytest.raises(dr.FormatError, match=f"inner/strange {message}"):
        check_files(folder)


def test_a_snapshot_of_the_hugging_face_cache_may_link_to_its_blobs(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "snapshots/abc")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs/1").write_bytes(bytes(5))
    (folder / "inner/more").symlink_to("../../../blobs/1")
    assert check_files(folder) == 17
    os.mkfifo(tmp_path / "blobs/2")
    (folder / "inner/pipe").symlink_to("../../../blobs/2")
    with pytest.raises(dr.FormatError, match="pipe is not a regular file"):
        check_files(folder)


def test_a_document_of_gigabytes_is_refused(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set")
    os.truncate(folder / "info.json", 1 << 34)
    with pytest.raises(dr.FormatError, match="info.json has 17179869184 bytes, and a document of a data set has at m"):
        check_files(folder)


@pytest.mark.parametrize(
    "error",
    [
        *(RecursionError(), ZeroDivisionError("x"), MemoryError(), OverflowError(), AssertionError(), KeyError("a")),
        *(OSError("no number"), IsADirectoryError(errno.EISDIR, "x"), RuntimeError("a\nb"), EOFError(), TypeError()),
    ],
    ids=repr,
)
def test_what_damage_raises_is_one_error_of_one_line(error: Exception) -> None:
    message = "^set cannot be read: .*; get an undamaged copy of it$"
    with pytest.raises(dr.FormatError, match=message) as caught, reading("set"):
        raise error
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        *(KeyboardInterrupt(), SystemExit(1), dr.StorageFull("full"), dr.SchemaError("x"), dr.MissingExtra("x")),
        *(OSError(errno.EIO, "x"), PermissionError(errno.EACCES, "x"), OSError(errno.ENOSPC, "x"), ImportError("x")),
    ],
    ids=repr,
)
def test_what_is_no_fault_of_the_data_passes(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, reading("set"):
        raise error
    assert caught.value is error


def test_claims_are_held_against_what_is_stored() -> None:
    check_claim(1 << 28, 1, "a")
    check_claim(1 << 40, 1 << 30, "a")
    with pytest.raises(dr.FormatError, match="^a claims 1099511627776 bytes, which cannot come from 1048576 stored"):
        check_claim(1 << 40, 1 << 20, "a")
    with pytest.raises(dr.FormatError, match="^a takes 9223372036854775808 bytes at once"):
        check_memory(1 << 63, "a")


SOURCES: dict[str, tuple[Any, str]] = {
    "npz": (npz, "dataset.json"),
    "torchrl": (torchrl_memmap, "storage/meta.json"),
    "dreamer": (dreamer, "*.npz"),
    "zarr": (zarr_episodes, "meta/episode_ends/.zarray"),
    "sb3_pickle": (sb3_pickle, ""),
    "lerobot": ("diskreplay.interop.lerobot", "meta/info.json"),
    "parquet": ("diskreplay.interop.parquet", "steps/00000000.parquet"),
    "rlds": ("diskreplay.interop.rlds", "features.json"),
    "d4rl": ("diskreplay.interop.d4rl", ""),
    "robomimic": ("diskreplay.interop.robomimic", ""),
    "minari": ("diskreplay.interop.minari", "data/metadata.json"),
}


@pytest.mark.parametrize("make", [pipe, device])
@pytest.mark.parametrize(("module", "name"), SOURCES.values(), ids=SOURCES)
def test_no_import_waits_for_a_pipe_or_reads_a_device(
    tmp_path: Path, kept_store: Callable[..., Path], module: Any, name: str, make: Any
) -> None:
    made = pytest.importorskip(module, exc_type=ImportError) if isinstance(module, str) else module
    source = tmp_path / "set"
    made.export_dataset(kept_store("vectors", PLAIN), source)
    file = next(source.glob(name)) if name else source
    file.unlink()
    make(file)
    with pytest.raises((dr.FormatError, dr.StoreNotFound)):
        made.import_dataset(source, tmp_path / "back")


# --- archives of NumPy -----------------------------------------------------------------------------------------------


def npy(shape: Any, data: bytes = bytes(32), descr: str = "<f8") -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": shape})
    return file.getvalue() + data


ARCHIVES = {
    "more values than bytes": (npy((1 << 40,)), "has another number of bytes than its shape"),
    "a negative shape": (npy((-1,)), "has another number of bytes than its shape"),
    "objects": (npy((4,), pickle.dumps([1, 2, 3, 4]), "|O"), "an array of Python objects, which could run code"),
    "no array": (b"text", "magic"),
}


@pytest.mark.parametrize(("data", "message"), ARCHIVES.values(), ids=ARCHIVES)
def test_arrays_of_an_archive_have_the_bytes_of_their_headers(tmp_path: Path, data: bytes, message: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", data)
    with pytest.raises(dr.FormatError, match=message):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_of_an_archive_are_those_that_numpy_reads(tmp_path: Path, save: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "large": rng.normal(size=(1000, 7, 13)),
        "fortran": np.asfortranarray(rng.normal(size=(30, 40))),
        "empty": np.empty((0, 3), "i2"),
        "scalar": np.array(True),
        "swapped": np.arange(5, dtype=">i4"),
        "text": np.array(["a", "bcd"]),
    }
    save(tmp_path / "a.npz", **arrays)
    found = read_npz(tmp_path / "a.npz")
    assert found.keys() == arrays.keys()
    for name, values in arrays.items():
        np.testing.assert_array_equal(found[name], values, strict=True)
    assert read_npz(tmp_path / "a.npz", ["text", "other"].__contains__).keys() == {"text"}


def test_an_archive_that_unpacks_to_more_than_it_can_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(100))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    at = data.index(b"PK\x01\x02") + 24  # the length in the directory of the archive
    data[at : at + 4] = (300 << 20).to_bytes(4, "little")
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(dr.FormatError, match="a.npz claims 314572800 bytes, which cannot come from"):
        read_npz(tmp_path / "a.npz")


# --- pickles ---------------------------------------------------------------------------------------------------------


def deep(tuples: int) -> bytes:
    """A dict whose key is so many tuples, one in the other."""
    return b"\x80\x04})" + b"\x85" * tuples + b"Ns."


PICKLES = {
    "a place in the memo": (
        b"Nr" + (1 << 29).to_bytes(4, "little") + b".",
        "puts one at the place 536870912 of its memo$",
    ),
    "a place in text": (b"Np99999999\n.", "puts one at the place 99999999 of its memo$"),
    "tuples as a key": (deep(1 << 18), "tuples are nested deeper than 64$"),
    "tuples by the memo": (b"\x80\x04})" + b"\x94\x85" * (1 << 18) + b"Ns.", "tuples are nested deeper than 64$"),
    "a frame": (
        b"\x80\x04\x95" + (1 << 62).to_bytes(8, "little") + b"N.",
        "claims 4611686018427387904 bytes, and 2 are",
    ),
    "bytes": (b"\x80\x04\x8e" + (1 << 62).to_bytes(8, "little") + b"N.", "but only 2 remain"),
    "copies": (
        b"\x80\x04c_codecs\nencode\n\x94(X"
        + (1 << 16).to_bytes(4, "little")
        + b"x" * (1 << 16)
        + b"\x8c\x06latin1t\x94"
        b"R" + b"0h\x00h\x01R" * 1000 + b".",
        "it copies the same values many times$",
    ),
    "nothing": (b"", "damaged, or not a pickle"),
}


@pytest.mark.parametrize(("data", "message"), PICKLES.values(), ids=PICKLES)
def test_a_pickle_takes_no_more_than_it_has(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "buffer.pkl").write_bytes(data)
    with pytest.raises(dr.FormatError, match=message):
        load(tmp_path / "buffer.pkl", set())
