"""Data sets of diffusion_policy: zarr of both versions, in folders and zip files, read and written."""

import json
import os
import pickle
import tracemalloc
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import google_crc32c
import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, ZstdCodec

import diskreplay as dr
from diskreplay.interop import zarr_episodes
from diskreplay.interop.zarr_episodes import export_dataset, import_dataset
from tests.interop.round_trips import EPISODES, check_round_trip, make_store, random_episode


def write(path: Path, ends: Any, zarr_format: Any = 2, chunk_rows: int = 4, **data: np.ndarray) -> Path:
    """A data set as diffusion_policy writes it."""
    root = zarr.create_group(path, zarr_format=zarr_format, overwrite=True)
    for name, values in data.items():
        root.create_array(f"data/{name}", data=values, chunks=(chunk_rows, *values.shape[1:]))
    root.create_array("meta/episode_ends", data=np.array(ends))
    return path


def push_t() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    img = rng.random((10, 8, 8, 3)).astype(np.float32)
    state, action = (rng.random((10, size)).astype(np.float32) for size in (5, 2))
    return {"img": img, "state": state, "action": action}


def test_rows_behind_the_last_episode_are_named(tmp_path: Path) -> None:
    write(tmp_path / "set", [4, 7], **push_t())
    done = import_dataset(tmp_path / "set", tmp_path / "store")
    assert (done.steps, done.not_kept) == (7, ["rows 7 to 10, after the last episode"])


