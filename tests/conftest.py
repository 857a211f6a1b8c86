"""Settings of hypothesis, shared fixtures, and the check that no test leaves anything behind."""

import gc
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from diskreplay.errors import MissingExtra
from tests import inner
from tests.testing.merged import make_store
from tests.tiers import NIGHTLY, part_of_cases

# The machine may be busy with other tests: time says nothing about the code, so no deadline and no health check of it.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile(
    "ci", settings.get_profile("dev"), max_examples=50, derandomize=True, database=None, print_blob=True
)
settings.register_profile("nightly", settings.get_profile("dev"), max_examples=300, print_blob=True)
settings.register_profile("thorough", settings.get_profile("dev"), max_examples=1000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("nightly" if NIGHTLY else "ci" if os.environ.get("CI") else "dev")
)

FAILED = pytest.StashKey[bool]()
# How many modules there were when what is imported was left out of searches last, and how many tests have run since.
LEFT_OUT = pytest.StashKey[tuple[int, int]]()
MANY_MODULES, MANY_TESTS = 100, 100  # more than these since: then it is done again
TESTS = Path(__file__).parent
# Modules that are left out of the environment: tests that need one of them skip.
WITHOUT = os.environ.get("DISKREPLAY_WITHOUT", "").split()
GRACE_SECONDS = 20.0  # sealing in the background and exiting processes get this long to finish


@pytest.fixture
def tmp_store(tmp_path: Path) -> Path:
    """The path at which a test may create its store; nothing is there yet."""
    return tmp_path / "store"


@pytest.fixture(scope="session", autouse=True)
def _own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Have the stores of these tests wait for no others, which another process tests or somebody uses.

    Stable-Baselines3 would make a folder in TMPDIR for each logger.
    """
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))
    os.environ["SB3_LOGDIR"] = str(tmp_path_factory.mktemp("sb3"))


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else changes the stores of these tests: to look again, the checker has no need to wait."""
    monkeypatch.setattr("diskreplay.integrity.verify.check_segment._PAUSE_S", 0)
    monkeypatch.setattr("diskreplay.integrity.verify.check_root._PAUSE_S", 0)


def open_files() -> set[tuple[int, str]]:
    """Every open descriptor of a file or folder, with its target. Pipes and sockets belong to event loops and pools."""
    # multiprocessing keeps its arenas of shared memory (pym-...) for the next one who asks, matplotlib its fonts.
    devices = ("/dev/null", "/dev/pts", "/dev/tty", "/dev/urandom", "/dev/shm/pym-", "/dev/nvidia", "/proc/")
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the descriptor of the listing itself
        if target.startswith("/") and not target.startswith(devices) and "/mpl-data/fonts/" not in target:
            found.add((int(name), target))
    return found


def mapped_files(folder: str) -> set[str]:
    """Every file under the folder that is mapped into this process, as the kernel names it."""
    with open("/proc/self/maps") as maps:
        return {line.split(maxsplit=5)[5].rstrip() for line in maps if f" {folder}/" in line}


def own_threads() -> set[str]:
    """The names of the living threads that diskreplay started, but for those that decompress for all of a process."""
    names = {thread.name for thread in threading.enumerate() if thread.name.startswith("diskreplay")}
    return {name for name in names if not name.startswith("diskreplay-decompress")}


def child_processes() -> set[str]:
    """The names of the living processes that multiprocessing started."""
    multiprocessing = sys.modules.get("multiprocessing")
    return {child.name for child in multiprocessing.active_children()} if multiprocessing else set()


def look(folder: str) -> dict[str, set]:
    """Take stock of what a test could leave behind."""
    return {
        "descriptors": open_files(),
        "mappings": mapped_files(folder),
        "threads": own_threads(),
        "processes": child_processes(),
    }


