"""Writers, samplers and a store that is compacted all the time, in processes of their own: no step is lost or torn."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.inner import step_counter
from tests.stress import jobs
from tests.testing.coded import check_coded_store, coded_schema

SECONDS = float(os.environ.get("DISKREPLAY_STRESS_SECONDS", 6))
WRITERS = 3


def compact(path: str, _: int, seconds: float, __: bool, gate: Any, result: str) -> None:
    """Merge what is there until the time is up; leave how many segments that were in the file `result`."""
    merged = 0
    with dr.open(path, "a") as store:
        jobs.start_together(gate)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                merged += store.compact()["segments"]
            except dr.StoreLocked:  # another one is at it
                time.sleep(0.001)
    Path(result).write_text(json.dumps(merged))


def read(path: str, number: int, seconds: float, _: bool, gate: Any, result: str) -> None:
    """Read everything until the time is up, every other time with a new reader, and check that no step goes."""
    looks, known, ever = 0, dict[Any, Any](), 0
    with dr.open(path) as store:
        count = step_counter(Path(path))
        jobs.start_together(gate)
        until = time.monotonic() + seconds
        while looks < 2 or time.monotonic() < until:
            looks += 1
            now = count()
            assert now >= ever
            ever = now
            store.refresh()
            if number % 2:
                with dr.open(path) as fresh:
                    found = check_coded_store(fresh)
            else:
                found = check_coded_store(store)
            for key, span in known.items():
                assert key in found
                assert found[key].first == span.first == 0
                assert found[key].stop >= span.stop
            known = found
            assert sum(span.stop for span in found.values()) >= ever
    Path(result).write_text(json.dumps(looks))


@pytest.mark.slow(turns=4)
@pytest.mark.timeout(600)
def test_a_store_that_is_compacted_all_the_time_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    dr.create(path, coded_schema(), segment_steps=100, chunk_bytes=1 << 14, compaction="manual").close()
    work = [(jobs.write, number) for number in range(WRITERS)]
    work += [(compact, 0), (compact, 1), (read, 0), (read, 1), (jobs.sample, 0)]
    found = jobs.run_all(path, work, SECONDS)
    counts, merged, looks = found[:WRITERS], found[WRITERS] + found[WRITERS + 1], found[WRITERS + 2 : WRITERS + 4]
    assert merged > 10
    assert min(looks) > 1
    with dr.open(path, "a") as store:
        store.compact()
        spans = check_coded_store(store)
        assert {key: tuple(span) for key, span in spans.items()} == {
            (number, lane): (0, count)
            for number, lanes in enumerate(counts)
            for lane, count in enumerate(lanes)
            if count
        }
        assert step_counter(path)() == len(store)
        assert store.verify(deep=True) == []
    for (writer, lane), counter in ((tuple(map(int, k.split())), n) for k, n in found[-1]["newest"].items()):
        assert counter < counts[writer][lane]
