"""Every kind of finding, made by hand; a store at work has none; no byte of a sealed store is without a check."""

import ast
import errno
import json
import os
import random
import re
import shutil
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
import zarr

import diskreplay as dr
from tests.testing.commands import Refused, repair, verify
from tests.testing.on_disk import replace_bytes, reseal, set_words
from tests.testing.support import append_numbered, digest, open_files, serial_schema
from tests.tiers import SHARES, each_share, whole_or_part

pytestmark = pytest.mark.usefixtures("no_patience", "tables_of_few_rows")

SCHEMA = serial_schema(
    obs={"image": dr.Field((2, 3), "uint8"), "on": dr.Field((), "bool")}, episode={"seed": dr.Field((), "int64")}
)
ROOT = Path(dr.__file__).parents[1]
SEGMENT = "segments/00000001"
LANES = "segments/00000003"  # with initial priorities
KINDS = (
    "missing",
    "type",
    "size",
    "unreadable",
    "metadata",
    "checksum",
    "counters",
    "flags",
    "times",
    "priority",
    "eviction",
    "unexpected",
    "unproven",
    "quarantine",
)


def write(writer, steps, first=0, final=True):
    for t in range(steps):
        last = t == steps - 1
        obs, following = ({"image": np.full((2, 3), (first + i) % 256), "on": i % 2 == 0} for i in (t, t + 1))
        writer.append(
            obs,
            t,
            1.0,
            last,
            serial=first + t,
            next_obs=following if final else None,
            episode={"seed": 5} if last else None,
        )


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store of three sealed segments of four lanes or one, with every way in which an episode ends."""
    path = tmp_path_factory.mktemp("original") / "store"
    blank = {"image": np.zeros((2, 3), np.uint8), "on": True}
    dr.create(path, SCHEMA, chunk_bytes=4096, segment_steps=12, capacity=1000).close()
    with dr.open(path, "a") as store, store.writer() as writer:
        for episode in range(4):
            write(writer, 6, 10 * episode, final=episode % 2 == 0)
        writer.append(blank, 0, 1.0, False, serial=0)
        writer.end_episode(episode={"seed": 1})
        writer.append(blank, 0, 1.0, False, True, serial=0)
        writer.append(blank, 0, 1.0, False, serial=0)
    with dr.open(path, "a") as store, store.writer(num_envs=4) as writer:
        for t in range(9):
            obs = {"image": np.full((4, 2, 3), t), "on": np.ones(4, bool)}
            writer.append(
                obs,
                np.zeros(4, int),
                np.ones(4),
                np.arange(4) == t % 5,
                serial=np.full(4, t),
                priority=[t, np.nan, 1, -t] if t > 2 else None,
            )
    return path


@pytest.fixture
def store_path(original, tmp_store):
    """The path of a copy of `original`, to be damaged."""
    shutil.copytree(original, tmp_store)
    return tmp_store


def found(path, *, deep=False):
    return {(problem.kind, problem.where) for problem in verify(path, deep=deep)}


# --- stores that are whole -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deep", [False, True])
def test_nothing_is_wrong_with_a_whole_store(original, deep):
    before = digest(original)
    assert verify(original, deep=deep) == []
    with dr.open(original) as store:
        assert store.verify(deep=deep) == []
    assert digest(original) == before


@pytest.mark.slow
@pytest.mark.parametrize("segment_steps", [None, 20, "episode"])
@pytest.mark.parametrize("lanes", [None, 3])
def test_nothing_is_wrong_with_a_store_that_is_being_written(tmp_store, segment_steps, lanes):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=segment_steps) as store:
        with store.writer(num_envs=lanes) as writer:
            for t in range(60):
                lead = () if lanes is None else (lanes,)
                numbers = np.full(lead, t)
                ends = np.full(lead, t % 7 == 6)
                obs, following = (np.full((*lead, 3), i, np.float32) for i in (t, t + 1))
                one = lanes is None
                writer.append(
                    obs,
                    t if one else numbers,
                    float(t) if one else numbers,
                    bool(ends) if one else ends,
                    next_obs=following if t % 3 else None,
                    serial=t if one else numbers,
                )
                if t % 10 == 0:
                    assert store.verify(deep=True) == []
        assert store.verify(deep=True) == []


def before_opening(monkeypatch, pattern, call):
    """Call with the part of a path that matches before a file with such a path is opened."""
    real = os.open

    def open_file(path, *args, **kwargs):
        if match := re.search(pattern, os.fspath(path)):
            call(match[0])
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_file)


def make_unreadable(monkeypatch, pattern):
    """Have the disk refuse to read files whose path has a match."""
    real = os.pread

    def pread(fd, *args):
        if re.search(pattern, os.readlink(f"/proc/self/fd/{fd}")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, *args)

    monkeypatch.setattr(os, "pread", pread)


def test_nothing_is_wrong_while_segments_are_evicted_from_under_it(tmp_store, monkeypatch):
    dr.create(tmp_store, serial_schema(), capacity=60, segment_steps=20, chunk_bytes=64).close()
    with dr.open(tmp_store, "a") as store, store.writer() as writer:
        for first in range(0, 200, 10):
            append_numbered(writer, range(first, first + 10))
    gone = []

    def evict(where):
        gone.append(where)
        shutil.move(tmp_store / where, tmp_store / "counters" / f"old-{len(gone)}")

    before_opening(monkeypatch, r"segments/\d+(?=/obs/zarr\.json$)", evict)
    assert verify(tmp_store, deep=True) == []
    assert len(gone) >= 3


def test_what_a_writer_was_in_the_middle_of_is_looked_at_again(tmp_store, monkeypatch):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64) as store, store.writer() as writer:
        append_numbered(writer, range(5), end="open")
        document = tmp_store / "segments/00000000/obs/zarr.json"
        good = document.read_bytes()
        looks = []

        def damage_once(where):
            looks.append(where)
            document.write_bytes(b"{" if len(looks) == 1 else good)

        before_opening(monkeypatch, r"segments/00000000/obs/zarr\.json$", damage_once)
        assert verify(tmp_store) == []
        assert len(looks) == 2


def test_a_dead_writers_segment_and_one_of_another_boot_are_no_damage(tmp_store, tmp_path):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096) as store, store.writer() as writer:
        append_numbered(writer, range(5))
        writer.flush()
        append_numbered(writer, range(5, 8), end="open")
        shutil.copytree(tmp_store, tmp_path / "copy")  # like a dead one: nobody holds its lock
    # Of a copy only what is marked counts: the rest may be anything, and is told.
    (problem,) = verify(tmp_path / "copy")
    assert (problem.kind, problem.where) == ("unproven", "segments/00000000")
    assert problem.detail.startswith("up to 3 steps of writer 0 after the last mark")
    flags = tmp_path / "copy/segments/00000000/done/c.0.0"
    data = bytearray(flags.read_bytes())
    data[6:8] = b"\xff\xff"
    flags.write_bytes(data)
    assert found(tmp_path / "copy") == {("unproven", "segments/00000000")}
    data[2] = 0xFF  # now the mark does not fit
    flags.write_bytes(data)
    (problem,) = verify(tmp_path / "copy")
    assert problem.detail.startswith("up to 5 steps")


def test_foreign_arrays_and_hidden_files_are_no_damage(store_path):
    zarr.open_group(store_path / SEGMENT, mode="a").create_array("derived", shape=(3,), dtype="float32")
    (store_path / ".DS_Store").write_text("x")
    segment = json.loads((store_path / SEGMENT / "zarr.json").read_bytes())
    assert "derived" not in segment["attributes"]["checksums"]
    assert verify(store_path, deep=True) == []


def test_a_store_behind_a_link_is_verified(store_path, tmp_path):
    (tmp_path / "link").symlink_to(store_path)
    assert verify(tmp_path / "link", deep=True) == []


# --- damage by hand --------------------------------------------------------------------------------------------------


def reseal_counter(path, name, rows):
    np.array(rows, "<i8").tofile(path / SEGMENT / name / "c.0")
    crc = google_crc32c.value(np.array(rows, "<i8").tobytes())
    reseal(path / SEGMENT / "zarr.json", lambda attributes: attributes["checksums"].update({f"{name}/c.0": crc}))


def with_attributes(name, **changes):
    return lambda path: reseal(path / name / "zarr.json", lambda attributes: attributes.update(changes))


def with_evictions(path, first, steps, rows=1):
    block = np.zeros((4096, 2), "<i8")
    block[0] = first, steps
    block.tofile(path / "evictions/c.0.0")
    document = path / "evictions/zarr.json"
    document.write_text(document.read_text().replace('"shape":[4096,2]', f'"shape":[{rows},2]'))
    set_words(path, evictions=1)


def as_link(name):
    def damage(path):
        shutil.move(path / name, path.parent / "elsewhere")
        (path / name).symlink_to(path.parent / "elsewhere")

    return damage


def unlink(name):
    return lambda path: (path / name).unlink()


def rmtree(name):
    return lambda path: shutil.rmtree(path / name)


def write_file(name, text="x"):
    return lambda path: (path / name).write_text(text)


def truncate(name, size):
    return lambda path: os.truncate(path / name, size)


def as_folder(name):
    def damage(path):
        (path / name).unlink()
        (path / name).mkdir()

    return damage


def as_pipe(name):
    def damage(path):
        (path / name).unlink()
        os.mkfifo(path / name)

    return damage


DAMAGE = {
    "root without its end": (truncate("zarr.json", 100), "checksum", "zarr.json"),
    "root that is no JSON": (write_file("zarr.json", "{"), "checksum", "zarr.json"),
    "no root": (unlink("zarr.json"), "missing", "zarr.json"),
    "capacity of nothing": (with_attributes(".", capacity=0), "metadata", "zarr.json"),
    "capacity of no bytes": (with_attributes(".", capacity_bytes=0), "metadata", "zarr.json"),
    "an age of nothing": (with_attributes(".", max_age_s=-1), "metadata", "zarr.json"),
    "an endless age": (with_attributes(".", max_age_s=10**400), "metadata", "zarr.json"),
    "no time of sealing": (with_attributes(SEGMENT, sealed_at="now"), "metadata", f"{SEGMENT}/zarr.json"),
    "unproven rows that came in another age": (
        with_attributes(SEGMENT, claimed=[9], unproven_steps=1, unproven_time=1 << 63),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "huge chunks": (with_attributes(".", chunk_bytes=1 << 60), "metadata", "zarr.json"),
    "a number as the time of creation": (with_attributes(".", created=5), "metadata", "zarr.json"),
    "no schema": (with_attributes(".", schema={}), "metadata", "zarr.json"),
    "no templates": (with_attributes(".", segment_metadata={}), "metadata", "zarr.json"),
    "a file in the root": (write_file("notes.txt"), "unexpected", "notes.txt"),
    "a link in the root": (lambda path: (path / "link").symlink_to("/"), "type", "link"),
    "a file among segments": (write_file("segments/notes.txt"), "unexpected", "segments/notes.txt"),
    "a file in a segment": (write_file(f"{SEGMENT}/notes.txt"), "unexpected", f"{SEGMENT}/notes.txt"),
    "a file among chunks": (write_file(f"{SEGMENT}/reward/c.1.0"), "unexpected", f"{SEGMENT}/reward/c.1.0"),
    "no counters": (rmtree("counters"), "missing", "counters"),
    "no segments": (rmtree("segments"), "missing", "segments"),
    "segments elsewhere": (as_link("segments"), "type", "segments"),
    "counters elsewhere": (as_link("counters"), "type", "counters"),
    "a document of counters": (truncate("counters/zarr.json", 10), "metadata", "counters/zarr.json"),
    "counters that are a folder": (as_folder("counters/c.0"), "type", "counters/c.0"),
    "a document that is a folder": (as_folder(f"{SEGMENT}/done/zarr.json"), "type", f"{SEGMENT}/done/zarr.json"),
    "short counters": (truncate("counters/c.0", 255), "size", "counters/c.0"),
    "a torn counter": (lambda path: replace_bytes(path / "counters/c.0", 0, b"\x09"), "counters", "counters/c.0"),
    "impossible counters": (lambda path: set_words(path, first_live=9), "counters", "counters/c.0"),
    "a counter without end": (lambda path: set_words(path, evicted=(1 << 63) - 1), "counters", "counters/c.0"),
    "an unused word": (lambda path: set_words(path, unused=9), "counters", "counters/c.0"),
    "counters that went back": (lambda path: set_words(path, next_segment=1), "counters", "counters/c.0"),
    "a lock elsewhere": (as_link("counters/lock"), "type", "counters/lock"),
    "a lock that is a folder": (as_folder("counters/lock"), "type", "counters/lock"),
    "a segment's lock elsewhere": (as_link(f"{SEGMENT}/committed/lock"), "type", f"{SEGMENT}/committed/lock"),
    "no segment document": (unlink(f"{SEGMENT}/zarr.json"), "missing", f"{SEGMENT}/zarr.json"),
    "an empty segment document": (truncate(f"{SEGMENT}/zarr.json", 0), "checksum", f"{SEGMENT}/zarr.json"),
    "no checksums of blocks": (unlink(f"{SEGMENT}/durable/blocks"), "missing", f"{SEGMENT}/durable/blocks"),
    "a checksum of a block": (
        lambda path: replace_bytes(path / SEGMENT / "durable/blocks", 0, b"\x01\x02\x03\x04"),
        "checksum",
        f"{SEGMENT}/durable/blocks",
    ),
    "lost rows that are no episode": (
        with_attributes(SEGMENT, lost=[[1, 1]], steps_lost=1, lost_values=[0]),
        "flags",
        f"{SEGMENT}/done",
    ),
    "more values of episodes than rows": (
        with_attributes(SEGMENT, values=[9_999]),
        "counters",
        f"{SEGMENT}/zarr.json",
    ),
    "more values of episodes than a segment has ids": (
        with_attributes(SEGMENT, values=[1 << 70]),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "more rows kept than a segment has ids": (
        with_attributes(SEGMENT, claimed=[1 << 70]),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "more rows lost than a segment has ids": (
        with_attributes(SEGMENT, lost=[[0, 1 << 70]], lost_values=[1 << 70]),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "lost rows in no order": (
        with_attributes(SEGMENT, lost=[[3, 1], [1, 1]], steps_lost=1),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "rows lost twice": (
        with_attributes(SEGMENT, lost=[[0, 9], [1, 1]], steps_lost=1),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "more steps lost than rows": (
        with_attributes(SEGMENT, lost=[[1, 1]], steps_lost=2),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "lanes that are none": (with_attributes(SEGMENT, lanes=[]), "metadata", f"{SEGMENT}/zarr.json"),
    "steps that are not there": (with_attributes(SEGMENT, steps=5), "counters", f"{SEGMENT}/zarr.json"),
    "other times than its rows have": (
        with_attributes(SEGMENT, times=[1, 2]),
        "counters",
        f"{SEGMENT}/zarr.json",
    ),
    "times of no order": (with_attributes(SEGMENT, times=[2, 1]), "metadata", f"{SEGMENT}/zarr.json"),
    "times that are none": (with_attributes(SEGMENT, times=[0.0, 1e300]), "metadata", f"{SEGMENT}/zarr.json"),
    "a clock that is none": (with_attributes(SEGMENT, clock={"wall": "now"}), "metadata", f"{SEGMENT}/zarr.json"),
    "a clock of the far future": (
        with_attributes(SEGMENT, clock={"wall": 1 << 63}),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "a time that falls": (
        lambda path: replace_bytes(path / SEGMENT / "time/c.0.0", 8, bytes(8)),
        "times",
        f"{SEGMENT}/time",
    ),
    "checksums elsewhere": (
        with_attributes(SEGMENT, checksums={"../../zarr.json": 1}),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "checksums of no name": (
        lambda path: reseal(
            path / SEGMENT / "zarr.json", lambda attributes: attributes["checksums"].update({"\ud800": 1})
        ),
        "metadata",
        f"{SEGMENT}/zarr.json",
    ),
    "no checksums": (with_attributes(SEGMENT, checksums={}), "checksum", f"{SEGMENT}/obs/image/zarr.json"),
    "a segment elsewhere": (as_link(SEGMENT), "type", SEGMENT),
    "an array elsewhere": (as_link(f"{SEGMENT}/obs/image"), "type", f"{SEGMENT}/obs/image"),
    "a group elsewhere": (as_link(f"{SEGMENT}/obs"), "type", f"{SEGMENT}/obs"),
    "a chunk elsewhere": (as_link(f"{SEGMENT}/reward/c.0.0"), "type", f"{SEGMENT}/reward/c.0.0"),
    "a chunk that is a pipe": (as_pipe(f"{SEGMENT}/reward/c.0.0"), "type", f"{SEGMENT}/reward/c.0.0"),
    "a chunk that is a folder": (as_folder(f"{SEGMENT}/reward/c.0.0"), "missing", f"{SEGMENT}/reward/c.0.0"),
    "counts that are a pipe": (as_pipe(f"{SEGMENT}/committed/c.0"), "type", f"{SEGMENT}/committed/c.0"),
    "no array": (rmtree(f"{SEGMENT}/extra/serial"), "missing", f"{SEGMENT}/extra/serial"),
    "no chunk": (unlink(f"{SEGMENT}/action/c.0.0"), "missing", f"{SEGMENT}/action/c.0.0"),
    "a short chunk": (truncate(f"{SEGMENT}/action/c.0.0", 5), "size", f"{SEGMENT}/action/c.0.0"),
    "an empty counter": (truncate(f"{SEGMENT}/committed/c.0", 0), "size", f"{SEGMENT}/committed/c.0"),
    "rows that cannot be": (
        lambda path: replace_bytes(path / SEGMENT / "committed/c.0", 7, b"\x40"),
        "checksum",
        f"{SEGMENT}/committed/c.0",
    ),
    "an array of another shape": (
        lambda path: replace_bytes(path / SEGMENT / "done/zarr.json", 0, b'{"shape":[2,'),
        "metadata",
        f"{SEGMENT}/done/zarr.json",
    ),
    "an unknown flag": (
        lambda path: replace_bytes(path / SEGMENT / "done/c.0.0", 0, b"\x84"),
        "flags",
        f"{SEGMENT}/done",
    ),
    "an episode that never begins": (
        lambda path: replace_bytes(path / SEGMENT / "done/c.0.0", 0, b"\0"),
        "flags",
        f"{SEGMENT}/done",
    ),
    "a priority below 0": (
        lambda path: replace_bytes(path / LANES / "priority/c.0.5", 0, np.float64(-1.0).tobytes()),
        "priority",
        f"{LANES}/priority",
    ),
    "no document of priorities": (unlink(f"{LANES}/priority/zarr.json"), "missing", f"{LANES}/priority/zarr.json"),
    "other numbers for priorities": (
        lambda path: shutil.copy(path / LANES / "time/zarr.json", path / LANES / "priority/zarr.json"),
        "metadata",
        f"{LANES}/priority/zarr.json",
    ),
    "no priorities": (rmtree(f"{LANES}/priority"), "missing", f"{LANES}/priority"),
    "priorities of other chunks": (
        with_attributes(LANES, chunk_rows={"priority": 3}),
        "metadata",
        f"{LANES}/zarr.json",
    ),
    "no counts of rows": (
        lambda path: reseal_counter(path, "committed", [1 << 40]),
        "counters",
        f"{SEGMENT}/committed/c.0",
    ),
    "more observations than rows": (
        lambda path: reseal_counter(path, "observed", [1 << 20]),
        "counters",
        f"{SEGMENT}/observed/c.0",
    ),
    "a limiter of nothing": (lambda path: (path / "limiters/x").mkdir(), "missing", "limiters/x/c.0"),
    "a file among limiters": (write_file("limiters/x"), "unexpected", "limiters/x"),
    "an eviction of nothing": (lambda path: with_evictions(path, 1, 5), "eviction", "evictions"),
    "an eviction of the future": (lambda path: with_evictions(path, 9 << 35, 5), "eviction", "evictions/c.0.0"),
    "evictions without a file": (
        lambda path: with_evictions(path, 0, 6) or (path / "evictions/c.0.0").unlink(),
        "missing",
        "evictions/c.0.0",
    ),
    "evictions that were not counted": (
        lambda path: with_evictions(path, 0, 6, rows=7),
        "metadata",
        "evictions/zarr.json",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(store_path, name):
    damage, kind, where = DAMAGE[name]
    damage(store_path)
    before = open_files(store_path)
    assert (kind, where) in found(store_path)
    assert open_files(store_path) == before == []
    for problem in verify(store_path, deep=True):
        assert problem.kind in KINDS
        assert "\n" not in problem.detail
        assert problem.detail


def attributes_in(module):
    """Return the names of the attributes in the tables of a module of `diskreplay/segments`."""
    calls = ast.walk(ast.parse((ROOT / "diskreplay/segments" / module).read_text()))
    return [n.args[0].value for n in calls if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "Attribute"]


ATTRIBUTES = [
    *(("zarr.json", name) for name in attributes_in("documents/root.py")),
    *((f"{SEGMENT}/zarr.json", name) for name in attributes_in("segment.py")),
]


@pytest.mark.parametrize(("document", "name"), ATTRIBUTES)
def test_every_attribute_of_a_document_is_checked_by_verify_and_on_the_page_of_the_format(store_path, document, name):
    page = (ROOT / "docs/format.md").read_text()
    assert f"`{name}`" in page, "docs/format.md does not explain this attribute"
    reseal(store_path / document, lambda attributes: attributes.update({name: [{"no": "value"}]}))
    try:
        problems = found(store_path)
    except Refused as error:  # the value of `requires` is a feature of a newer release
        problems = {("metadata", document)} if "needs" in str(error) else set()
    assert document in {where for _, where in problems}, (
        f"verify accepts a wrong type of {name}: add the attribute to the checks of diskreplay/integrity/verify"
    )


def test_a_flipped_bit_of_a_sealed_chunk_is_found_by_deep_alone(store_path):
    chunk = f"{SEGMENT}/reward/c.0.0"
    data = (store_path / chunk).read_bytes()
    replace_bytes(store_path / chunk, 2, bytes([data[2] ^ 16]))

    assert found(store_path) == set()
    assert found(store_path, deep=True) == {("checksum", chunk)}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_found(store_path):
    (store_path / SEGMENT / "reward/zarr.json").chmod(0)
    assert ("unreadable", f"{SEGMENT}/reward/zarr.json") in found(store_path)


def test_damaged_priorities_are_named_by_their_rows(store_path: Path):
    chunk = store_path / LANES / "priority/c.0.5"
    replace_bytes(chunk, 2 * 8, np.float64(0.25).tobytes())
    (problem,) = verify(store_path, deep=True)
    assert (problem.kind, problem.where) == ("checksum", f"{LANES}/priority/c.0.5")
    assert "row 5 of lane 0, row 5 of lane 1" in problem.detail


def test_a_file_that_the_disk_cannot_read_is_found(store_path, monkeypatch):
    make_unreadable(monkeypatch, f"{SEGMENT}/reward/c\\.0\\.0$")
    assert found(store_path, deep=True) == {("unreadable", f"{SEGMENT}/reward/c.0.0")}


def test_evictions_by_hand_that_are_episodes_are_no_damage(store_path):
    with dr.open(store_path) as store:
        episode = store.episodes[2]
        with_evictions(store_path, int(episode.ids[0]), len(episode))
    assert verify(store_path) == []
    with_evictions(store_path, int(episode.ids[0]), len(episode) - 1)
    assert found(store_path) == {("eviction", "evictions")}


def test_steps_in_quarantine_are_a_finding_until_somebody_decides_about_them(store_path):
    for name in ("zarr.json", "durable/document"):
        replace_bytes(store_path / SEGMENT / name, 5, b"!")
    repair(store_path)
    (problem,) = verify(store_path, deep=True)
    assert (problem.kind, problem.where) == ("quarantine", f"counters/quarantine/{SEGMENT}")
    assert problem.detail == (
        "12 steps are set aside from segment 1 (zarr.json does not match its checksum); diskreplay repair --restore 1 "
        "brings it back, --drop 1 deletes it"
    )
    record = store_path / f"counters/quarantine/{SEGMENT}.record.json"
    for damage in (lambda: record.write_text("{"), lambda: record.write_text("[1]"), record.unlink):
        damage()
        (problem,) = verify(store_path, deep=True)
        assert problem.detail.startswith("12 steps are set aside from segment 1; ")


def test_steps_in_quarantine_that_cannot_be_read_are_not_counted_in_part(store_path, monkeypatch):
    for name in ("zarr.json", "durable/document"):
        replace_bytes(store_path / SEGMENT / name, 5, b"!")
    repair(store_path)
    (store_path / f"counters/quarantine/{SEGMENT}.record.json").unlink()
    make_unreadable(monkeypatch, "counters/quarantine.*/done/")  # the path of the test has the word, too
    (problem,) = verify(store_path)
    assert problem.kind == "quarantine"
    assert "12 steps" not in problem.detail
    assert not problem.detail.startswith("0 steps")


def test_a_pipe_in_a_group_is_told_as_what_it_is_not(store_path):
    os.mkfifo(store_path / SEGMENT / "pipe")
    (problem,) = verify(store_path)
    assert problem == dr.Problem("type", f"{SEGMENT}/pipe", "is neither a file nor a folder")
    set_words(store_path, next_segment=1)
    shutil.rmtree(store_path / "segments/00000002")
    assert ("counters", "counters/c.0") in found(store_path)


def test_every_kind_is_made_by_a_test_above():
    assert {kind for _, kind, _ in DAMAGE.values()} | {"unreadable", "unproven", "quarantine"} == set(KINDS)


@pytest.mark.parametrize("make", ["nothing", "file", "empty", "foreign"])
def test_what_is_no_store_is_refused(tmp_path, make):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    zarr.create_group(tmp_path / "foreign")
    with pytest.raises(Refused, match=make):
        verify(tmp_path / make)


def test_a_store_of_a_newer_format_is_refused_by_name(store_path):
    with_attributes(".", format_version=2)(store_path)
    with pytest.raises(Refused, match=r"version 2.*update diskreplay"):
        verify(store_path)
    with_attributes(".", format_version=1, requires=["telepathy"])(store_path)
    with pytest.raises(Refused, match="telepathy"):
        verify(store_path)


@pytest.mark.parametrize("requires", [[], None])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_store_from_before_the_release_is_refused_by_name(tmp_path, store_path, requires, is_empty):
    path = store_path
    if is_empty:
        path = tmp_path / "empty"
        dr.create(path, serial_schema()).close()
    with_attributes(".", requires=requires)(path)
    files = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    message = (
        f"^{re.escape(str(path))} was written before the format was released, and this release does not read it: "
        "export it with the version that wrote it, and import the export here$"
    )
    for use in (verify, dr.open, lambda path: dr.open(path, "a"), repair):
        with pytest.raises((dr.FormatError, Refused), match=message):
            use(path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == files


# --- every byte ------------------------------------------------------------------------------------------------------


def flips(store, share, apart):
    """Flip a bit of a share of bytes of every file in turn; yield where, and what was found.

    All shares together take every byte of a small file or a counter, and every ``apart``-th one of the others; but for
    locks, which are empty, and the room for evictions by hand, of which there are none.
    """
    chance, path = random.Random(share), store.path
    step, at = SHARES * apart, share * apart
    unused = {*path.rglob("lock"), path / "evictions" / "c.0.0"}
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p not in unused):
        data = file.read_bytes()
        if file.name == "c.0" or len(data) < step:
            positions = range(share, len(data), SHARES)
        else:
            positions = range(at % step, len(data), step)
        for position in positions:
            flipped = bytes([data[position] ^ 1 << chance.randrange(8)])
            replace_bytes(file, position, flipped)
            yield f"{file.relative_to(path)}:{position}", store.verify(deep=True)
            replace_bytes(file, position, data[position : position + 1])
        at += len(data)


@pytest.mark.slow(turns=2)
@each_share
def test_a_flipped_bit_anywhere_is_found(tmp_store, share):
    with dr.create(tmp_store, SCHEMA, chunk_bytes=4096, segment_steps=12) as store, store.writer() as writer:
        write(writer, 6)
        write(writer, 3, 6, final=False)
    assert sum(file.stat().st_size for file in tmp_store.rglob("*") if file.is_file()) <= 128 << 10
    with dr.open(tmp_store) as store:
        missed = [where for where, problems in flips(store, share, whole_or_part(1, 5)) if not problems]
        assert missed == []
        assert store.verify(deep=True) == []


def test_progress_is_in_bytes_where_all_is_read_and_in_segments_else(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), chunk_bytes=64, segment_steps=20) as store, store.writer() as writer:
        for first in range(0, 60, 5):
            append_numbered(writer, range(first, first + 5))
    told: list[tuple[int, int]] = []
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True, progress=lambda *of: told.append(of)) == []
    done, totals = zip(*told, strict=True)
    on_disk = sum(path.lstat().st_blocks * 512 for path in (tmp_store / "segments").rglob("*") if path.is_file())
    assert set(totals) == {on_disk - (tmp_store / "segments/zarr.json").lstat().st_blocks * 512}
    assert (done[0], done[-1]) == (0, totals[0])
    assert list(done) == sorted(done)
    assert len(set(done)) > 10
    told.clear()
    with dr.open(tmp_store) as store:
        assert store.verify(progress=lambda *of: told.append(of)) == []
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("is_counted", [True, False])
def test_a_segment_that_is_made_and_sealed_meanwhile_is_no_finding(tmp_store: Path, is_counted: bool) -> None:
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
    (number,) = (int(path.name) for path in (tmp_store / "segments").glob("[0-9]*"))
    set_words(tmp_store, next_segment=number)  # the folder of a segment is placed before the counter is increased

    def count_it(done: int, total: int) -> None:
        if is_counted:
            set_words(tmp_store, next_segment=number + 1)

    with dr.open(tmp_store) as store:
        details = [problem.detail for problem in store.verify(progress=count_it)]
    expected = f"the next segment is {number}, but segments/{number:08} is there"
    assert details == ([] if is_counted else [expected])
