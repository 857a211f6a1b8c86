"""Closing a writer from any thread, threads that share one, and signals in the middle of its calls."""

import contextlib
import gc
import itertools
import random
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest

import diskreplay as dr
from tests.conftest import mapped_files, open_files, own_threads
from tests.crash.injection import is_interrupted
from tests.testing.support import append_numbered, run_python, serial_schema, serials, wait_until
from tests.tiers import whole_or_part

WIDE = dr.Field((512,), "uint8")  # rows that are written by position, through descriptors
IN_USE = (
    "another thread is in the middle of a call of this writer; one thread at a time may use it: make a writer for each "
    "thread, store.writer()"
)
CLOSED = "this writer is closed; make a new one: store.writer()"
LANES = 4
PATIENCE_S = 300.0


def schema():
    return serial_schema(obs={"image": WIDE, "state": dr.Field((3,), "float32")})


def obs_of(serial, *leading):
    values = {"image": np.full((512,), serial % 256, np.uint8), "state": np.full((3,), serial, np.float32)}
    return {name: np.broadcast_to(value, (*leading, *value.shape)) for name, value in values.items()}


def append(writer, serial):
    writer.append(obs_of(serial), serial, float(serial), serial % 7 == 6, serial=serial)


def append_lanes(writer, serial):
    lanes = np.full(LANES, serial)
    ends = lanes % 7 == 6
    writer.append(obs_of(serial, LANES), lanes, lanes.astype("f4"), ends, serial=lanes)


def append_episode(writer, serial):
    block = np.full(3, serial)
    writer.append_episode(obs_of(serial, 3), block, block.astype("f4"), terminated=True, serial=block)


def append_and_flush(writer, serial):
    append(writer, serial)
    writer.flush()


def append_and_end(writer, serial):
    append(writer, serial)
    writer.end_episode(obs_of(serial + 1))


CALLS = {
    "append": (None, append),
    "append of lanes": (LANES, append_lanes),
    "append_episode": (None, append_episode),
    "flush": (None, append_and_flush),
    "end_episode": (None, append_and_end),
}


def check(path):
    """No row is torn, nothing is left to be sealed, and verify finds nothing."""
    with dr.open(path) as store:
        assert store.verify(deep=True) == []
        assert {segment["state"] for segment in store.info()["segments"]} <= {"sealed"}
        for episode in store.episodes:
            serial = episode["serial"]
            assert (episode.action == serial).all()
            assert (episode.reward == serial).all()
            assert (episode.obs["image"][: len(serial)] == serial[:, None] % 256).all()
            assert (episode.obs["state"][: len(serial)] == serial[:, None]).all()
        return len(store)


def call_until_it_raises(call, writer, raised):
    try:
        for serial in range(1 << 30):
            call(writer, serial)
    except Exception as error:
        raised.append(error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("whole_store", [False, True])
def test_close_waits_for_the_call_in_progress_and_later_ones_are_refused(tmp_path, kind, whole_store):
    envs, call = CALLS[kind]
    rng = random.Random(0)
    for n in range(25):
        path, raised = tmp_path / str(n), []
        store = dr.create(path, schema(), chunk_bytes=4096, segment_steps=40)
        writer = store.writer(envs)

        thread = threading.Thread(target=call_until_it_raises, args=(call, writer, raised))
        thread.start()
        time.sleep(rng.random() * 0.01)  # any moment
        (store if whole_store else writer).close()
        thread.join(PATIENCE_S)
        assert [(type(error), str(error)) for error in raised] == [(dr.WriterClosed, CLOSED)]
        store.close()
        check(path)


class Blocking:
    """A value that takes its time to become an array: whoever appends it is in the middle of the call meanwhile."""

    def __init__(self, then=lambda: None):
        self.begun, self.go_on, self.then = threading.Event(), threading.Event(), then

    def __array__(self, dtype=None, copy=None):
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        self.then()
        return np.zeros(3, np.float32)


@pytest.fixture
def store(tmp_store):
    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=40) as store:
        yield store


