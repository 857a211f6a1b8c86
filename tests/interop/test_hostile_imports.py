"""Data sets of somebody hostile: mutations of files of real libraries are imported rightly, or refused in one line."""

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import npz, torchrl_memmap
from tests.interop.hostile_imports import Checker, run
from tests.interop.round_trips import PLAIN, make_store
from tests.tiers import whole_or_part

SHARED = Path(__file__).parents[3] / "shared/data"


def make_zarr(folder: Path, zarr_format: int) -> str:
    from tests.interop.test_zarr_episodes import push_t, write

    write(folder / "set", [3, 10], zarr_format, **push_t())
    return "set"


def make_shards(folder: Path) -> str:
    import zarr

    from tests.interop.test_zarr_episodes import push_t

    root = zarr.create_group(folder / "set")
    for name, rows in push_t().items():
        sizes = {"chunks": (2, *rows.shape[1:]), "shards": (4, *rows.shape[1:])}
        root.create_array(f"data/{name}", data=rows, **sizes)
    root.create_array("meta/episode_ends", data=np.array([3, 10]))
    return "set"


def make_zip(folder: Path) -> str:
    from tests.interop.test_zarr_episodes import zipped

    make_zarr(folder.parent / "unzipped", 2)
    zipped(folder.parent / "unzipped/set").rename(folder / "set.zip")
    return "set.zip"


def make_sb3(folder: Path, case: str) -> str:
    pytest.importorskip("stable_baselines3", reason="needs stable-baselines3")
    from stable_baselines3.common.save_util import save_to_pkl

    from tests.interop.test_sb3_pickle import filled

    save_to_pkl(folder / "buffer.pkl", filled(case, 20))
    return "buffer.pkl"


def make_d4rl(folder: Path, **options: object) -> str:
    pytest.importorskip("h5py", reason="needs h5py")
    from tests.interop.test_d4rl import arrays_of, write

    write(folder / "set.hdf5", arrays_of(groups=bool(options)), **options)
    return "set.hdf5"


def make_robomimic(folder: Path, origin: str) -> str:
    pytest.importorskip("h5py", reason="needs h5py")
    from tests.interop.test_robomimic import write_isaac, write_robomimic

    path = folder / "set.hdf5"
    if origin == "robosuite":
        write_isaac(path, obs=False)
    else:
        (write_isaac if origin == "isaac" else write_robomimic)(path)
    return path.name


def make_minari(folder: Path, data_format: str) -> str:
    pytest.importorskip("minari", reason="needs minari")
    from tests.interop.test_minari import make_data_set

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", str(folder))
        make_data_set("own-v0", "dict", data_format)
    return "own-v0"


def make_lerobot(folder: Path, version: str, video: bool) -> str:
    pytest.importorskip("av", reason="needs av")
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    from tests.interop.lerobot.data_sets import write_v21, write_v30

    (write_v21 if version == "2.1" else write_v30)(folder / "set", video=video)
    return "set"


def make_parquet(folder: Path) -> str:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    from diskreplay.interop import parquet

    parquet.export_dataset(make_store(folder.parent / "store", "nested", priorities=True), folder / "set")
    return "set"


def make_rlds(folder: Path) -> str:
    pytest.importorskip("google.protobuf", reason="needs protobuf")
    shutil.copytree(Path(__file__).parent / "rlds_sample", folder / "set")
    return "set"


def make_octo(folder: Path) -> str:
    pytest.importorskip("google.protobuf", reason="needs protobuf")
    pytest.importorskip("simplejpeg", reason="needs simplejpeg")
    found = sorted((SHARED / "rlds_octo_bridge").rglob("features.json"))
    if not found:
        pytest.skip("needs ../shared/data/rlds_octo_bridge")
    shutil.copytree(found[0].parent, folder / "set")
    return "set"


