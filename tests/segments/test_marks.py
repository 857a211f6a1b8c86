"""Rows prove themselves: what readers show of copies, after a reboot, and where bytes are not what was marked."""

import os
import random
import shutil
import tempfile
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.crash import workloads
from tests.crash.power import another_boot
from tests.testing.coded import check_coded_parts
from tests.testing.commands import repair
from tests.testing.filesystems import mounted, network_disk
from tests.testing.on_disk import marks_of, reseal, segment_of
from tests.testing.support import append_numbered, digest, serial_schema, serials, wait_until

SECTOR = 512


def durable_rows(path: Path, lanes: int = 1) -> list[int]:
    marks = marks_of(segment_of(path), lanes)
    return marks[-1][0] if marks else [0] * lanes


def test_a_thread_marks_what_is_published_without_a_call(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer(durability=0.01) as writer:
        append_numbered(writer, range(5), end="open")
        wait_until(lambda: durable_rows(tmp_store) == [5])
        append_numbered(writer, range(5, 9), end="open")
        wait_until(lambda: durable_rows(tmp_store) == [9])


def test_without_durability_nothing_is_marked_and_no_thread_runs(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer(durability="none") as writer:
        append_numbered(writer, range(5), end="open")
        assert not any(thread.name == "diskreplay-marker" for thread in threading.enumerate())
        assert durable_rows(tmp_store) == [0]


def marked_serials(path: Path) -> list[int]:
    """Return the steps that marks prove, of a copy that no process has written."""
    with tempfile.TemporaryDirectory() as folder, suppress(FileNotFoundError):
        shutil.copytree(path, f"{folder}/copy")
        with dr.open(f"{folder}/copy") as store:
            return serials(store)
    return []


def test_an_episode_is_durable_when_the_append_that_ends_it_returns(tmp_store):
    with (
        dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store,
        store.writer(durability="episode") as writer,
    ):
        append_numbered(writer, range(5))
        assert durable_rows(tmp_store) == [6]
        append_numbered(writer, range(5, 7), end="open")
        assert durable_rows(tmp_store) == [6]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 1, 3, 40])
def test_after_a_reboot_just_the_marked_rows_count_and_the_rest_is_kept(tmp_store, lanes):
    schema = dr.Schema(obs=dr.Field((5,), "float32"), action=dr.Field((), "int64"))
    n = lanes or 1
    shape = () if lanes is None else (n,)
    with dr.create(tmp_store, schema, chunk_bytes=256) as store:
        writer = store.writer(lanes, durability="none")

        def step(t: int) -> None:
            ends = np.full(shape, t % 4 == 3)
            writer.append(np.full((*shape, 5), t, "f4"), np.full(shape, t), np.full(shape, t), ends)

        for t in range(10):
            step(t)
        writer.flush()
        for t in range(10, 17):
            step(t)
        copy = tmp_store.with_name("copy")
        shutil.copytree(tmp_store, copy)
        writer.close()
    for again in range(2):
        with another_boot(), dr.open(copy) as store:
            assert len(store) == 10 * n
            assert sorted(np.concatenate([e.action for e in store.episodes]).tolist()) == sorted([*range(10)] * n)
        problems = dr.open(copy).verify(deep=True)
        assert [(p.kind, p.where) for p in problems] == [("unproven", "segments/00000000")]
        assert f"up to {7 * n} steps" in problems[0].detail
        if not again:
            with another_boot(), dr.open(copy, "a"):
                pass
    with dr.open(copy) as store:
        assert store.snapshot.sealed.all()


