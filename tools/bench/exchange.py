"""Import and export data sets beside the libraries of their formats."""

import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple

import h5py
import numpy as np
import pyarrow as pa
from gymnasium import Space
from minari import MinariDataset
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from numpy.typing import NDArray
from pyarrow import parquet as pyarrow_parquet

import diskreplay as dr
from diskreplay.interop import arrow_arrays, d4rl, lerobot, minari, parquet
from diskreplay.interop.exchange.choosing import Choice
from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.interop.exchange.field_trees import space_of
from diskreplay.interop.exchange.importing import Source
from tools.bench.harness import Contestant, Report, Table, Target, in_turn, number, ratio_table, ratios

LEAST = 0.7
READ, IMPORT, EXPORT = "read", "import", "export"


class Size(NamedTuple):
    """Episodes of each data set, and steps of each of them."""

    vectors: int
    vector_steps: int
    images: int
    image_steps: int


FULL, TINY = Size(100, 4000, 8, 1000), Size(2, 5, 2, 5)

BOX = {"type": "Box", "low": "-Infinity", "high": "Infinity"}
SCHEMAS = {
    "vectors": dr.Schema(dr.Field((17,), "float64", BOX), dr.Field((6,), "float32", BOX), dr.Field((), "float64")),
    "images": dr.Schema(
        dr.Field((64, 64, 3), "uint8", {"type": "Box", "low": 0, "high": 255}),
        dr.Field((), "int64", {"type": "Discrete", "n": 4, "start": 0}),
        dr.Field((), "float64"),
    ),
}


Arrays = Iterator[NDArray[Any]]


class Peer(NamedTuple):
    """What a format's own library does: it reads a data set into arrays, and writes episodes that are in memory."""

    name: str
    read: Callable[[Path], Arrays]
    write: Callable[[Path, dr.Schema, list[EpisodeData]], None]


