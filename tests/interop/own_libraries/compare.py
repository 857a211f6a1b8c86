"""Compare data sets of other libraries with stores, value by value: their reading with ours, and ours with theirs.

    python -m tests.interop.own_libraries.compare [NAME ...]

Each version of a library gets an environment of its own, with versions from PyPI. There its program writes data sets
and reads them into a file. The rest happens here: an import, a comparison with the file, and an export, which the
library reads in turn.
"""

import json
import os
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tests.interop.own_libraries.dumps import load
from tests.interop.round_trips import SCHEMAS, Values, as_held, make_store
from tests.testing.support import REPOSITORY
from tools.environments import NEWEST, Resolver, interpreters, minor_of, run

Episodes = list[dict[str, Any]]
HERE = Path(__file__).parent
SHARED = REPOSITORY.parent / "shared/data"
_DTYPES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "float32",
    "float64",
)
_NUMBERS = {f"{dtype}_{size}": dr.Field((size,), dtype) for dtype in _DTYPES for size in (2, 20)}
OWN = {**SCHEMAS, "numbers": dr.Schema(_NUMBERS, dr.Field((2,), "float32"), extra=_NUMBERS)}
"""Stores that are exported. "numbers" has all dtypes, in small and in large arrays."""


@dataclass(frozen=True)
class Library:
    """How data sets of a library are compared.

    Attributes
    ----------
    module : str
        The module of our import and export.
    program : str
        The program that writes and reads them.
    versions : tuple
        Requirements of its environment; the first one names the library.
    python : str
        The Python of the environment.
    torch : bool
        Whether it needs torch.
    imports, exports : mapping
        Options by the name of a data set.
    lacks_texts : bool
        Whether an export has numbers in place of texts.
    adds : tuple of str
        How the names of values begin that the library adds where a store has none.
    built : collection
        Packages of the environment that have no wheels.
    without : collection
        Dependencies that data sets do without.
    own : collection
        Stores that are exported for the library to read.
    own_names : mapping
        How the names of their leaves begin in the library, by how they begin in the store.
    sets : collection
        The data sets of the program that are of this format; empty: all.
    shared : collection
        Data sets of `SHARED`, which others made. They are left out if that folder does not exist.
    reads_exports : bool
        Whether it reads the version of the format that an export writes.
    """

    module: str
    program: str
    versions: tuple[tuple[str, ...], ...]
    python: str = "3.11"
    torch: bool = False
    imports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exports: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    lacks_texts: bool = False
    adds: tuple[str, ...] = ()
    built: Collection[str] = ()
    without: Collection[str] = ()
    own: Collection[str] = ()
    own_names: Mapping[str, str] = field(default_factory=dict)
    sets: Collection[str] = ()
    shared: Collection[str] = ()
    reads_exports: bool = True


