"""Backups hold what their store holds: at rest byte for byte, while it is written as it was at one moment."""

import errno
import fcntl
import os
import re
import shutil
from pathlib import Path

import pytest

import diskreplay as dr
from tests.crash.injection import Point, failing, in_child, needs_room
from tests.crash.power import another_boot
from tests.crash.workloads import Single, Vector, create
from tests.testing.coded import check_coded_store
from tests.testing.filesystems import mounted
from tests.testing.on_disk import flip, locked, segment_of
from tests.testing.support import append_numbered, digest, serial_schema


def ignore(told: object) -> None:
    """What a workload tells is of no interest here."""


def numbered(path: Path, steps: int = 40, **kwargs) -> dr.Store:
    """Make a store of sealed segments of ten numbered steps."""
    store = dr.create(path, serial_schema(), segment_steps=10, chunk_bytes=64, **kwargs)
    with store.writer() as writer:
        for first in range(0, steps, 5):
            append_numbered(writer, range(first, first + 5))
    store.refresh()
    return store


def make_with_dead_writer(path: Path) -> None:
    """Make a store of seven steps whose writer died before it marked any."""
    create(path, capacity=None).close()

    def die(tell) -> None:
        with dr.open(path, "a") as store:
            one = Single(store, 1, ignore, durability="none")
            for _ in range(7):
                one.step()
            os._exit(0)

    in_child(die)


def change_times(path: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in path.rglob("*")}


def content(path: Path) -> dict[tuple, tuple]:
    with dr.open(path) as store:
        return {
            tuple(e.ids.tolist()): (e["serial"].tobytes(), e.obs.tobytes(), e.times.tobytes(), e.ended)
            for e in store.episodes
        }


