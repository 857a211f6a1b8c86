"""Stores written by somebody hostile: one line of an error or data, never a crash, a hang, or a file elsewhere."""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import time
import tracemalloc
import warnings
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import diskreplay as dr
from tests.conftest import own_threads
from tests.inner import forget_warnings
from tests.segments.hostile import BYTES, apply, changes
from tests.testing.commands import Refused, repair, verify
from tests.testing.on_disk import write_document
from tests.testing.packed import pack_numbers
from tests.testing.support import digest, scratch, serial_schema
from tests.tiers import whole_or_part

FIELDS = {
    "obs": {"a": dr.Field((3,), "float32"), "b": dr.Field((), "bool")},
    "episode": {"seed": dr.Field((), "int64")},
}
SCHEMA = serial_schema(**FIELDS)
MOST_BYTES = 64 << 20  # a store of 20 kB must not make anybody allocate more; a document of its own may have as much


def make_original(path):
    """Make the store that is mutated; some steps of its second segment were lost."""
    with dr.create(path, SCHEMA, chunk_bytes=4096, segment_steps=12) as store, store.writer() as writer:
        for _ in range(4):
            for t in range(6):
                obs, following = ({"a": [i] * 3, "b": True} for i in (t, t + 1))
                end = t == 5
                writer.append(obs, t, 1.0, end, serial=t, next_obs=following, episode={"seed": 1} if end else None)
    rewards = path / "segments/00000001/reward/c.0.0"
    rewards.write_bytes(b"\xff" + rewards.read_bytes()[1:])
    assert repair(path).steps_lost == 6
    shutil.rmtree(path / "counters/quarantine")
    return path


def make_packed(path):
    """Make a store with a field that is compressed, in a pack into which an earlier one was merged, and a segment."""
    schema = serial_schema(**FIELDS, extra={"wide": dr.Field((300,), "uint8")})
    with dr.create(path, schema, segment_steps=12, compaction="manual", compression="zstd") as store:
        for merges in (True, True, False):
            for _ in range(2):
                append_episode(path, 6)
            if merges:
                store.compact()
            store.refresh()
            store.evict(lambda episode: int(episode.ids[0]) == store.episodes[-2].ids[0])
    assert len(pack_numbers(path)) == 1
    assert len(list((path / "segments").glob("0*"))) == 2
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_original(tmp_path_factory.mktemp("original") / "store")


@pytest.fixture(scope="module", params=["segments", "packs"])
def either(request, tmp_path_factory):
    if request.param == "packs":
        pytest.importorskip("zstandard")
    make = make_packed if request.param == "packs" else make_original
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diskreplay.segments.documents.layout.LEAST_TABLE_ROWS", 0)
        return make(tmp_path_factory.mktemp("original") / "store")


@pytest.fixture(autouse=True)
def no_patience(no_patience, monkeypatch):
    monkeypatch.setattr("diskreplay.segments.files.commit._RETRIES", 2)


def leaves_of(tree):
    """Return the arrays of a tree."""
    if isinstance(tree, dict):
        return leaves_of(list(tree.values()))
    return [leaf for below in tree for leaf in leaves_of(below)] if isinstance(tree, list | tuple) else [tree]


ACROSS = dr.Sequences(length=4, stride=2, cross_episodes=True)
VIEWS = [dr.Transitions(n_step=3), dr.Transitions(n_step=2, frame_stack=3), dr.Sequences(length=4, overlap=2), ACROSS]


def read_all(path, mode="r"):
    """Read every byte of every episode, and draw batches."""
    with dr.open(path, mode) as store:
        for episode in store.episodes:
            # By the schema that the store has now: a document whose checksum fits may have lost a field.
            extras = [leaf.removeprefix("extra/") for leaf in store.schema.leaves if leaf.startswith("extra/")]
            for value in leaves_of([episode.obs, episode.action, episode.reward, *map(episode.__getitem__, extras)]):
                assert value.nbytes >= 0
        store.info()
        for view in VIEWS:
            draw(store, view)