class Pair(NamedTuple):
    """A format by two ways: ours, and that of its own library."""

    name: str
    adapter: ModuleType
    options: dict[str, Any]
    peer: Peer
    kinds: tuple[str, ...] = ("vectors", "images")


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Read and write each format in turn with its library."""
    del peers  # without them there is nothing to compare
    tables, targets = [], []
    for kind, schema in SCHEMAS.items():
        counts = (size.images, size.image_steps) if kind == "images" else (size.vectors, size.vector_steps)
        episodes = _episodes(schema, *counts)
        store = folder / f"{kind}.replay"
        with dr.create(store, schema) as made, made.writer(durability="none") as writer:
            for episode in episodes:
                episode.append_to(writer, schema)
        for pair in (pair for pair in PAIRS if kind in pair.kinds):
            name, peer = f"{kind}, {pair.name}", pair.peer.name
            seconds = in_turn(_contestants(pair, store, schema, episodes, folder), rounds)
            medians = {what: float(np.median(np.concatenate(taken))) * 1e3 for what, taken in seconds.items()}
            tables.append(Table([name, "median ms"], [[what, number(median)] for what, median in medians.items()]))
            compared = [(READ, f"{peer} reads"), (IMPORT, f"{peer} reads, NumPy saves"), (EXPORT, f"{peer} writes")]
            tables.append(ratio_table(seconds, compared))
            for ours, theirs in compared:
                share = float(np.median(ratios(seconds, ours, theirs)))
                targets.append(Target(f"{name}: {ours}, beside: {theirs}", share, LEAST, "times as fast", True))
    return Report(
        "Import and export data sets",
        tables,
        targets,
        [
            f"Vectors: {size.vectors} episodes of {size.vector_steps} steps, 17 float64 and 6 float32; images: "
            f"{size.images} of {size.image_steps}, 64x64x3 uint8.",
            "To read is to have the arrays of each episode in turn; ours of Arrow are mapped. An import reads, appends "
            "to a new store and seals it, with checksums; beside it the library reads, and numpy.save writes each "
            "array to a file of its own. An export reads a store; the library writes the same episodes from memory.",
            "Images are not JPEG: neither here nor there.",
        ],
    )


def _episodes(schema: dr.Schema, count: int, steps: int) -> list[EpisodeData]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        rows = {}
        for path, leaf in schema.step_leaves.items():
            shape = (steps + (path == "obs"), *leaf.shape)
            low = leaf.dtype.kind == "f"
            rows[path] = (rng.normal(size=shape) if low else rng.integers(0, 4, shape)).astype(leaf.dtype)
        made.append(EpisodeData(rows, True, False))
    return made


def _contestants(
    pair: Pair, store: Path, schema: dr.Schema, episodes: list[EpisodeData], folder: Path
) -> list[Contestant]:
    own, left, adapter, peer = folder / "own", folder / "left", pair.adapter, pair.peer
    _remove(own)
    adapter.export_dataset(store, own, **pair.options)

    def timed(name: str, work: Callable[[], object]) -> Contestant:
        def once() -> Any:
            started = perf_counter()
            work()
            taken = np.array([perf_counter() - started])
            _remove(left)
            return taken

        return Contestant(name, once)

    return [
        timed(READ, lambda: _exhaust(_read(adapter.open_source(own)))),
        timed(f"{peer.name} reads", lambda: _exhaust(peer.read(own))),
        timed(IMPORT, lambda: adapter.import_dataset(own, left)),
        timed(f"{peer.name} reads, NumPy saves", lambda: _save(peer.read(own), left)),
        timed(EXPORT, lambda: adapter.export_dataset(store, left, **pair.options)),
        timed(f"{peer.name} writes", lambda: peer.write(left, schema, episodes)),
    ]


def _read(source: Source) -> Iterator[EpisodeData]:
    return source.read(0, source.lay_out(Choice()).paths)


def _remove(path: Path) -> None:
    """Remove a data set, or a store."""
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _exhaust(items: Iterator[Any]) -> None:
    for _ in items:
        pass


def _save(arrays: Arrays, folder: Path) -> None:
    folder.mkdir()
    for number_, array in enumerate(arrays):
        np.save(folder / f"{number_}.npy", array)


# --- Minari ----------------------------------------------------------------------------------------------------------


def _read_minari(folder: Path) -> Arrays:
    for episode in MinariDataset(folder / "data").iterate_episodes():
        yield from (episode.observations, episode.actions, episode.rewards, episode.terminations, episode.truncations)


def _write_minari(data_format: str) -> Callable[[Path, dr.Schema, list[EpisodeData]], None]:
    def write(folder: Path, schema: dr.Schema, episodes: list[EpisodeData]) -> None:
        folder.mkdir()
        spaces: list[Space[Any]] = [space_of(schema.obs), space_of(schema.action)]
        storage = MinariStorage.new(folder / "data", *spaces, data_format=data_format, jpeg_encoding=False)
        storage.update_episodes(map(_buffer, episodes))

    return write


def _buffer(episode: EpisodeData) -> EpisodeBuffer:
    flags = np.zeros((2, len(episode)), bool)
    flags[0, -1] = True
    rows = episode.steps
    return EpisodeBuffer(
        observations=rows["obs"],
        actions=rows["action"],
        rewards=rows["reward"],
        terminations=flags[0],
        truncations=flags[1],
    )


# --- Parquet ---------------------------------------------------------------------------------------------------------


def _read_parquet(folder: Path) -> Arrays:
    for file in sorted((folder / "steps").iterdir()):
        table = pyarrow_parquet.read_table(file)
        starts = np.flatnonzero(table.column("step").to_numpy() == 0)
        for start, stop in pairwise([*starts.tolist(), len(table)]):
            for column in table.slice(start, stop - start).columns:
                yield _to_numpy(column.combine_chunks())


def _to_numpy(column: Any) -> NDArray[Any]:
    if pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width
        data = np.frombuffer(column.buffers()[1], np.uint8)
        return data[column.offset * width : (column.offset + len(column)) * width]
    while pa.types.is_fixed_size_list(column.type):
        column = column.flatten()
    found: NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return found


def _write_parquet(folder: Path, schema: dr.Schema, episodes: list[EpisodeData]) -> None:
    folder.mkdir()
    columns: dict[str, Any] = {}
    for path in schema.step_leaves:
        rows = np.concatenate([episode.steps[path] for episode in episodes])
        flat = pa.array(rows.reshape(-1))
        if rows.ndim == 2:
            columns[path] = pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])
        elif rows.ndim > 2:
            data = [None, pa.py_buffer(rows)]
            columns[path] = pa.Array.from_buffers(pa.binary(rows[0].nbytes), len(rows), data)
        else:
            columns[path] = flat
    obs = columns.pop("obs")
    pyarrow_parquet.write_table(pa.table(columns), folder / "rest.parquet", use_dictionary=False)
    pyarrow_parquet.write_table(pa.table({"obs": obs}), folder / "obs.parquet", use_dictionary=False)


# --- LeRobot: the tables alone, as the library writes them -----------------------------------------------------------


def _read_lerobot(folder: Path) -> Arrays:
    for file in sorted(folder.glob("data/*/*.parquet")):
        table = pyarrow_parquet.read_table(file)
        starts = np.flatnonzero(table.column("frame_index").to_numpy() == 0)
        for start, stop in pairwise([*starts.tolist(), len(table)]):
            for column in table.slice(start, stop - start).columns:
                yield _to_numpy(column.combine_chunks())


def _write_lerobot(folder: Path, schema: dr.Schema, episodes: list[EpisodeData]) -> None:
    folder.mkdir()
    writer, rows = None, 0
    for number_, episode in enumerate(episodes):
        steps = len(episode)
        frames = np.arange(steps)
        columns = {
            "observation.state": arrow_arrays.to_arrow(episode.steps["obs"][:steps]),
            "action": arrow_arrays.to_arrow(episode.steps["action"]),
            "next.reward": pa.array(episode.steps["reward"]),
            "next.done": pa.array(frames == steps - 1),
            "timestamp": pa.array((frames / 30).astype(np.float32)),
            "frame_index": pa.array(frames),
            "episode_index": pa.array(np.full(steps, number_)),
            "index": pa.array(frames + rows),
            "task_index": pa.array(np.zeros(steps, np.int64)),
        }
        table = pa.table(columns)
        if writer is None:
            writer = pyarrow_parquet.ParquetWriter(folder / "data.parquet", table.schema)
        writer.write_table(table)
        rows += steps
    if writer is not None:
        writer.close()


# --- D4RL ------------------------------------------------------------------------------------------------------------


def _read_d4rl(path: Path) -> Arrays:
    with h5py.File(path) as file:
        arrays = {name: file[name][()] for name in file}
    ends = np.flatnonzero(arrays["terminals"] | arrays["timeouts"]) + 1
    for start, stop in pairwise([0, *ends.tolist()]):
        for values in arrays.values():
            yield values[start:stop]


def _write_d4rl(path: Path, schema: dr.Schema, episodes: list[EpisodeData]) -> None:
    arrays = {
        "observations": np.concatenate([episode.steps["obs"][:-1] for episode in episodes]),
        "next_observations": np.concatenate([episode.steps["obs"][1:] for episode in episodes]),
        "actions": np.concatenate([episode.steps["action"] for episode in episodes]),
        "rewards": np.concatenate([episode.steps["reward"] for episode in episodes]),
    }
    terminals = np.zeros(len(arrays["rewards"]), bool)
    terminals[np.cumsum([len(episode) for episode in episodes]) - 1] = True
    with h5py.File(path, "w") as file:
        for name, values in {**arrays, "terminals": terminals, "timeouts": terminals & False}.items():
            file.create_dataset(name, data=values, compression="gzip")


PAIRS = [
    *(
        Pair(
            f"Minari in {title}",
            minari,
            {"data_format": data_format},
            Peer("Minari", _read_minari, _write_minari(data_format)),
        )
        for data_format, title in (("hdf5", "HDF5"), ("arrow", "Arrow"))
    ),
    Pair("Parquet", parquet, {}, Peer("pyarrow", _read_parquet, _write_parquet)),
    Pair("tables of LeRobot", lerobot, {}, Peer("pyarrow", _read_lerobot, _write_lerobot), ("vectors",)),
    Pair("D4RL", d4rl, {}, Peer("h5py", _read_d4rl, _write_d4rl), ("vectors",)),
]