def test_chunks_that_take_more_than_half_of_the_memory_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One chunk of each array has all rows, so that reading a short episode reads all of them."""
    rng = np.random.default_rng(0)
    state, other, action = (rng.random((4000, size)).astype(np.float32) for size in (20, 20, 2))
    file = write(tmp_path / "set", [10, 4000], chunk_rows=4000, state=state, other=other, action=action)
    memory = {"SC_PHYS_PAGES": 3 * state.nbytes, "SC_PAGE_SIZE": 1}
    monkeypatch.setattr(os, "sysconf", memory.get)
    with pytest.raises(dr.FormatError, match=r": the episode of rows 0 to 10 takes \d+ bytes at once, more"):
        import_dataset(file, tmp_path / "store")


def test_a_round_trip_through_zarr_3(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "nested")
    check_round_trip(store, tmp_path / "set", lambda *a, **k: export_dataset(*a, zarr_format=3, **k), import_dataset)
    assert zarr.open_group(tmp_path / "set", mode="r").metadata.zarr_format == 3


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_data_set_of_diffusion_policy(tmp_path: Path, zarr_format: int) -> None:
    data = push_t()
    write(tmp_path / "push.zarr", [3, 3, 10], zarr_format, **data)
    imported = import_dataset(tmp_path / "push.zarr", tmp_path / "store")
    assert (imported.episodes, imported.steps) == (2, 10)
    assert imported.skipped == [("episode 1", "it has no rows")]
    seen = set()
    import_dataset(tmp_path / "push.zarr", tmp_path / "again", where=lambda episode: not seen.add(episode.number))
    assert seen == {0, 2}
    with dr.open(tmp_path / "store") as store:
        assert [(len(episode), episode.ended) for episode in store.episodes] == [(3, "truncated"), (7, "truncated")]
        episode = store.episodes[1]
        for name in ("img", "state"):
            np.testing.assert_array_equal(episode.obs[name], data[name][3:], strict=True)
        np.testing.assert_array_equal(episode.action, data["action"][3:], strict=True)
        np.testing.assert_array_equal(episode.reward, np.zeros(7, np.float32), strict=True)


def test_arrays_get_the_roles_that_are_given(tmp_path: Path) -> None:
    data = push_t()
    write(tmp_path / "set", [10], move=data["action"], r=np.arange(10.0)[:, None], state=data["state"], tag=np.ones(10))
    import_dataset(tmp_path / "set", tmp_path / "store", action="move", reward="r", extra=["tag"], ended="terminated")
    with dr.open(tmp_path / "store") as store:
        episode = store.episodes[0]
        assert episode.terminated
        np.testing.assert_array_equal(episode.reward, np.arange(10.0), strict=True)
        np.testing.assert_array_equal(episode["tag"], np.ones(10))
        assert store.schema.obs.keys() == {"state"}


@pytest.mark.parametrize("name", ["set", "set.zip"])
def test_an_export_has_the_arrays_that_diffusion_policy_reads(tmp_path: Path, name: str) -> None:
    make_store(tmp_path / "store", "nested")
    export_dataset(tmp_path / "store", tmp_path / name, rename={"obs/image": "img"})
    file: Any = zarr.storage.ZipStore(tmp_path / name, mode="r") if name.endswith(".zip") else tmp_path / name
    root = zarr.open_group(file, mode="r")
    ends = root["meta/episode_ends"][:]
    np.testing.assert_array_equal(ends, np.cumsum([steps for steps, _, _ in EPISODES]))
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(root["data/img"][ends[0] : ends[1]], store.episodes[1].obs["image"][:1])
        np.testing.assert_array_equal(root["data/move"][:3], store.episodes[0].action["move"])
    data = dict(root["data"].arrays())
    assert {array.shape[0] for array in data.values()} == {ends[-1]}
    assert root.metadata.zarr_format == 2
    assert not [*root["data"].groups(), *root["meta"].groups()]
    assert all(array.ndim for _, array in root["meta"].arrays())


def test_large_rows_go_through_many_chunks(tmp_path: Path) -> None:
    schema = dr.Schema(dr.Field((256, 256, 3), "uint8"), dr.Field((), "int64"))
    store = make_store(tmp_path / "store", "", [(25, "truncated", True), (13, "cut", False)], schema=schema)
    check_round_trip(store, tmp_path / "set", export_dataset, import_dataset)
    assert zarr.open_group(tmp_path / "set", mode="r")["data/obs"].chunks[0] == 10


def test_priorities_that_only_later_episodes_have_fill_the_rows_before_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zarr_episodes, "_CHUNK_BYTES", 128)
    make_store(tmp_path / "store", "vectors", EPISODES * 2)
    rng = np.random.default_rng(1)
    with dr.open(tmp_path / "store", "a") as store, store.writer() as writer:
        later = random_episode(store.schema, rng, 9, "terminated", True)
        replace(later, priority=rng.random(9)).append_to(writer, store.schema)
    check_round_trip(tmp_path / "store", tmp_path / "set", export_dataset, import_dataset)


def test_names_that_cannot_be_are_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "nested")
    with pytest.raises(dr.SchemaError, match="obs/move cannot be the array data/move: the name is taken; rename="):
        export_dataset(tmp_path / "store", tmp_path / "set", rename={"obs/image": "move"})
    assert not (tmp_path / "set").exists()


def test_what_is_no_data_set_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "store"
    with pytest.raises(dr.StoreNotFound, match="set is not a data set of zarr: there is no such folder or file$"):
        import_dataset(tmp_path / "set", target)
    (tmp_path / "set").mkdir()
    with pytest.raises(dr.FormatError, match="set is not a group of zarr: "):
        import_dataset(tmp_path / "set", target)
    (tmp_path / "set.zip").write_bytes(b"PK")
    with pytest.raises(dr.FormatError, match="set.zip is not a group of zarr: "):
        import_dataset(tmp_path / "set.zip", target)
    zarr.create_group(tmp_path / "set", zarr_format=2)
    with pytest.raises(dr.FormatError, match="set has no array meta/episode_ends"):
        import_dataset(tmp_path / "set", target)
    data = push_t()
    for ends in ([5, 3], np.array([5, 3], "u8"), [-1, 3], [[10]], [0.5]):
        write(tmp_path / "set", ends, **data)
        with pytest.raises(
            dr.FormatError, match="meta/episode_ends must have one axis of integers that never decrease"
        ):
            import_dataset(tmp_path / "set", target)
    write(tmp_path / "set", [11], **data)
    with pytest.raises(dr.FormatError, match="obs/img has 10 rows, and 11 are needed$"):
        import_dataset(tmp_path / "set", target)
    write(tmp_path / "set", [10], state=data["state"])
    with pytest.raises(dr.SchemaError, match="set: no feature is the action; its features are state float32"):
        import_dataset(tmp_path / "set", target)
    with pytest.raises(dr.SchemaError, match="ended must be terminated, truncated or cut, not 'done'$"):
        import_dataset(tmp_path / "set", target, ended="done")  # type: ignore[arg-type]
    assert not target.exists()


def test_a_name_with_a_nul_byte_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "some", "vectors")
    export_dataset(tmp_path / "some", tmp_path / "set")
    attributes = zarr.open_group(tmp_path / "set", mode="a").attrs
    said: Any = attributes["diskreplay"]
    attributes["diskreplay"] = said | {"names": dict.fromkeys(said["names"], "a\0b")}
    with pytest.raises(dr.FormatError, match=r"set: 'data/a\\x00b' cannot be the name of an array$"):
        import_dataset(tmp_path / "set", tmp_path / "store")


def test_a_damaged_chunk_and_a_damaged_attribute_are_named(tmp_path: Path) -> None:
    write(tmp_path / "set", [10], **push_t())
    (tmp_path / "set/data/state/1.0").write_bytes(b"damaged")
    with pytest.raises(
        dr.FormatError, match="set: the chunk data/state/1.0 is incomplete, or unpacks to more than 80 bytes$"
    ):
        import_dataset(tmp_path / "set", tmp_path / "store")
    make_store(tmp_path / "some", "vectors")
    export_dataset(tmp_path / "some", tmp_path / "own")
    zarr.open_group(tmp_path / "own", mode="a").attrs["diskreplay"] = {"version": 1}
    with pytest.raises(dr.FormatError, match="own: its attribute 'diskreplay' cannot be used: 'schema'$"):
        import_dataset(tmp_path / "own", tmp_path / "other")


def test_a_chunk_of_blosc_that_ends_early_is_not_read_beyond_its_end(tmp_path: Path) -> None:
    """Numbers without a pattern are stored as they are, and blosc copies what its header counts."""
    write(tmp_path / "set", [10], **push_t())
    chunk = tmp_path / "set/data/action/1.0"
    whole = chunk.read_bytes()
    for length in range(len(whole)):
        chunk.write_bytes(whole[:length])
        with pytest.raises(
            dr.FormatError, match="the chunk data/action/1.0 is incomplete, or unpacks to more than 32 bytes"
        ):
            import_dataset(tmp_path / "set", tmp_path / "store")


# --- files of somebody hostile ---------------------------------------------------------------------------------------

PICKLE: dict[str, Any] = {"id": "pickle", "protocol": 4}
HOSTILE_2: dict[str, tuple[dict[str, Any], str]] = {
    "a pickle as filter": ({"dtype": "|O", "filters": [{"id": "vlen-utf8"}, PICKLE]}, "codec vlen-utf8, pickle"),
    "a pickle as compressor": ({"dtype": "|O", "filters": [{"id": "vlen-utf8"}], "compressor": PICKLE}, "pickle"),
    "a pickle behind bytes": ({"dtype": "|O", "filters": [{"id": "vlen-bytes"}, PICKLE]}, "codec vlen-bytes, pickle"),
    "a pickle of numbers": ({"compressor": PICKLE}, "codec pickle"),
    "json": ({"dtype": "|O", "filters": [{"id": "json2"}]}, "codec json2"),
    "objects": ({"dtype": "|O"}, r"dtype '\|O'"),
    "texts": ({"dtype": "<U9"}, "dtype '<U9'"),
    "records": ({"dtype": [["a", "<f4"]]}, "dtype"),
    "a filter to objects": ({"filters": [{"id": "delta", "dtype": "<f4", "astype": "|O"}]}, r"dtype '\|O'"),
    "packed twice": ({"filters": [{"id": "zlib", "level": 1}], "compressor": {"id": "zlib", "level": 1}}, "several"),
    "filters that widen": (
        {"filters": [{"id": "delta", "dtype": "<f8", "astype": "|i1"}] * 8},
        "several times, by del",
    ),
    "a filter of packed bytes": (
        {"filters": [{"id": "zlib"}, {"id": "shuffle"}], "compressor": None},
        "changed after it is packed, by zlib, shuffle",
    ),
    "chunks beyond all memory": ({"chunks": [1 << 40, 2]}, "claims|axes"),
    "more chunks than axes": ({"chunks": [10, 2, 1]}, "axes"),
    "a negative shape": ({"shape": [-1, 2]}, "shape"),
    "chunks of text": ({"chunks": "10"}, "chunks"),
}
LITTLE, CRC = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}


def sharded(chunk: list[int], index: list[Any], *around: Any) -> dict[str, Any]:
    settings = {"chunk_shape": chunk, "codecs": [LITTLE], "index_codecs": index}
    return {"codecs": [{"name": "sharding_indexed", "configuration": settings}, *around]}


HOSTILE_3: dict[str, tuple[dict[str, Any], str]] = {
    "a pickle": ({"codecs": [{"name": "bytes"}, {"name": "numcodecs.pickle", "configuration": {}}]}, "codec pickle"),
    "texts": ({"data_type": "string", "codecs": [{"name": "vlen-utf8"}]}, "codec vlen-utf8"),
    "objects": ({"data_type": {"name": "object", "configuration": {}}}, "dtype"),
    "a pickle in a shard": (
        {
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": [1, 2],
                        "codecs": [{"name": "bytes"}, {"name": "numcodecs.pickle"}],
                        "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}],
                    },
                }
            ]
        },
        "codec pickle",
    ),
    "a checksum before packed bytes": (
        {"codecs": [{"name": "bytes"}, {"name": "zstd"}, {"name": "numcodecs.crc32"}]},
        "changed after it is packed, by bytes, zstd, crc32",
    ),
    "packed shards": (sharded([2, 2], [LITTLE, CRC], {"name": "gzip"}), "codecs around its shards"),
    "a packed index": (sharded([2, 2], [LITTLE, {"name": "zstd"}]), "an index of shards at the 'end', packed by"),
    "an index that is big-endian": (
        sharded([2, 2], [{"name": "bytes", "configuration": {"endian": "big"}}]),
        "an index of shards at the 'end', packed by",
    ),
    "chunks beyond their shard": (
        sharded([1 << 40, 2], [LITTLE, CRC]),
        r"shards of \[.*\] and chunks of \[1099511627776",
    ),
    "another grid": ({"chunk_grid": {"name": "rectilinear", "configuration": {}}}, "chunks"),
}
HOSTILE = [
    *(pytest.param(2, *case, id=f"2 {name}") for name, case in HOSTILE_2.items()),
    *(pytest.param(3, *case, id=f"3 {name}") for name, case in HOSTILE_3.items()),
]


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.fixture
def read_keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that zarr reads of stores, chunks among them."""
    keys: list[str] = []
    for made in (zarr.storage.LocalStore, zarr.storage.ZipStore):

        def get(store: Any, key: str, *rest: Any, get: Any = made.get, **more: Any) -> Any:
            keys.append(key)
            return get(store, key, *rest, **more)

        monkeypatch.setattr(made, "get", get)
    return keys


