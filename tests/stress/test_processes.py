"""Forked and spawned processes, threads, pickles, and programs that end badly: the safe thing, and nothing hangs."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import diskreplay as dr
from diskreplay.testing import check_account
from tests.crash import injection
from tests.testing.on_disk import is_locked
from tests.testing.support import REPOSITORY, append_numbered, mapped_files, serial_schema, wait_until

STEPS = 500


@pytest.fixture
def store(tmp_store):
    """A store of numbered steps: sealed segments, and one that its writer holds open."""
    with dr.create(tmp_store, serial_schema(), segment_steps=50, chunk_bytes=1024) as store, store.writer() as writer:
        for first in range(0, STEPS, 5):
            append_numbered(writer, range(first, first + 5))
        store.refresh()
        store.writer_of_test = writer
        yield store
        del store.writer_of_test


def in_child(function):
    """Run a function in a forked child, which leaves without any cleaning up; fail where it raised."""
    injection.in_child(lambda tell: function())


def check_batch(batch):
    """Check that every row of a batch is of one step."""
    fields = batch.numpy()
    assert len(fields["serial"])
    assert (fields["obs"] == fields["serial"][:, None]).all()
    assert (fields["next_obs"] == fields["serial"][:, None] + 1).all()
    assert (fields["action"] == fields["serial"]).all()


def visible(store):
    return sorted(int(serial) for episode in store.episodes for serial in episode["serial"])


# --- fork ------------------------------------------------------------------------------------------------------------


def test_a_forked_child_reads_its_parents_store_and_sees_what_is_new(store):
    def child():
        assert visible(store) == list(range(STEPS))
        store.refresh()
        assert store.episodes[-1]["serial"].tolist() == list(range(STEPS - 5, STEPS))
        sampler = dr.Sampler(store, dr.Transitions(), batch_size=32, seed=0)
        check_batch(sampler.sample())
        sampler.close()

    in_child(child)
    check_batch(dr.Sampler(store, dr.Transitions(), batch_size=32, seed=0).sample())


def test_a_forked_child_writes_and_evicts_through_its_parents_store(store):
    def child():
        with store.writer() as writer:
            append_numbered(writer, range(1000, 1005))
        assert store.evict(lambda episode: episode["serial"][0] in (1000, 0)) == 10
        store.close()

    in_child(child)
    append_numbered(store.writer_of_test, range(STEPS, STEPS + 5))
    store.refresh()
    assert visible(store) == list(range(5, STEPS + 5))


@pytest.mark.parametrize("lanes", [None, 3])
def test_a_forked_child_is_refused_by_its_parents_writer_whatever_it_calls(tmp_store, lanes):
    with dr.create(tmp_store, serial_schema()) as store, store.writer(lanes) as writer:
        shape = () if lanes is None else (lanes,)
        step = [np.zeros((*shape, 3)), np.zeros(shape, int), np.zeros(shape), np.zeros(shape, bool)]
        writer.append(*step, serial=np.zeros(shape, int))

        def child():
            lane = () if lanes is None else (0,)
            block = (np.zeros((2, 3)), np.zeros(2, int), np.zeros(2))
            for call in (
                lambda: writer.append(*step, serial=np.zeros(shape, int)),
                lambda: writer.append_episode(*lane, *block, terminated=True, serial=np.zeros(2, int)),
                writer.end_episode,
                writer.flush,
            ):
                with pytest.raises(dr.WriterClosed, match="belongs to the parent"):
                    call()
            writer.close()
            store.close()

        in_child(child)
        lock = tmp_store / "segments" / "00000000" / "committed" / "lock"
        assert is_locked(lock)
        writer.append(*step, serial=np.ones(shape, int))
        store.refresh()
        assert len(store) == 2 * (lanes or 1)
        assert not any(episode.cut for episode in store.episodes)


def test_a_forked_child_keeps_nothing_of_its_parents_mapped_and_no_lock(store):
    """A child that never looks at the store again must not hold evicted segments on disk, or a dead parent's lock."""
    assert len(mapped_files(store.path)) > 5
    [episode.obs for episode in store.episodes]

    def child():
        # The counters of the store and of segments stay: they are small, and a reader needs them to look again.
        assert {path.split("/")[-2] for path in mapped_files(store.path)} <= {"counters", "committed", "observed"}
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and _there(fd)]
        assert not [path for path in held if path.endswith("/lock") and path.startswith(str(store.path))]

    in_child(child)


def _there(fd):
    return os.path.exists(f"/proc/self/fd/{fd}")


def test_arrays_that_a_child_inherits_stay_readable(store):
    arrays = [(episode.obs, episode.reward, episode["serial"]) for episode in store.episodes]

    def child():
        store.refresh()
        for obs, reward, serial in arrays:
            assert (obs[:-1, 0] == serial).all()
            assert (reward == serial).all()

    in_child(child)


