"""A store has an identity: whoever has it open is never led into another one, and learns that it is gone."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import diskreplay as dr
from tests.crash.injection import failing
from tests.integrity.verify.test_verify import before_opening
from tests.testing.commands import Refused, repair, verify
from tests.testing.on_disk import attributes_of
from tests.testing.support import REPOSITORY, append_numbered, digest, run_python, serial_schema, serials

WORKER = """
import sys
import diskreplay as dr
from tests.testing.support import append_numbered, serials

store = dr.open(sys.argv[1], sys.argv[2])
limiter = dr.RateLimiter(1.0, 1, 1e9)

def append(first, steps=5):
    append_numbered(writer, range(first, first + steps))

def shown():
    store.refresh()
    return serials(store)

for line in sys.stdin:
    try:
        exec(line)
        print("done", flush=True)
    except BaseException as error:
        print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
"""


class Worker:
    """A process with a store open, which runs the lines that it is given and answers how each went."""

    def __init__(self, path, mode="a"):
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(path), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def run(self, line):
        print(line, file=self._process.stdin, flush=True)
        return self._process.stdout.readline().rstrip("\n")

    def end(self):
        self._process.stdin.close()
        self._process.stdout.read()
        self._process.stdout.close()
        return self._process.wait(timeout=600)


@pytest.fixture
def start():
    workers = []

    def begin(path, mode="a"):
        workers.append(Worker(path, mode))
        assert workers[-1].run('writer = store.writer() if store.mode == "a" else None') == "done"
        return workers[-1]

    yield begin
    for worker in workers:
        worker.end()


def make(path, steps=(), schema=None, **kwargs):
    """Make a store with sealed segments of 8 rows."""
    with dr.create(path, schema or serial_schema(), segment_steps=8, **kwargs) as store, store.writer() as writer:
        for first in steps:
            append_numbered(writer, range(first, first + 5))
        return store.uuid


def append_until_told(worker):
    """Append until the worker's store is gone for it; return what it was told."""
    for first in range(1000, 1400, 5):
        answer = worker.run(f"append({first})")
        if answer != "done":
            return answer
    raise AssertionError("it appended 400 steps")


def use_as_an_orphan(worker):
    """Do all that an orphan can do; nothing of it may work on the store that is at its path now."""
    told = append_until_told(worker)
    assert told.startswith("StoreNotFound")
    lines = [
        "store.evict(lambda episode: True)",
        "store.writer().append_episode([[0] * 3] * 3, [0] * 3, [0.0] * 3, terminated=True, serial=[1, 2, 3])",
        "sampler.save('run')",
        "sampler.save('other')",
        "store.delete_sampler_state('run')",
        "store.writer(limiter=limiter).append([0] * 3, 0, 0.0, False, serial=1)",
        "sampler.update_priorities(sampler.sample().index, [1.0] * 4)",
        "store.repair()",
        "store.repair(dry_run=True); store.verify(deep=True)",
        "store.refresh()",
        "sampler.close()",
        "writer.close()",
        "store.close()",
    ]
    for line in lines:
        answer = worker.run(line)
        told += answer
        assert answer == "done" or answer.split()[0] in ("StoreNotFound", "SegmentGone", "NotEnoughData"), line
        if any(word in line for word in ("save", "limiter", "delete", "repair()")):
            assert answer.startswith("StoreNotFound"), line
    assert "/proc/self" not in told


def other_schema():
    return serial_schema(dr.Field((5,), "float64"), episode={"seed": dr.Field((), "int64")})


def replace_by_a_new_one(path, schema):
    shutil.rmtree(path)
    make(path, range(0, 60, 5), schema)


def replace_by_renames(path, schema):
    make(path.with_name("other"), range(0, 60, 5), schema)
    path.rename(path.with_name("old"))
    path.with_name("other").rename(path)


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("replace", [replace_by_a_new_one, replace_by_renames])
@pytest.mark.parametrize("schema", [serial_schema, None], ids=["same schema", "other schema"])
def test_an_old_worker_writes_nothing_into_the_store_that_took_its_stores_place(tmp_store, start, replace, schema):
    make(tmp_store, [0, 5, 10])
    worker = start(tmp_store)
    assert worker.run("append(100)") == "done"
    assert worker.run("sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=4)") == "done"
    assert worker.run("sampler.save('run'); sampler.sample()") == "done"

    if schema is None:

        def replace_by_another(path, _):  # append_numbered writes the first schema alone
            if replace is replace_by_a_new_one:
                shutil.rmtree(path)
            else:
                path.rename(path.with_name("old"))
            dr.create(path, other_schema(), segment_steps=8).close()

        replace_by_another(tmp_store, None)
    else:
        replace(tmp_store, schema())
    with dr.open(tmp_store) as store:
        assert store.uuid == attributes_of(tmp_store)["uuid"]
    before = digest(tmp_store)

    use_as_an_orphan(worker)
    assert digest(tmp_store) == before
    assert dr.open(tmp_store).verify(deep=True) == []
    if schema is not None:
        assert serials(tmp_store) == list(range(60))
    if (old := tmp_store.with_name("old")).exists():
        # What it had written when it learnt of it is kept, where its store is now.
        dr.open(old, "a").close()
        kept = serials(old)
        assert kept[:15] == [*range(5), *range(5, 15)]
        assert kept[15:20] == list(range(100, 105))
        assert dr.open(old).verify(deep=True) == []