def zipped(folder: Path) -> Path:
    target = folder.with_suffix(".zip")
    with zipfile.ZipFile(target, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, file.relative_to(folder).as_posix())
    return target


@pytest.mark.parametrize("is_zip", [False, True])
@pytest.mark.parametrize("name", ["meta/episode_ends", "data/action", "data/state"])
@pytest.mark.parametrize(("zarr_format", "said", "message"), HOSTILE)
def test_nothing_is_decoded_of_an_array_that_is_not_of_plain_numbers(
    tmp_path: Path,
    read_keys: list[str],
    zarr_format: Any,
    said: dict[str, Any],
    message: str,
    name: str,
    is_zip: bool,
) -> None:
    folder = write(tmp_path / "set", [3, 10], zarr_format, action=np.ones((10, 2)), state=np.ones((10, 2)))
    document = folder / name / (".zarray" if zarr_format == 2 else "zarr.json")
    document.write_text(json.dumps(json.loads(document.read_text()) | said))
    for chunk in (path for path in (folder / name).rglob("*") if path.is_file() and path != document):
        chunk.write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    read_keys.clear()
    with pytest.raises(dr.FormatError, match=f"{name} .*{message}") as caught:
        import_dataset(zipped(folder) if is_zip else folder, tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert not [key for key in read_keys if key.startswith(f"{name}/") and not key.endswith((".zarray", "zarr.json"))]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "store").exists()