def others(writer):
    """What else a thread may want of a writer while another one uses it."""
    block = np.zeros(3)
    return [
        lambda: append_numbered(writer, [1]),
        lambda: writer.append_episode(np.zeros((3, 3), "f4"), block, block, terminated=True, serial=block),
        writer.end_episode,
        writer.flush,
    ]


def test_a_call_in_the_middle_of_another_threads_is_an_error_and_close_waits(store):
    writer, value = store.writer(), Blocking()
    appending = threading.Thread(target=writer.append, args=(value, 5, 5.0, False), kwargs={"serial": 5})
    appending.start()
    assert value.begun.wait(PATIENCE_S)
    for call in others(writer):
        with pytest.raises(dr.StoreLocked, match=f"^{re.escape(IN_USE)}$"):
            call()
    closing = [threading.Thread(target=writer.close) for _ in range(2)]
    for thread in closing:
        thread.start()
    while writer._lock is writer._own_lock:
        time.sleep(0.001)
    for call in others(writer):
        with pytest.raises(dr.WriterClosed, match=f"^{re.escape(CLOSED)}$"):
            call()
    assert all(thread.is_alive() for thread in closing)
    value.go_on.set()
    for thread in [appending, *closing]:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    store.refresh()
    assert serials(store) == [5]
    assert store.info()["segments"][0]["state"] == "sealed"


def test_the_same_call_works_when_the_other_thread_is_done(store):
    writer, value = store.writer(), Blocking()
    appending = threading.Thread(target=writer.append, args=(value, 5, 5.0, True), kwargs={"serial": 5})
    appending.start()
    assert value.begun.wait(PATIENCE_S)
    with pytest.raises(dr.StoreLocked):
        append_numbered(writer, [1, 2])
    value.go_on.set()
    appending.join(PATIENCE_S)
    append_numbered(writer, [1, 2])
    writer.close()
    store.refresh()
    assert serials(store) == [5, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("envs", [None, LANES])
def test_threads_that_share_a_writer_tear_no_step(tmp_store, envs):
    call = append if envs is None else append_lanes
    with dr.create(tmp_store, schema(), chunk_bytes=4096, segment_steps=100) as store:
        writer, done, wrong = store.writer(envs), [], []
        begin = threading.Barrier(4)

        def work(first):
            begin.wait(PATIENCE_S)
            for serial in range(first, first + 700):
                try:
                    call(writer, serial)
                    done.append(serial)
                except dr.StoreLocked:
                    time.sleep(0)
                except BaseException as error:
                    wrong.append(error)

        threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE_S)
        assert wrong == []
    with dr.open(tmp_store) as store:
        found = serials(store)
    assert sorted(found) == sorted(done * (envs or 1))
    assert check(tmp_store) == len(found)


def test_an_append_that_waits_for_a_limiter_ends_when_the_writer_is_closed(store):
    limiter = dr.RateLimiter(samples_per_insert=1.0, min_size=1, error_buffer=2.0)
    writer, raised = store.writer(limiter=limiter), []

    def work():
        with pytest.raises(dr.WriterClosed) as caught:
            append_numbered(writer, range(100))
        raised.append(str(caught.value))

    thread = threading.Thread(target=work)
    thread.start()
    seen = -1
    while len(store) != seen or seen < 1:  # until it waits
        seen = len(store)
        time.sleep(0.05)
        store.refresh()
    writer.close()
    thread.join(PATIENCE_S)
    assert raised == [CLOSED]
    assert store.info()["segments"][0]["state"] == "sealed"


def test_a_writer_that_is_closed_in_the_middle_of_a_call_of_the_same_thread_closes_at_its_end(tmp_store):
    """As by a signal's handler, which comes in the middle of anything."""
    store = dr.create(tmp_store, serial_schema())
    writer = store.writer()
    value = Blocking(then=store.close)
    value.go_on.set()
    writer.append(value, 5, 5.0, False, serial=5)
    with pytest.raises(dr.WriterClosed):
        append_numbered(writer, [6])
    with dr.open(tmp_store) as reader:
        assert serials(reader) == [5]
        assert reader.info()["segments"][0]["state"] == "sealed"


