"""After a loss of power everything durable is there, nothing torn is visible, and nobody has to repair anything."""

import json
import os
import random
import signal
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import diskreplay as dr
from tests.crash import workloads
from tests.crash.injection import in_child
from tests.crash.power import Recording, State, another_boot, states
from tests.testing.coded import check_coded_parts
from tests.testing.commands import repair
from tests.testing.filesystems import mounted
from tests.testing.on_disk import EPISODE_VALUES, attributes_of, marks_of
from tests.testing.support import digest, scratch
from tests.tiers import whole_or_part

RUNS = int(os.environ.get("DISKREPLAY_POWER_RUNS", 0))
DURABILITIES = ("none", "episode", 0.001)
ACTS = (1, 1, 2, 2, 4)


def random_run(seed: int) -> tuple[dict[str, Any], Any]:
    """Make up a short run: how its store is made, and what its writer does."""
    rng = random.Random(seed)
    durability = DURABILITIES[seed % 3]
    lanes = bool(seed // 3 % 2)
    made = {
        "capacity": None if lanes else rng.choice([None, 6]),
        "segment_steps": rng.choice([4, 6, "episode", 64]),
        "chunk_bytes": rng.choice([128, 512, 4096]),
    }

    def work(store: dr.Store, tell: workloads.Tell) -> None:
        writer = (workloads.Vector if lanes else workloads.Single)(store, 1, tell, durability=durability)
        for _ in range(rng.choice(ACTS)):
            act(writer, rng)
        if rng.random() < 0.5:
            writer.flush()
        if rng.random() < 0.5:
            act(writer, rng)
        writer.close()

    return made, work


def act(writer: Any, rng: random.Random) -> None:
    """Make a few calls."""
    known = rng.random() < 0.7
    if isinstance(writer, workloads.Vector):
        writer.step(ends=[rng.randrange(5)], cuts=[rng.randrange(5)], skip=[rng.randrange(9)], known=known)
        if rng.random() < 0.3:
            writer.block(rng.randrange(workloads.LANES), rng.randrange(1, 3))
    elif rng.random() < 0.4:
        writer.block(rng.randrange(1, 4), terminated=rng.random() < 0.5, known=known)
    else:
        for t in range(left := rng.randrange(1, 4)):
            writer.step(rng.choice(["terminated", "truncated", ""]) if t == left - 1 else "", known=known)
    what = rng.random()
    if what < 0.2:
        writer.flush()
    elif what < 0.3:
        writer.end()


def check(state: State, path: Path, marks: list[dict[str, Any]], capacity: int | None, known: dict[int, Any]) -> None:
    """Open a store that lost its power as a reader does, and as the next writer.

    Many states become the same store, which is looked at once: ``known`` are those of the same run.
    """
    promised = marks[state.marks - 1] if state.marks else {"counts": [0], "durable": [0]}
    most = marks[state.marks]["counts"] if state.marks < len(marks) else promised["counts"]
    if not (path / "zarr.json").exists():
        assert state.marks == 0
        return
    with another_boot():
        with dr.open(path) as store:
            found = check_coded_parts(store)
            check_promises(found, promised["durable"], most, capacity)
            with dr.open(path, "a"):
                pass
            store.refresh()
            assert check_coded_parts(store) == found
        recovered = hash(tuple(sorted(digest(path).items())))
        if recovered not in known:
            # What was never written is set aside, and what its counters claim is told; there is nothing to repair.
            with dr.open(path) as store:
                assert check_coded_parts(store) == found
                assert {segment["state"] for segment in store.info()["segments"]} <= {"sealed"}
                assert {problem.kind for problem in store.verify(deep=True)} <= {"quarantine", "unproven"}
            assert repair(path).actions == []
            known[recovered] = found
        assert known[recovered] == found
        left = {name for name in os.listdir(path / "counters") if not name.startswith(".")}
        assert left <= {"c.0", "lock", "zarr.json", "quarantine"}


def check_promises(found: dict, durable: list[int], most: list[int], capacity: int | None) -> None:
    for lane, count in enumerate(durable):
        spans = found.get((1, lane), [])
        # What only the page cache held when the power went may have evicted older steps already.
        first = 0 if capacity is None else max(0, max(most) - capacity)
        if first < count:
            assert spans, f"lane {lane}: nothing of {count} durable steps is there"
            assert spans[0].first <= first, f"lane {lane}: {spans} of {count} durable steps"
            assert spans[0].stop >= count, f"lane {lane}: {spans} of {count} durable steps"
        assert all(span.stop <= limit for span in spans for limit in [most[lane] if lane < len(most) else 0])
    assert {lane for _, lane in found} <= set(range(len(most)))


def record(folder: Path, seed: int) -> tuple[Recording, dict[str, Any]]:
    """Record a run from the making of its store on."""
    made, work = random_run(seed)
    with (
        Recording(folder) as recording,
        workloads.early_preallocation(),
        workloads.create(folder / "store", **made) as store,
    ):
        recording.mark({"counts": [0], "durable": [0]})
        work(store, recording.mark)
    return recording, made


def check_run(seed: int, subsets: int, every: int = 1) -> int:
    """Record a run and check every nth of the states that it could leave, different ones; return how many."""
    count, known = 0, dict[int, Any]()
    with scratch() as folder:
        run = Path(folder) / "run"
        run.mkdir()
        recording, made = record(run, seed)
        for number, state in enumerate(states(recording, seed, subsets, every=every)):
            with TemporaryDirectory(dir=folder) as disk:
                state.write(disk)
                try:
                    check(state, Path(disk) / "store", recording.marks, made["capacity"], known)
                except BaseException as error:
                    raise AssertionError(f"run {seed}, {made}, state {number}, {state.why}: {error!r}") from error
            count += 1
    return count


def check_evicted(path: Path, was_evicted: bool, was_begun: bool) -> None:
    """Check that an episode is evicted as a whole or not at all, and stays so."""
    with another_boot():
        with dr.open(path, "a") as store:
            found = check_coded_parts(store)[1, 0]
            assert found in ([[(3, 5)]] if was_evicted else [[(0, 5)], [(3, 5)]] if was_begun else [[(0, 5)]])
            assert store.verify(deep=True) == []
            store.evict(lambda episode: len(episode) == 2)
        with dr.open(path) as store:
            assert check_coded_parts(store).get((1, 0), []) in ([], [(0, 3)])


def test_an_eviction_by_hand_is_whole_after_a_loss_of_power(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with workloads.create(run / "store", capacity=None, segment_steps=64) as store:
        writer = workloads.Single(store, 1, lambda _: None)
        writer.block(3)
        writer.block(2)
        writer.close()
        store.refresh()
        with Recording(run) as recording:
            recording.mark("begun")
            store.evict(lambda episode: len(episode) == 3)
            recording.mark("evicted")
    count = 0
    for state in states(recording, 0, 20):
        with TemporaryDirectory(dir=tmp_path) as disk:
            state.write(disk)
            check_evicted(Path(disk) / "store", state.marks == 2, state.marks > 0)
            count += 1
    assert count > 10


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow(turns=2)) for seed in range(1, 6))])
def test_a_store_that_lost_its_power_has_everything_durable(seed: int) -> None:
    assert check_run(seed, 10, every=whole_or_part(83, 83 if seed == 0 else 601)) > 5