def test_consolidated_documents_do_not_replace_those_of_the_arrays(tmp_path: Path, read_keys: list[str]) -> None:
    folder = write(tmp_path / "set", [10], **push_t())
    zarr.consolidate_metadata(str(folder), zarr_format=2)
    consolidated = json.loads((folder / ".zmetadata").read_text())
    consolidated["metadata"]["data/state/.zarray"]["compressor"] = PICKLE
    (folder / ".zmetadata").write_text(json.dumps(consolidated))
    assert import_dataset(folder, tmp_path / "store").steps == 10
    assert "data/state/0.0" in read_keys


def test_of_two_documents_of_one_name_in_a_zip_file_both_are_checked(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", [10], **push_t())
    target = zipped(folder)
    hostile = json.loads((folder / "data/state/.zarray").read_text()) | {"compressor": PICKLE}
    with zipfile.ZipFile(target, "r") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    again = files.pop("data/state/.zarray")
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("data/state/.zarray", json.dumps(hostile))
        for name, data in files.items():
            archive.writestr(name, data)
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("data/state/.zarray", again)
    with pytest.raises(dr.FormatError, match="data/state is packed by the codec pickle"):
        import_dataset(target, tmp_path / "store")


def bomb_of(codec: str) -> bytes:
    return bytes(numcodecs.get_codec({"id": codec}).encode(np.zeros(64 << 20, np.uint8)))


def check_not_unpacked(folder: Path, message: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(dr.FormatError, match=message):
            import_dataset(folder, folder.with_name("store"))
        assert tracemalloc.get_traced_memory()[1] < 48 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("codec", "before"),
    [
        *((codec, "nothing") for codec in ("zlib", "gzip", "bz2", "zstd", "blosc")),
        *((codec, "a frame") for codec in ("zlib", "gzip", "zstd")),
        ("zstd", "a skippable frame"),
    ],
)
def test_a_chunk_that_unpacks_to_more_than_it_may_is_not_unpacked(tmp_path: Path, codec: str, before: str) -> None:
    bomb = bomb_of(codec)
    if before == "a frame":
        bomb = bytes(numcodecs.get_codec({"id": codec}).encode(np.zeros(4, np.uint8))) + bomb
    elif before == "a skippable frame":  # of zstd; as the header of another frame, it declares 0 bytes
        bomb = b"\x50\x2a\x4d\x18\x20\0\0\0" + bytes(32) + bomb
    folder = write(tmp_path / "set", [10], **push_t())
    document = folder / "data/state/.zarray"
    document.write_text(json.dumps(json.loads(document.read_text()) | {"compressor": {"id": codec}}))
    for chunk in (folder / "data/state").glob("*.0"):
        chunk.write_bytes(bomb)
    check_not_unpacked(folder, "set: (the chunk data/state/..0 is incomplete, or unpacks to more than 80 bytes|rows)")


def write_shards(folder: Path, ends: list[int], place: str) -> Path:
    """A data set with the index of each shard at the start or the end; state is packed as `bomb_of` packs."""
    root = zarr.create_group(folder, zarr_format=3)
    for name, values in push_t().items():
        codec = ShardingCodec(
            chunk_shape=(2, *values.shape[1:]), codecs=[BytesCodec(), ZstdCodec()], index_location=place
        )
        root.create_array(
            f"data/{name}", data=values, chunks=(10, *values.shape[1:]), serializer=codec, compressors=None
        )
    root.create_array("meta/episode_ends", data=np.array(ends))
    return folder


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("ends", [[10], [3, 7]])
def test_a_shard_is_read_wherever_its_index_is(tmp_path: Path, ends: list[int], place: str) -> None:
    assert import_dataset(write_shards(tmp_path / "set", ends, place), tmp_path / "store").episodes == len(ends)
    with dr.open(tmp_path / "store") as store:
        read = np.concatenate([episode.obs["state"] for episode in store.episodes])
    np.testing.assert_array_equal(read, push_t()["state"][: ends[-1]])


@pytest.mark.parametrize("place", ["start", "end"])
@pytest.mark.parametrize("ends", [[10], [3, 7]])
@pytest.mark.parametrize("change", ["a bomb", "a chunk beyond the end", "no index"])
def test_a_chunk_of_a_shard_is_not_unpacked_to_more_than_it_may(
    tmp_path: Path, change: str, ends: list[int], place: str
) -> None:
    """Of whole shards, zarr reads the file at once, and of others the index and some chunks."""
    folder = write_shards(tmp_path / "set", ends, place)
    bomb = bomb_of("zstd")
    length = len(bomb) + (change == "a chunk beyond the end") * 1000
    index = np.array([[0 if place == "end" else 5 * 16 + 4, length]] * 5, "<u8").tobytes()
    index += google_crc32c.value(index).to_bytes(4, "little")
    shard = bomb + index if place == "end" else index + bomb
    (folder / "data/state/c/0/0").write_bytes(b"x" if change == "no index" else shard)
    check_not_unpacked(folder, "set: the chunk data/state/c/0/0 is incomplete, or unpacks to more than 200 bytes$")


def test_more_chunks_in_a_shard_than_its_index_can_list_are_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "set", [10], "end")
    document = folder / "data/state/zarr.json"
    said = json.loads(document.read_text())
    said["chunk_grid"]["configuration"]["chunk_shape"] = [1 << 20, 5]
    said["codecs"][0]["configuration"]["chunk_shape"] = [1, 1]
    document.write_text(json.dumps(said))
    with pytest.raises(dr.FormatError, match="a shard of data/state claims 5242880 chunks, which cannot come from"):
        import_dataset(folder, tmp_path / "store")