def test_a_worker_of_a_store_that_is_gone_learns_it(tmp_store, start):
    make(tmp_store)
    worker = start(tmp_store)
    assert worker.run("append(0)") == "done"
    shutil.rmtree(tmp_store)
    assert append_until_told(worker).startswith(f"StoreNotFound {tmp_store} (store ")
    assert worker.run("writer.append([0] * 3, 0, 0.0, False, serial=1)").startswith("WriterClosed")
    assert worker.run("store.close()").split()[0] in ("done", "StoreNotFound")
    assert not tmp_store.exists()


def test_a_store_whose_contents_were_replaced_is_another_store(tmp_store, start):
    make(tmp_store)
    make(tmp_store.with_name("other"), [0])
    worker = start(tmp_store)
    assert worker.run("append(100)") == "done"
    for child in tmp_store.iterdir():
        child.unlink() if child.is_file() else shutil.rmtree(child)
    shutil.copytree(tmp_store.with_name("other"), tmp_store, dirs_exist_ok=True)
    before = digest(tmp_store)
    assert append_until_told(worker).startswith("StoreNotFound")
    assert worker.run("store.close()").split()[0] in ("done", "StoreNotFound")
    assert digest(tmp_store) == before


@pytest.mark.slow(turns=4)
def test_a_store_that_is_renamed_in_place_goes_on(tmp_store, start):
    make(tmp_store)
    worker, reader = start(tmp_store), start(tmp_store, "r")
    assert worker.run("append(0)") == "done"
    moved = tmp_store.with_name("moved")
    (moved.parent / "deeper").mkdir()
    tmp_store.rename(moved)
    for first in range(5, 100, 5):
        assert worker.run(f"append({first})") == "done"
        if first == 50:
            moved.rename(moved := moved.parent / "deeper" / "store")
    assert worker.run("sampler = dr.Sampler(store, dr.Transitions(), batch_size=4); sampler.save('run')") == "done"
    assert worker.run("sampler.close(); writer.flush()") == "done"
    assert worker.run("store.evict(lambda episode: episode['serial'][0] == 0)") == "done"
    assert reader.run("assert shown() == list(range(5, 100)), shown()") == "done"
    assert worker.run("store.close()") == "done"
    assert not tmp_store.exists()
    assert serials(moved) == list(range(5, 100))
    assert dr.open(moved).verify(deep=True) == []


def test_a_store_that_is_moved_to_another_file_system_is_gone_for_its_workers(tmp_store, start, tmp_path):
    elsewhere = Path("/dev/shm") if os.stat("/dev/shm").st_dev != os.stat(tmp_path).st_dev else Path("/var/tmp")
    if os.stat(elsewhere).st_dev == os.stat(tmp_path).st_dev:
        pytest.skip("there is no second file system")
    make(tmp_store, [0, 5, 10])
    worker = start(tmp_store)
    assert worker.run("append(15)") == "done"
    target = elsewhere / f"diskreplay-moved-{os.getpid()}"
    try:
        subprocess.run(["mv", str(tmp_store), str(target)], check=True)
        before = digest(target)
        assert append_until_told(worker).startswith("StoreNotFound")
        assert worker.run("store.close()").split()[0] in ("done", "StoreNotFound")
        assert digest(target) == before
        assert serials(target)[:15] == list(range(15))
    finally:
        shutil.rmtree(target)


@pytest.mark.slow(turns=4)
def test_a_reader_never_sees_the_store_that_took_the_place_of_its_own(tmp_store, start):
    make(tmp_store, range(0, 60, 5))
    worker, reader = start(tmp_store), start(tmp_store, "r")
    assert worker.run("append(60)") == "done"
    assert reader.run("assert shown() == list(range(65))") == "done"
    assert reader.run("sampler = dr.Sampler(store, dr.Transitions(), batch_size=64, seed=0)") == "done"
    shutil.rmtree(tmp_store)
    make(tmp_store, range(5000, 5100, 5))
    for _ in range(3):
        answer = reader.run("store.refresh()")
        assert answer == "done" or answer.startswith("StoreNotFound")
        answer = reader.run("assert max(sampler.sample().numpy()['serial']) < 65")
        assert answer == "done" or answer.split()[0] in ("StoreNotFound", "SegmentGone")
    assert reader.run("sampler.close()") == "done"


