"""A process that saves states and is killed at any instant leaves the old state or the new one, whole, and no more."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import diskreplay as dr
from tests.crash.injection import die_at
from tests.testing.support import REPOSITORY, append_numbered, serial_schema
from tests.tiers import SHARES, each_share, whole_or_part

SAVE = """
import sys
import diskreplay as dr
from tests.crash.test_states import tree

with dr.open(sys.argv[1], "a") as store:
    for i in range(int(sys.argv[2]), 1 << 30):
        store.save_sampler_state("run", tree(i))
        print(i, flush=True)
"""


def tree(i: int) -> dict[str, Any]:
    return {
        "i": i,
        "arrays": [np.full(n, i) for n in (0, 1, 100, 5000)],
        "deep": {"chances": np.full((3, i % 4), i / 7)},
    }


def save(path: Path, number: int, _: Any = None) -> None:
    with dr.open(path, "a") as store:
        store.save_sampler_state("run", tree(number))


def saved(path: Path) -> int:
    """Return the number of the state that is there, which is whole."""
    with dr.open(path) as store:
        return check_whole(store.load_sampler_state("run"))


def check_whole(state: dict[str, Any]) -> int:
    i = state["i"]
    expected = tree(i)
    found = [*state["arrays"], state["deep"]["chances"]]
    for array, other in zip(found, [*expected["arrays"], expected["deep"]["chances"]], strict=True):
        np.testing.assert_array_equal(array, other, strict=True)
    return int(i)


def walk_without_warnings(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _, member in zarr.open_group(path, mode="r")["samplers"].members(max_depth=None):
            if isinstance(member, zarr.Array):
                np.asarray(member[...])


def check_clean(path: Path, name: str, there: bool) -> None:
    """Open for writing and make a segment; then nothing may be left of what the dead process was about."""
    walk_without_warnings(path)
    with dr.open(path, "a") as store:
        assert not [left for left in os.listdir(path / "counters") if left.startswith(("state-", "old-", "new-"))]
        with store.writer() as writer:
            append_numbered(writer, [0, 1])
        assert store.verify(deep=True) == []
    names = os.listdir(path / "samplers" / name) if there else []
    assert len(names) == 2 * there
    assert os.listdir(path / "samplers").count(name) == there
    walk_without_warnings(path)


def saves(path: Path) -> bool:
    """Whether a process is, or was, in the middle of a save."""
    return any(name.startswith("state-") for name in os.listdir(path / "counters"))


def stop_inside(child: subprocess.Popen[str], path: Path) -> None:
    """Stop a process in the middle of a save."""
    is_inside = False
    while not is_inside:
        child.send_signal(signal.SIGCONT)
        time.sleep(0.001)  # it goes on a little: into a save, or out of one
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        is_inside = saves(path)


def check_rounds(path: Path, rounds: int) -> None:
    dr.create(path, serial_schema()).close()
    rng = random.Random(0)
    newest, killed_inside = 0, 0
    for number in range(rounds):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE, str(path), str(newest + 1)], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True
        ) as child:
            assert child.stdout is not None
            told = int(child.stdout.readline())
            for _ in range(rng.randrange(4)):
                told = int(child.stdout.readline())
            # The instant of the death is what is tried out, no matter which it is.
            time.sleep(rng.random() * 0.02)
            if number == rounds - 1 and not killed_inside:  # none was in the middle of a save, by chance
                stop_inside(child, path)
            child.send_signal(signal.SIGKILL)
            told = max([told, *map(int, child.stdout.read().split("\n")[:-1])])
        killed_inside += saves(path)
        found = saved(path)
        assert told <= found <= told + 1
        check_clean(path, "run", True)
        assert saved(path) == found
        newest = found
    assert killed_inside


@pytest.mark.slow(turns=4)
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_at_random_instants_leaves_one_whole_state(tmp_store: Path) -> None:
    check_rounds(tmp_store, whole_or_part(40, 4))


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
@each_share
def test_a_process_that_dies_before_any_file_operation_leaves_one_whole_state(
    tmp_store: Path, first: bool, share: int
) -> None:
    dr.create(tmp_store, serial_schema()).close()
    old = 1
    seen = set()
    for operation in range(share, 1000, SHARES):
        if first:
            shutil.rmtree(tmp_store / "samplers" / "run", ignore_errors=True)
        else:
            save(tmp_store, old)
        died = die_at(partial(save, tmp_store, old + 1), operation).died
        try:
            found = saved(tmp_store)
        except dr.StoreNotFound:
            found = 0
        assert found in ({0, old + 1} if first else {old, old + 1})
        seen.add(found > old)
        check_clean_quickly(tmp_store, found)
        old += 2
        if not died:
            assert found == old - 1
            break
    assert operation > 40
    assert seen == {True, False}


def check_clean_quickly(path: Path, found: int) -> None:
    with dr.open(path, "a"):
        pass
    assert sorted(os.listdir(path / "counters")) == ["c.0", "lock", "zarr.json"]
    assert os.listdir(path / "samplers").count("run") == (found > 0)
    if found:
        assert len(os.listdir(path / "samplers" / "run")) == 2
        assert saved(path) == found