@pytest.fixture
def to(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def hidden_sibling(to: Path) -> Path:
    """Return where an unfinished backup lies."""
    return to.with_name(f".{to.name}.backup")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store at rest with everything that a store can have; the tests only read it."""
    path = tmp_path_factory.mktemp("full") / "store"
    with create(path, capacity=100) as store:
        for kind, number in ((Single, 1), (Vector, 2), (Single, 3)):
            some = kind(store, number, ignore)
            for t in range(25):
                some.step(("terminated" if t % 6 == 5 else "") if kind is Single else [t % 3])
            some.close()
        store.refresh()
        assert store.evict(lambda episode: len(episode) == 6 and episode["last"] is None)
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized()) as sampler:
            sampler.sample(8)
            sampler.save("learner")
        limiter = dr.RateLimiter(1.0, 1, 1000.0, name="pace")
        with dr.Sampler(store, dr.Transitions(), limiter=limiter) as sampler:
            sampler.sample(8)
        store.write_note("source", {"made": "here"})
        number = min(int(segment.name) for segment in (path / "segments").glob("0*"))
        for name in ("zarr.json", "durable/document"):
            flip(segment_of(path, number) / name, 5)
        store.repair()
    with dr.open(path, "a"):
        pass
    (path / "segments/mine").mkdir()
    (path / "segments/mine/file").write_text("of another tool")
    return path


def test_a_backup_of_a_store_at_rest_is_the_same_byte_for_byte(full: Path, to: Path) -> None:
    with dr.open(full) as store:
        made = store.backup(to)
        assert (made.path, made.segments, made.problems) == (to, len(list((full / "segments").glob("0*"))), [])
        assert store.quarantine
        info = store.info()
        assert made.steps_in_quarantine == info["quarantine"]["steps"] > 0
        classes = [name for name in vars(made) if name.startswith("steps") and name != "steps_in_quarantine"]
        assert {name: getattr(made, name) for name in classes} == {name: info[name] for name in classes}
    assert digest(to) == digest(full)
    for file in (full / "segments").rglob("c.0.*"):
        before, after = os.stat(file), os.stat(to / file.relative_to(full))
        assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    with dr.open(to) as backup, dr.open(full) as store:
        assert backup.uuid == store.uuid
        assert check_coded_store(backup) == check_coded_store(store)
        assert backup.verify(deep=True) == [*store.verify(deep=True)]
        assert backup.read_note("source") == {"made": "here"}
    with dr.open(to, "a") as backup, dr.Sampler(backup, dr.Transitions(), dr.Prioritized()) as sampler:
        sampler.load("learner")
        sampler.sample(8)
    assert not hidden_sibling(to).exists()


@pytest.mark.parametrize("how", ["link=False", "no links", "no reflinks"])
def test_where_nothing_can_be_shared_every_file_is_copied(
    full: Path, to: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM if how == "no links" else errno.EOPNOTSUPP, "not here")

    link = os.link
    monkeypatch.setattr(fcntl, "ioctl", refuse)
    if how != "no reflinks":
        monkeypatch.setattr(os, "link", refuse)
    with dr.open(full) as store:
        made = store.backup(to, link=how != "link=False")
    assert digest(to) == digest(full)
    linked = {str(file.relative_to(to)) for file in to.rglob("*") if file.is_file() and file.stat().st_nlink > 1}
    assert bool(linked) == (how == "no reflinks")
    # Only chunks of sealed segments: what is in quarantine may be replaced by hand, in its place.
    assert all(re.fullmatch(r"segments/[0-9]+/.*/c\.0\.[0-9.]+", name) for name in linked)
    assert (made.bytes_shared > 0) == (how == "no reflinks")
    assert made.bytes >= made.bytes_shared + made.bytes_copied > 0
    assert os.link is link or how != "no reflinks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xfs", "btrfs"])
def test_blocks_are_shared_where_the_file_system_can(kind: str) -> None:
    with mounted(kind, 110) as disk:
        with numbered(disk.path / "store") as store:
            made = store.backup(disk.path / "backup")
        files = [file for file in (disk.path / "backup").rglob("c.0.*") if file.is_file()]
        assert files
        assert {file.stat().st_nlink for file in files} == {1}
        assert made.bytes_shared > 0
        assert digest(disk.path / "backup") == digest(disk.path / "store")
        del store


def test_what_is_being_written_is_there_up_to_what_is_committed(tmp_store: Path, to: Path) -> None:
    with create(tmp_store, capacity=None) as store:
        one, some = Single(store, 1, ignore, durability="none"), Vector(store, 2, ignore)
        for t in range(11):
            one.step("terminated" if t == 4 else "")
            some.step([0] if t == 6 else (), skip=[1] if t % 2 else (), cuts=[2] if t == 8 else ())
        store.refresh()
        shown = check_coded_store(store)
        before = {tuple(e.ids.tolist()): e.ended for e in store.episodes}
        assert store.backup(to).problems == []
        one.step()
        one.close()
        some.close()
    # Elsewhere, and in another boot: nothing has to be proven any more.
    moved = shutil.copytree(to, to.with_name("moved"))
    for path in (to, moved):
        with another_boot(), dr.open(path) as backup:
            assert check_coded_store(backup) == shown
            after = {tuple(e.ids.tolist()): e.ended for e in backup.episodes}
            assert after == {ids: ended.replace("open", "cut") for ids, ended in before.items()}
            assert "open" in before.values()
            # The observation behind the last step of each episode is there, too.
            assert all(len(e.obs["code"]) == len(e) + 1 for e in backup.episodes if e.ended == "cut")
            assert backup.verify(deep=True) == []
    with dr.open(to, "a") as backup:
        more = Single(backup, 3, ignore)
        more.step()
        more.close()
        backup.refresh()
        assert check_coded_store(backup).keys() == shown.keys() | {(3, 0)}
        assert backup.verify(deep=True) == []
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []


def test_a_dead_writers_rows_are_backed_up_as_the_next_opener_would_take_them(tmp_store: Path, to: Path) -> None:
    make_with_dead_writer(tmp_store)
    with dr.open(tmp_store) as store:
        assert store.backup(to).steps == 7
        store.backup(to.with_name("later"))
    with another_boot(), dr.open(to) as backup:
        assert len(backup) == 7
    # In another boot no mark proves these rows: they are kept as they are, and not shown.
    with another_boot(), dr.open(tmp_store) as store:
        assert len(store) == 0
        assert store.backup(to.with_name("other")).problems == []
        assert store.info()["steps_unproven"] == 7
    assert digest(to.with_name("other")) == digest(tmp_store)
    dr.open(to.with_name("other"), "a").close()
    with dr.open(to.with_name("other")) as backup:
        assert (len(backup), backup.info()["steps_unproven"]) == (0, 7)


def test_rows_that_do_not_match_their_mark_are_named(tmp_store: Path, to: Path) -> None:
    with create(tmp_store) as store:
        one = Single(store, 1, ignore)
        one.step()
        one.flush()
        one.step()
        with open(next((tmp_store / "segments").glob("*/reward/c.0.0")), "r+b") as file:
            file.write(b"\xff")
        (problem,) = store.backup(to).problems
        assert (problem.kind, problem.where) == ("checksum", "segments/00000000")
        one.close()


# --- while it changes -------------------------------------------------------------------------------------------------


def test_what_is_evicted_meanwhile_is_not_in_the_backup(tmp_store: Path, to: Path) -> None:
    with numbered(tmp_store) as store:
        calls = []

        def evict(done: int, total: int) -> None:
            calls.append((done, total))
            if len(calls) == 40:
                store.evict(lambda episode: int(episode["serial"][0]) < 20)

        made = store.backup(to, evict)
        assert calls[-1][0] == calls[-1][1]
        assert [done for done, _ in calls] == sorted(done for done, _ in calls)
        assert (made.segments, made.steps, made.problems) == (2, 20, [])
        assert content(to) == content(tmp_store)
        assert digest(to) == digest(tmp_store)


# --- damage -----------------------------------------------------------------------------------------------------------


def test_damage_is_named_and_copied(tmp_store: Path, to: Path) -> None:
    numbered(tmp_store).close()
    chunk, gone, document = (
        tmp_store / "segments" / name
        for name in ("00000000/reward/c.0.0", "00000001/action/c.0.1", "00000002/zarr.json")
    )
    data = bytearray(chunk.read_bytes())
    data[0] ^= 0xFF
    chunk.chmod(0o644)
    chunk.write_bytes(data)
    gone.unlink()
    document.write_bytes(document.read_bytes()[:100])
    (tmp_store / "segments/00000003/done/c.0.0").unlink()
    (tmp_store / "segments/00000003/done/c.0.0").symlink_to("/etc/passwd")
    (tmp_store / "segments/00000004").symlink_to("00000000")
    with pytest.warns(dr.DamagedSegmentWarning), dr.open(tmp_store) as store:
        problems = store.backup(to).problems
    assert [(problem.kind, problem.where) for problem in problems] == [
        ("checksum", "segments/00000000/reward/c.0.0"),
        ("missing", "segments/00000001/action/c.0.1"),
        ("metadata", "segments/00000002"),
        ("type", "segments/00000003/done/c.0.0"),
        ("type", "segments/00000004"),
    ]
    assert str(tmp_store) not in problems[0].detail
    (tmp_store / "segments/00000003/done/c.0.0").unlink()
    (tmp_store / "segments/00000004").unlink()
    assert digest(to) == digest(tmp_store)


def test_steps_that_nothing_proves_are_never_linked(tmp_store: Path, to: Path) -> None:
    make_with_dead_writer(tmp_store)
    with another_boot():
        dr.open(tmp_store, "a").close()
    with dr.open(tmp_store) as store:
        store.backup(to)
    before, times = digest(to), change_times(to)
    with another_boot(), dr.open(tmp_store, "a") as store:
        assert [action.what for action in store.repair(salvage=True)] == ["salvaged"]
        store.refresh()
        assert len(store) == 7
    assert (digest(to), change_times(to)) == (before, times)


# --- interrupted, and refused -----------------------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupt(store: dr.Store, to: Path, after: int, **kwargs) -> None:
    calls = []

    def stop(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == after:
            raise Interrupted

    with pytest.raises(Interrupted):
        store.backup(to, stop, **kwargs)
    assert not to.exists()


def test_an_interrupted_backup_goes_on_with_what_is_whole(tmp_store: Path, to: Path) -> None:
    hidden = hidden_sibling(to)
    with numbered(tmp_store) as store:
        interrupt(store, to, 200, link=False)
        chunks = sorted(file for file in hidden.rglob("c.0.*") if file.is_file())
        assert len(chunks) > 20
        inodes = {file.relative_to(hidden): file.stat().st_ino for file in chunks}
        torn, short, extra = chunks[0], chunks[1], chunks[2].with_name("c.0.99")
        for file in (torn, short):
            file.chmod(0o644)
        torn.write_bytes(bytes(torn.stat().st_size - 1) + b"x")
        short.write_bytes(b"")
        extra.write_bytes(b"of nobody")
        made = store.backup(to, link=False)
        assert made.problems == []
        assert made.bytes_copied < made.bytes
        assert digest(to) == digest(tmp_store)
        kept = {path for path, inode in inodes.items() if (to / path).stat().st_ino == inode}
        assert {to / path for path in inodes.keys() - kept} <= {
            to / torn.relative_to(hidden),
            to / short.relative_to(hidden),
        }
        assert not hidden.exists()


def test_a_full_disk_is_said_and_resumed(tmp_store: Path, to: Path) -> None:
    with numbered(tmp_store) as store:
        count = 0

        def is_full(point: Point) -> bool:
            nonlocal count
            count += point.name == "pwrite" or needs_room(point, to.parent)
            return count > 60 and (point.name == "pwrite" or needs_room(point, hidden_sibling(to)))

        with failing(is_full), pytest.raises(dr.StorageFull) as full:
            store.backup(to, link=False)
        assert str(full.value).endswith(
            f"no space for the backup at {to}; free some and make the backup again, which resumes, or "
            f"delete {hidden_sibling(to)}"
        )
        store.backup(to, link=False)
        assert digest(to) == digest(tmp_store)


def test_nothing_is_made_where_something_is_in_the_way(tmp_store: Path, to: Path) -> None:
    hidden = hidden_sibling(to)
    with numbered(tmp_store, 5) as store:
        to.mkdir()
        with pytest.raises(dr.StoreExists, match=f"^{to} exists already; give the path of a new store$"):
            store.backup(to)
        to.rmdir()
        with pytest.raises(ValueError, match=f"^{tmp_store}/in is inside the store {tmp_store}; give a path outside"):
            store.backup(tmp_store / "in")
        hidden.mkdir()
        (hidden / "mine").write_text("of somebody")
        with pytest.raises(dr.StoreExists, match=f"^{hidden} is not an unfinished backup of {tmp_store}; delete it"):
            store.backup(to)
        shutil.rmtree(hidden)
        hidden.write_text("a file")
        with pytest.raises(dr.StoreExists, match=f"^{hidden} is in the way of the backup; delete it"):
            store.backup(to)
        hidden.unlink()
        dr.create(hidden, serial_schema()).close()
        with pytest.raises(dr.StoreExists, match="is an unfinished backup of another store"):
            store.backup(to)
        shutil.rmtree(hidden)
        interrupt(store, to, 1)
        with (
            locked(hidden / "counters/lock"),
            pytest.raises(dr.StoreLocked, match=f"^another process is making a backup in {hidden}; wait for it"),
        ):
            store.backup(to)
        store.backup(to)
    with pytest.raises(dr.Closed):
        store.backup(to)
    assert sorted(os.listdir(to.parent)) == ["backup", "store"]


def test_what_appears_at_the_path_meanwhile_is_not_replaced(tmp_store: Path, to: Path) -> None:
    with numbered(tmp_store, 5) as store:

        def appear(done: int, total: int) -> None:
            if not to.exists():
                to.mkdir()
                (to / "mine").write_text("of somebody")

        with pytest.raises(dr.StoreExists, match="exists already"):
            store.backup(to, appear)
        assert os.listdir(to) == ["mine"]


def test_a_store_that_is_deleted_meanwhile_is_said(tmp_store: Path, to: Path) -> None:
    with numbered(tmp_store, 20) as store:

        def delete(done: int, total: int) -> None:
            if tmp_store.exists():
                shutil.rmtree(tmp_store)

        with pytest.raises(dr.StoreNotFound, match="was deleted"):
            store.backup(to, delete)
        assert not to.exists()


def test_a_backup_counts_what_was_being_deleted(tmp_store: Path, to: Path) -> None:
    """A process died after it had taken a segment out, and before it counted the steps of it as evicted."""
    with numbered(tmp_store) as store:
        os.rename(tmp_store / "segments/00000000", tmp_store / "counters/old-00000000-10")
        store.backup(to)
    with dr.open(to) as backup:
        assert backup.info()["steps_evicted"] == 10
        assert len(backup) == 30
        assert backup.verify(deep=True) == []
    assert not (to / "counters/old-00000000-10").exists()