def draw(store, view):
    try:
        sampler = dr.Sampler(store, view, dr.Prioritized(), batch_size=16, seed=0)
    except ValueError:
        assert set(store.schema.obs) != set(SCHEMA.obs)  # with a fitting checksum, a document may lack a field
        return
    with sampler, contextlib.suppress(dr.NotEnoughData):
        batch = sampler.sample()
        assert sampler.update_priorities(batch.index, batch.weight) == 0


def said(call):
    """Run a call: it works, or says in one line what is wrong with the store; return that line.

    Of a damaged segment it is a warning, as the store is used without it.
    """
    message = ""
    forget_warnings()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("error")
        warnings.simplefilter("always", dr.DamagedSegmentWarning)
        try:
            call()
        except (dr.FormatError, dr.StoreNotFound, Refused) as error:
            message = str(error)
    message = message or "".join(str(warning.message) for warning in told[:1])
    assert "\n" not in message
    return message


def refused(call):
    """Return what a call has `said`, in little memory."""
    tracemalloc.start()
    try:
        message = said(call)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3 * MOST_BYTES
    return message


HEALTH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@pytest.mark.slow(turns=4)
@settings(max_examples=whole_or_part(120, 20), suppress_health_check=HEALTH)
@given(st.data())
def test_mutated_stores_are_read_or_refused_in_one_line(either, data):
    check_mutated(either, data.draw(changes(either)))


# What `verify` may raise: what is whole, and of another version or of something else, is no damage.
NO_DAMAGE = ("has format version", "which this release does not know", "is not a diskreplay store")


def check_mutated(original, planned):
    with scratch() as folder:
        use_mutated(Path(folder), original, planned, refused)


def use_mutated(folder, original, planned, refused):
    """Make the changes in a copy, and do all that can be done with it."""
    path, outside = folder / "store", folder / "outside"
    shutil.copytree(original, path)
    for change in planned:
        apply(path, change, outside)
    kept = outside.read_bytes() if outside.exists() else None

    found = []
    reason = refused(lambda: found.extend(verify(path, deep=True)))
    assert not reason or any(words in reason for words in NO_DAMAGE)
    was_refused = refused(lambda: read_all(path))
    refused(lambda: read_all(path, "a"))
    refused(lambda: repair(path))
    refused(lambda: read_all(path))

    # Whatever a reader refuses, verify has a word for.
    assert found or reason or not was_refused
    assert kept is None or outside.read_bytes() == kept


@pytest.mark.slow
@pytest.mark.parametrize("data", BYTES)
@pytest.mark.parametrize("name", ["zarr.json", "segments/00000001/zarr.json", "counters/c.0"])
def test_files_of_something_else_are_found_and_refused(original, tmp_store, name, data):
    shutil.copytree(original, tmp_store)
    (tmp_store / name).write_bytes(data)
    assert [problem.where for problem in verify(tmp_store)] == [name]
    assert refused(lambda: read_all(tmp_store))