_NOT_OF_DATA_SETS = (
    *("cmake", "diffusers", "opencv-python-headless", "pynput", "pyserial", "rerun-sdk", "torchcodec", "wandb"),
)
_SUFFIXES = {"d4rl": ".hdf5", "robomimic": ".hdf5", "sb3_pickle": ".pkl"}
_NEEDED_BY_MINARI = ("gymnasium>=1.1", "h5py", "pyarrow", "pillow")
_FORMATS_OF_MINARI = [
    f"{kind}-{form}" for kind in ("dict", "images", "vectors") for form in ("hdf5", "arrow", "parquet")
]
LIBRARIES = {
    "rlds": Library(
        "rlds",
        "by_tfds.py",
        (
            ("tensorflow-datasets==4.9.3", "tensorflow-cpu==2.15.1", "tensorflow-metadata==1.15.0", "setuptools<81"),
            ("tensorflow-datasets==4.9.10", "tensorflow-cpu==2.21.0", "setuptools<81"),
        ),
        lacks_texts=True,
        built=("promise",),
        own=("vectors", "doubles", "nested", "images", "numbers"),
        adds=("extra/step_discount",),
        shared=("rlds_octo_bridge/bridge_dataset/1.0.0",),
    ),
    "minari 0.5.3": Library(
        "minari",
        "by_minari.py",
        (("minari[hdf5,arrow]==0.5.3", *_NEEDED_BY_MINARI),),
        reads_exports=False,  # 0.5.3 refuses data sets of 0.5.4, which is the lowest version that exports
    ),
    "minari": Library(
        "minari",
        "by_minari.py",
        (("minari[hdf5,arrow]==0.5.4", *_NEEDED_BY_MINARI),),
        own=("vectors", "doubles", "nested", "images"),
        own_names={"extra/": "extra/infos/"},
        adds=("episode/reset_infos",),
        exports={kind: {"data_format": kind.partition("-")[2]} for kind in _FORMATS_OF_MINARI},
    ),
    "robomimic": Library(
        "robomimic",
        "by_robomimic.py",
        (("robomimic==0.2.0", "numpy<2.3"), ("robomimic==0.3.0", "numpy<2.3")),
        torch=True,
        built=("robomimic",),
        without=("diffusers", "egl-probe", "huggingface-hub", "imageio-ffmpeg", "tensorboardX", "transformers"),
        own=("vectors", "doubles", "images"),
        shared=("robosuite_lift/demo.hdf5",),
    ),
    "sb3_pickle 2.0": Library(
        "sb3_pickle",
        "by_sb3.py",
        (("stable-baselines3==2.0.0", "numpy<2"),),
        torch=True,
        reads_exports=False,  # a NumPy before 2 does not load what a later one has pickled
    ),
    "sb3_pickle": Library(
        "sb3_pickle",
        "by_sb3.py",
        (("stable-baselines3==2.7.0",), ("stable-baselines3==2.9.2",)),
        torch=True,
        own=("vectors", "images"),
    ),
    "torchrl_memmap": Library(
        "torchrl_memmap",
        "by_torchrl.py",
        (("torchrl==0.14.0", "tensordict==0.14.2"), ("torchrl==0.14.1", "tensordict==0.14.3")),
        torch=True,
        own=("vectors", "doubles", "nested", "images"),
    ),
    "zarr_episodes": Library(
        "zarr_episodes",
        "by_zarr.py",
        (("zarr==2.18.3", "numcodecs<0.16"), ("zarr==3.1.6",)),
        own=("vectors", "doubles", "images"),
    ),
    "d4rl": Library(
        "d4rl",
        "by_h5py.py",
        (("h5py==3.11.0",), ("h5py==3.16.0",)),
        own=("vectors", "doubles", "nested", "images", "numbers"),
    ),
    "npz": Library(
        "npz",
        "by_numpy.py",
        (("numpy==1.26.4",), ("numpy==2.4.6",)),
        sets=("episodes", "flat"),
        own=tuple(OWN),
        shared=("sb2_gail/expert_cartpole.npz", "sb2_gail/expert_pendulum.npz"),
    ),
    "dreamer": Library(
        "dreamer",
        "by_numpy.py",
        (("numpy==1.26.4",), ("numpy==2.4.6",)),
        sets=("dreamer",),
        own=("vectors", "doubles"),
        exports={"vectors": {"one_hot": False}},
    ),
    "parquet": Library(
        "parquet",
        "by_arrow.py",
        (("pyarrow==16.0.0", "pandas==2.2.2", "polars", "numpy<2.3"), ("pyarrow==26.0.1", "pandas", "polars")),
        own=tuple(OWN),
    ),
    "lerobot 2.1": Library(
        "lerobot",
        "by_lerobot.py",
        (("lerobot==0.3.3", "numpy<2.3"),),
        torch=True,
        without=_NOT_OF_DATA_SETS,
        imports={"lerobot_v21_g1 lerobot_v21_g1": {"skip": ["observation.images.cam_high"]}},
        adds=("task",),
        shared=("lerobot_v21_g1",),
        reads_exports=False,
    ),
    "lerobot": Library(
        "lerobot",
        "by_lerobot.py",
        (("lerobot==0.4.0", "numpy<2.3"), ("lerobot==0.4.4", "numpy<2.3")),
        torch=True,
        without=_NOT_OF_DATA_SETS,
        own=("doubles", "images"),
        adds=("task",),
    ),
}
CASES = {f"{name}-{versions[0]}": (name, versions) for name, each in LIBRARIES.items() for versions in each.versions}


class Count(NamedTuple):
    """How many values were equal: of a data set in the store, and of an export in the library."""

    name: str
    values_in: int | None
    values_out: int | None


def values_of(store: dr.Store, not_held: Collection[str] = (), *, texts: bool = True) -> Episodes:
    """Return the values of a store's episodes as a format holds them, texts in place of their numbers."""
    found = []
    for episode in store.episodes:
        data = as_held(Values.of(episode, store.schema), not_held)
        values: dict[str, Any] = {**data.steps, **data.fields}
        for path in values if texts else ():
            if path.partition("/")[2] in store.texts:
                values[path] = np.array(store.texts[path.partition("/")[2]])[values[path]]
        if "task" in store.texts and "extra/task_index" in values:  # LeRobot's
            values["task"] = np.array(store.texts["task"])[values.pop("extra/task_index")]
        found.append({**values, "terminated": np.bool_(data.terminated), "truncated": np.bool_(data.truncated)})
    return found


def count_equal(found: Episodes, expected: Episodes) -> int:
    """Return how many values two readings have; AssertionError if they are not the same."""
    assert len(found) == len(expected), f"{len(found)} episodes, and {len(expected)} are expected"
    count = 0
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys(), (
            f"episode {number}: only in one reading are {sorted(one.keys() ^ other.keys())}"
        )
        for path, value in one.items():
            wanted = other[path]
            assert value.dtype.kind == "U" or value.dtype == wanted.dtype, (number, path, value.dtype, wanted.dtype)
            np.testing.assert_array_equal(value, wanted, f"episode {number}, {path}", strict=value.dtype.kind != "U")
            count += value.size
    return count