def test_ends_of_many_episodes_without_steps_take_no_memory(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", np.zeros(1, "u1"), **push_t())
    document = folder / "meta/episode_ends/.zarray"
    document.write_text(json.dumps(json.loads(document.read_text()) | {"shape": [4 << 20], "chunks": [4 << 20]}))
    (folder / "meta/episode_ends/0").unlink(missing_ok=True)
    tracemalloc.start()
    try:
        import_dataset(folder, tmp_path / "store")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_a_document_in_a_zip_file_is_not_unpacked_if_it_is_too_large(tmp_path: Path) -> None:
    target = zipped(write(tmp_path / "set", [10], **push_t()))
    with zipfile.ZipFile(target, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("other/.zattrs", bytes(65 << 20))
    with pytest.raises(
        dr.FormatError, match=f"{target.name}: other/.zattrs has 68157440 bytes, and a document of a data"
    ):
        import_dataset(target, tmp_path / "store")


@pytest.mark.parametrize("codec", ["zlib", "gzip", "bz2", "zstd", "blosc", "lz4", "shuffle", "delta"])
def test_usual_codecs_are_read(tmp_path: Path, codec: str) -> None:
    data = push_t()
    root = zarr.create_group(tmp_path / "set", zarr_format=2)
    for name, values in data.items():
        filters = {"shuffle": [numcodecs.Shuffle(4)], "delta": [numcodecs.Delta("<f4")]}.get(codec)
        options: Any = {"filters": filters, "compressors": numcodecs.get_codec({"id": "zlib" if filters else codec})}
        root.create_array(f"data/{name}", data=values, chunks=(4, *values.shape[1:]), **options)
    root.create_array("meta/episode_ends", data=np.array([10]))
    import_dataset(tmp_path / "set", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_allclose(store.episodes[0].obs["img"], data["img"], atol=1e-5)


@pytest.mark.parametrize("codec", ["gzip", "zstd", "blosc", "shards"])
def test_usual_codecs_of_zarr_3_are_read(tmp_path: Path, codec: str) -> None:
    data = push_t()
    root = zarr.create_group(tmp_path / "set", zarr_format=3)
    made = {"gzip": GzipCodec(), "zstd": ZstdCodec(checksum=True), "blosc": BloscCodec(), "shards": BloscCodec()}[codec]
    for name, values in data.items():
        shards = {"shards": (8, *values.shape[1:])} if codec == "shards" else {}
        chunks = (4, *values.shape[1:])
        root.create_array(f"data/{name}", data=values, chunks=chunks, compressors=[made, Crc32cCodec()], **shards)
    root.create_array("meta/episode_ends", data=np.array([10]))
    import_dataset(tmp_path / "set", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.episodes[0].obs["img"], data["img"])


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
def test_a_checksum_behind_a_compressed_chunk_is_read(tmp_path: Path) -> None:
    codecs = pytest.importorskip("zarr.codecs.numcodecs")
    data = push_t()
    root = zarr.create_group(tmp_path / "set", zarr_format=3)
    for name, values in data.items():
        chunks, made = (4, *values.shape[1:]), [GzipCodec(), codecs.Fletcher32()]
        root.create_array(f"data/{name}", data=values, chunks=chunks, compressors=made)
    root.create_array("meta/episode_ends", data=np.array([10]))
    import_dataset(tmp_path / "set", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        np.testing.assert_array_equal(store.episodes[0].obs["img"], data["img"])


def test_an_episode_of_more_rows_than_the_files_can_hold_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", [1 << 36], **push_t())
    for document in folder.glob("data/*/.zarray"):
        said = json.loads(document.read_text())
        document.write_text(json.dumps(said | {"shape": [1 << 36, *said["shape"][1:]]}))
    with pytest.raises(dr.FormatError, match="claims .* (bytes|chunks), which cannot come from"):
        import_dataset(folder, tmp_path / "store")
