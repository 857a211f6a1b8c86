"""Compiled kernels are found again, whoever else compiles them and wherever they can be kept."""

import ctypes
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diskreplay.kernels import cache
from tests.testing.support import REPOSITORY

# Runs one kernel; prints the folder and how often it was compiled.
PICK = """
import numpy as np
from diskreplay.kernels import cache, table
pick = table.chosen("ids_at")
out = np.zeros(3, np.int64)
block = np.array([[7, 0], [2, 0], [3, 0], [0, 0], [0, 3]])
pick(np.array([0.0, 1, 2]), 0, 1, block, out[:0], out.copy(), out)
assert out.tolist() == [7, 9, 11]
print(cache.folder(), sum(pick.stats.cache_misses.values()))
"""
# Forks while another thread compiles, with each of four kernels; prints the folder and how often.
FORK = """
import faulthandler, os, threading, time
faulthandler.dump_traceback_later(60, exit=True)
from diskreplay.kernels import cache, table
forks = 0
for name in ("nstep", "powers", "gae", "stream"):
    thread = threading.Thread(target=table.chosen, args=(name,))
    thread.start()
    while thread.is_alive():
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)
        forks += 1
        time.sleep(0.001)  # else it would fork all the time, and nothing be compiled
print(cache.folder(), forks)
"""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1


def become_ordinary():
    """Let permissions count for root too; a user without that right has no capability to drop."""
    ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0)


