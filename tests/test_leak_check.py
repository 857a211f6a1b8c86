"""The fixture that looks for leaks must find them: it runs here on tests that leave something behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import gc, mmap, multiprocessing, threading, time
import pytest

KEPT = []

def test_leaves_a_descriptor(tmp_path):
    KEPT.append(open(tmp_path / "file", "w"))

def test_leaves_a_mapping(tmp_path):
    (tmp_path / "mapped").write_bytes(b"x" * 4096)
    with open(tmp_path / "mapped", "r+b") as file:
        KEPT.append(mmap.mmap(file.fileno(), 0))

def test_leaves_a_thread():
    stop = threading.Event()
    KEPT.append(stop)
    threading.Thread(target=stop.wait, name="diskreplay-test", daemon=True).start()

def test_leaves_a_process():
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), name="sleeper", daemon=True)
    child.start()
    KEPT.append(child)

@pytest.mark.leaks("to see that it may")
def test_may_leave_a_descriptor(tmp_path):
    KEPT.append(open(tmp_path / "file", "w"))

@pytest.mark.leaks
def test_gives_no_reason():
    pass

def test_leaves_garbage_that_the_collector_closes(tmp_path):
    cycle = [open(tmp_path / "file", "w")]
    cycle.append(cycle)

def test_tidies_up(tmp_path):
    with open(tmp_path / "file", "w"):
        threading.Thread(target=int, name="diskreplay-short").start()
"""


@pytest.mark.slow
def test_each_kind_of_leak_fails_its_test_and_nothing_else_does(tmp_path: Path) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text()
    assert "GRACE_SECONDS = 20.0" in conftest
    (tmp_path / "conftest.py").write_text(conftest.replace("GRACE_SECONDS = 20.0", "GRACE_SECONDS = 0.2"))
    (tmp_path / "test_leaks.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = leaks\n")
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}  # which has `tests`
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    failed = [line for line in done.stdout.splitlines() if line.startswith("ERROR ")]
    assert len(failed) == 5, done.stdout
    for line, (name, reason) in zip(
        sorted(failed),
        [
            ("test_gives_no_reason", "needs a reason"),
            ("test_leaves_a_descriptor", "the test left behind: {'descriptors'"),
            ("test_leaves_a_mapping", "the test left behind: {"),
            ("test_leaves_a_process", "the test left behind: {'processes': {'sleeper'}}"),
            ("test_leaves_a_thread", "the test left behind: {'threads': {'diskreplay-test'}}"),
        ],
        strict=True,
    ):
        assert name in line
        assert reason in done.stdout
