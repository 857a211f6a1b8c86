"""Writers that nobody closes: collected, or open when their process ends."""

import gc
import subprocess
import sys
import threading
import time
import warnings

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.on_disk import is_locked
from tests.testing.support import (
    REPOSITORY,
    append_numbered,
    open_descriptors,
    run_python,
    serial_schema,
    serials,
    wait_until,
)

WIDE = dr.Field((512,), "uint8")


def warning_of(path):
    return (
        f"^a writer of {path} was not closed, and its segments are sealed only now: close it, or use it in a with "
        "statement$"
    )


def states(path):
    with dr.open(path) as store:
        return [segment["state"] for segment in store.info()["segments"]]


def wait_until_sealed(path):
    wait_until(lambda: {*states(path)} <= {"sealed"})


def append_wide(writer, serial, lanes=()):
    obs = {f"image{i}": np.full((*lanes, 512), serial % 256, np.uint8) for i in range(3)}
    value = np.full(lanes, serial)
    writer.append(obs, value, value.astype("f4"), np.zeros(lanes, bool) if lanes else False, serial=value)


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("envs", [None, 2])
def test_dropped_writers_leave_no_descriptor_and_no_segment_that_is_not_sealed(tmp_store, envs):
    schema = serial_schema(obs={f"image{i}": WIDE for i in range(3)})
    with dr.create(tmp_store, schema, chunk_bytes=4096, compaction="manual") as store:
        gc.collect()  # what an earlier test left has descriptors too
        before = open_descriptors()
        for serial in range(300):
            with pytest.warns(ResourceWarning, match=warning_of(tmp_store)):
                append_wide(store.writer(envs), serial, () if envs is None else (envs,))
        wait_until_sealed(tmp_store)
        wait_until(lambda: open_descriptors() == before)
        assert len(store._writers) == 0
    assert states(tmp_store) == ["sealed"] * 300
    assert serials(tmp_store) == [serial for serial in range(300) for _ in range(envs or 1)]


def test_a_writer_in_a_cycle_is_sealed_when_that_is_collected(tmp_store):
    class Holder:
        pass

    with dr.create(tmp_store, serial_schema()) as store:
        holder = Holder()
        holder.me, holder.writer = holder, store.writer()
        append_numbered(holder.writer, [1, 2, 3], end="open")
        del holder
        with pytest.warns(ResourceWarning, match=warning_of(tmp_store)):
            gc.collect()
    assert states(tmp_store) == ["sealed"]
    assert serials(tmp_store) == [1, 2, 3]


@pytest.mark.slow
def test_a_dropped_writers_segments_count_against_the_capacity_in_bytes(tmp_store):
    with dr.create(tmp_store, serial_schema(), capacity_bytes=1 << 20, chunk_bytes=4096) as store:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for first in range(0, 4000, 20):
                append_numbered(store.writer(), range(first, first + 20))
                newest = max(tmp_store.glob("segments/*/committed/lock"))
                wait_until(lambda lock=newest: not is_locked(lock))
        with store.writer() as writer:
            append_numbered(writer, [4000])
        size = sum(segment["bytes"] for segment in store.info()["segments"])
        assert size <= 3 << 19
        assert 0 < len(store.info()["segments"]) < 200


def test_a_writer_that_was_closed_or_gave_up_is_dropped_in_silence(tmp_store):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with dr.create(tmp_store, serial_schema()) as store:
            writer = store.writer()
            append_numbered(writer, [1])
            writer.close()
            del writer
            writer = store.writer()
            append_numbered(writer, [2])
            store.close()
            del writer
            gc.collect()
    assert states(tmp_store) == ["sealed"] * 2


ENDS = {
    "end of the program": "",
    "sys.exit": "sys.exit(3)",
    "exception": "1 // 0",
    "thread": (
        "begun = threading.Event()\n"
        "def work():\n"
        "    for first in range(6, 1 << 40, 3):\n"
        "        append_numbered(writer, range(first, first + 3))\n"
        "        begun.set()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "begun.wait()"
    ),
    "limiter": (
        "limited = store.writer(limiter=dr.RateLimiter(1.0, 1, 8.0))\n"
        "threading.Thread(target=append_numbered, args=(limited, range(6, 100)), daemon=True).start()\n"
        "while len(store) < 8: store.refresh()"
    ),
    "function": "del writer",
}
PROGRAM = """
import sys, threading
import diskreplay as dr
from tests.testing.support import append_numbered
store = dr.open(sys.argv[1], "a")
writer = store.writer()
append_numbered(writer, range(3))
append_numbered(writer, range(3, 6), end="open")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("action", ["default", "error"])
def test_a_writer_that_is_open_when_the_interpreter_ends_is_sealed(tmp_store, end, action):
    dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=50).close()
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-W", action, "-c", PROGRAM + ENDS[end], str(tmp_store)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=600,
        check=False,
    )
    assert done.returncode == {"sys.exit": 3, "exception": 1}.get(end, 0), done.stderr
    assert f"ResourceWarning: a writer of {tmp_store} was not closed" in done.stderr
    assert set(states(tmp_store)) == {"sealed"}
    found = serials(tmp_store)
    if end in ("thread", "limiter"):
        assert found[:6] == list(range(6))
        assert len(found) > 6
    else:
        assert found == list(range(6))
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []
    assert time.monotonic() - started < 60


FORKED = """
import gc, os, sys
import diskreplay as dr
from tests.testing.support import append_numbered
store = dr.open(sys.argv[1], "a")
writer = store.writer()
append_numbered(writer, [1, 2], end="open")
pid = os.fork()
if pid == 0:
    if sys.argv[2] == "drop":
        del writer
        gc.collect()
    sys.exit(0)  # as any program: what is called at its end is called here, too
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
store.refresh()
assert [segment["state"] for segment in store.info()["segments"]] == ["writing"]
append_numbered(writer, [3, 4])
store.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drop", "end"])
def test_a_forked_childs_copy_of_a_writer_does_nothing_when_it_is_dropped(tmp_store, how):
    dr.create(tmp_store, serial_schema()).close()
    assert run_python(FORKED, tmp_store, how) == ""
    assert states(tmp_store) == ["sealed"]
    assert sorted(serials(tmp_store)) == [1, 2, 3, 4]


def test_segments_are_sealed_also_where_no_thread_can_be_started(tmp_store, monkeypatch):
    """As when the interpreter ends, from Python 3.12 on."""

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=20) as store:
        writer = store.writer()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        append_numbered(writer, range(5))
        writer.close()
        monkeypatch.undo()
    assert states(tmp_store) == ["sealed"]
    assert serials(tmp_store) == list(range(5))


def test_what_an_interrupt_left_to_be_sealed_is_sealed_also_where_no_thread_can_be_started(tmp_store, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    store = dr.create(tmp_store, serial_schema(), chunk_bytes=4096)
    writer = store.writer()
    append_numbered(writer, range(5))
    with monkeypatch.context() as patch:
        patch.setattr(store._sealer, "_begin", interrupt)
        with pytest.raises(KeyboardInterrupt):
            writer.close()
    assert states(tmp_store) != ["sealed"]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        store.close()
    assert states(tmp_store) == ["sealed"]
    assert serials(tmp_store) == list(range(5))
