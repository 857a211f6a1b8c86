"""Where the system says no: a full disk, too many open files, an interrupt; nothing that was committed is lost."""

import errno
import itertools
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.crash import workloads
from tests.crash.injection import Point, failing, in_child, intercepted, needs_room
from tests.crash.test_writers import KINDS, STRIDE, check_recovered, check_spans
from tests.testing.coded import check_coded_store
from tests.testing.commands import verify
from tests.testing.support import digest
from tests.tiers import SHARES, each_share, whole_or_part

Told = list[dict[str, Any]]

# Also with a mark of each episode that ends: then a call that has published steps may find no room for the mark.
MARKING = KINDS | {f"{kind}, episodes": partial(write, durability="episode") for kind, write in KINDS.items()}


class Patient:
    """A writer whose calls are made again when there was no room and `make_room` has been called."""

    def __init__(self, writer: Any, make_room: Callable[[], None]) -> None:
        self._writer, self._make_room = writer, make_room

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # A mark that failed in the background is raised by the next call, also when there is room again.
            for _ in range(2):
                try:
                    return getattr(self._writer, name)(*args, **kwargs)
                except dr.StorageFull:
                    self._make_room()
            return getattr(self._writer, name)(*args, **kwargs)

        return call


def write_patiently(path: Path, kind: str, tell: Any, make_room: Callable[[], None]) -> None:
    """Run a workload in a store that is there; whatever finds no room is repeated when there is some."""
    with workloads.early_preallocation():
        store = dr.open(path, "a")
        real = store.writer
        store.writer = lambda *args, **kwargs: Patient(real(*args, **kwargs), make_room)  # type: ignore[method-assign]
        MARKING[kind](store, tell)
        store.close()


def check_all(path: Path, told: Told) -> None:
    """Check that everything is there that was told, no more, and that nobody has to mend anything."""
    with dr.open(path) as store:
        check_spans(store, told, died=False)
        assert {segment["state"] for segment in store.info()["segments"]} == {"sealed"}
        assert store.verify(deep=True) == []
    assert sorted(os.listdir(path / "counters")) == ["c.0", "lock", "zarr.json"]


def check_full(path: Path, told: Told) -> None:
    """Check a store on a full disk: what was told is there, and perhaps the end of an episode that was cut."""
    with dr.open(path) as store:
        check_spans(store, told, died=False)
    assert verify(path) == []


def fill_at(
    path: Path,
    kind: str,
    number: int,
    needs: Callable[[Point, Path], bool] = needs_room,
    check: Callable[[Path, Told], None] = check_full,
) -> bool:
    """Let the disk be full from the nth call on that needs room, until a writer says so; tell whether it did."""
    told: Told = []
    state = {"left": number, "full": False, "seen": False}

    def refuses(point: Point) -> bool:
        if not needs(point, path):
            return False
        state["left"] -= 1
        state["full"] |= state["left"] == -1
        return state["full"]

    def make_room() -> None:
        state["seen"] = True
        check(path, told)
        state["full"] = False

    with failing(refuses):
        write_patiently(path, kind, told.append, make_room)
    check_all(path, told)
    return state["left"] < 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", MARKING)
@each_share
@pytest.mark.timeout(3000)
def test_a_disk_that_is_full_at_any_call_loses_nothing_and_the_writer_goes_on(
    tmp_path: Path, kind: str, share: int
) -> None:
    # The last calls of all take segments out, which needs room for a name.
    stride = STRIDE or 101
    for number in itertools.count(3 + share * stride, SHARES * stride):
        path = tmp_path / str(number)
        workloads.create(path).close()
        try:
            was_full = fill_at(path, kind, number)
        except BaseException as error:
            raise AssertionError(f"full from call {number} on: {error!r}") from error
        if not was_full:
            break
        shutil.rmtree(path)
    assert number > 300


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def leave(folder: Path, pages: int) -> Path:
    """Fill a file system but for so many pages; return the file that takes the rest."""
    ballast, free = folder / "ballast", os.statvfs(folder)
    with open(ballast, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, (free.f_bavail - pages) * free.f_frsize)
    return ballast


def fill(folder: Path, kind: str, pages: int, tell: Any) -> None:
    """Write on a disk that has so many pages left, and make room when it is full."""
    path = folder / "store"
    ballast, told = leave(folder, pages), Told()

    def note(x: Any) -> None:
        told.append(x)
        tell(x)

    def make_room() -> None:
        check_full(path, told)
        ballast.unlink(missing_ok=True)

    write_patiently(path, kind, note, make_room)
    tell({"was full": not ballast.exists()})


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_disk_that_fills_up_loses_nothing_and_the_writer_goes_on(small_disk: Path, kind: str) -> None:
    was_full = []
    # How much is on the disk at once depends on when segments are sealed and evicted in the background.
    for pages in [*range(0, 320, 51), 640]:
        workloads.create(small_disk / "store").close()
        # In a process of its own: where a hole is read on a full disk, it ends by SIGBUS.
        *told, last = in_child(partial(fill, small_disk, kind, pages)).told
        was_full.append(last["was full"])
        check_all(small_disk / "store", told)
        shutil.rmtree(small_disk / "store")
        (small_disk / "ballast").unlink(missing_ok=True)
    assert sum(was_full) > 0
    assert not was_full[-1]


