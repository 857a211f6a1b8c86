"""Data sets that others published: every value of an import and of an export is what another reader finds.

`own_libraries` compares them with the readings of TFDS, LeRobot and robomimic, every night.
"""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.interop.own_libraries.compare import HERE, LIBRARIES, SHARED, compare_set
from tools.environments import run

# scheme, the library that reads it, data set
SETS = [
    ("npz", "numpy", "sb2_gail/expert_cartpole.npz"),
    ("npz", "numpy", "sb2_gail/expert_pendulum.npz"),
    ("robomimic", "h5py", "robosuite_lift/demo.hdf5"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "library", "data_set"), SETS, ids=[data_set for *_, data_set in SETS])
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_every_value_is_that_of_another_reader(name: str, library: str, data_set: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    if not (SHARED / data_set).exists():
        pytest.skip(f"needs ../shared/data/{data_set}")
    do = partial(run, sys.executable, HERE / LIBRARIES[name].program, cwd=tmp_path)
    count = compare_set(name, "", SHARED / data_set, tmp_path / "made", do)
    assert count.values_in is not None
    assert count.values_out is not None
    assert 0 < count.values_in <= count.values_out


@pytest.mark.slow
def test_every_number_of_a_data_set_of_lerobot_is_that_of_pyarrow(tmp_path: Path) -> None:
    pytest.importorskip("av")
    pq = pytest.importorskip("pyarrow.parquet")
    from diskreplay.interop.lerobot import export_dataset, import_dataset

    source = SHARED / "lerobot_v21_g1"
    if not source.exists():
        pytest.skip("needs ../shared/data/lerobot_v21_g1")
    import_dataset(source, tmp_path / "store", skip=["observation.images.cam_high"])
    export_dataset(tmp_path / "store", tmp_path / "again")
    tables = [pq.read_table(file) for file in sorted((source / "data").rglob("*.parquet"))]
    again = pq.read_table(tmp_path / "again/data").sort_by("index")
    count = 0
    with dr.open(tmp_path / "store") as store:
        assert store.num_episodes == len(tables)
        for number, (episode, table) in enumerate(zip(store.episodes, tables, strict=True)):
            theirs = again.filter(np.equal(again["episode_index"].to_numpy(), number))
            for name, rows in (("observation.state", episode.obs), ("action", episode.action)):
                for read in (table, theirs):
                    np.testing.assert_array_equal(rows, np.stack(read[name].to_numpy()), name, strict=True)
                    count += rows.size
            for name in ("timestamp", "frame_index", "task_index"):
                np.testing.assert_array_equal(theirs[name].to_numpy(), table[name].to_numpy(), name)
                count += len(table)
    assert count == sum(len(table) for table in tables) * (2 * (26 + 26) + 3)