FOLDERS = [
    *("counters", "segments", "evictions", "limiters", "samplers"),
    *(f"segments/00000001{inner}" for inner in ("", "/obs", "/obs/a", "/done", "/committed", "/durable", "/extra")),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_no_folder_is_followed_out_of_the_store(original, tmp_store, tmp_path, name):
    shutil.copytree(original, tmp_store)
    shutil.move(tmp_store / name, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "old-letters").mkdir()
    (tmp_path / "elsewhere" / "old-letters" / "dear").write_text("x")
    (tmp_store / name).symlink_to(tmp_path / "elsewhere")
    before = digest(tmp_path / "elsewhere")

    assert ("type", name) in {(problem.kind, problem.where) for problem in verify(tmp_store, deep=True)}
    for mode in ("r", "a"):
        assert "symbolic link" in said(lambda mode=mode: read_all(tmp_store, mode))
    repair(tmp_store)
    refused(lambda: read_all(tmp_store, "a"))
    assert digest(tmp_path / "elsewhere") == before


def append_episode(path, steps=2):
    with dr.open(path, "a") as store, store.writer() as writer:
        obs = {"a": np.zeros((steps + 1, 3), "f4"), "b": np.ones(steps + 1, bool)}
        action, reward, extra = np.zeros(steps, "i8"), np.zeros(steps, "f4"), {"serial": np.arange(steps)}
        if "extra/wide" in store.schema.leaves:
            extra["wide"] = np.ones((steps, 300), "u1")
        writer.append_episode(obs, action, reward, terminated=True, **extra, episode={"seed": 1})


def evict_all(path):
    with dr.open(path, "a") as store:
        store.evict(lambda _: True)


def check_replaced(original, path, name, how):
    """Remove a file or folder, or put a folder or file in its place, and do all that can be done with the store."""
    shutil.copytree(original, path)
    was_folder = (path / name).is_dir()
    shutil.rmtree(path / name) if was_folder else (path / name).unlink()
    if how == "replaced":
        (path / name).touch() if was_folder else (path / name).mkdir()
    elif how == "pipe":
        os.mkfifo(path / name)
    elif how == "zeros":
        (path / name).symlink_to("/dev/zero")
    elif how == "deep":
        (path / name).write_bytes(b'{"a":' * 20_000 + b"1" + b"}" * 20_000)
    uses = [read_all, append_episode, evict_all]
    for use in [lambda path: verify(path, deep=True), *uses, lambda path: repair(path, dry_run=True), repair, *uses]:
        said(lambda use=use: use(path))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["missing", "replaced"])
@pytest.mark.parametrize("name", ["segments", "counters", "evictions", "evictions/zarr.json", "evictions/c.0.0"])
def test_what_is_missing_or_of_another_kind_is_refused_in_one_line(original, tmp_store, name, how):
    check_replaced(original, tmp_store, name, how)


@pytest.mark.parametrize("how", ["pipe", "zeros"])
def test_a_lock_that_is_no_regular_file_stops_nobody(original, tmp_store, how):
    check_replaced(original, tmp_store, "segments/00000001/committed/lock", how)


KINDS = ["missing", "replaced", "pipe", "zeros", "deep"]


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("how", KINDS)
def test_any_file_or_folder_that_is_missing_or_of_another_kind_is_refused_in_one_line(either, how):
    first = min(path.name for path in (either / "segments").iterdir() if path.is_dir())
    every = sorted(path.relative_to(either) for path in either.rglob("*"))
    # Not of the first segment: as another, which has lost steps, or lacks evicted ones, as well.
    every = [below for below in every if "segments" not in below.parts or first not in below.parts]
    apart = whole_or_part(1, len(KINDS))  # in a part each has its turn with one kind
    for below in every[KINDS.index(how) % apart :: apart]:
        with scratch() as folder:
            check_replaced(either, Path(folder) / "store", below, how)


@pytest.mark.parametrize("name", ["counters/quarantine", "counters/quarantine/segments", "limiters/default"])
@pytest.mark.parametrize("use", ["repair", "open", "limiter"])
def test_nothing_is_moved_or_made_through_a_link(original, tmp_store, tmp_path, name, use):
    shutil.copytree(original, tmp_store)
    (tmp_path / "elsewhere").mkdir()
    (tmp_store / name).parent.mkdir(exist_ok=True)
    (tmp_store / name).symlink_to(tmp_path / "elsewhere")
    if use == "repair":
        (tmp_store / "segments/00000001/reward/zarr.json").write_bytes(b"{}")
        (tmp_store / "segments/00000001/done/c.0.0").write_bytes(b"")
        said(lambda: repair(tmp_store))
    elif use == "open":  # what says nothing of itself since the power went is set aside
        for file in ("zarr.json", "durable/c.0"):
            (tmp_store / "segments/00000001" / file).write_bytes(b"")
        said(lambda: dr.open(tmp_store, "a").close())
    else:
        with dr.open(tmp_store, "a") as store:
            said(lambda: store.writer(limiter=dr.RateLimiter(1.0, 1, 10.0)).close())
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [path.is_symlink() for path in tmp_store.rglob("*")].count(True) == 1  # where it was, or set aside
    # Nothing is lost: it is where it was, or in quarantine.
    actions = [path / "action/c.0.0" for path in tmp_store.rglob("00000001") if path.is_dir()]
    assert (original / "segments/00000001/action/c.0.0").read_bytes() in [path.read_bytes() for path in actions]