HANDLER = """
import os, signal, sys, threading, time
import diskreplay as dr
from tests.testing.support import append_numbered
store = dr.open(sys.argv[1], "a")
writer = store.writer()
def end(*_):
    store.close()
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
def send():
    time.sleep(float(sys.argv[2]))
    os.kill(os.getpid(), signal.SIGTERM)
def report(unraisable):
    if unraisable.exc_type is not SystemExit:
        sys.__unraisablehook__(unraisable)
sys.unraisablehook = report
threading.Thread(target=send).start()
try:
    for serial in range(1 << 40):
        append_numbered(writer, range(4 * serial, 4 * serial + 4))
except dr.WriterClosed:
    sys.exit(7)  # the handler ran within a finalizer, out of which Python lets no exception
"""


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.05, 0.111, 0.2])
def test_a_signals_handler_may_close_the_store_and_exit(tmp_store, delay):
    dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=100).close()
    with pytest.raises(AssertionError, match="exit code 7\n\n$"):
        run_python(HANDLER, tmp_store, delay)
    # A segment that was just being handed over to be sealed is left to the next opener.
    with dr.open(tmp_store, "a") as store:
        assert {segment["state"] for segment in store.info()["segments"]} == {"sealed"}
        found = serials(store)
        assert found == list(range(len(found)))
        assert store.verify(deep=True) == []


class Interrupted(Exception):
    pass


@pytest.mark.leaks("an exception may come between the opening of a file and the assignment of its descriptor")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:an appended obs differs")  # an episode that was interrupted does not go on
def test_a_signal_at_any_moment_leaves_a_writer_that_can_be_used_or_closed(tmp_store):
    """An exception of a handler may come between any two instructions: no turn is lost for good."""
    rng, armed = random.Random(0), False

    def interrupt(number, frame):
        nonlocal armed
        if armed:
            armed = False
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=200) as store:
            serial, outcomes = 0, set()
            for _ in range(80):
                writer = store.writer()
                with contextlib.suppress(Interrupted):
                    armed = True  # first: a signal that comes before that is lost, and there is no other
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 3e-3))
                    while armed:  # or it was raised where nothing can be, as in a finalizer
                        append_numbered(writer, [serial, serial + 1])
                        serial += 2
                try:
                    append_numbered(writer, [serial])
                    outcomes.add("usable")
                except dr.WriterClosed:
                    outcomes.add("closed")
                writer.close()
            assert "closed" in outcomes
            assert outcomes <= {"usable", "closed"}
    finally:
        signal.signal(signal.SIGALRM, before)
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []


def held(path):
    """Return what this process holds of a store: descriptors, with them locks, mappings, and threads."""
    gc.collect()
    return (
        {target for _, target in open_files() if target.startswith(str(path))} | mapped_files(str(path)) | own_threads()
    )


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("envs", [None, LANES])
@pytest.mark.parametrize("whole_store", [False, True])
def test_a_close_that_is_interrupted_at_any_line_is_completed_by_the_next(tmp_path, envs, whole_store):
    append_one = append_lanes if envs else append
    for line in itertools.count(0, whole_or_part(5, 67)):
        path = tmp_path / str(line)
        store = dr.create(path, schema(), chunk_bytes=4096, segment_steps=20)
        with contextlib.closing(store):
            writer = store.writer(envs)
            for serial in range(24):
                append_one(writer, serial)
            was_interrupted = is_interrupted((store if whole_store else writer).close, line)
            if line % 2:
                writer.close()
        del writer, store
        wait_until(lambda path=path: not held(path), 60)  # a thread that was told to end may be on its way out
        assert check(path) == 24 * (envs or 1)
        with dr.open(path, "a") as store, store.writer(envs) as writer:
            append_one(writer, 7)
        assert check(path) == 25 * (envs or 1)
        shutil.rmtree(path)
        if not was_interrupted:
            break
    assert line > 300
