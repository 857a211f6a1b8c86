"""Import and export data sets, compared with the libraries of their formats."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import h5py
import numpy as np
import pyarrow as pa
import zarr
from gymnasium import Space
from minari import MinariDataset
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_storage import MinariStorage
from numpy.typing import NDArray
from PIL import Image
from pyarrow import parquet as pyarrow_parquet

import diskreplay as dr
from diskreplay.interop import (
    arrow_arrays,
    d4rl,
    dreamer,
    lerobot,
    minari,
    npz,
    parquet,
    rlds,
    robomimic,
    sb3_pickle,
    torchrl_memmap,
    zarr_episodes,
)
from diskreplay.interop.exchange.choosing import Options
from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.interop.exchange.field_trees import space_of
from diskreplay.interop.exchange.importing import Given, Source, open_source
from diskreplay.interop.rlds.records import example_class
from tools.bench.harness import Contestant, Report, Seconds, Table, Target, in_turn, number, ratio_table, ratios

LEAST = 0.7
READ, IMPORT, EXPORT = "read", "import", "export"


class Size(NamedTuple):
    """Episodes of each data set, and steps of each of them."""

    vectors: int
    vector_steps: int
    images: int
    image_steps: int


FULL, TINY = Size(1000, 1000, 20, 1000), Size(2, 5, 2, 5)

OPTIONAL = {"Stable-Baselines3": "stable_baselines3", "tensordict": "tensordict"}

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
Write = Callable[[Path, dr.Schema, list[EpisodeData]], None]


class Peer(NamedTuple):
    """A format's own library: it reads a data set into arrays, and may write episodes from memory."""

    name: str
    read: Callable[[Path], Arrays]
    write: Write | None = None


