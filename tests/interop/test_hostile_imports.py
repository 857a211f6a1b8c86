"""Data sets of somebody hostile: mutations of what real libraries wrote are imported, or refused in one line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diskreplay.interop import npz, torchrl_memmap
from tests.interop.round_trips import PLAIN, make_store
from tests.tiers import whole_or_part

SHARED = Path(__file__).parents[3] / "shared/data"


def make_zarr(folder: Path, zarr_format: int) -> str:
    from tests.interop.test_zarr_episodes import push_t, write

    write(folder / "set", [3, 10], zarr_format, **push_t())
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


def make_robomimic(folder: Path) -> str:
    pytest.importorskip("h5py", reason="needs h5py")
    from tests.interop.test_robomimic import write_isaac

    write_isaac(folder / "set.hdf5")
    return "set.hdf5"


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
    folder.rmdir()
    folder.symlink_to(Path(__file__).parent / "rlds_sample")
    return "."


def make_octo(folder: Path) -> str:
    pytest.importorskip("google.protobuf", reason="needs protobuf")
    found = sorted((SHARED / "rlds_octo_bridge").rglob("features.json"))
    if not found:
        pytest.skip("needs ../shared/data/rlds_octo_bridge")
    folder.rmdir()
    folder.symlink_to(found[0].parent)
    return "."


def make_dreamer(folder: Path) -> str:
    from tests.interop.test_dreamer import rows, write

    for number, count in enumerate((5, 9)):
        write(folder / "set", f"20260101T00000{number}-abc{number}-{count}", rows(count, number))
    return "set"


def make_npz(folder: Path) -> str:
    npz.export_dataset(make_store(folder.parent / "store", "nested", priorities=True), folder / "set")
    return "set"


def make_memmap(folder: Path) -> str:
    torchrl_memmap.export_dataset(make_store(folder.parent / "store", "vectors", PLAIN), folder / "set")
    return "set"


ORIGINALS: dict[str, tuple[str, Callable[[Path], str]]] = {
    "zarr 2": ("zarr_episodes", lambda folder: make_zarr(folder, 2)),
    "zarr 3": ("zarr_episodes", lambda folder: make_zarr(folder, 3)),
    "zarr zip": ("zarr_episodes", make_zip),
    "sb3 vectors": ("sb3_pickle", lambda folder: make_sb3(folder, "vectors")),
    "sb3 dicts": ("sb3_pickle", lambda folder: make_sb3(folder, "dicts")),
    "d4rl": ("d4rl", make_d4rl),
    "d4rl packed": ("d4rl", lambda folder: make_d4rl(folder, compression="gzip", chunks=True)),
    "robomimic": ("robomimic", make_robomimic),
    "minari hdf5": ("minari", lambda folder: make_minari(folder, "hdf5")),
    "minari arrow": ("minari", lambda folder: make_minari(folder, "arrow")),
    "minari parquet": ("minari", lambda folder: make_minari(folder, "parquet")),
    "lerobot 3.0": ("lerobot", lambda folder: make_lerobot(folder, "3.0", False)),
    "lerobot 2.1 video": ("lerobot", lambda folder: make_lerobot(folder, "2.1", True)),
    "parquet": ("parquet", make_parquet),
    "rlds": ("rlds", make_rlds),
    "rlds octo": ("rlds", make_octo),
    "dreamer": ("dreamer", make_dreamer),
    "npz": ("npz", make_npz),
    "torchrl_memmap": ("torchrl_memmap", make_memmap),
}


@pytest.mark.slow
@pytest.mark.parametrize(("format_name", "make"), ORIGINALS.values(), ids=ORIGINALS)
def test_mutated_data_sets_are_imported_or_refused_in_one_line(
    tmp_path: Path, format_name: str, make: Callable[[Path], str]
) -> None:
    """In a process of its own: a crash, a hang or much memory is a failure of that alone."""
    (tmp_path / "original").mkdir()
    (tmp_path / "unzipped").mkdir()
    name = make(tmp_path / "original")
    command = [sys.executable, "-m", "tests.interop.hostile_imports", format_name, tmp_path / "original", name]
    done = subprocess.run([*command, str(whole_or_part(600, 40))], capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