# --- what is of another store ----------------------------------------------------------------------------------------


CHECKS = {
    "verify": lambda path: verify(path, deep=True),
    "repair": lambda path: repair(path).left,
    "dry run": lambda path: repair(path, dry_run=True).left,
}
MIDDLE = r"segments/00000001/reward/zarr\.json$"  # a file that all of them read


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_a_store_that_is_renamed_while_it_is_verified_or_repaired_is_followed(tmp_store, monkeypatch, check):
    make(tmp_store, range(0, 40, 5))
    moved = tmp_store.with_name("moved")

    def rename(_):
        if tmp_store.exists():
            tmp_store.rename(moved)

    before_opening(monkeypatch, MIDDLE, rename)
    assert CHECKS[check](tmp_store) == []
    assert serials(moved) == list(range(40))
    assert not tmp_store.exists()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_store_that_is_deleted_while_it_is_verified_or_repaired_is_not_found(
    tmp_store, monkeypatch, check, is_replaced
):
    make(tmp_store, range(0, 40, 5))
    before, is_deleted = None, False

    def delete(_):
        nonlocal before, is_deleted
        if not is_deleted:
            is_deleted = True
            shutil.rmtree(tmp_store)
            if is_replaced:
                make(tmp_store, [0])
                before = digest(tmp_store)

    before_opening(monkeypatch, MIDDLE, delete)
    with pytest.raises(Refused, match="^/(?!proc).* was deleted"):
        CHECKS[check](tmp_store)
    assert before == digest(tmp_store) if is_replaced else not tmp_store.exists()


def test_every_store_and_segment_has_an_identity_of_its_own(tmp_path):
    one, two = make(tmp_path / "one", [0, 5, 10]), make(tmp_path / "two")
    assert one != two
    files = (tmp_path / "one").glob("segments/0*/zarr.json")
    documents = [attributes_of(path.parent) for path in files]
    assert len(documents) > 1
    assert {document["store"] for document in documents} == {one}
    assert len({one, *(document["uuid"] for document in documents)}) == 1 + len(documents)
    with dr.open(tmp_path / "one") as store:
        assert store.uuid == one == attributes_of(tmp_path / "one")["uuid"]


