"""`diskreplay doctor` and `--version --json`: their values, their problems, and machines that lack something."""

import json
import os
import platform
import resource
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.testing.support import run_python
from tests.testing.without import run_without

EXTRAS = ("torch", "numba", "llvmlite", "gymnasium", "pandas", "xarray", "pyarrow", "h5py", "matplotlib", "PIL")
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def install(folder: Path, name: str, version: str, *lines: str) -> None:
    """Make metadata of a library in a folder, as pip does."""
    within = folder / f"{name}-{version}.dist-info"
    within.mkdir()
    (within / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install metadata of libraries before all others; of `diskreplay` these are the lines."""
    monkeypatch.syspath_prepend(tmp_path)

    def install_all(*lines: str, python: str = HERE, **libraries: str) -> None:
        install(
            tmp_path, "diskreplay", dr.__version__, f"Classifier: Programming Language :: Python :: {python}", *lines
        )
        for name, version in libraries.items():
            install(tmp_path, name, version)

    return install_all


def test_a_healthy_machine_fits_on_a_screen_and_has_no_problems(
    run: Callable, tmp_path: Path, installed: Callable
) -> None:
    installed("Requires-Dist: numpy>=2")
    done = run("doctor", tmp_path)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) <= 24
    assert [line[:13].strip() for line in lines if line[:1] != " "] == [
        *("diskreplay", "libraries", "processor", "path", "file system", "/dev/shm", "limits", "numba", "kernels"),
        "problems",
    ]
    assert str(tmp_path) in done.out
    assert lines[-1].split() == ["problems", "none"]


def test_a_program_is_told_the_same(run: Callable, tmp_path: Path) -> None:
    done = run("doctor", tmp_path, "--json")
    found = json.loads(done.out)
    assert (done.code, found["usable"]) == (0, True)
    assert (found["diskreplay"], found["python"]) == (dr.__version__, platform.python_version())
    assert found["libraries"]["numpy"] == metadata.version("numpy")
    assert found["libraries"].keys() <= found["tested"].keys()
    assert found["tested"]["numba"], "its range is empty"
    assert not {"pytest", "ruff", "mkdocs"} & found["tested"].keys()
    assert found["cpu"]["cores"] == len(os.sched_getaffinity(0))
    disk = found["file_system"]
    assert disk["path"] == str(tmp_path)
    assert disk["type"] in Path("/proc/filesystems").read_text().split()
    assert os.path.ismount(disk["mount_point"])
    assert "rw" in disk["options"]
    assert disk["writable"]
    status = os.statvfs(tmp_path)
    assert disk["bytes"] == status.f_blocks * status.f_frsize
    assert (found["limits"]["descriptors"], found["limits"]["most_descriptors"]) == resource.getrlimit(
        resource.RLIMIT_NOFILE
    )
    assert found["limits"]["mappings"] == int(Path("/proc/sys/vm/max_map_count").read_text())


def test_versions_are_given_to_a_program(run: Callable) -> None:
    done = run("--version", "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert found["diskreplay"] == dr.__version__
    assert found["libraries"]["zarr"] == metadata.version("zarr")


def test_versions_that_were_not_tested_are_told_with_what_to_install(run: Callable, installed: Callable) -> None:
    installed(
        "Provides-Extra: torch",
        "Provides-Extra: test",
        "Requires-Dist: numpy>=2",
        'Requires-Dist: numba<0.69,>=0.61; extra == "torch"',
        'Requires-Dist: numba<0.68.5; (python_version >= "3.11") and extra == "torch"',
        'Requires-Dist: numba<0.1; (python_version < "3.11") and extra == "torch"',
        'Requires-Dist: torch>=2.2; extra == "torch"',
        'Requires-Dist: pytest<1; extra == "test"',
        numpy="1.26.4",
        numba="0.68.7",
        torch="2.5.0+cpu",
        python="2.7",
    )
    numba = "<0.68.5,<0.69,>=0.61"
    done = run("doctor", "--json")
    assert done.code == 0
    assert json.loads(done.out)["problems"] == [
        f"Python {platform.python_version()} is outside of the tested versions (2.7): use one of these",
        f'numba 0.68.7 is outside of the tested versions ({numba}): pip install "numba{numba}"',
        'numpy 1.26.4 is outside of the tested versions (>=2): pip install "numpy>=2"',
    ]


def test_a_core_library_that_is_missing_makes_it_unusable(run: Callable, installed: Callable) -> None:
    installed("Requires-Dist: no-such-library>=3", "Provides-Extra: x", 'Requires-Dist: no-such-either; extra == "x"')
    done = run("doctor", "--json")
    assert done.code == 1
    assert json.loads(done.out)["problems"] == [
        'no-such-library is not installed, and diskreplay needs it: pip install "no-such-library>=3"'
    ]


def test_a_checkout_that_is_not_installed_has_no_table_to_compare_with(
    run: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", fail)
    done = run("doctor", "--json")
    found = json.loads(done.out)
    assert (done.code, found["libraries"]) == (0, {})
    assert "is not installed, so tested versions are unknown: install it with pip" in found["problems"][0]


def test_another_platform_is_unusable(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Darwin", "host", "24.0", "version", "arm64")))
    monkeypatch.delattr(os, "sched_getaffinity")
    hide(monkeypatch, "/proc", "/sys")
    done = run("doctor")
    assert (done.code, done.err) == (1, "")
    assert "this is Darwin on arm64: use a supported machine" in done.out


def test_the_command_line_begins_where_python_lacks_what_only_linux_has() -> None:
    run_python(
        "import os, time; del time.CLOCK_BOOTTIME, os.sched_getaffinity, os.memfd_create\n"
        "from diskreplay.__main__ import main\n"
        "assert main(['--version']) == 0"
    )


def hide(monkeypatch: pytest.MonkeyPatch, *folders: str, **texts: str) -> None:
    """Have files of these folders read as `texts` by their names, or not at all."""
    read = Path.read_text

    def read_text(path: Path, *args: object, **options: str) -> str:
        if path.name in texts:
            return texts[path.name]
        if str(path).startswith(folders):
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)


def test_what_cannot_be_read_is_left_out(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "/proc", "/sys")
    done = run("doctor", "--json")
    found = json.loads(done.out)
    assert (done.code, done.err) == (0, "")
    assert (found["limits"]["mappings"], found["file_system"]["mount_point"]) == (None, None)
    assert run("doctor").code == 0


def test_a_file_system_without_blocks_is_not_full(run: Callable) -> None:
    done = run("doctor", "/proc", "--json")
    found = json.loads(done.out)
    assert (done.code, found["file_system"]["bytes"]) == (0, 0)
    assert not any("make room" in problem for problem in found["problems"])


def test_a_mount_point_with_a_space_and_a_damaged_table_are_read(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "my disk"
    folder.mkdir()
    at = str(folder).replace(" ", r"\040")
    lines = [
        "damaged",
        "21 1 0:1 / / rw,relatime shared:1 - ext4 /dev/root rw",
        rf"22 1 0:2 / {at} rw,noatime - overlay none rw,lowerdir=/a:/b,xino=off",
        rf"23 1 0:3 / {at}er rw - ext4 /dev/other rw,data=ordered",
    ]
    hide(monkeypatch, mountinfo="\n".join(lines))
    found = json.loads(run("doctor", folder, "--json").out)["file_system"]
    assert (found["mount_point"], found["options"]) == (str(folder), ["rw", "noatime", "xino=off"])


def test_a_container_has_the_cores_of_its_quota(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, **{"cpu.max": "250000 100000\n"})
    assert json.loads(run("doctor", "--json").out)["cpu"]["quota_cores"] == 2.5
    assert "(a quota of 2.5)" in run("doctor").out


def test_each_problem_of_a_machine_is_a_line(
    run: Callable, installed: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed()
    monkeypatch.setattr("diskreplay.segments.files.durable._type_number", lambda path: 0x6969)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    few = 1 << 20
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((few, 1, few, 64, 64, few, few, few, 0, 255, 0)))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    hide(monkeypatch, max_map_count="5000\n")
    here = os.getcwd()
    done = run("doctor", "--json")
    found = json.loads(done.out)
    assert (done.code, found["usable"]) == (0, True)
    assert (found["file_system"]["network"], found["limits"]["most_descriptors"]) == (True, None)
    network, *others = found["problems"]
    assert network.startswith(f"{here} is on nfs. ")
    assert others == [
        f"{here} cannot be written by this user: stores there can only be read, choose another folder",
        f"{here} has 64 B free: make room, or limit stores with capacity_bytes=",
        "/dev/shm has 1.0 MB; workers of a DataLoader need it: give the container --shm-size=8g, or use a Sampler "
        "with prefetch= instead of workers",
        "a process may have only 256 files open: allow more (ulimit -n 1024)",
        "a process may have only 5,000 mappings, but stores keep up to 30,000: "
        "allow more (sysctl vm.max_map_count=65530)",
    ]
    shown = run("doctor").out
    assert shown.count("\nproblem ") == len(found["problems"])
    assert "nfs, possibly mounted by several machines" in shown


def tell(**variables: str) -> dict[str, Any]:
    """Return what `doctor --json` prints in a process with these variables of the environment."""
    code = "from diskreplay.__main__ import main; assert main(['doctor', '--json']) == 0"
    found: dict[str, Any] = json.loads(run_python(code, env=os.environ | variables))
    return found


def test_numba_says_where_kernels_are_kept(tmp_path: Path) -> None:
    before = tell(NUMBA_CACHE_DIR=str(tmp_path), NUMBA_OPT="2")["numba"]
    assert (Path(before["cache"]).parent, before["kernels_kept"], before["cache_error"]) == (tmp_path, 0, None)
    assert (before["error"], before["variables"]) == (None, {"NUMBA_CACHE_DIR": str(tmp_path), "NUMBA_OPT": "2"})
    (Path(before["cache"]) / "ids_at.compiled").touch()
    assert tell(NUMBA_CACHE_DIR=str(tmp_path))["numba"]["kernels_kept"] == 1


def test_a_cache_that_cannot_be_written_and_kernels_in_python_are_problems() -> None:
    nowhere = {"NUMBA_CACHE_DIR": "/proc/a", "XDG_CACHE_HOME": "/proc/b", "NUMBA_DISABLE_JIT": "1"}
    found = tell(**nowhere)
    assert found["numba"]["cache"] is None
    unwritable, disabled = found["problems"][-2:]
    assert unwritable.startswith("compiled kernels cannot be saved, so each process compiles them for itself (")
    assert unwritable.endswith("): set NUMBA_CACHE_DIR to a writable folder")
    assert disabled == "NUMBA_DISABLE_JIT is set, so kernels run as plain Python, much slower: unset it"


def test_libraries_that_cannot_be_imported_are_a_line() -> None:
    code = """
from diskreplay.__main__ import main

code = main(["doctor"])
print(code)
"""
    assert run_without(EXTRAS, code) == "0"
    code = """
import contextlib, io, json
from diskreplay.__main__ import main

with contextlib.redirect_stdout(io.StringIO()) as out:
    code = main(["doctor", "--json"])
print(json.dumps([code, json.loads(out.getvalue())]))
"""
    code, found = json.loads(run_without(EXTRAS, code))
    assert (code, found["numba"]["cache"], found["numba"]["error"]) == (0, None, "No module named 'numba'")
    assert found["problems"][-1] == (
        "numba cannot be loaded (No module named 'numba'): pip install --force-reinstall \"diskreplay[torch]\""
    )