def leaked(before: dict[str, set], folder: str) -> dict[str, set]:
    """Tell what is there now and was not before."""
    return {kind: new for kind, now in look(folder).items() if (new := now - before[kind])}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --part: `tools/test` runs a part of the slow tests."""
    parser.addoption(
        "--part",
        type=int,
        metavar="NUMBER",
        help="run a sixteenth of the cases of each slow test; NUMBER + 1 is the next",
    )


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases of slow tests that are not in the part that was asked for."""
    number = config.getoption("part")
    if number is not None:
        markers = {item.nodeid: item.get_closest_marker("slow") for item in items}
        slow = {case: marker.kwargs.get("turns", 1) for case, marker in markers.items() if marker is not None}
        left_out = slow.keys() - part_of_cases(slow, number)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def leave_out_imported(config: pytest.Config) -> None:
    """Leave what is imported by now out of searches for cycles: 20 ms each, not 200. Many tests and `no_leaks` search.

    What a test imports late, such as torch and numba, is left out from the next test on, and what pytest and libraries
    keep of each test a little later.
    """
    modules, tests = config.stash.get(LEFT_OUT, (0, 0))
    if len(sys.modules) > modules + MANY_MODULES or tests >= MANY_TESTS:
        modules, tests = len(sys.modules), 0
        gc.collect()
        gc.freeze()
    config.stash[LEFT_OUT] = modules, tests + 1


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin without what was imported for all tests."""
    leave_out_imported(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Remember whether the test failed: its traceback keeps its variables alive, which would look like a leak."""
    report = yield
    # So does that of one that a missing module ends.
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed or bool(WITHOUT and report.skipped)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Skip a file that imports a module of WITHOUT."""
    report = yield
    missing = [name for name in WITHOUT if f"No module named '{name}" in str(report.longrepr)]
    if report.failed and missing:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {missing[0]}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Skip a test whose fixtures need a module of WITHOUT."""
    with skipped_without():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip a test that needs a module of WITHOUT."""
    with skipped_without():
        yield


@contextmanager
def skipped_without() -> Iterator[None]:
    """Skip where a module of WITHOUT cannot be imported."""
    try:
        yield
    except ImportError as error:
        missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        # A library that fails without another one, which is not declared, is no such case.
        of_tests = at is not None and Path(at.tb_frame.f_code.co_filename).is_relative_to(TESTS)
        if not (isinstance(error, MissingExtra) or of_tests) or (missing.name or "").split(".")[0] not in WITHOUT:
            raise
        pytest.skip(f"needs {missing.name}")


@pytest.fixture
def tables_of_few_rows() -> Iterator[None]:
    """Have every segment that this process seals keep a table of its episodes, however few rows it has."""
    with inner.tables_of_few_rows():
        yield


@pytest.fixture
def threads_make_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have threads make all batches that samplers prefetch, small ones too."""
    monkeypatch.setattr("diskreplay.sampling.prefetcher.LEAST_FOR_A_THREAD", 0)


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves descriptors, mappings, threads of diskreplay, or processes behind."""
    marker = request.node.get_closest_marker("leaks")
    if marker is not None:
        if not (marker.args or marker.kwargs.get("reason")):
            pytest.fail("the marker leaks needs a reason: @pytest.mark.leaks('why')", pytrace=False)
        yield
        return
    leave_out_imported(request.config)
    folder = str(tmp_path_factory.getbasetemp())
    before = look(folder)
    yield
    if request.node.stash.get(FAILED, False):
        return
    request.node.funcargs.clear()  # what fixtures returned may hold a folder open, as long as it is referenced
    until = time.monotonic() + GRACE_SECONDS
    while left := leaked(before, folder):
        gc.collect()
        if not (left := leaked(before, folder)):
            return
        if time.monotonic() > until:
            pytest.fail(f"the test left behind: {left}", pytrace=False)
        time.sleep(0.05)


@pytest.fixture(scope="session")
def made_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store of two dozen sealed segments of three writers and two boots; it is not to be changed."""
    path = tmp_path_factory.mktemp("made") / "store"
    make_store(path)
    return path


@pytest.fixture
def many_segments(made_store: Path, tmp_store: Path) -> Path:
    """Return the path of a copy of that store."""
    shutil.copytree(made_store, tmp_store)
    return tmp_store