def start(code=PICK, where=REPOSITORY, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    kept |= {"PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=kept | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=become_ordinary,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    folder, compiled = out.split()
    return folder, int(compiled), err


@pytest.mark.slow
def test_of_processes_that_start_at_once_one_compiles(tmp_path):
    processes = [start(NUMBA_CACHE_DIR=tmp_path) for _ in range(8)]
    found = [finish(process) for process in processes]
    assert {folder for folder, _, _ in found} == {str(next(tmp_path.glob("diskreplay-*")))}
    assert sorted(compiled for _, compiled, _ in found) == [0] * 7 + [1]
    assert not list(tmp_path.glob("diskreplay-*/*.tmp.*"))


@pytest.mark.slow
def test_what_only_kernels_call_is_compiled_with_them_and_not_kept(tmp_path):
    code = PICK.replace("sum(pick.stats.cache_misses.values())", "len(ids_at._search.signatures)")
    code = code.replace("import cache, table", "import cache, ids_at, table")
    assert [finish(start(code, NUMBA_CACHE_DIR=tmp_path))[1] for _ in range(2)] == [1, 0]
    assert {path.name.split("-")[0] for path in tmp_path.glob("diskreplay-*/*.nb?")} == {"ids_at.ids_at"}


@pytest.mark.slow
def test_what_kernels_call_where_it_is_is_kept_beside_them(tmp_path):
    code = PICK.replace("import cache, table", "import cache, sumtree, table")
    code = code.replace("print(", 'table.chosen("sumtree_find")\nprint(')
    code = code.replace("pick.stats", "sumtree._descend.stats")
    assert [finish(start(code, NUMBA_CACHE_DIR=tmp_path))[1] for _ in range(2)] == [1, 0]
    kept = {path.name.split("-")[0] for path in tmp_path.glob("diskreplay-*/*.nb?")}
    assert kept == {"ids_at.ids_at", "sumtree._descend", "sumtree.sumtree_find"}


@pytest.mark.slow
def test_who_compiles_says_so_once(tmp_path):
    code = PICK.replace("print(", 'table.chosen("nstep")\nprint(')
    assert finish(start(code, NUMBA_CACHE_DIR=tmp_path))[2] == f"{cache.COMPILING}\n"
    assert finish(start(code, NUMBA_CACHE_DIR=tmp_path))[2] == ""
    quiet = "import logging\nlogging.getLogger('diskreplay').setLevel('ERROR')\n" + code
    assert finish(start(quiet, NUMBA_CACHE_DIR=tmp_path / "other"))[2] == ""


@pytest.mark.slow
def test_a_process_is_forked_while_it_compiles(tmp_path):
    assert finish(start(FORK, NUMBA_CACHE_DIR=tmp_path))[1] > 3


@pytest.mark.slow
def test_damaged_files_are_compiled_again(tmp_path):
    assert finish(start(NUMBA_CACHE_DIR=tmp_path))[1] == 1
    files = sorted(tmp_path.glob("diskreplay-*/ids_at.ids_at-*"))
    assert [file.suffix for file in files] == [".nbc", ".nbi"]
    for file, damage in zip(files, (b"", b"\x80\x05nonsense"), strict=True):
        good = file.read_bytes()
        file.write_bytes(damage)
        assert finish(start(NUMBA_CACHE_DIR=tmp_path))[1] == 1
        assert len(file.read_bytes()) == len(good)


@pytest.fixture
def read_only_package(tmp_path):
    """A copy of the package that nobody may write to."""
    package = tmp_path / "site-packages"
    shutil.copytree(REPOSITORY / "diskreplay", package / "diskreplay", ignore=shutil.ignore_patterns("__pycache__"))
    folders = [path for path in package.rglob("*") if path.is_dir()]
    for path in folders:
        path.chmod(0o555)
    probe = start(f"import os; print(os.access({str(folders[0])!r}, os.W_OK))")
    if probe.communicate()[0].strip() != "False":
        pytest.skip("permissions do not count here")
    yield package
    for path in folders:
        path.chmod(0o755)


@pytest.mark.slow
def test_kernels_of_a_read_only_installation_are_kept_in_the_users_cache(read_only_package, tmp_path):
    for expected in (1, 0):
        folder, compiled, _ = finish(start(where=read_only_package, XDG_CACHE_HOME=tmp_path / "cache"))
        assert folder.startswith(str(tmp_path / "cache" / "diskreplay" / "diskreplay-"))
        assert compiled == expected
    assert not list(read_only_package.rglob("__pycache__"))


@pytest.mark.slow
def test_without_any_place_kernels_are_compiled_and_a_warning_says_so(read_only_package, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    folder, _, err = finish(start(where=read_only_package, XDG_CACHE_HOME=locked, NUMBA_CACHE_DIR=locked))
    assert folder == "None"
    assert err.startswith("<string>:4: RuntimeWarning: compiled kernels cannot be kept")
    assert "set NUMBA_CACHE_DIR to a folder that can be written" in err


def test_another_source_has_another_folder_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.numba_private.config, "CACHE_DIR", str(tmp_path))
    made = []
    for number in range(12):
        monkeypatch.setattr(cache, "source_digest", lambda number=number: f"{number:02x}" * 32)
        made.append(Path(cache.folder.__wrapped__()))
        os.utime(made[-1], (number, number))
    assert len(set(made)) == 12
    assert set(tmp_path.iterdir()) == set(made[-8:])


def test_kernels_that_are_used_stay_however_old_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(cache.numba_private.config, "CACHE_DIR", str(tmp_path))

    def used(number):
        monkeypatch.setattr(cache, "source_digest", lambda: f"{number:02x}" * 32)
        return Path(cache.folder.__wrapped__())

    first = used(0)
    for number in range(1, 8):
        os.utime(used(number), (number, number))
    os.utime(first, (0, 0))
    assert used(0) == first
    used(8)
    assert first.exists()
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.slow
@pytest.mark.parametrize("file", ["ids.py", "kernels/ids_at.py"])
def test_what_is_compiled_into_kernels_is_part_of_their_source(file, tmp_path):
    package = tmp_path / "changed" / "diskreplay"
    shutil.copytree(REPOSITORY / "diskreplay", package, ignore=shutil.ignore_patterns("__pycache__"))
    before = finish(start(where=package.parent, NUMBA_CACHE_DIR=tmp_path))
    with (package / file).open("a") as source:
        source.write("# another one\n")
    after = finish(start(where=package.parent, NUMBA_CACHE_DIR=tmp_path))
    assert before[0] != after[0]
    assert (before[1], after[1]) == (1, 1)


def test_a_process_that_holds_the_lock_for_too_long_is_not_waited_for(tmp_path, monkeypatch):
    held = cache._locked(str(tmp_path))
    assert held.is_locked
    monkeypatch.setattr(cache, "_PATIENCE", 0.05)
    started = time.monotonic()
    assert cache._locked(str(tmp_path)) is None
    assert time.monotonic() - started >= 0.05
    held.release()
    again = cache._locked(str(tmp_path))
    assert again.is_locked
    again.release()
    assert cache._locked(str(tmp_path / "lock")) is None  # in no folder


@pytest.mark.slow
def test_kernels_are_kept_in_the_users_cache_and_nothing_beside_the_package(tmp_path):
    package = tmp_path / "site-packages"
    shutil.copytree(REPOSITORY / "diskreplay", package / "diskreplay", ignore=shutil.ignore_patterns("__pycache__"))
    installed = sorted(package.rglob("*"))
    home, cache_home = tmp_path / "home", tmp_path / "cache"
    for environment, expected in [
        ({"HOME": home, "XDG_CACHE_HOME": cache_home}, cache_home),
        ({"HOME": home, "XDG_CACHE_HOME": "relative"}, home / ".cache"),
        ({"HOME": home}, home / ".cache"),
    ]:
        folder, _, err = finish(start(where=package, **environment))
        assert Path(folder).parent == expected / "diskreplay"
        assert err in ("", f"{cache.COMPILING}\n")
    assert sorted(package.rglob("*")) == installed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "home", "site-packages"]


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(cache.numba_private.config, "CACHE_DIR", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.warns(RuntimeWarning, match=r"^compiled kernels cannot be kept.*\(the user has no home\): set NUMBA"):
        assert cache.folder.__wrapped__() is None


def test_another_numba_has_another_folder(monkeypatch):
    before = cache.source_digest()
    assert cache.source_digest.__wrapped__() == before
    monkeypatch.setattr(cache.numba, "__version__", "0.99.0")
    assert cache.source_digest.__wrapped__() != before