def test_a_copy_has_the_identity_of_its_original(tmp_path):
    make(tmp_path / "one", [0])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with dr.open(tmp_path / "one") as one, dr.open(tmp_path / "two", "a") as two:
        assert one.uuid == two.uuid
        assert two.verify(deep=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("sealed", [True, False])
def test_a_segment_of_another_store_is_damage_and_never_shown(tmp_path, sealed, start):
    make(tmp_path / "one", [0])
    if sealed:
        other = make(tmp_path / "two", [900])
    else:
        other = make(tmp_path / "two")
        worker = start(tmp_path / "two")
        assert worker.run("append(900)") == "done"
    shutil.rmtree(tmp_path / "one/segments/00000000")
    shutil.copytree(tmp_path / "two/segments/00000000", tmp_path / "one/segments/00000000")

    (problem, *more) = dr.open(tmp_path / "two").verify() + repair(tmp_path / "one", dry_run=True).left
    assert (problem.kind, problem.where, more) == ("metadata", "segments/00000000/zarr.json", [])
    assert other in problem.detail
    with pytest.warns(dr.DamagedSegmentWarning, match=other), dr.open(tmp_path / "one") as store:
        assert len(store) == 0
    with dr.open(tmp_path / "one", "a") as store:  # a process is warned once
        assert len(store) == 0
    repair(tmp_path / "one")
    with dr.open(tmp_path / "one") as store:
        assert len(store) == 0
        assert {problem.kind for problem in store.verify(deep=True)} == {"quarantine"}


def test_a_state_of_another_store_is_refused(tmp_path):
    one, two = make(tmp_path / "one", [0]), make(tmp_path / "two", [0])
    with dr.open(tmp_path / "one", "a") as store, dr.Sampler(store, dr.Transitions(), batch_size=4) as sampler:
        sampler.save("run")
        shutil.copytree(tmp_path / "one/samplers/run", tmp_path / "two/samplers/theirs")
    with dr.open(tmp_path / "two", "a") as store, dr.Sampler(store, dr.Transitions(), batch_size=4) as sampler:
        with pytest.raises(dr.FormatError, match=rf"samplers/theirs is a state of another store \('{one}'\).*{two}"):
            sampler.load("theirs")
        where = "samplers/theirs/1/zarr.json"
        assert [(p.kind, p.where) for p in store.verify(deep=True)] == [("metadata", where)]
        store.delete_sampler_state("theirs")
        assert store.verify(deep=True) == []


def test_a_state_is_deleted_by_its_name(tmp_store):
    make(tmp_store, [0])
    with dr.open(tmp_store, "a") as store, dr.Sampler(store, dr.Transitions(), batch_size=4) as sampler:
        sampler.save("one")
        sampler.save("two")
        store.delete_sampler_state("one")
        for verb in (sampler.load, store.delete_sampler_state):
            with pytest.raises(dr.StoreNotFound, match="no sampler state named 'one'; it has two"):
                verb("one")
            with pytest.raises(dr.StoreNotFound, match=r"named '\.\./two'"):
                verb("../two")
        sampler.load("two")
        assert sorted(path.name for path in (tmp_store / "samplers").iterdir()) == ["two", "zarr.json"]
        assert sorted(path.name for path in (tmp_store / "counters").iterdir()) == ["c.0", "lock", "zarr.json"]
        assert store.verify(deep=True) == []
        with dr.open(tmp_store) as reader, pytest.raises(dr.ReadOnlyError, match='mode "a" to delete'):
            reader.delete_sampler_state("two")


# --- boots that are not known ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_where_the_boot_is_not_known_no_row_of_another_process_counts_before_it_is_durable(tmp_store):
    """The machine may have gone down since, and rows may be torn: that nobody knows the boot's name proves nothing."""
    make(tmp_store)
    code = """
import os, signal, sys
import diskreplay as dr
from tests.crash.power import another_boot
from tests.testing.support import append_numbered

unknown = another_boot("")
unknown.__enter__()
store = dr.open(sys.argv[1], "a")
if sys.argv[2] == "write":
    writer = store.writer(durability="none")  # kept: one that is dropped is sealed
    append_numbered(writer, range(3), end="open")
    store.refresh()
    assert len(store) == 3  # its own rows it knows
    os.kill(os.getpid(), signal.SIGKILL)
print(len(store))
"""
    with pytest.raises(AssertionError, match="exit code -9"):
        run_python(code, tmp_store, "write")
    assert run_python(code, tmp_store, "read") == "0\n"


# --- what is said ----------------------------------------------------------------------------------------------------


def in_words(error):
    """Return all that a traceback would say of an error."""
    errors = []
    while error is not None and error not in errors:
        errors.append(error)
        error = error.__cause__ or error.__context__
    return " ".join(map(str, errors))


USES = {
    "open": lambda path: dr.open(path).close(),
    "open to write": lambda path: dr.open(path, "a").close(),
    "append": lambda path: write(path),
    "append with a limiter": lambda path: write(path, limiter=dr.RateLimiter(1.0, 1, 1e9)),
    "flush": lambda path: write(path, flush=True),
    "refresh": lambda path: refresh(path),
    "evict": lambda path: use(path, lambda store: store.evict(lambda episode: True)),
    "info": lambda path: use(path, lambda store: store.info()),
    "save": lambda path: use(path, lambda store: sampler_of(store).save("run")),
    "load": lambda path: use(path, lambda store: sampler_of(store).load("run")),
    "delete": lambda path: use(path, lambda store: store.delete_sampler_state("run")),
    "repair": lambda path: use(path, lambda store: store.repair()),
}


def use(path, do):
    with dr.open(path, "a") as store:
        do(store)


def sampler_of(store):
    return dr.Sampler(store, dr.Transitions(), batch_size=4)


def write(path, flush=False, **kwargs):
    with dr.open(path, "a") as store, store.writer(**kwargs) as writer:
        for first in range(0, 40, 5):
            append_numbered(writer, range(first, first + 5))
            if flush:
                writer.flush()


def refresh(path):
    with dr.open(path) as reader, dr.open(path, "a") as store, store.writer() as writer:
        for first in range(0, 40, 5):
            append_numbered(writer, range(first, first + 5))
            reader.refresh()
            [episode.obs for episode in reader.episodes]


@pytest.mark.slow
@pytest.mark.parametrize("what", USES)
def test_no_message_names_a_descriptor_instead_of_the_path(tmp_path, what):
    """Every call to the system fails in turn, and so does each of the first that follow it."""
    make(tmp_path / "original", [0, 5, 10])
    use(tmp_path / "original", lambda store: sampler_of(store).save("run"))
    said = set()
    for number in range(0, 300, 3):
        path = tmp_path / "store"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(tmp_path / "original", path)
        count = iter(range(1 << 30))
        refused = []

        def is_next(point, count=count, refused=refused, number=number):
            if point.name in ("store", "close", "mmap") or not point.args:
                return False
            at = next(count)
            if number <= at < number + 2:
                refused.append(point)
            return number <= at < number + 2

        try:
            with failing(is_next, errno.EIO):
                USES[what](path)
        except Exception as error:
            said.add(in_words(error))
        if not refused:
            break
    assert said
    assert not [words for words in said if "/proc/self" in words]
