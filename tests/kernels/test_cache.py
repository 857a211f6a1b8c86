"""Compiled kernels are found again, whoever else compiles them and wherever they can be kept."""

import ctypes
import os
import pty
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from diskreplay.kernels import cache
from tests.testing.support import REPOSITORY

# Runs one kernel; prints the folder and how often it was compiled.
PICK = """
import numpy as np
from diskreplay.kernels import cache, table
from diskreplay.kernels.packed import pack
pick = table.get_kernel("ids_at")
memory, nothing = np.zeros((2, 3), np.int64), np.zeros(0, np.int64)
block = np.array([[7, 0], [2, 0], [3, 0], [0, 0], [0, 3]])
pick(np.array([0.0, 1, 2]), 0, 1, pack(nothing, block, nothing), memory)
assert memory[0].tolist() == [7, 9, 11]
print(cache.folder(), sum(pick.stats.cache_misses.values()))
"""
# Draws one of a thousand ids.
RANDOM = """
import numpy as np
from diskreplay.kernels import cache, table
from diskreplay.kernels.packed import pack
memory, nothing = np.zeros((2, 1), np.int64), np.zeros(0, np.int64)
block = np.array([[0, 0], [1, 0], [1000, 0], [0, 0], [0, 1000]])
table.get_kernel("random_ids")(5, 0, 1, pack(nothing, block, nothing), memory)
print(cache.folder(), memory[0, 0])
"""
# Forks while another thread compiles, with each of four kernels; prints the folder and how often.
FORK = """
import faulthandler, os, threading, time
faulthandler.dump_traceback_later(60, exit=True)
from diskreplay.kernels import cache, table
forks = 0
for name in ("nstep", "powers", "gae", "stream"):
    thread = threading.Thread(target=table.get_kernel, args=(name,))
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


def start(code=PICK, where=REPOSITORY, stderr=subprocess.PIPE, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    kept |= {"PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        env=kept | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        preexec_fn=become_ordinary,
    )


def finish(process):
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    folder, compiled = out.split()
    return folder, int(compiled), err


@pytest.mark.slow(turns=4)
def test_of_processes_that_start_at_once_one_compiles(tmp_path):
    processes = [start(NUMBA_CACHE_DIR=tmp_path) for _ in range(4)]
    found = [finish(process) for process in processes]
    assert {folder for folder, _, _ in found} == {str(min(tmp_path.glob("diskreplay-*")))}
    assert sorted(compiled for _, compiled, _ in found) == [0] * 3 + [1]
    assert not list(tmp_path.glob("diskreplay-*/*.tmp.*"))


@pytest.mark.slow(turns=4)
def test_what_only_kernels_call_is_compiled_with_them_and_not_kept(tmp_path):
    assert [finish(start(NUMBA_CACHE_DIR=tmp_path))[1] for _ in range(2)] == [1, 0]
    assert {path.name.split("-")[0] for path in tmp_path.glob("diskreplay-*/*.nb?")} == {"ids_at.ids_at"}


# Compiles or loads a kernel; prints the folder and how often it was compiled itself.
ONE = """
from diskreplay.kernels import cache, table
name = "{}"
print(cache.folder(), sum(cache.compile_kernel(table.MODULES[name], name).stats.cache_misses.values()))
"""


@pytest.mark.slow(turns=4)
def test_a_shared_kernel_is_compiled_once_for_itself_and_those_that_call_it(tmp_path):
    assert finish(start(ONE.format("weights"), NUMBA_CACHE_DIR=tmp_path))[1] == 1
    assert finish(start(ONE.format("powers"), NUMBA_CACHE_DIR=tmp_path))[1] == 0
    kept = {path.name.split("-")[0] for path in tmp_path.glob("diskreplay-*/*.nb?")}
    assert kept == {"sumtree.powers", "sumtree.weights"}


@pytest.mark.slow(turns=4)
def test_who_compiles_says_so_once(tmp_path):
    code = PICK.replace("print(", 'table.get_kernel("nstep")\nprint(')
    assert finish(start(code, NUMBA_CACHE_DIR=tmp_path))[2] == f"{cache.COMPILING}\n"
    assert finish(start(code, NUMBA_CACHE_DIR=tmp_path))[2] == ""
    quiet = "import logging\nlogging.getLogger('diskreplay').setLevel('ERROR')\n" + code
    assert finish(start(quiet, NUMBA_CACHE_DIR=tmp_path / "other"))[2] == ""


# Compiles or loads kernels; prints the folder and how many it compiled itself.
SEVERAL = """
from diskreplay.kernels import cache, table
names = "advise", "nstep", "discounted", "stream"
table.compile_all(names)
print(cache.folder(), sum(sum(table.get_kernel(name).stats.cache_misses.values()) for name in names))
"""


@pytest.mark.slow(turns=4)
def test_a_terminal_shows_which_kernel_of_several_is_compiled(tmp_path):
    for expected in (f"{cache.COMPILING}\r\n\r\x1b[Kcompiling kernel 1 of 4: advise", ""):
        ours, theirs = pty.openpty()
        process = start(SEVERAL, stderr=theirs, NUMBA_CACHE_DIR=tmp_path)
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the process has ended
            while read := os.read(ours, 1024):
                shown += read
        os.close(ours)
        assert process.wait() == 0
        process.stdout.close()
        text = shown.decode()
        assert text.startswith(expected)
        assert text.endswith("\r\x1b[K" if expected else "")


@pytest.mark.slow(turns=4)
def test_nothing_but_a_line_is_shown_where_there_is_no_terminal(tmp_path):
    assert finish(start(SEVERAL, NUMBA_CACHE_DIR=tmp_path))[2] == f"{cache.COMPILING}\n"
    assert finish(start(SEVERAL, NUMBA_CACHE_DIR=tmp_path))[1:] == (0, "")


@pytest.mark.slow(turns=4)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="no second process would be faster")
def test_a_second_process_compiles_the_last_kernels_first(tmp_path):
    # The first kernel takes until the second one is there.
    code = SEVERAL.replace(
        "table.compile_all(names)",
        """