def test_a_parents_lock_is_free_when_it_dies_though_its_forked_child_lives(tmp_store):
    dr.create(tmp_store, serial_schema()).close()
    code = """
import os, sys, time
import diskreplay as dr
from tests.testing.on_disk import is_locked
from tests.testing.support import append_numbered
writer = dr.open(sys.argv[1], "a").writer()
append_numbered(writer, range(5))
if os.fork() == 0:
    print("forked", flush=True)
    os.close(1)
    sys.stdin.read()
    os._exit(0)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_store)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY
    ) as parent:
        parent.stdout.readline()
        lock = tmp_store / "segments" / "00000000" / "committed" / "lock"
        assert is_locked(lock)
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
        assert not is_locked(lock)
        with dr.open(tmp_store, "a") as store:
            assert visible(store) == list(range(5))
        parent.stdin.close()  # the child ends


@pytest.mark.slow(turns=4)
def test_forks_in_the_middle_of_other_threads_work_leave_children_that_can_go_on(store):
    """Locks of threads that a child has not would be held there for ever."""
    stop = threading.Event()

    def refresh():
        while not stop.is_set():
            store.refresh()
            store.episodes[0].obs.sum()

    def write():
        first = STEPS
        with dr.open(store.path, "a") as other, other.writer() as writer:
            # Not for ever: the children read all of it.
            while not stop.is_set() and first < 10_000:
                append_numbered(writer, range(first, first + 5))
                first += 5

    def child():
        store.refresh()
        assert visible(store)[:STEPS] == list(range(STEPS))
        with store.writer() as writer:
            append_numbered(writer, [10**9])
        store.refresh()
        assert visible(store)[-1] == 10**9
        store.close()

    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(refresh), pool.submit(refresh), pool.submit(write)]
        try:
            for _ in range(4):
                in_child(child)
        finally:
            stop.set()
        for each in work:
            each.result()
    assert store.verify(deep=True) == []


# --- loaders of torch ------------------------------------------------------------------------------------------------


class Batches(torch.utils.data.IterableDataset):
    """Some batches of a sampler that each worker makes, or of one that it is given."""

    def __init__(self, store, sampler=None):
        self.store, self.sampler = store, sampler

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        sampler = self.sampler or dr.Sampler(
            self.store, dr.Transitions(), batch_size=16, seed=1, rank=info.id, world_size=info.num_workers
        )
        for _ in range(5):
            yield dict(sampler.sample().numpy())


def load(dataset, context):
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context=context, timeout=120
    )
    return [{name: np.asarray(value) for name, value in batch.items()} for batch in loader]


class _Fields:
    def __init__(self, fields):
        self.fields = fields

    def numpy(self):
        return self.fields


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_share_the_steps_without_overlap(store):
    batches = load(Batches(store), "fork")
    assert len(batches) == 10
    by_rank = [set(), set()]
    for number, batch in enumerate(batches):
        check_batch(_Fields(batch))
        by_rank[number % 2] |= set(batch["serial"].tolist())
    assert not by_rank[0] & by_rank[1]
    check_batch(dr.Sampler(store, dr.Transitions(), batch_size=32).sample())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_are_refused_by_a_sampler_of_their_parent(store):
    """All of them, and their parent, would draw the same steps."""
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=16, seed=1)
    check_batch(sampler.sample())
    said = "this sampler belongs to another process, number .*: make one there"
    with pytest.raises(dr.ReplayError, match=said) as refused:
        load(Batches(store, sampler), "fork")
    traceback.clear_frames(refused.tb)  # or else torch waits 5 s for each worker of the iterator in the traceback
    with pytest.raises(TypeError, match="cannot be sent to another process: make one there"):
        pickle.dumps(Batches(store, sampler))
    check_batch(sampler.sample())
    sampler.close()


# --- pickles ---------------------------------------------------------------------------------------------------------


def _read_in_child(store, answer):
    answer.put((store.mode, visible(store)))
    store.close()


@pytest.mark.slow(turns=4)
def test_a_store_travels_to_a_spawned_process(store):
    context = multiprocessing.get_context("spawn")
    answer = context.SimpleQueue()
    child = context.Process(target=_read_in_child, args=(store, answer))
    child.start()
    assert answer.get() == ("a", list(range(STEPS)))
    child.join(60)
    assert child.exitcode == 0
    answer.close()


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 2])
def test_a_writer_cannot_be_pickled_and_says_what_to_do(store, lanes):
    with store.writer(lanes) as writer, pytest.raises(TypeError, match=r"make a writer there: store\.writer\(\)"):
        pickle.dumps(writer)


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_threads_share_a_sampler_while_another_updates_priorities_and_steps_are_evicted(store):
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=32, seed=0)
    drawn, stop = [], threading.Event()

    def draw():
        for _ in range(150):
            batch = sampler.sample()
            check_batch(batch)
            drawn.append(batch.index)

    def update():
        while not stop.is_set():
            for index in drawn[-3:]:
                sampler.update_priorities(index, np.random.default_rng(len(drawn)).random(32))

    def evict():
        for first in range(0, 200, 50):
            store.evict(lambda episode, first=first: first <= episode["serial"][0] < first + 30)
            append_numbered(store.writer_of_test, range(1000 + first, 1005 + first))

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(draw), pool.submit(draw), pool.submit(evict)]
        updating = pool.submit(update)
        try:
            for each in work:
                each.result()
        finally:
            stop.set()
        updating.result()
    batch = sampler.sample()
    check_batch(batch)
    gone = {serial for first in range(0, 200, 50) for serial in range(first, first + 30)}
    assert not gone & set(batch.numpy()["serial"].tolist())
    sampler.close()


@pytest.mark.slow(turns=4)
def test_threads_evict_and_write_at_once(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity=400, segment_steps=20, chunk_bytes=1024) as store:

        def write(first):
            with store.writer() as writer:
                for start in range(first, first + 1000, 5):
                    append_numbered(writer, range(start, start + 5))

        def tenth(episode):
            return episode["serial"][-1] % 50 < 5  # the last step: capacity may have hidden the first ones

        def evict():
            return sum(store.evict(tenth) for _ in range(15))

        with ThreadPoolExecutor(4) as pool:
            writing = [pool.submit(write, first) for first in (0, 10_000)]
            evicting = [pool.submit(evict) for _ in range(2)]
            for each in writing:
                each.result()
            evicted = sum(each.result() for each in evicting)
        evicted += store.evict(tenth)
        store.refresh()
        assert 0 < evicted <= 200
        assert not [serial for serial in visible(store) if serial % 50 < 5]
        assert len(store) <= 400
        check_account(store, 2000)
        assert store.verify(deep=True) == []


@pytest.mark.slow
def test_a_segment_has_one_writer(store):
    """Nobody is given a lock that a living writer holds: not this process, not one that looks for dead writers."""

    def writing():
        return [info["number"] for info in store.info()["segments"] if info["state"] == "writing"]

    wait_until(lambda: len(writing()) == 1)  # what is full is sealed beside its writer
    numbers = writing()
    lock = store.path / "segments" / f"{numbers[0]:08d}" / "committed" / "lock"
    assert is_locked(lock)
    with dr.open(store.path, "a") as other, other.writer() as writer:
        append_numbered(writer, range(10**6, 10**6 + 5))
        other.refresh()
        states = {info["number"]: info["state"] for info in other.info()["segments"]}
        assert states[numbers[0]] == "writing"
        assert sum(state == "writing" for state in states.values()) == 2


# --- programs that end badly -----------------------------------------------------------------------------------------

ENDS = {
    "raise": "raise RuntimeError('in the training loop')",
    "sys.exit": "sys.exit(1)",
    "a thread": "thread = threading.Thread(target=lambda: 1 // 0); thread.start(); thread.join(); sys.exit(1)",
    "KeyboardInterrupt": "os.kill(os.getpid(), signal.SIGINT)\nwhile True: sampler.sample()",
}
TRAIN = """
import os, signal, sys, threading
import diskreplay as dr
from tests.testing.on_disk import is_locked
from tests.testing.support import append_numbered

signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for what it starts in the background
store = dr.open(sys.argv[1], "a")
writer = store.writer()
for first in range(0, 3000, 5):
    append_numbered(writer, range(first, first + 5))
append_numbered(writer, range(3000, 3003), end="open")
sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=32, prefetch=2)
for i, batch in enumerate(sampler):
    sampler.update_priorities(batch.index, batch.reward)
    if i == 20:
        print("training", flush=True)
        END
"""


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("end", ENDS)
def test_a_training_loop_that_ends_badly_leaves_nothing_hanging(tmp_store, end):
    dr.create(tmp_store, serial_schema(), segment_steps=500, chunk_bytes=4096).close()
    code = TRAIN.replace("END", ENDS[end].replace("\n", "\n        "))
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_store)], capture_output=True, text=True, cwd=REPOSITORY, timeout=120
    )
    assert done.stdout == "training\n", done.stderr
    assert done.returncode in (1, -signal.SIGINT, 130)
    for lock in tmp_store.rglob("lock"):
        assert not is_locked(lock)
    with dr.open(tmp_store, "a") as store:
        assert visible(store) == list(range(3003))
    with dr.open(tmp_store) as reader:
        assert {info["state"] for info in reader.info()["segments"]} == {"sealed"}
        assert reader.verify(deep=True) == []