@pytest.mark.slow
def test_marks_fit_no_further_than_the_first_byte_that_is_wrong(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=128) as store:
        writer = store.writer(durability="none")
        ends = [0]
        for first in range(0, 30, 3):
            append_numbered(writer, range(first, first + 3), priority=first / 2 if first > 9 else None)
            writer.flush()
            ends.append(ends[-1] + 4)
        shutil.copytree(tmp_store, tmp_path / "copy")
        writer.close()
    assert durable_rows(tmp_path / "copy") == [40]
    rng = random.Random(0)
    chunks = sorted(p for p in segment_of(tmp_path / "copy").rglob("c.0.*"))
    rows = {p.parent.name: (p.stat().st_size) for p in chunks}
    assert len(chunks) > 10
    for _ in range(60):
        chunk = rng.choice(chunks)
        data = bytearray(chunk.read_bytes())
        number, row_bytes = int(chunk.name.split(".")[2]), {"obs": 12, "done": 1, "reward": 4}.get(chunk.parent.name, 8)
        at = rng.randrange(len(data))
        row = number * (rows[chunk.parent.name] // row_bytes) + at // row_bytes
        data[at] ^= 1 << rng.randrange(8)
        good = chunk.read_bytes()
        chunk.write_bytes(data)
        with dr.open(tmp_path / "copy") as store:
            # The episodes up to the last mark before the row; rows behind the last one are nobody's.
            expected = min(row // 4, 10) * 3
            assert len(store) == expected, (chunk, at)
            assert serials(store) == [*range(expected)]
        chunk.write_bytes(good)


@pytest.mark.parametrize("seed", range(3))
def test_marks_prove_new_rows_of_whole_chunks_and_of_some_lanes(tmp_store, tmp_path, seed):
    lanes, rng = 12, np.random.default_rng(seed)
    schema = dr.Schema(dr.Field((256,), "float32"), dr.Field((), "int64"))
    with (
        dr.create(tmp_store, schema, chunk_bytes=lanes << 12) as store,
        store.writer(num_envs=lanes, durability="none") as writer,
    ):
        for share in (1.0, 0.7, 1.0, 0.2):
            for _ in range(rng.integers(1, 9)):
                obs = rng.standard_normal((lanes, 256)).astype(np.float32)
                none = np.zeros(lanes, bool)
                writer.append(obs, rng.integers(0, 9, lanes), obs[:, 0], none, mask=rng.random(lanes) < share)
            writer.flush()
        steps = store.refresh()
        shutil.copytree(tmp_store, tmp_path / "copy")
        assert len(marks_of(segment_of(tmp_path / "copy"), lanes)) == 4
    with dr.open(tmp_path / "copy") as copy:
        assert copy.verify() == []  # no step is unproven
        assert len(copy) == steps


def test_marks_from_before_the_first_priority_prove_as_much_as_those_behind_it(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=256) as store:
        writer = store.writer(durability="none")
        append_numbered(writer, range(6), end="open")
        writer.flush()
        append_numbered(writer, range(6, 9), end="open", priority=2.0)
        shutil.copytree(tmp_store, tmp_path / "before")
        writer.flush()
        shutil.copytree(tmp_store, tmp_path / "behind")
        writer.close()
    marks = marks_of(segment_of(tmp_path / "behind"), 1)
    assert [(rows, priority > 0) for rows, priority, _ in marks] == [([6], False), ([9], True)]
    for name, rows in (("before", 6), ("behind", 9)):
        for again in range(2):
            with another_boot(), dr.open(tmp_path / name, "a" if again else "r") as store:
                (episode,) = store.episodes
                assert episode["serial"].tolist() == [*range(rows)]
                np.testing.assert_array_equal(episode["priority"], [np.nan] * 6 + [2.0] * (rows - 6))


@pytest.mark.slow
def test_a_damaged_or_torn_log_proves_what_its_whole_marks_do(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        writer = store.writer(durability="none")
        for first in range(0, 12, 3):
            append_numbered(writer, range(first, first + 3))
            writer.flush()
        shutil.copytree(tmp_store, tmp_path / "copy")
        writer.close()
    log = segment_of(tmp_path / "copy") / "durable/marks"
    good = log.read_bytes()
    size = 24 + 8
    assert len(good) == 4 * size
    for at in range(len(good)):
        data = bytearray(good)
        data[at] ^= 0x40
        log.write_bytes(data)
        with dr.open(tmp_path / "copy") as store:
            assert len(store) == at // size * 3
        log.write_bytes(good[:at])
        with dr.open(tmp_path / "copy") as store:
            assert len(store) == at // size * 3
    log.unlink()
    assert len(dr.open(tmp_path / "copy")) == 0


def test_a_boot_id_that_cannot_be_read_is_no_boot(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        with another_boot(""), dr.open(tmp_store, "a") as nameless, nameless.writer(durability="none") as writer:
            append_numbered(writer, range(3))
            writer.flush()
            append_numbered(writer, range(3, 5))
            with dr.open(tmp_store) as reader:
                assert len(reader) == 5  # what this process wrote it knows
            with another_boot(""), dr.open(tmp_store) as reader:  # and another one does not
                assert len(reader) == 3
        store.refresh()


def test_salvage_takes_what_is_whole_by_the_flags(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        writer = store.writer(durability="none")
        append_numbered(writer, range(3))
        writer.flush()
        append_numbered(writer, range(3, 8))
        append_numbered(writer, range(8, 10), end="open")
        copy = tmp_store.with_name("copy")
        shutil.copytree(tmp_store, copy)
        writer.close()
    ids = [int(i) for e in dr.open(tmp_store).episodes for i in e.ids]
    with dr.open(copy, "a") as store:
        assert len(store) == 3
    flags = segment_of(copy) / "done/c.0.0"
    flags.chmod(0o644)
    data = bytearray(flags.read_bytes())
    data[12] = 0xFF  # the second step of the open episode
    flags.write_bytes(data)
    planned = repair(copy, salvage=True, dry_run=True).actions
    assert "segments/00000000" in {action.where for action in planned if action.what == "salvaged"}
    data[12] = 0
    flags.write_bytes(data)
    done = repair(copy, salvage=True)
    assert [(a.what, a.detail) for a in done.actions] == [
        ("salvaged", "7 unproven steps were recovered, 0 are left behind")
    ]
    assert done.left == []
    with dr.open(copy) as store:
        assert serials(store) == [*range(10)]
        assert [int(i) for e in store.episodes for i in e.ids] == ids[:10]
        assert store.verify(deep=True) == []


def test_an_open_reader_follows_what_is_salvaged_and_a_segment_with_unproven_rows_comes_back(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        writer = store.writer(durability="none")
        append_numbered(writer, range(3))
        writer.flush()
        append_numbered(writer, range(3, 8))
        copy = tmp_store.with_name("copy")
        shutil.copytree(tmp_store, copy)
        writer.close()
    with dr.open(copy, "a"):
        pass
    (copy / "counters/quarantine/segments").mkdir(parents=True)
    segment_of(copy).rename(copy / "counters/quarantine/segments/00000000")
    repair(copy, restore=0)
    with dr.open(copy) as reader:
        assert len(reader) == 3
        repair(copy, salvage=True)
        reader.refresh()
        assert serials(reader) == [*range(8)]


# --- copies of a store that is written --------------------------------------------------------------------------------


class History:
    """What every file of a store was at several moments, and which steps were durable then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.moments: list[dict[str, tuple[bytes, int]]] = []
        self.durable: list[list[int]] = []

    def take(self, durable: list[int]) -> None:
        moment = {}
        for file in self.path.rglob("*"):
            with suppress(FileNotFoundError):  # a thread is sealing
                if file.is_file():
                    moment[str(file.relative_to(self.path))] = file.read_bytes(), file.stat().st_mode & 0o777
        self.moments.append(moment)
        self.durable.append(list(durable))

    def copy(self, target: Path, rng: random.Random, start: int) -> None:
        """Write a copy that began at a moment: each folder is listed, and each sector read, then or later."""
        last = len(self.moments) - 1
        listed: dict[str, int] = {"": start}
        for name in sorted({name for moment in self.moments[start:] for name in moment}):
            folder, moment = "", start
            for part in name.split("/")[:-1]:
                above, folder = folder, f"{folder}/{part}".lstrip("/")
                if folder not in listed:
                    there = any(known.startswith(f"{folder}/") for known in self.moments[listed[above]])
                    listed[folder] = rng.randint(listed[above], last) if there else last + 1
                moment = listed[folder]
                if moment > last:
                    break
            if moment > last or name not in self.moments[moment]:
                continue  # made after the folder that it, or its folder, is in was listed
            at = rng.randint(moment, last)
            if name not in self.moments[at]:
                continue  # removed before it was read
            data, mode = self.moments[at][name]
            versions = [m[name][0] for m in self.moments[at:] if name in m and len(m[name][0]) == len(data)]
            if "/c." in name:
                # A file that is read while it is written.
                parts = range(0, len(data), SECTOR)
                picks = sorted(rng.randrange(len(versions)) for _ in parts)
                data = b"".join(versions[v][p : p + SECTOR] for v, p in zip(picks, parts, strict=True))
            file = target / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
            file.chmod(mode)


@pytest.mark.slow
@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize(
    "seed", [12, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24) if seed != 12)]
)
def test_a_copy_of_a_store_that_is_written_shows_what_was_durable_when_it_began_and_nothing_torn(tmp_path, seed):
    rng = random.Random(seed)
    lanes = seed % 2
    with workloads.create(
        tmp_path / "store", capacity=None, segment_steps=rng.choice([6, 20, 64]), chunk_bytes=rng.choice([512, 2048])
    ) as store:
        history = History(tmp_path / "store")
        kind = workloads.Vector if lanes else workloads.Single
        writer = kind(store, 1, lambda _: None, durability="none")
        counted = (lambda: writer.durable.tolist()) if lanes else (lambda: [writer.durable])
        for t in range(24):
            if lanes:
                writer.step(ends=[rng.randrange(6)], skip=[rng.randrange(9)])
            else:
                writer.step("terminated" if rng.random() < 0.3 else "")
            if rng.random() < 0.4:
                writer.flush()
            if t % 3 == 2:
                history.take(counted())
        writer.close()
        history.take(counted())
    for trial in range(12):
        start = rng.randrange(len(history.moments))
        copy = tmp_path / f"copy-{trial}"
        history.copy(copy, rng, start)
        with dr.open(copy) as store:
            shown = check_coded_parts(store)
        check_shown(shown, history.durable[start])
        with dr.open(copy, "a"):
            pass
        while repair(copy).actions:  # documents and counters may be of another moment than what they belong to
            pass
        with dr.open(copy) as store:
            after = check_coded_parts(store)
            check_shown(after, history.durable[start])
            kinds = {problem.kind for problem in store.verify(deep=True)}
            assert kinds <= {"unproven", "quarantine"}  # what the copy lacks files of is kept apart
        shutil.rmtree(copy)


def check_shown(shown: dict, durable: list[int]) -> None:
    for lane, count in enumerate(durable):
        if count:
            # What was appended since may be there in part.
            assert shown[1, lane][0].first == 0
            assert shown[1, lane][0].stop >= count


def test_a_segment_that_was_sealed_while_it_was_copied_proves_its_rows(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        writer = store.writer(durability="none")
        append_numbered(writer, range(3))
        writer.flush()
        copy = tmp_store.with_name("copy")
        shutil.copytree(tmp_store, copy)
        append_numbered(writer, range(3, 6))
        writer.close()
        for name in ("zarr.json", "committed/c.0", "observed/c.0", "done/c.0.0", "durable/marks"):
            source = segment_of(tmp_store) / name
            shutil.copy2(source, segment_of(copy) / name)
    with dr.open(copy) as store:
        assert serials(store) == [0, 1, 2]
    with dr.open(copy, "a"):
        pass
    with dr.open(copy) as store:
        assert serials(store) == [0, 1, 2]
        assert {p.kind for p in store.verify(deep=True)} == {"unproven"}


def copy_while_sealed(path: Path, marked: int) -> Path:
    """Copy a store of six steps while its segment is sealed: some chunks are from before, and do not fit its document.

    Marks prove the first step, or nothing.
    """
    copy = path.with_name("copy")
    with dr.create(path, serial_schema(episode={"seed": dr.Field((), "int64")}), chunk_bytes=4096) as store:
        writer = store.writer(durability="none")
        append_numbered(writer, [0], episode={"seed": 0})
        if marked:
            writer.flush()
        shutil.copytree(path, copy)
        for serial in range(1, 6):
            append_numbered(writer, [serial], episode={"seed": serial})
        writer.close()
    for name in ("zarr.json", "committed/c.0", "observed/c.0", "durable/c.0", "done/c.0.0"):
        shutil.copy2(segment_of(path) / name, segment_of(copy) / name)
    return copy


LACKING = {
    "missing": lambda file: file.unlink(),
    "short": lambda file: os.truncate(file, file.stat().st_size - 8),
}


def copy_marked(path: Path, copy: Path) -> None:
    """Make a store of 2,000 steps, and copy it while it is written; there is a mark at every 500th of them."""
    with dr.create(path, serial_schema(), chunk_bytes=4096) as store, store.writer(durability="none") as writer:
        for first in range(0, 2000, 500):
            append_numbered(writer, range(first, first + 500))
            writer.flush()
        shutil.copytree(path, copy)


@pytest.mark.slow
@pytest.mark.parametrize("lack", LACKING)
@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("opener", ["open", "repair", "repair of another machine's"])
def test_of_a_copy_that_lacks_a_file_nothing_is_deleted(tmp_store, lack, chunk, opener):
    """Rows count as far as they are proven; all that the copy has is kept in quarantine, and told."""
    foreign = opener == "repair of another machine's"
    copy = tmp_store.with_name("copy")
    copy_marked(tmp_store, copy)
    if foreign:
        other = {"machine_id": "another machine", "boot_id": "its boot"}
        reseal(segment_of(copy) / "zarr.json", lambda attributes: attributes.update(other))
    rows = segment_of(tmp_store) / f"reward/c.0.{chunk}"
    per_chunk = os.stat(rows).st_size // 4
    LACKING[lack](segment_of(copy) / f"reward/c.0.{chunk}")
    before = {file.relative_to(segment_of(copy)): file.read_bytes() for file in segment_of(copy).rglob("c.*")}
    proven = max(rows for rows in (0, 500, 1000, 1500) if rows <= per_chunk * chunk)

    if opener == "open":
        dr.open(copy, "a").close()
    else:
        with network_disk() if foreign else nullcontext():
            planned = repair(copy, dry_run=True, foreign=foreign).actions
            done = repair(copy, foreign=foreign).actions
        assert [action.what for action in done] == [action.what for action in planned]
        assert "quarantined" in {action.what for action in done}
    with dr.open(copy) as store:
        assert serials(store) == list(range(proven))
        (entry,) = store.quarantine
        assert entry.steps == 2000 - proven
        assert {"quarantine"} <= {problem.kind for problem in store.verify(deep=True)} <= {"quarantine", "unproven"}
    for file, data in before.items():
        assert (copy / entry.where / file).read_bytes() == data
    assert repair(copy).actions == []
    dr.open(copy, "a").close()
    with dr.open(copy) as store:
        assert store.quarantine == [entry]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_disk_leaves_a_copy_that_lacks_a_file_as_it_is(tmp_store, tmp_path, kind):
    with mounted(kind, 8, folder=tmp_path) as disk:
        copy = disk.path / "copy"
        copy_marked(tmp_store, copy)
        (segment_of(copy) / "reward/c.0.1").unlink()
        before = digest(segment_of(copy))
        filling = disk.fill()
        dr.open(copy, "a").close()
        assert digest(segment_of(copy)) == before
        with dr.open(copy) as reader:
            assert len(reader) == 1000
            assert reader.quarantine == []
        disk.free(filling)
        dr.open(copy, "a").close()
        with dr.open(copy) as reader:
            assert [entry.segment for entry in reader.quarantine] == [0]
            assert len(reader) == 1000


def test_a_copy_by_a_tool_that_keeps_no_permissions_is_whole(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer() as writer:
        append_numbered(writer, range(3))
    chunk = segment_of(tmp_store) / "obs/c.0.0.0"
    assert not os.stat(chunk).st_mode & 0o222
    copy = tmp_path / "copy"
    shutil.copytree(tmp_store, copy, copy_function=shutil.copyfile)
    assert os.stat(segment_of(copy) / "obs/c.0.0.0").st_mode & 0o200
    with dr.open(copy) as store:
        assert len(store) == 3
        assert store.verify(deep=True) == []
    with dr.open(copy, "a") as store:
        assert len(store) == 3


@pytest.mark.parametrize("durability", ["none", 3600.0])
@pytest.mark.parametrize("row", [0, 700, 1999])
def test_a_damaged_byte_costs_its_block_in_a_copy_whose_files_can_be_written(tmp_store, tmp_path, durability, row):
    with (
        dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store,
        store.writer(durability=durability) as writer,
    ):
        append_numbered(writer, range(300), end="open")
        if durability != "none":
            writer.flush()
        for first in range(300, 2000, 10):
            append_numbered(writer, range(first, first + 10))
    copy = tmp_path / "copy"
    shutil.copytree(tmp_store, copy, copy_function=shutil.copyfile)
    per_chunk = (segment_of(copy) / "reward/c.0.0").stat().st_size // 4
    chunk = segment_of(copy) / f"reward/c.0.{row // per_chunk}"
    data = bytearray(chunk.read_bytes())
    data[4 * (row % per_chunk)] ^= 1
    chunk.write_bytes(data)
    with dr.open(copy) as store:
        before = {*serials(store)}
        assert {problem.kind for problem in store.verify(deep=True)} == {"unproven"}
    with dr.open(copy, "a"):
        pass
    assert repair(copy, salvage=True).actions == []
    with dr.open(copy) as store:
        shown = {*serials(store)}
        assert shown == before
        (entry,) = store.quarantine
        assert entry.steps == 2000 - len(shown)
        assert 0 < len(shown) >= 2000 - 512 - 300 - 20
        assert {problem.kind for problem in store.verify(deep=True)} == {"quarantine"}
        assert row - 600 < min({*range(2000)} - shown) <= row + 1


@pytest.mark.slow
def test_a_full_disk_leaves_a_damaged_copy_whose_files_can_be_written_as_it_is(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer(durability="none") as writer:
        for first in range(0, 2000, 10):
            append_numbered(writer, range(first, first + 10))
    with mounted("tmpfs", 8, folder=tmp_path) as disk:
        copy = disk.path / "copy"
        shutil.copytree(tmp_store, copy, copy_function=shutil.copyfile)
        chunk = segment_of(copy) / "reward/c.0.0"
        chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
        before = digest(segment_of(copy))
        filling = disk.fill()
        dr.open(copy, "a").close()
        assert digest(segment_of(copy)) == before
        disk.free(filling)
        dr.open(copy, "a").close()
        with dr.open(copy) as store:
            (entry,) = store.quarantine
            assert len(store) == 2000 - entry.steps > 0


def test_rows_that_neither_checksums_nor_marks_prove_are_not_shown_of_a_segment_that_was_sealed_meanwhile(tmp_store):
    copy = tmp_store.with_name("copy")
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store:
        writer = store.writer(durability="none")
        for first in range(0, 1500, 10):
            append_numbered(writer, range(first, first + 10))
        shutil.copytree(tmp_store, copy)
        for first in range(1500, 2500, 10):
            append_numbered(writer, range(first, first + 10))
        writer.close()
        for file in segment_of(tmp_store).rglob("*"):
            # All but the rewards were copied after it was sealed.
            if (file.is_file() and file.parent.name != "reward") or file.name == "zarr.json":
                target = segment_of(copy) / file.relative_to(segment_of(tmp_store))
                target.unlink(missing_ok=True)
                shutil.copy2(file, target)
    wanted = {int(s): float(r) for e in dr.open(tmp_store).episodes for s, r in zip(e["serial"], e.reward, strict=True)}
    for mode in ("r", "a", "r"):
        with dr.open(copy, mode):
            pass
        with dr.open(copy) as store:
            shown = {int(s): float(r) for e in store.episodes for s, r in zip(e["serial"], e.reward, strict=True)}
            assert shown.items() <= wanted.items()
    assert len(shown) >= 900
    assert {problem.kind for problem in dr.open(copy).verify(deep=True)} == {"quarantine"}


def update_copy(source: Path, target: Path, unit_ns: int) -> None:
    """Copy, as rsync does, the files whose size or time of change is another one, and the modes of all."""
    for file in sorted(source.rglob("*")):
        at = target / file.relative_to(source)
        if file.is_dir():
            at.mkdir(exist_ok=True, parents=True)
            continue
        now, before = file.stat(), at.stat() if at.exists() else None
        if before and (now.st_size, now.st_mtime_ns // unit_ns) == (before.st_size, before.st_mtime_ns // unit_ns):
            at.chmod(now.st_mode)
        else:
            at.unlink(missing_ok=True)
            shutil.copy2(file, at)


def test_a_copy_that_is_brought_up_to_date_after_sealing_is_whole(tmp_store, tmp_path):
    copy = tmp_path / "copy"
    with dr.create(tmp_store, serial_schema(), chunk_bytes=256) as store, store.writer(durability="none") as writer:
        append_numbered(writer, range(3))
        update_copy(tmp_store, copy, 1_000_000_000)  # within the second in which the rest is written
        append_numbered(writer, range(3, 126))
    update_copy(tmp_store, copy, 1_000_000_000)
    with dr.open(copy) as store:
        assert serials(store) == [*range(126)]
        assert all((e.obs[:-1, 0] == e["serial"]).all() for e in store.episodes)
        assert store.verify(deep=True) == []


def test_a_copy_that_is_brought_up_to_date_shows_what_was_durable_then(tmp_store, tmp_path):
    copy = tmp_path / "copy"
    with dr.create(tmp_store, serial_schema(), chunk_bytes=256) as store, store.writer(durability="none") as writer:
        for first in range(0, 120, 6):
            append_numbered(writer, range(first, first + 3))
            update_copy(tmp_store, copy, 1)
            append_numbered(writer, range(first + 3, first + 6))
            writer.flush()
            update_copy(tmp_store, copy, 1)
            with dr.open(copy) as copied:
                assert serials(copied) == [*range(first + 6)]
