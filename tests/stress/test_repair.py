"""Repair, restore, describe and verify a store whose writers, samplers and saves go on, in processes of their own."""

import json
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

import diskreplay as dr
from tests.integrity.repair.test_quarantine import flip, serials
from tests.testing.commands import repair, verify
from tests.testing.support import REPOSITORY, append_numbered, serial_schema, wait_until
from tests.tiers import whole_or_part

WRITER = """
import sys, threading
import diskreplay as dr
from tests.testing.support import append_numbered
number = first = int(sys.argv[2])
with dr.open(sys.argv[1], "a") as store, store.writer() as writer:
    print("ready", flush=True)
    asked = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
    while not asked.wait(float(sys.argv[3])):
        append_numbered(writer, range(number, number + 5))
        number += 5
print(number - first, flush=True)
"""

TRAINER = """
import json, sys, threading
import numpy as np
import diskreplay as dr
with dr.open(sys.argv[1]) as store, open(sys.argv[2], "ab", buffering=0) as drawn:
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=64, seed=0)
    sampler.sample()
    print("ready", flush=True)
    asked, batches = threading.Event(), 0
    threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
    while not asked.is_set():
        batch = sampler.sample()
        values = batch.numpy()
        assert (values["obs"][:, 0] == values["serial"]).all()
        assert (values["next_obs"][:, 0] == values["serial"] + 1).all()
        sampler.update_priorities(batch.index, np.ones(64))
        batches += 1
        drawn.write(b".")
    sampler.close()
print(json.dumps(batches), flush=True)
"""

SAVER = """
import sys, threading
import diskreplay as dr
with dr.open(sys.argv[1], "a") as store:
    sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=64, seed=0)
    sampler.sample()
    sampler.save("trainer")
    print("ready", flush=True)
    asked, saves = threading.Event(), 0
    threading.Thread(target=lambda: (sys.stdin.readline(), asked.set()), daemon=True).start()
    while not asked.is_set():
        sampler.save("trainer")
        saves += 1
    sampler.close()
print(saves, flush=True)
"""


@contextmanager
def running(code, *arguments):
    """Run code in a process of its own; give a function that ends it and returns the number that it printed last."""
    with subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"

            def stop():
                process.stdin.write("stop\n")
                process.stdin.flush()
                said = process.stdout.readline()
                assert process.wait(60) == 0
                return json.loads(said)

            yield stop
        finally:
            process.kill()


@pytest.fixture
def store_path(tmp_store):
    """A store of 500 steps in sealed segments of a hundred rows."""
    with (
        dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=100) as store,
        store.writer() as writer,
    ):
        for start in range(0, 500, 5):
            append_numbered(writer, range(start, start + 5))
    return tmp_store


def oldest(store):
    """The serials below 500."""
    found = []
    for episode in store.episodes:
        if (first := int(episode["serial"][0])) >= 500:
            break
        assert episode["serial"].tolist() == list(range(first, first + 5))
        found += episode["serial"].tolist()
    return found


@pytest.mark.slow(turns=4)
def test_segments_come_and_go_beside_a_trainer_and_writers(store_path):
    rounds, drawn = whole_or_part(4, 2), store_path.parent / "drawn"
    with (
        running(WRITER, store_path, 1_000_000, 0.1) as stop_one,
        running(WRITER, store_path, 2_000_000, 0.1) as stop_other,
        running(TRAINER, store_path, drawn) as stop_trainer,
        dr.open(store_path) as reader,
    ):
        for turn in range(rounds):
            # A trainer that has yet to look at what the last turn changed would read what this one damages, and warn.
            before = drawn.stat().st_size
            wait_until(lambda before=before: drawn.stat().st_size >= before + 2)
            number = turn % 4
            name = f"segments/{number:08d}"
            documents = [f"{name}/zarr.json", f"{name}/durable/document"]  # damage to its rows would not set it aside
            steps = next(s["steps"] for s in reader.info()["segments"] if s["number"] == number)
            for document in documents:
                flip(store_path / document)
            done = repair(store_path)
            assert ("quarantined", name) in [(action.what, action.where) for action in done.actions]
            assert [(entry.segment, entry.steps) for entry in done.quarantine] == [(number, steps)]
            reader.refresh()
            assert len(oldest(reader)) == 500 - steps
            for document in documents:
                flip(store_path / "counters/quarantine" / document)
            if turn % 2:
                (store_path / "counters/quarantine" / name).rename(store_path / name)
                dr.open(store_path, "a").close()
            else:
                repair(store_path, restore=number)
            reader.refresh()
            assert oldest(reader) == list(range(500))
        assert stop_trainer() > rounds
        one, other = stop_one(), stop_other()
    assert repair(store_path).quarantine == []
    with dr.open(store_path) as store:
        expected = [*range(500), *range(1_000_000, 1_000_000 + one), *range(2_000_000, 2_000_000 + other)]
        assert serials(store) == expected
        assert store.verify(deep=True) == []


@pytest.mark.slow(turns=4)
def test_states_that_are_saved_without_a_pause_are_never_taken_for_damaged(store_path):
    with running(SAVER, store_path) as stop:
        until = time.monotonic() + whole_or_part(5, 2)
        looks = 0
        while looks <= 10 or time.monotonic() < until:
            assert verify(store_path, deep=True) == []
            looks += 1
        for _ in range(3):
            # What a save is just removing may be taken for what a dead one left, and is removed either way.
            assert {action.what for action in repair(store_path).actions} <= {"removed"}
        assert stop() > 10
    assert verify(store_path, deep=True) == []


@pytest.mark.slow
def test_a_store_is_described_while_its_segments_leave(tmp_store):
    dr.create(tmp_store, serial_schema(), chunk_bytes=4096, segment_steps=20, capacity=100).close()
    with running(WRITER, tmp_store, 0, 0.001) as stop, dr.open(tmp_store) as reader:
        until = time.monotonic() + whole_or_part(4, 1)
        looks = 0
        while looks <= 10 or time.monotonic() < until:
            with dr.open(tmp_store) as late:
                for store in (reader, late):
                    info = store.info()
                    assert info["steps"] <= 100
                    assert {segment["state"] for segment in info["segments"]} <= {"sealed", "writing"}
            looks += 1
            if looks % 4 == 0:
                reader.refresh()
        assert stop() > 100  # else no segment has left