# --- other refusals: the writer closes, and what it published is kept ------------------------------------------------


class Once:
    """Raises once: in place of the nth point for which a condition holds."""

    def __init__(self, number: int, condition: Callable[[Point], bool], error: Callable[[], BaseException]) -> None:
        self._left, self._condition, self._error = number, condition, error
        self.raised = False

    def __call__(self, point: Point) -> None:
        if threading.current_thread() is threading.main_thread() and self._condition(point):
            self._left -= 1
            if self._left == -1:
                self.raised = True
                raise self._error()


def write_until_refused(path: Path, kind: str, once: Once, tell: Any) -> None:
    """Run a workload that is refused something, or interrupted, once; then close all of it, as a caller would."""
    with workloads.early_preallocation():
        store = dr.open(path, "a")
        try:
            with intercepted(once):
                KINDS[kind](store, tell)
        except (OSError, KeyboardInterrupt) as error:
            assert once.raised
            tell({"type": type(error).__name__})
        with suppress(OSError):  # what could not be sealed is sealed by the next process
            store.close()
    tell({"raised": once.raised})


def refuse_each(folder: Path, kind: str, condition: Any, error: Any, stride: int) -> set[str]:
    """Refuse a workload something, or interrupt it, at each point; return what its caller was told."""
    kinds = set()
    for number in range(3, 1 << 30, stride):
        path = folder / str(number)
        workloads.create(path).close()
        with dr.open(path) as reader:
            try:
                told = in_child(partial(write_until_refused, path, kind, Once(number, condition, error))).told
                raised = told.pop()["raised"]
                kinds |= {told.pop()["type"]} if told and "type" in told[-1] else set()
                check_recovered(path, told, True, reader)
            except BaseException as failed:
                raise AssertionError(f"refused at point {number}: {failed!r}") from failed
        shutil.rmtree(path)
        if not raised:
            break
    assert number > 3
    return kinds


REFUSED_STRIDE = STRIDE or whole_or_part(307, 997)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3000)
def test_a_writer_that_finds_no_descriptor_at_any_open_loses_nothing(tmp_path: Path, kind: str) -> None:
    def error() -> OSError:
        return OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    kinds = refuse_each(tmp_path, kind, lambda point: point.name == "open", error, REFUSED_STRIDE // 3 + 1)
    assert kinds == {"OSError"}


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3000)
def test_a_writer_that_is_interrupted_at_any_point_loses_nothing(tmp_path: Path, kind: str) -> None:
    kinds = refuse_each(tmp_path, kind, lambda _: True, KeyboardInterrupt, REFUSED_STRIDE)
    assert kinds == {"KeyboardInterrupt"}


def write_with_few_descriptors(path: Path, kind: str, tell: Any) -> None:
    used = len(os.listdir("/proc/self/fd"))
    with workloads.early_preallocation():
        store = dr.open(path, "a")
        for more in range(0, 40, 8):
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            try:
                KINDS[kind](store, lambda _: None, number=more + 3)
                tell("done")
            except OSError as error:
                tell(errno.errorcode[error.errno or 0])
        store.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_process_with_too_few_descriptors_can_write_when_it_has_more(tmp_path: Path, kind: str) -> None:
    workloads.create(tmp_path / "store", capacity=None).close()
    told = in_child(partial(write_with_few_descriptors, tmp_path / "store", kind)).told
    # What cannot be removed again, for want of a descriptor, is in the way of the next attempt.
    assert {"EMFILE", "done"} <= set(told) <= {"EMFILE", "EEXIST", "done"}
    with dr.open(tmp_path / "store", "a"):
        pass
    with dr.open(tmp_path / "store") as store:
        check_coded_store(store)
        assert store.verify(deep=True) == []


@pytest.fixture
def written(tmp_path: Path) -> Path:
    workloads.create(tmp_path / "store").close()
    with dr.open(tmp_path / "store", "a") as store:
        workloads.write_single(store, lambda _: None)
    return tmp_path / "store"


def open_as_nobody(path: Path, tell: Any) -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with dr.open(path) as store:
        tell(len(store))
    try:
        dr.open(path, "a")
    except dr.ReadOnlyError as error:
        tell(str(error))