def compare(name: str, requirements: tuple[str, ...], scratch: Path) -> Iterator[Count]:
    """Yield the number of equal values of each data set; AssertionError if two values differ."""
    library = LIBRARIES[name]
    interpreter = next((each for each in interpreters() if minor_of(each) == library.python), None)
    if interpreter is None:
        raise LookupError(f"{name} needs Python {library.python}, which is not installed")
    run(interpreter, "-m", "venv", "--without-pip", scratch / "env")
    python = scratch / "env/bin/python"
    Resolver(scratch).install(
        python, requirements, NEWEST, torch=library.torch, built=library.built, without=library.without
    )
    do = partial(run, python, HERE / library.program, cwd=scratch)
    (scratch / "sets").mkdir()
    do("write", scratch / "sets")
    for kind, made in data_sets(library, scratch / "sets").items():
        yield compare_set(name, kind, made, scratch / f"of {kind}", do)
        shutil.rmtree(scratch / f"of {kind}")
    for kind in library.own:
        yield compare_own(name, kind, scratch / f"own {kind}", do)
        shutil.rmtree(scratch / f"own {kind}")


def data_sets(library: Library, made: Path) -> dict[str, Path]:
    """Return the data sets that a library has made, and those of `SHARED`, by their names."""
    found = {each.stem: each for each in sorted(made.iterdir()) if not each.name.startswith(".")}
    found = {kind: path for kind, path in found.items() if kind in (library.sets or found)}
    others = [path for name in library.shared if (path := SHARED / name).exists()]
    return found | {f"{path.relative_to(SHARED).parts[0]} {path.stem}": path for path in others}


def compare_set(name: str, kind: str, made: Path, folder: Path, do: Callable[..., None]) -> Count:
    """Import a data set that a library made, and export it; return how many values are equal."""
    library, module = LIBRARIES[name], import_module(f"diskreplay.interop.{LIBRARIES[name].module}")
    folder.mkdir()
    do("read", made, folder / "made.npz")
    module.import_dataset(made, folder / "store", **library.imports.get(kind, {}))
    with dr.open(folder / "store") as store:
        assert store.verify(deep=True) == []
        stored = values_of(store)
        values_in = count_equal(stored, without(load(folder / "made.npz"), stored, library.adds))
        if not library.reads_exports:
            return Count(kind, values_in, None)
        return Count(
            kind, values_in, export(name, kind, store, folder / f"exported{_SUFFIXES.get(library.module, '')}", do)
        )


def export(name: str, kind: str, store: dr.Store, target: Path, do: Callable[..., None]) -> int:
    """Export a store, and return how many of its values the library reads, without the data that it cannot hold."""
    library, module = LIBRARIES[name], import_module(f"diskreplay.interop.{LIBRARIES[name].module}")
    exported = module.export_dataset(store, target, **library.exports.get(kind, {}))
    leaves = {path: (leaf.shape, leaf.dtype.name) for path, leaf in store.schema.leaves.items()}
    if name == "parquet":  # whose nested lists do not say how they are nested in the store
        (target / "leaves.json").write_text(json.dumps(leaves))
    do("read", target, target.with_name("exported.npz"))
    held = values_of(store, {each.name for each in exported.not_held}, texts=not library.lacks_texts)
    for own, theirs in library.own_names.items() if kind in OWN else ():
        held = [{re.sub(f"^{own}", theirs, path): value for path, value in each.items()} for each in held]
    return count_equal(held, without(load(target.with_name("exported.npz")), held, library.adds))


def without(read: Episodes, held: Episodes, adds: tuple[str, ...]) -> Episodes:
    """Return what a library has read, without additional values that a store does not have."""
    kept = []
    for one, other in zip(read, held, strict=True):
        kept.append({path: value for path, value in one.items() if path in other or not path.startswith(adds)})
    return kept


def compare_own(name: str, kind: str, folder: Path, do: Callable[..., None]) -> Count:
    """Export a store of random values; return how many of them the library reads."""
    folder.mkdir()
    suffix = _SUFFIXES.get(LIBRARIES[name].module, "")
    with dr.open(make_store(folder / "store", kind, schema=OWN[kind])) as store:
        return Count(f"own {kind}", None, export(name, kind, store, folder / f"exported{suffix}", do))


def main() -> None:
    """Compare the libraries that the command line names, or all, and print a line for each data set."""
    for case, (name, requirements) in CASES.items():
        if sys.argv[1:] and not any(case.startswith(each) for each in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as scratch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for count in compare(name, requirements, Path(scratch)):
                found = {"in": count.values_in, "out": count.values_out}
                said = ", ".join(f"{number:,} values {way}" for way, number in found.items() if number is not None)
                print(f"{case} {count.name}: {said}", flush=True)


if __name__ == "__main__":
    main()