@pytest.mark.slow(turns=4)
@pytest.mark.timeout(100_000)
@pytest.mark.parametrize("seed", range(100, 100 + max(RUNS, 4)))
def test_a_store_that_lost_its_power_in_any_way_has_everything_durable(seed: int) -> None:
    assert check_run(seed, 200, every=1 if RUNS else whole_or_part(9, 331)) > whole_or_part(100, 5)


def check_documents(path: Path) -> int:
    """Check that other tools can read every array that has durable rows; return how many there are."""
    count = 0
    for segment in sorted((path / "segments").glob("0*")):
        marks = marks_of(segment, lanes=1)
        if not marks:
            continue
        (rows,) = marks[-1].rows
        per_chunk = attributes_of(segment)["chunk_rows"]
        flags = b"".join((segment / f"done/c.0.{k}").read_bytes() for k in range(-(-rows // per_chunk["done"])))
        values = sum(flag & EPISODE_VALUES > 0 for flag in flags[:rows])
        for document in [*segment.glob("**/zarr.json")]:
            leaf = str(document.parent.relative_to(segment))
            if "/." in leaf:
                continue  # a draft, which no tool looks for
            text = document.read_text()
            node = json.loads(text) if text else {}
            assert node, f"{document} is empty, and {rows} rows are durable"
            if leaf in per_chunk:
                assert node["shape"][1] >= (values if leaf == "episode/last" else rows), document
                count += 1
    return count


@pytest.mark.slow
def test_arrays_with_durable_rows_have_their_documents_after_a_loss_of_power(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with Recording(run) as recording, workloads.create(run / "store", capacity=None, segment_steps=10_000) as store:
        writer = workloads.Single(store, 1, recording.mark)
        writer.block(20)
        writer.flush()
        writer.block(100)  # into further chunks of every field
    count = 0
    for number, state in enumerate(states(recording, 0, 30)):
        if number % 5 == 0:
            with TemporaryDirectory(dir=tmp_path) as disk:
                state.write(disk)
                count += check_documents(Path(disk) / "store")
    assert count > 20


def write_and_die(path: Path, rounds: int, tell: Any) -> None:
    store = dr.open(path, "a")
    writer = workloads.Single(store, 1, lambda _: None)
    writer.block(20)
    writer.flush()
    for _ in range(rounds):
        writer.block(20)
    # What is synced takes the log of the whole file system along, and with data=writeback nothing of other files.
    with open(path.parent / "other", "wb") as file:
        file.write(b"synced")
        file.flush()
        os.fsync(file.fileno())
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["data=writeback", "data=writeback,noauto_da_alloc", "data=ordered"])
def test_arrays_with_durable_rows_have_their_documents_after_a_power_cut_of_an_ext4(options: str) -> None:
    for rounds in range(1, 6):
        with mounted("ext4", 32, options) as disk:
            path = disk.path / "store"
            workloads.create(path, capacity=None, segment_steps=10_000).close()
            assert in_child(partial(write_and_die, path, rounds)).died
            disk.lose_power()
            disk.unmount()
            disk.mount()
            assert (disk.path / "other").read_bytes() == b"synced"
            assert check_documents(path) > 3
            with another_boot(), dr.open(path) as store:
                assert len(store) >= 20
                assert {problem.kind for problem in store.verify()} <= {"unproven"}