@pytest.mark.parametrize(
    "draft", ["next-0-1-2", "state-run-1-2", "next-0-1-2/committed", "new-00000007", "old-00000007-5"]
)
def test_no_lock_is_made_through_the_link_of_what_a_process_was_making(original, tmp_store, tmp_path, draft):
    shutil.copytree(original, tmp_store)
    (tmp_path / "elsewhere" / "committed").mkdir(parents=True)
    (tmp_path / "elsewhere" / "lock").touch()
    (tmp_path / "elsewhere" / "lock").unlink()
    link = tmp_store / "counters" / draft
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "elsewhere")
    for use in (
        lambda: dr.open(tmp_store, "a").close(),
        lambda: repair(tmp_store, dry_run=True),
        lambda: repair(tmp_store),
    ):
        said(use)
        assert [path.name for path in (tmp_path / "elsewhere").rglob("*")] == ["committed"]
    assert len(dr.open(tmp_store)) == len(dr.open(original)) == 18


SCHEMAS = {
    "a name that goes up": {"dict": {"..": {"shape": [], "dtype": "bool"}}},
    "a name with a slash": {"dict": {"a/../../b": {"shape": [], "dtype": "bool"}}},
    "a name that is absolute": {"dict": {"/tmp/x": {"shape": [], "dtype": "bool"}}},
    "objects": {"shape": [], "dtype": "object"},
    "a shape beyond all memory": {"shape": [1 << 30, 1 << 30], "dtype": "float64"},
    "a shape of many axes": {"shape": [1] * 10_000, "dtype": "bool"},
    "a negative shape": {"shape": [-1], "dtype": "bool"},
    "a shape of text": {"shape": "3", "dtype": "bool"},
    "a number": 5,
}


@pytest.mark.parametrize("node", SCHEMAS.values(), ids=SCHEMAS)
def test_schemas_that_cannot_be_are_found_and_refused(original, tmp_store, node):
    shutil.copytree(original, tmp_store)
    document = json.loads((tmp_store / "zarr.json").read_bytes())
    document["attributes"]["schema"]["obs"] = node
    write_document(tmp_store / "zarr.json", document)

    (problem, *_) = verify(tmp_store)
    assert (problem.kind, problem.where) == ("metadata", "zarr.json")
    assert len(problem.detail) < 300
    assert refused(lambda: read_all(tmp_store))
    assert repair(tmp_store).actions == []


def test_a_segment_that_claims_more_steps_than_can_be_counted_is_set_aside(original, tmp_store):
    """Found by `tests.segments.fuzz`: the sum of evicted steps did not fit its counter."""
    shutil.copytree(original, tmp_store)
    name = "segments/00000000/zarr.json"
    document = json.loads((tmp_store / name).read_bytes())
    document["attributes"]["steps"] = 10**30
    write_document(tmp_store / name, document)

    assert name in {problem.where for problem in verify(tmp_store)}
    assert repair(tmp_store).actions
    (problem,) = verify(tmp_store, deep=True)
    assert problem.detail.startswith("12 steps are set aside from segment 0 ") or "12 steps of writer" in problem.detail
    read_all(tmp_store, "a")