def make_dreamer(folder: Path, version: int) -> str:
    from tests.interop.test_dreamer import rows, write

    counts = (5, 9)
    for number, count in enumerate(counts):
        following = f"-abc{number + 1}" if number + 1 < len(counts) else "-0"
        name = f"20260101T00000{number}-abc{number}{following if version == 3 else ''}-{count}"
        write(folder / "set", name, rows(count, number))
    return "set"


def make_npz(folder: Path, origin: str) -> str:
    from tests.interop.test_npz import flat

    if origin == "own":
        npz.export_dataset(make_store(folder.parent / "store", "nested", priorities=True), folder / "set")
        return "set"
    rows = {**flat(12), "dones": np.isin(np.arange(12), (3, 4, 11) if origin == "flat" else 11)}
    if origin == "flat":
        np.savez(folder / "set.npz", **rows)
        return "set.npz"
    (folder / "set").mkdir()
    for number in range(3):
        np.savez_compressed(folder / f"set/{number}.npz", **{key: each[4 * number :] for key, each in rows.items()})
    return "set"


def make_memmap(folder: Path) -> str:
    torchrl_memmap.export_dataset(make_store(folder.parent / "store", "vectors", PLAIN), folder / "set")
    return "set"


ORIGINALS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "zarr 2": ("zarr_episodes", lambda folder: make_zarr(folder, 2)),
    "zarr 3": ("zarr_episodes", lambda folder: make_zarr(folder, 3)),
    "zarr shards": ("zarr_episodes", make_shards),
    "zarr zip": ("zarr_episodes", make_zip),
    "sb3 vectors": ("sb3_pickle", lambda folder: make_sb3(folder, "vectors")),
    "sb3 dicts": ("sb3_pickle", lambda folder: make_sb3(folder, "dicts")),
    "d4rl": ("d4rl", make_d4rl),
    "d4rl packed": ("d4rl", lambda folder: make_d4rl(folder, compression="gzip", chunks=True)),
    "robomimic": ("robomimic", lambda folder: make_robomimic(folder, "robomimic")),
    "robomimic of robosuite": ("robomimic", lambda folder: make_robomimic(folder, "robosuite")),
    "robomimic of isaac": ("robomimic", lambda folder: make_robomimic(folder, "isaac")),
    "minari hdf5": ("minari", lambda folder: make_minari(folder, "hdf5")),
    "minari arrow": ("minari", lambda folder: make_minari(folder, "arrow")),
    "minari parquet": ("minari", lambda folder: make_minari(folder, "parquet")),
    "lerobot 3.0": ("lerobot", lambda folder: make_lerobot(folder, "3.0", False)),
    "lerobot 3.0 video": ("lerobot", lambda folder: make_lerobot(folder, "3.0", True)),
    "lerobot 2.1": ("lerobot", lambda folder: make_lerobot(folder, "2.1", False)),
    "lerobot 2.1 video": ("lerobot", lambda folder: make_lerobot(folder, "2.1", True)),
    "parquet": ("parquet", make_parquet),
    "rlds": ("rlds", make_rlds),
    "rlds octo": ("rlds", make_octo),
    "dreamer 2": ("dreamer", lambda folder: make_dreamer(folder, 2)),
    "dreamer 3": ("dreamer", lambda folder: make_dreamer(folder, 3)),
    "npz": ("npz", lambda folder: make_npz(folder, "own")),
    "npz flat": ("npz", lambda folder: make_npz(folder, "flat")),
    "npz foreign": ("npz", lambda folder: make_npz(folder, "foreign")),
    "torchrl_memmap": ("torchrl_memmap", make_memmap),
}


LARGE = {"rlds octo"}
"""Data sets that take a second to import: few mutations."""


def make_original(folder: Path, key: str) -> tuple[str, Path, str]:
    """Make a data set; return its format, the folder that it lies in, and its name."""
    format_name, make = ORIGINALS[key]
    (folder / "original").mkdir()
    (folder / "unzipped").mkdir()
    return format_name, folder / "original", make(folder / "original")