import os, time
from pathlib import Path
keep = cache._keep
def slowly(*arguments):
    found = keep(*arguments)
    while not list(Path(cache.folder()).glob("nstep.compiled")):
        time.sleep(0.01)
    return found
cache._keep = slowly
table.compile_all(names)
""",
    )
    assert finish(start(code, NUMBA_CACHE_DIR=tmp_path))[1] == 1
    assert len(list(tmp_path.glob("diskreplay-*/*.nbc"))) == 4


@pytest.mark.slow
def test_a_process_is_forked_while_it_compiles(tmp_path):
    assert finish(start(FORK, NUMBA_CACHE_DIR=tmp_path))[1] > 3


@pytest.mark.slow(turns=4)
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


@pytest.mark.slow(turns=4)
def test_kernels_of_a_read_only_installation_are_kept_in_the_users_cache(read_only_package, tmp_path):
    installed = sorted(read_only_package.rglob("*"))
    for expected in (1, 0):
        folder, compiled, _ = finish(start(where=read_only_package, XDG_CACHE_HOME=tmp_path / "cache"))
        assert folder.startswith(str(tmp_path / "cache" / "diskreplay" / "diskreplay-"))
        assert compiled == expected
    assert sorted(read_only_package.rglob("*")) == installed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "site-packages"]


@pytest.mark.slow
def test_without_any_place_kernels_are_compiled_and_a_warning_says_so(read_only_package, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    folder, _, err = finish(start(where=read_only_package, XDG_CACHE_HOME=locked, NUMBA_CACHE_DIR=locked))
    assert folder == "None"
    assert err.startswith("<string>:5: RuntimeWarning: compiled kernels cannot be saved")
    assert "set NUMBA_CACHE_DIR to a writable folder" in err


def test_another_source_has_another_folder_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    made = []
    for number in range(12):
        monkeypatch.setattr(cache, "source_digest", lambda number=number: f"{number:02x}" * 32)
        made.append(Path(cache.folder.__wrapped__()))
        of_numba = Path(f"{made[-1]}_{'0' * 40}")  # which it makes where NUMBA_CACHE_DIR is set
        of_numba.mkdir()
        for path in (made[-1], of_numba):
            os.utime(path, (number, number))
    assert len(set(made)) == 12
    assert set(tmp_path.iterdir()) == {*made[-8:], *(Path(f"{path}_{'0' * 40}") for path in made[-8:])}


def test_kernels_that_are_used_stay_however_old_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

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


@pytest.mark.slow(turns=4)
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


@pytest.mark.slow
def test_a_change_of_what_a_kernel_calls_in_another_file_is_seen(tmp_path):
    package = tmp_path / "changed" / "diskreplay"
    shutil.copytree(REPOSITORY / "diskreplay", package, ignore=shutil.ignore_patterns("__pycache__"))
    assert finish(start(RANDOM, where=package.parent, NUMBA_CACHE_DIR=tmp_path))[1] > 0
    called = package / "kernels" / "runs.py"
    stamp, text = called.stat(), called.read_text()
    # Of the same size and time; a stride is read where times are, which are 0.
    called.write_text(text.replace("FIRST, STRIDE, COUNT, TIME, BEFORE", "FIRST, TIME, COUNT, STRIDE, BEFORE"))
    os.utime(called, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert finish(start(RANDOM, where=package.parent, NUMBA_CACHE_DIR=tmp_path))[1] == 0


@pytest.mark.slow
def test_a_full_disk_costs_time_and_nothing_else(tmp_path):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))\n"
    code = limit + PICK.replace("sum(pick.stats.cache_misses.values())", "len(pick.signatures)")
    for _ in range(2):
        _, signatures, err = finish(start(code, NUMBA_CACHE_DIR=tmp_path))
        assert signatures == 1
        assert err == f"{cache.COMPILING}\n"
    assert not [*tmp_path.rglob("*.nbc"), *tmp_path.rglob("*tmp*")]
    assert finish(start(NUMBA_CACHE_DIR=tmp_path))[1] == 1
    assert finish(start(NUMBA_CACHE_DIR=tmp_path))[1] == 0


@pytest.mark.slow
def test_a_damaged_copy_of_the_source_is_written_again(tmp_path):
    folder, compiled, _ = finish(start(NUMBA_CACHE_DIR=tmp_path))
    assert compiled == 1
    copied = Path(folder) / "ids_at.py"
    text = copied.read_bytes()
    copied.write_bytes(b"raise RuntimeError")
    assert finish(start(NUMBA_CACHE_DIR=tmp_path))[1] == 0
    assert copied.read_bytes() == text


def test_a_process_that_holds_the_lock_for_too_long_is_not_waited_for(tmp_path, monkeypatch):
    held = cache._locked(str(tmp_path / "lock"))
    assert held.is_locked
    monkeypatch.setattr(cache, "_PATIENCE", 0.05)
    started = time.monotonic()
    assert cache._locked(str(tmp_path / "lock")) is None
    assert time.monotonic() - started >= 0.05
    held.release()
    again = cache._locked(str(tmp_path / "lock"))
    assert again.is_locked
    again.release()
    assert cache._locked(str(tmp_path / "lock" / "lock")) is None  # in no folder


@pytest.mark.parametrize(("variable", "expected"), [("caches", "caches"), ("relative", ".cache"), (None, ".cache")])
def test_kernels_are_kept_in_the_users_cache(variable, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if variable is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / variable) if variable == expected else variable)
    assert Path(cache.folder.__wrapped__()).parent == tmp_path / expected / "diskreplay"
    assert [path.name for path in tmp_path.iterdir()] == [expected]


def test_without_a_home_nothing_is_kept(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.warns(RuntimeWarning, match=r"^compiled kernels cannot be saved.*\(the user has no home\): set NUMBA"):
        assert cache.folder.__wrapped__() is None


def test_another_numba_has_another_folder(monkeypatch):
    before = cache.source_digest()
    assert cache.source_digest.__wrapped__() == before
    monkeypatch.setattr(cache.numba, "__version__", "0.99.0")
    assert cache.source_digest.__wrapped__() != before