@pytest.mark.slow(turns=4)
def test_an_index_that_claims_a_huge_compressed_inner_chunk_is_refused(tmp_store):
    pytest.importorskip("zstandard")
    make_packed(tmp_store)
    folder = tmp_store / f"segments/{pack_numbers(tmp_store)[-1]:08}"
    (file,) = (folder / "extra/wide").glob("c*")
    document = json.loads((folder / "zarr.json").read_bytes())
    inner = document["attributes"]["compressed"]["extra/wide"]["rows"]
    index = np.full((document["attributes"]["chunk_rows"]["extra/wide"] // inner, 2), -1, "<i8")
    index[0] = 0, 1 << 40
    data = index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    document["attributes"]["compressed"]["extra/wide"]["nbytes"] = (1 << 40) + len(data)
    document["attributes"]["checksums"]["durable/indexes"] = google_crc32c.value(data)
    write_document(folder / "zarr.json", document)
    shutil.copyfile(folder / "zarr.json", folder / "durable/document")
    for each in file, folder / "durable/indexes":
        each.chmod(0o644)
    os.truncate(file, 0)
    with open(file, "r+b") as opened:
        opened.seek(1 << 40)
        opened.write(data)
    (folder / "durable/indexes").write_bytes(data)
    assert "impossible values" in refused(lambda: read_all(tmp_store))
    assert file.name in {Path(problem.where).name for problem in verify(tmp_store)}
    assert repair(tmp_store).left == []
    assert {problem.kind for problem in verify(tmp_store)} == {"quarantine"}
    read_all(tmp_store)


@pytest.mark.slow
@pytest.mark.parametrize(("inner", "rows"), [(32, 1 << 40), (1 << 30, 1 << 30), (1 << 20, 1 << 20)])
def test_a_compressed_array_that_claims_a_huge_index_or_inner_chunk_is_refused(tmp_store, inner, rows):
    pytest.importorskip("zstandard")
    make_packed(tmp_store)
    folder = tmp_store / f"segments/{pack_numbers(tmp_store)[-1]:08}"
    (file,) = (folder / "extra/wide").glob("c*")
    document = json.loads((folder / "zarr.json").read_bytes())
    nbytes = 16 * (rows // inner) + 104
    document["attributes"]["compressed"]["extra/wide"] |= {"rows": inner, "nbytes": nbytes}
    document["attributes"]["chunk_rows"]["extra/wide"] = rows
    write_document(folder / "zarr.json", document)
    shutil.copyfile(folder / "zarr.json", folder / "durable/document")
    file.chmod(0o644)
    os.truncate(file, nbytes)
    assert "unusable attributes" in refused(lambda: read_all(tmp_store))
    assert "metadata" in {problem.kind for problem in verify(tmp_store, deep=True)}
    assert repair(tmp_store).left == []
    assert {problem.kind for problem in verify(tmp_store, deep=True)} == {"quarantine"}


TINY = dr.Schema(dr.Field((), "uint8"), dr.Field((), "uint8"))


def swell(path, rows, sealed, first_flag):
    """Make the one segment of a store claim so many rows in chunks that are holes but for their first bytes."""
    segment = path / "segments/00000000"
    document = json.loads((segment / "zarr.json").read_bytes())
    attributes = document["attributes"]
    for leaf, nbytes in (("obs", 1), ("action", 1), ("reward", 4), ("done", 1), ("time", 8)):
        per_chunk = attributes["chunk_rows"][leaf] = min(rows, (1 << 32) // nbytes)
        for chunk in range(rows // per_chunk):
            with open(segment / leaf / f"c.0.{chunk}", "ab") as file:
                file.truncate(per_chunk * nbytes)
        array = json.loads((segment / leaf / "zarr.json").read_bytes())
        array["shape"], array["chunk_grid"]["configuration"]["chunk_shape"] = [1, rows], [1, per_chunk]
        write_document(segment / leaf / "zarr.json", array)
    with open(segment / "done/c.0.0", "r+b") as file:
        file.write(bytes([first_flag] + [0] * 99))
    for name in ("committed", "observed", "durable"):
        np.array([rows], "<i8").tofile(segment / name / "c.0")
    attributes |= {"steps": rows, "checksums": {}} if sealed else {"sealed": False}
    attributes["inode"] = (segment / "committed/c.0").stat().st_ino
    write_document(segment / "zarr.json", document)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize(("flag", "message"), [(4, ""), (0, "flags in done are damaged"), (12, "ends twice")])
def test_holes_take_neither_memory_nor_time(tmp_store, sealed, flag, message, mode):
    """A few blocks on disk that claim to be billions of rows."""
    with dr.create(tmp_store, TINY, max_age_s=1e9) as store, store.writer() as writer:
        writer.append_episode([1] * 6, [0] * 5, [0.0] * 5, terminated=False)
    swell(tmp_store, 1 << 31, sealed, flag)
    lengths = []

    def look():
        with dr.open(tmp_store, mode) as store:
            lengths.append([len(episode) for episode in store.episodes])
            assert mode == "a" or not sealed or store.info(total_reward=False)["steps_inserted"] == 1 << 31

    used = resource.getrusage(resource.RUSAGE_SELF)
    told = refused(look)
    now = resource.getrusage(resource.RUSAGE_SELF)
    while own_threads():  # with mode "a", an unsealed segment is being sealed
        time.sleep(0.01)
    assert message in told
    assert bool(message) == bool(told)
    if not message:
        assert lengths == [[1 << 31]]
    assert now.ru_maxrss - used.ru_maxrss < (256 << 20) / 1024
    assert now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime < 8


@pytest.mark.slow
def test_a_long_episode_in_a_sparse_copy_is_read_as_it_is(tmp_store, tmp_path):
    """Most of its flags are zeros, which some tools copy as holes."""
    lengths = [3, 1_200_000, 1, 700_001, 64, 1_500_000]
    with dr.create(tmp_store, TINY, segment_steps=1 << 22) as store, store.writer(num_envs=2) as writer:
        for lane in (1, 0):
            for steps in lengths[lane:]:
                obs, action, reward = np.ones(steps + 1, "u1"), np.zeros(steps, "u1"), np.zeros(steps, "f4")
                writer.append_episode(lane, obs, action, reward, terminated=steps != 64)
        whole = store.uuid
    subprocess.run(["cp", "-a", "--sparse=always", str(tmp_store), str(tmp_path / "sparse")], check=True)
    (chunk, *_) = (tmp_path / "sparse").glob("segments/00000000/done/c.0.0")
    assert chunk.stat().st_blocks * 512 * 4 < chunk.stat().st_size
    tables = []
    for path in (tmp_store, tmp_path / "sparse"):
        with dr.open(path) as store:
            store.refresh()
            tables.append(store.episode_table())
            assert (store.uuid, store.verify(deep=True)) == (whole, [])
            assert len(store) == 2 * sum(lengths) - lengths[0]
    for name, column in tables[0].items():
        assert column.tolist() == tables[1][name].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1 << 20, 1 << 34, 1 << 62, -1])
def test_counters_beyond_all_chunks_do_not_make_verify_look_for_each(original, tmp_store, rows):
    """With fitting checksums, and chunks of a row each."""
    shutil.copytree(original, tmp_store)
    segment = tmp_store / "segments/00000001"
    for name in ("committed", "durable"):
        np.array([rows], "<i8").tofile(segment / name / "c.0")
    document = json.loads((segment / "zarr.json").read_bytes())
    for name in ("committed", "durable"):
        del document["attributes"]["checksums"][f"{name}/c.0"]
    write_document(segment / "zarr.json", document)
    tracemalloc.start()
    problems = verify(tmp_store, deep=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert {problem.kind for problem in problems} <= {"missing", "metadata", "counters", "checksum"}
    assert 1 <= len(problems) < 40
    assert peak < MOST_BYTES
    assert said(lambda: read_all(tmp_store))