def share(key: str, mutations: int) -> int:
    """Return how many of the mutations of a format one of its data sets takes."""
    alike = [each for each in ORIGINALS.keys() - LARGE if ORIGINALS[each][0] == ORIGINALS[key][0]]
    return -(-mutations // (50 if key in LARGE else len(alike)))


@pytest.mark.parametrize("key", [key for key in ORIGINALS if key not in LARGE])
def test_some_mutations_are_imported_rightly_or_refused_in_one_line(tmp_path: Path, key: str) -> None:
    checker = Checker(*make_original(tmp_path, key), tmp_path)
    found = {number: checker.check(number)[0] for number in range(share(key, 4))}
    assert not any(found.values()), found


@pytest.mark.slow
@pytest.mark.parametrize("key", ORIGINALS)
def test_mutations_are_imported_rightly_or_refused_in_one_line(tmp_path: Path, key: str) -> None:
    """In a process of its own: a crash, a hang or much memory is a failure of one mutation alone."""
    wrong, counts = run(*make_original(tmp_path, key), 0, whole_or_part(share(key, 1000), 20))
    assert not wrong, list(wrong.values())[:5]
    assert sum(counts[f"raise: {what}"] for what in ("the same values", "other values", "other episodes"))
    assert counts["raise: FormatError"]


# --- kinds of damage that mutations have found ------------------------------------------------------------------------


def change_array(path: Path, name: str, rows: np.ndarray | None) -> None:
    """Replace an array of an archive, or remove it."""
    with np.load(path) as file:
        arrays = {key: file[key] for key in file.files if key != name}
    np.savez(path, **arrays, **({} if rows is None else {name: rows}))


def two_episodes(folder: Path) -> Path:
    """A folder of npz with two episodes of two steps, which have a nest of episode fields."""
    number = dr.Field((), "f4")
    schema = dr.Schema(number, dr.Field((), "i8"), episode={"task": {"a": number, "b": number}})
    with dr.create(folder / "from", schema) as store, store.writer() as writer:
        for _ in range(2):
            task = {"a": 1.0, "b": 2.0}
            writer.append_episode(np.zeros(3), np.zeros(2, "i8"), np.zeros(2), terminated=True, episode={"task": task})
    npz.export_dataset(folder / "from", folder / "set")
    return folder / "set"


@pytest.mark.parametrize("dtype", ["M8[s]", "i4,f4", "c8", "V5", "S3"])
@pytest.mark.parametrize("name", ["reward", "obs", "episode/task/a"])
def test_an_array_that_is_not_of_numbers_costs_its_episode(tmp_path: Path, dtype: str, name: str) -> None:
    root = two_episodes(tmp_path)
    change_array(root / "episode-00000001.npz", name, np.zeros({"reward": 2, "obs": 3}.get(name, ()), dtype))
    with pytest.raises(dr.SchemaError, match=f"^episode 1 of {root} has {name} of the dtype .* which is not numeric$"):
        npz.import_dataset(root, tmp_path / "store")
    done = npz.import_dataset(root, tmp_path / "some", on_error="skip")
    assert [what for what, _ in done.skipped] == ["episode 1"]


def test_an_episode_that_lacks_a_part_of_a_nest_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    root = two_episodes(tmp_path)
    change_array(root / "episode-00000001.npz", "episode/task/b", None)
    said = f"^{root}: episode 1 has no episode/task/b, but has other values of the episode field 'task'$"
    with pytest.raises(dr.FormatError, match=said):
        npz.import_dataset(root, tmp_path / "store")
    done = npz.import_dataset(root, tmp_path / "some", on_error="skip")
    assert (done.episodes, [what for what, _ in done.skipped]) == (1, ["episode 1"])


def test_an_episode_with_values_that_its_schema_cannot_hold_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    root = two_episodes(tmp_path)
    change_array(root / "episode-00000001.npz", "action", np.array([0.5, 1]))
    with pytest.raises(dr.SchemaError, match=rf"^{root}: episode 1 has 0\.5 in action, which int64 cannot hold"):
        npz.import_dataset(root, tmp_path / "store")
    done = npz.import_dataset(root, tmp_path / "some", on_error="skip")
    assert (done.episodes, [what for what, _ in done.skipped]) == (1, ["episode 1"])


def test_a_message_about_names_with_control_characters_is_one_printable_line(tmp_path: Path) -> None:
    np.savez(tmp_path / "set.npz", **{"obs": np.zeros(3), "a\nb\x1b[2J": np.zeros(3)})
    with pytest.raises(dr.SchemaError, match=r"no feature is the action; .* a b\\x1b\[2J float64\[\]") as raised:
        npz.import_dataset(tmp_path / "set.npz", tmp_path / "store")
    assert str(raised.value).isprintable()


def test_a_message_about_a_damaged_schema_names_the_data_set(tmp_path: Path) -> None:
    root = two_episodes(tmp_path)
    document = root / "dataset.json"
    document.write_text(document.read_text().replace("float32", "float33"))
    with pytest.raises(dr.FormatError, match=f"^{root}: schema: obs is not a field"):
        npz.import_dataset(root, tmp_path / "store")


def test_an_episode_of_minari_without_an_info_of_the_others_has_zeros_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    make_minari(tmp_path, "hdf5")
    import h5py

    from diskreplay.interop import minari

    with h5py.File(tmp_path / "own-v0/data/main_data.hdf5", "r+") as file:
        del file["episode_1/infos/state/velocity"]
    minari.import_dataset("own-v0", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        values = [episode["infos"]["state"]["velocity"] for episode in store.episodes[:2]]
    assert [bool(each.any()) for each in values] == [True, False]


def test_numbers_that_json_lacks_are_texts_in_the_note_of_an_import(tmp_path: Path) -> None:
    root = two_episodes(tmp_path)
    said = json.loads((root / "dataset.json").read_text())
    said["metadata"] = {"mean": [float("nan"), 1.5], "bounds": {"low": -float("inf"), "high": float("inf")}}
    (root / "dataset.json").write_text(json.dumps(said))
    npz.import_dataset(root, tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        noted = store.read_note("import")["metadata"]
    assert noted == {"mean": ["NaN", 1.5], "bounds": {"low": "-Infinity", "high": "Infinity"}}


def test_an_episode_without_steps_is_named_and_can_be_skipped(tmp_path: Path) -> None:
    root = two_episodes(tmp_path)
    for name, dtype in (("reward", "f4"), ("action", "i8"), ("obs", "f4")):
        change_array(root / "episode-00000000.npz", name, np.zeros(0, dtype))
    with pytest.raises(dr.FormatError, match=f"^episode 0 of {root} has no steps$"):
        npz.import_dataset(root, tmp_path / "store")
    done = npz.import_dataset(root, tmp_path / "some", on_error="skip")
    assert (done.episodes, [what for what, _ in done.skipped]) == (1, ["episode 0"])


def test_a_flag_that_a_table_lacks_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    import pyarrow as pa
    from pyarrow import parquet as pq

    from diskreplay.interop import parquet

    parquet.export_dataset(make_store(tmp_path / "from", "vectors"), tmp_path / "set")
    path = tmp_path / "set/episodes/00000000.parquet"
    table = pq.read_table(path)
    at = table.column_names.index("terminated")
    pq.write_table(table.set_column(at, "terminated", pa.array([None] * table.num_rows, pa.bool_())), path)
    with pytest.raises(dr.FormatError, match="the column terminated has 8 null values$"):
        parquet.import_dataset(tmp_path / "set", tmp_path / "store")


@pytest.mark.parametrize("change", ["a row less", "rows moved", "a negative length"])
def test_rows_of_a_table_that_are_not_those_of_its_episodes_are_refused(tmp_path: Path, change: str) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    import pyarrow as pa
    from pyarrow import parquet as pq

    from diskreplay.interop import parquet

    parquet.export_dataset(make_store(tmp_path / "from", "vectors"), tmp_path / "set")
    steps, ends = (tmp_path / f"set/{name}/00000000.parquet" for name in ("steps", "episodes"))
    table, lengths = pq.read_table(steps), pq.read_table(ends)
    if change == "a row less":
        pq.write_table(table.slice(0, table.num_rows - 1), steps)
    elif change == "rows moved":
        pq.write_table(pa.concat_tables([table.slice(3), table.slice(0, 3)]), steps)
    else:
        numbers = lengths["length"].to_pylist()
        numbers[:2] = [-1, numbers[0] + numbers[1] + 1]
        at = lengths.column_names.index("length")
        pq.write_table(lengths.set_column(at, "length", pa.array(numbers)), ends)
    with pytest.raises(dr.FormatError, match=r"steps/00000000.parquet (has \d+ rows, and its|is step \d+ of episode)"):
        parquet.import_dataset(tmp_path / "set", tmp_path / "store")


def test_more_episodes_than_steps_are_refused_before_any_is_left_out(tmp_path: Path) -> None:
    root = two_episodes(tmp_path)
    document = root / "dataset.json"
    document.write_text(document.read_text().replace('"episodes": 2', f'"episodes": {1 << 35}'))
    with pytest.raises(dr.FormatError, match=f"^{root} claims 34359738368 episodes of 4 steps; it is damaged$"):
        npz.import_dataset(root, tmp_path / "store", on_error="skip")


def test_an_hdf5_array_of_more_chunks_than_its_file_can_hold_is_refused(tmp_path: Path) -> None:
    """HDF5 takes hundreds of bytes and some microseconds for each, though most are not there."""
    name = make_d4rl(tmp_path, chunks=True)
    import h5py

    from diskreplay.interop import d4rl

    with h5py.File(tmp_path / name, "r+") as file:
        file.create_dataset("rest", (200_000_000,), "?", chunks=(3,))
    with pytest.raises(dr.FormatError, match="set.hdf5: rest claims 66666667 chunks, which cannot come from"):
        d4rl.import_dataset(tmp_path / name, tmp_path / "store")


def test_a_zarr_array_of_more_chunks_than_its_files_can_hold_is_refused(tmp_path: Path) -> None:
    import zarr

    from diskreplay.interop import zarr_episodes

    make_zarr(tmp_path, 3)
    zarr.open_group(tmp_path / "set", mode="a").create_array("data/more", shape=(50_000_000,), chunks=(1,), dtype="?")
    with pytest.raises(dr.FormatError, match="set: data/more claims 50000000 chunks, which cannot come from"):
        zarr_episodes.import_dataset(tmp_path / "set", tmp_path / "store")


def test_names_that_are_no_texts_are_escaped_in_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    make_minari(tmp_path, "hdf5")
    import h5py

    from diskreplay.interop import minari

    with h5py.File(tmp_path / "own-v0/data/main_data.hdf5", "r+") as file:
        file["episode_1/infos"][b"\xff"] = np.zeros(3)
    minari.import_dataset("own-v0", tmp_path / "store")
    with dr.open(tmp_path / "store") as store:
        noted = json.dumps(store.read_note("import-00000000"))
    assert json.dumps(r"\xff") in noted


def test_a_damaged_text_in_a_pickle_warns_of_nothing(tmp_path: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="needs stable-baselines3")
    from diskreplay.interop import sb3_pickle

    (tmp_path / "buffer.pkl").write_bytes(b"S'\\8'\n.")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with pytest.raises(dr.FormatError, match="buffer.pkl"):
            sb3_pickle.import_dataset(tmp_path / "buffer.pkl", tmp_path / "store")
    assert warned == []
