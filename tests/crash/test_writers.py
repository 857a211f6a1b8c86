"""A writer that is killed anywhere loses nothing that it had committed, shows nothing torn, and needs no repair."""

import itertools
import os
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.crash import workloads
from tests.crash.injection import STORE, die_at, points_of
from tests.testing.coded import check_coded_store, coded_obs, coded_step, make_codes
from tests.tiers import SHARES, each_share, whole_or_part

# How many points lie between two that are tried. 1 tries all of them, which takes minutes.
STRIDE = int(os.environ.get("DISKREPLAY_CRASH_STRIDE", 0))
KINDS = {"single": workloads.write_single, "vector": workloads.write_vector}


def kill(path: Path, kind: str, point: int) -> Any:
    """Let a writer of its own process die at a point."""

    def work(tell: Any) -> None:
        with workloads.early_preallocation(), dr.open(path, "a") as store:
            KINDS[kind](store, tell)

    return die_at(work, point)


def check_spans(store: Any, told: list[dict[str, Any]], died: bool) -> dict:
    """Check that every step is there that was told, and at most one call's more; the oldest may be evicted."""
    spans = check_coded_store(store)
    # Of the first call nothing was told, whatever it published of each lane.
    counts = told[-1]["counts"] if told else [0] * (1 + max((lane for _, lane in spans), default=0))
    total = 0
    for lane, count in enumerate(counts):
        stop = spans[1, lane].stop if (1, lane) in spans else 0
        assert count <= stop <= count + 3 * died
        total += stop
    assert len(store) == min(total, workloads.CAPACITY)
    return spans


def check_recovered(path: Path, told: list[dict[str, Any]], died: bool, reader: Any) -> None:
    """Look at the store as its next users do: readers that were there, new ones, and a process that may write."""
    reader.refresh()
    spans = check_spans(reader, told, died)
    with dr.open(path) as store:
        assert check_coded_store(store) == spans
    with dr.open(path, "a") as store:
        assert check_coded_store(store) == spans
        with store.writer() as writer:
            for t in range(2):
                writer.append(
                    **coded_step(make_codes(2, 0, t)), terminated=t == 1, next_obs=coded_obs(make_codes(2, 0, t + 1))
                )
    assert sorted(os.listdir(path / "counters")) == ["c.0", "lock", "zarr.json"]
    reader.refresh()
    with dr.open(path) as store:
        found = check_coded_store(store)
        assert check_coded_store(reader) == found
        assert found.pop((2, 0)) == (0, 2)
        assert {key: span.stop for key, span in found.items()} == {key: span.stop for key, span in spans.items()}
        assert {segment["state"] for segment in store.info()["segments"]} == {"sealed"}
        assert all(episode.terminated or episode.truncated for episode in store.episodes)
        assert store.verify(deep=True) == []


def run(folder: Path, kind: str, points: Any) -> int:
    """Kill a writer at each of these points, in a store of its own; return the first that it does not have."""
    for number in points:
        path = folder / f"{kind}-{number}"
        workloads.create(path).close()
        with dr.open(path) as reader:
            death = kill(path, kind, number)
            try:
                check_recovered(path, death.told, death.died, reader)
            except BaseException as error:
                raise AssertionError(f"after the death at point {number}: {error!r}") from error
        if not death.died:
            return number
    return -1


def places(path: Path, kind: str) -> list[int]:
    """Return a point in each line of code that publishes something."""
    workloads.create(path).close()

    def work() -> None:
        with workloads.early_preallocation(), dr.open(path, "a") as store:
            KINDS[kind](store, lambda _: None)

    lines = defaultdict(list)
    for number, point in enumerate(points_of(work)):
        if point.name == STORE and point.args[0] in PUBLISHING:
            lines[point.args].append(number)
    rng = random.Random(0)
    return sorted(map(rng.choice, lines.values()))


PUBLISHING = ("set", "restore_complements", "publish", "append")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@each_share
def test_a_writer_that_is_killed_where_it_publishes_something_loses_nothing(
    tmp_path: Path, kind: str, share: int
) -> None:
    points = places(tmp_path / "whole", kind)
    assert len(points) > 10
    run(tmp_path, kind, points[share::SHARES])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@each_share
def test_a_writer_that_is_killed_at_any_point_loses_nothing(tmp_path: Path, kind: str, share: int) -> None:
    stride = STRIDE or whole_or_part(53, 203)
    last = run(tmp_path, kind, itertools.count(share * stride, SHARES * stride))
    assert last > 1000
