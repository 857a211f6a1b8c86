"""Compaction by itself: when it begins, that it keeps what is there, and that it ends with the store."""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from multiprocessing import spawn
from pathlib import Path

import pytest

import diskreplay as dr
from tests.testing import inner
from tests.testing.merged import folders
from tests.testing.on_disk import is_locked
from tests.testing.support import append_numbered, serial_schema, wait_until

THREAD = "diskreplay-compaction"


# So many segments of about the same length are merged.
MANY = 70
SERIALS = list(range(5 * MANY))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    inner.merge_soon(monkeypatch)


def write(store: dr.Store, episodes: int, first: int = 0) -> None:
    with store.writer() as writer:
        for number in range(first, first + episodes):
            append_numbered(writer, range(5 * number, 5 * number + 5))


def serials(store: dr.Store) -> list[int]:
    store.refresh()
    return sorted(int(serial) for episode in store.episodes for serial in episode["serial"])


def is_working() -> bool:
    return any(thread.name == THREAD for thread in threading.enumerate())


def test_many_short_segments_are_merged_and_nothing_else_changes(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        wait_until(lambda: len(folders(tmp_store)) < 12)
        assert serials(store) == SERIALS
        with dr.open(tmp_store) as reader:
            assert serials(reader) == SERIALS
    assert not is_working()


@pytest.mark.parametrize("kwargs", [{"compaction": "manual"}, {}], ids=["manual", "few segments"])
def test_nothing_begins_where_it_is_not_wanted_or_does_not_pay(tmp_store: Path, kwargs: dict[str, str]) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode", **kwargs) as store:  # type: ignore[arg-type]
        write(store, MANY if kwargs else 6)
        assert not is_working()
        assert len(folders(tmp_store)) == (MANY if kwargs else 6)


def test_a_store_that_is_closed_in_the_middle_of_a_merge_is_whole(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        process = stop_who_merges(store)
        resume_when_store_closes(store, process)
    assert not is_working()
    assert not exists(process)
    assert not list(tmp_store.glob("counters/next-*"))
    with dr.open(tmp_store) as store:
        assert serials(store) == SERIALS


def process_of(store: dr.Store) -> int | None:
    """Return the number of the process that merges."""
    process = store._compaction._process
    return None if process is None else process.pid


def stop_who_merges(store: dr.Store) -> int:
    """Stop the process that merges wherever it is: it does not end before `resume`; return its number."""
    wait_until(lambda: process_of(store) is not None)
    process = process_of(store)
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    return process


def resume(process: int) -> None:
    with suppress(ProcessLookupError):  # who had no handler yet has ended
        os.kill(process, signal.SIGCONT)


def resume_when_store_closes(store: dr.Store, process: int) -> None:
    """Let a process that was stopped go on when it was asked to end."""

    def wait() -> None:
        pause = threading.Event()
        while not store._compaction._is_stopped:
            pause.wait(0.01)  # not `sleep`: this thread may end in another test, which replaces the clock
        resume(process)

    threading.Thread(target=wait, daemon=True).start()


def turn_file() -> Path:
    """Return the file whose lock a process holds that merges."""
    (file,) = Path(os.environ["XDG_RUNTIME_DIR"]).glob(f"diskreplay-{os.geteuid()}/compaction-*")
    return file


def exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def write_and_stay(path: Path, started: "multiprocessing.SimpleQueue[int]") -> None:
    inner.merge_soon(pytest.MonkeyPatch())
    with dr.create(path, serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        started.put(stop_who_merges(store))
        time.sleep(60)  # until it is killed


def test_who_merges_ends_with_the_process_that_wanted_it_and_keeps_its_turn_till_then(tmp_store: Path) -> None:
    context = multiprocessing.get_context("spawn")
    started = context.SimpleQueue()
    writer = context.Process(target=write_and_stay, args=(tmp_store, started))
    writer.start()
    process = started.get()
    assert str(turn_file()) in [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
    writer.kill()
    writer.join()
    resume(process)
    wait_until(lambda: not exists(process))
    wait_until(lambda: not is_locked(turn_file()))
    with dr.open(tmp_store, "a") as store:
        assert serials(store) == SERIALS
    assert not list(tmp_store.glob("counters/next-*"))


def test_a_forked_child_leaves_the_merging_to_its_parent(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        process = stop_who_merges(store)
        child = os.fork()
        if child == 0:
            store.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert process_of(store) == process
        resume(process)
        wait_until(lambda: len(folders(tmp_store)) < 12)
        assert serials(store) == SERIALS


def test_a_store_that_was_renamed_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, Path("elsewhere"), ""])  # what is no text means nothing there
    with dr.create(tmp_path / "store", serial_schema(), segment_steps="episode") as store:
        (tmp_path / "store").rename(tmp_path / "moved")
        write(store, MANY)
        wait_until(lambda: len(folders(tmp_path / "moved")) < 12)
        assert serials(store) == SERIALS


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ignored", "blocked"])
def test_merging_stops_where_the_program_does_not_want_the_signal(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    inner.ask_again_soon(monkeypatch)
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN if how == "ignored" else signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if how == "blocked" else set())
    try:
        with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
            write(store, MANY)
            process = stop_who_merges(store)
            resume_when_store_closes(store, process)
        assert not exists(process)
        assert len(folders(tmp_store)) == MANY  # else it went on to the end
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGTERM, handler)


def test_merging_goes_on_after_a_thread_that_failed(tmp_store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        begin = inner.real(inner.BEGIN_MERGING)
        monkeypatch.setattr(*inner.BEGIN_MERGING, lambda _: {}["an environment that changed"])
        write(store, MANY // 2)
        wait_until(lambda: store._compaction._looked_at is not None and not is_working())
        assert store._compaction._thread is not None  # the one that failed
        monkeypatch.setattr(*inner.BEGIN_MERGING, begin)
        write(store, MANY, first=MANY // 2)
        wait_until(lambda: len(folders(tmp_store)) < MANY)
        assert len(serials(store)) == 5 * (MANY + MANY // 2)


@pytest.mark.parametrize(("executable", "is_frozen"), [("", False), ("/nowhere/python", False), (sys.executable, True)])
def test_where_no_process_can_be_had_nothing_is_merged(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, executable: str, is_frozen: bool
) -> None:
    monkeypatch.setattr(spawn, "_python_exe", executable)
    monkeypatch.setattr(sys, "frozen", is_frozen, raising=False)
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        wait_until(lambda: not is_working())
        assert len(folders(tmp_store)) == MANY
        assert serials(store) == SERIALS


@pytest.mark.slow(turns=4)
def test_stores_take_turns_until_all_are_merged(tmp_path: Path) -> None:
    with ExitStack() as stores:
        every = [
            stores.enter_context(dr.create(tmp_path / str(n), serial_schema(), segment_steps="episode"))
            for n in range(3)
        ]
        for store in every:
            write(store, MANY)
        most = 0

        def are_merged() -> bool:
            nonlocal most
            most = max(most, sum(process_of(store) is not None for store in every))
            return all(len(folders(Path(store.path))) == 1 for store in every)

        wait_until(are_merged, 120.0)
        assert most == 1
        assert all(serials(store) == SERIALS for store in every)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["missing", "others", ""])
def test_without_a_folder_for_this_session_turns_are_taken_in_that_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    (tmp_path / f"others/diskreplay-{os.geteuid()}").mkdir(parents=True)
    (tmp_path / f"others/diskreplay-{os.geteuid()}").chmod(0o777)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / runtime) if runtime else "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with dr.create(tmp_path / "store", serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        process = stop_who_merges(store)
        resume_when_store_closes(store, process)
        held = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir()]
        assert [name for name in held if name.startswith(f"{tmp_path}/temporary/diskreplay-{os.geteuid()}/compaction-")]


def test_a_store_that_waits_for_its_turn_starts_no_process_and_can_be_closed(tmp_path: Path) -> None:
    with dr.create(tmp_path / "first", serial_schema(), segment_steps="episode") as first:
        write(first, MANY)
        process = stop_who_merges(first)
        resume_when_store_closes(first, process)
        with dr.create(tmp_path / "second", serial_schema(), segment_steps="episode") as second:
            write(second, MANY)
            wait_until(lambda: second._compaction._looked_at is not None)
            assert process_of(second) is None
        assert len(folders(tmp_path / "second")) == MANY


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["a file", "a link", "others may write it", "no place"])
def test_where_there_is_no_private_folder_each_store_is_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder, elsewhere = tmp_path / f"diskreplay-{os.geteuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir(0o700)
    if kind == "a file":
        folder.touch()
    elif kind == "a link":
        folder.symlink_to(elsewhere)
    elif kind == "others may write it":
        folder.mkdir()
        folder.chmod(0o777)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("nowhere" if kind == "no place" else "")))
    with dr.create(tmp_path / "store", serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        wait_until(lambda: len(folders(tmp_path / "store")) < 12)
    assert not list(elsewhere.iterdir())
    assert kind != "others may write it" or not list(folder.iterdir())


def test_the_process_has_the_priority_of_its_parent(tmp_store: Path) -> None:
    """One of a lower priority holds the store lock as long as others use all processors."""
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        write(store, MANY)
        process = stop_who_merges(store)
        assert os.getpriority(os.PRIO_PROCESS, process) == os.getpriority(os.PRIO_PROCESS, 0)
        resume_when_store_closes(store, process)


def test_no_process_is_begun_beside_another_one_that_merges(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), segment_steps="episode") as store:
        with store._retention.making_pack(0):
            write(store, MANY)
            wait_until(lambda: not is_working())
        assert len(folders(tmp_store)) == MANY
        assert not store._retention.is_making_pack()