@pytest.mark.parametrize("opened_again", [False, True])
def test_an_eviction_by_hand_has_room_on_a_full_disk_and_makes_some(small_disk: Path, opened_again: bool) -> None:
    """Entries have their blocks beforehand: what a full disk needs most must not need the disk."""
    schema = dr.Schema(obs=dr.Field((256,), "uint8"), action=dr.Field((), "int64"))
    store = dr.create(small_disk / "store", schema, chunk_bytes=4096, segment_steps=64)
    with store.writer() as writer:
        for episode in range(120):
            steps = np.full(8, episode)
            writer.append_episode(np.full((8, 256), episode, "u1"), steps, steps.astype("f4"), terminated=True)
    if opened_again:
        store.close()
    leave(small_disk, 0)
    if opened_again:
        store = dr.open(small_disk / "store", "a")
    assert os.statvfs(small_disk).f_bavail == 0
    assert store.evict(lambda episode: episode.action[0] % 8 == 1) == 15 * 8  # of each segment one: none can leave
    assert os.statvfs(small_disk).f_bavail == 0
    with pytest.raises(dr.StorageFull), store.writer() as writer:
        writer.append_episode(np.zeros((8, 256), "u1"), np.zeros(8, int), np.zeros(8), terminated=True)
    assert store.evict(lambda episode: episode.action[0] < 64) == 56 * 8  # whole segments
    assert os.statvfs(small_disk).f_bavail > 0
    with store.writer() as writer:
        writer.append_episode(np.zeros((8, 256), "u1"), np.full(8, 120), np.zeros(8), terminated=True)
    store.refresh()
    assert sorted({int(episode.action[0]) for episode in store.episodes}) == [
        n for n in range(64, 121) if n % 8 != 1 or n > 119
    ]
    assert store.verify(deep=True) == []
    store.close()


def test_room_for_entries_is_made_again_by_who_opens_the_store(small_disk: Path) -> None:
    path = small_disk / "store"
    chunks = lambda: len(list((path / "evictions").glob("c.*")))  # noqa: E731
    with dr.create(
        path, dr.Schema(obs=dr.Field((), "uint8"), action=dr.Field((), "int64")), chunk_bytes=65536
    ) as store:
        with store.writer() as writer:
            for number in range(4200):
                writer.append_episode(np.zeros(1, "u1"), np.full(1, number), np.zeros(1), terminated=True)
        ballast = leave(small_disk, 0)
        assert store.evict(lambda episode: episode.action[0] < 4000) == 4000
        assert chunks() == 1  # there was no room for the next one
        with pytest.raises(dr.StorageFull):
            store.evict(lambda episode: episode.action[0] < 4100)
        store.refresh()
        assert len(store) == 200
        os.unlink(ballast)
    with dr.open(path, "a") as store:
        assert chunks() == 2
        leave(small_disk, 0)
        assert store.evict(lambda episode: episode.action[0] < 4100) == 100
        assert store.evict(lambda episode: episode.action[0] < 4199) == 99
        assert [int(episode.action[0]) for episode in store.episodes] == [4199]
        assert store.verify(deep=True) == []


def test_a_store_that_was_made_without_room_for_entries_gets_it_when_it_is_opened(tmp_store: Path) -> None:
    dr.create(tmp_store, dr.Schema(obs=dr.Field((), "uint8"), action=dr.Field((), "int64"))).close()
    document = tmp_store / "evictions" / "zarr.json"
    document.write_bytes(document.read_bytes().replace(b"[4096,2]", b"[0,2]", 1))
    (tmp_store / "evictions" / "c.0.0").unlink()
    assert verify(tmp_store, deep=True) == []
    dr.open(tmp_store).close()
    assert not (tmp_store / "evictions" / "c.0.0").exists()
    dr.open(tmp_store, "a").close()
    assert (tmp_store / "evictions" / "c.0.0").read_bytes() == bytes(65536)
    assert b'"shape":[4096,2]' in document.read_bytes()
    assert verify(tmp_store, deep=True) == []


def test_a_store_without_permission_to_write_is_read_and_says_what_to_do(written: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    for folder in [written, *written.parents]:
        if not (mode := folder.stat().st_mode) & 0o001:
            folder.chmod(mode | 0o055)
    before = digest(written)
    steps, refused = in_child(partial(open_as_nobody, written)).told
    assert steps == workloads.CAPACITY
    assert refused.startswith(f"{written} cannot be written (Permission denied: {written}/counters/c.0); open it with")
    assert digest(written) == before


def test_a_store_on_a_read_only_disk_is_read_and_says_what_to_do(small_disk: Path, written: Path) -> None:
    shutil.copytree(written, small_disk / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with dr.open(small_disk / "store") as store:
        assert len(check_coded_store(store)) == 1
        assert store.verify(deep=True) == []
        with pytest.raises(dr.ReadOnlyError, match="cannot be written .Read-only file system"):
            dr.open(small_disk / "store", "a")


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_removed_underneath_is_an_error_and_not_a_hang(tmp_path: Path, kind: str) -> None:
    def work(tell: Any) -> None:
        store = workloads.create(tmp_path / "store")
        reader = dr.open(tmp_path / "store")
        writer = store.writer(num_envs=None if kind == "single" else 2)
        KINDS[kind](store, lambda _: None)
        shutil.rmtree(tmp_path / "store")
        for call in (partial(KINDS[kind], store, lambda _: None), writer.close, store.close, reader.refresh):
            try:
                call()
                tell("fine")
            except (OSError, dr.ReplayError) as error:
                tell(type(error).__name__)

    first, *_ = in_child(work).told
    assert first == "StoreNotFound"