class Pair(NamedTuple):
    """A format with an adapter of this package and with its own library."""

    name: str
    adapter: ModuleType
    peer: Peer
    options: Mapping[str, Any] = {}
    kinds: tuple[str, ...] = ("vectors", "images")

    @property
    def is_installed(self) -> bool:
        """Whether the library is installed; only some of the tests need it."""
        return find_spec(OPTIONAL.get(self.peer.name, "numpy")) is not None

    @property
    def compared(self) -> list[tuple[str, str]]:
        """Our contestants with the library's, in the order of the tables."""
        peer = self.peer.name
        found = [(READ, f"{peer} reads"), (IMPORT, f"{peer} reads"), (IMPORT, f"{peer} reads, NumPy saves")]
        return [*found, (EXPORT, f"{peer} writes")] if self.peer.write else found


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Read and write each format in turn with its library."""
    del peers  # they are always needed here
    times, compared, targets = list[list[str]](), list[Table](), list[Target]()
    for kind, schema in SCHEMAS.items():
        counts = (size.images, size.image_steps) if kind == "images" else (size.vectors, size.vector_steps)
        episodes = _episodes(schema, *counts)
        store = folder / f"{kind}.replay"
        with dr.create(store, schema) as made, made.writer(durability="none") as writer:
            for episode in episodes:
                episode.append_to(writer, schema)
        for pair in (pair for pair in PAIRS if kind in pair.kinds and pair.is_installed):
            name, own = f"{kind}, {pair.name}", folder / "own"
            pair.adapter.export_dataset(store, own, **pair.options)
            nbytes, stored = sum(array.nbytes for array in pair.peer.read(own)), _size(own)
            seconds = in_turn(_contestants(pair, store, schema, episodes, folder), rounds)
            _remove(own)
            times += [[f"{name}: {what}", *_cells(taken, nbytes, stored)] for what, taken in seconds.items()]
            found = ratio_table(seconds, pair.compared)
            compared.append(found._replace(rows=[[f"{name}: {row[0]}", *row[1:]] for row in found.rows]))
            for ours, theirs in pair.compared:
                if (ours, theirs) != (IMPORT, f"{pair.peer.name} reads"):  # not a fair target: an import also writes
                    share = float(np.median(ratios(seconds, ours, theirs)))
                    what = f"{name}: {ours}, compared with: {theirs}"
                    targets.append(Target(what, share, LEAST, "times as fast", True))
        _remove(store)
    ratio_rows = [row for table in compared for row in table.rows]
    return Report(
        "Import and export data sets",
        [
            Table(["what", "median s", "MB of values", "MB on disk", "MB of values a second"], times),
            Table(compared[0].header, ratio_rows),
        ],
        targets,
        [
            f"Vectors: {size.vectors} episodes of {size.vector_steps} steps, 17 float64 and 6 float32; images: "
            f"{size.images} of {size.image_steps}, 64x64x3 uint8. A set is an export of these. The values are counted "
            "as the library returns them: most formats hold the next observation of each step, too.",
            "To read is to have the arrays of each episode in turn; mapped arrays are touched once a page. An import "
            "reads, appends to a new store and seals it, with checksums. It is compared with a library that only "
            "reads, and with one that reads while numpy.save writes each array to a file of its own. An export reads "
            "a store; the library writes the same episodes from memory.",
            "RLDS is compared with protobuf and Pillow, without checksums, since TensorFlow is not installed. D4RL and "
            "robomimic are read by h5py, LeRobot by pyarrow.",
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

    def timed(name: str, work: Callable[[], object]) -> Contestant:
        def once() -> Seconds:
            started = perf_counter()
            work()
            taken = np.array([perf_counter() - started])
            _remove(left)
            return taken

        return Contestant(name, once)

    contestants = [
        timed(READ, lambda: _read(adapter, own, left)),
        timed(f"{peer.name} reads", lambda: _touch(peer.read(own))),
        timed(IMPORT, lambda: adapter.import_dataset(own, left)),
        timed(f"{peer.name} reads, NumPy saves", lambda: _save(peer.read(own), left)),
    ]
    if write := peer.write:
        contestants += [
            timed(EXPORT, lambda: adapter.export_dataset(store, left, **pair.options)),
            timed(f"{peer.name} writes", lambda: write(left, schema, episodes)),
        ]
    return contestants


def _cells(taken: list[Seconds], nbytes: int, stored: int) -> list[str]:
    median = float(np.median(np.concatenate(taken)))
    return [number(each) for each in (median, nbytes / 1e6, stored / 1e6, nbytes / 1e6 / median)]


def _read(adapter: ModuleType, own: Path, left: Path) -> None:
    """Read a data set like an import, but append nothing."""

    def drain(_: Path, place: Path, make: Callable[[Given], Source], options: Options) -> None:
        with open_source(place, make, options) as source:
            for episode in source.read(0, source.lay_out().paths):
                _touch(iter(episode.steps.values()))

    with mock.patch.object(adapter, "import_into", drain):
        adapter.import_dataset(own, left)


def _remove(path: Path) -> None:
    """Remove a data set, or a store."""
    if path.is_file():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def _touch(arrays: Arrays) -> None:
    """Read a byte of each page: mapped arrays are not read before."""
    for array in arrays:
        np.ascontiguousarray(array).reshape(-1).view(np.uint8)[::4096].max(initial=0)


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


# --- robomimic, and the layout of diffusion_policy -------------------------------------------------------------------


def _read_robomimic(path: Path) -> Arrays:
    with h5py.File(path) as file:
        for demo in file["data"].values():
            found: list[h5py.Dataset] = []
            demo.visititems(lambda _, item, found=found: found.append(item) if isinstance(item, h5py.Dataset) else None)
            for array in found:
                yield array[()]


def _read_zarr(folder: Path) -> Arrays:
    root = zarr.open_group(folder, mode="r")
    ends = root["meta/episode_ends"][...]
    for _, array in root["data"].arrays():
        rows = array[...]
        for start, stop in pairwise([0, *ends.tolist()]):
            yield rows[start:stop]


# --- NumPy's files, and files of Dreamer ------------------------------------------------------------------------------


def _read_npz(folder: Path) -> Arrays:
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as file:
            for name in file.files:
                yield file[name]


# --- buffers ---------------------------------------------------------------------------------------------------------


def _read_sb3(path: Path) -> Arrays:
    from stable_baselines3.common.save_util import load_from_pkl  # the extra bench has it

    buffer = load_from_pkl(path)
    yield from (value for value in vars(buffer).values() if isinstance(value, np.ndarray))


def _read_torchrl(folder: Path) -> Arrays:
    from tensordict import TensorDict  # the extra bench has it

    for value in TensorDict.load_memmap(folder / "storage").values(include_nested=True, leaves_only=True):
        yield value.clone().numpy()


# --- RLDS: an export to it has an example an episode, with images as PNG ----------------------------------------------


def _read_rlds(folder: Path) -> Arrays:
    message = example_class()
    for path in sorted(folder.glob("*.tfrecord-*")):
        with open(path, "rb") as file:
            while header := file.read(12):
                data = file.read(int.from_bytes(header[:8], "little"))
                file.read(4)
                for feature in message.FromString(data).features.feature.values():
                    yield from _values(feature)


def _values(feature: Any) -> Arrays:
    kind = feature.WhichOneof("kind")
    values = getattr(feature, kind).value
    if kind != "bytes_list":
        yield np.array(values, np.float32 if kind == "float_list" else np.int64)
    elif values[0].startswith(b"\x89PNG"):
        yield np.stack([np.asarray(Image.open(BytesIO(data))) for data in values])
    else:
        yield np.stack([np.frombuffer(data) for data in values])


PAIRS = [
    *(
        Pair(
            f"Minari in {title}",
            minari,
            Peer("Minari", _read_minari, _write_minari(data_format)),
            {"data_format": data_format},
        )
        for data_format, title in (("hdf5", "HDF5"), ("arrow", "Arrow"))
    ),
    Pair("Parquet", parquet, Peer("pyarrow", _read_parquet, _write_parquet)),
    Pair("tables of LeRobot", lerobot, Peer("pyarrow", _read_lerobot, _write_lerobot), kinds=("vectors",)),
    Pair("D4RL", d4rl, Peer("h5py", _read_d4rl, _write_d4rl), kinds=("vectors",)),
    Pair("robomimic", robomimic, Peer("h5py", _read_robomimic)),
    Pair("diffusion_policy", zarr_episodes, Peer("zarr", _read_zarr)),
    Pair("NumPy files", npz, Peer("NumPy", _read_npz)),
    Pair("Dreamer", dreamer, Peer("NumPy", _read_npz)),
    Pair("Stable-Baselines3", sb3_pickle, Peer("Stable-Baselines3", _read_sb3)),
    Pair("TorchRL", torchrl_memmap, Peer("tensordict", _read_torchrl)),
    Pair("RLDS", rlds, Peer("protobuf", _read_rlds)),
]
