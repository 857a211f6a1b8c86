"""Eight writers and two samplers on one store at once."""

import os

import pytest

import diskreplay as dr
from tests.stress import jobs
from tests.testing.coded import check_coded_store, coded_schema
from tests.tiers import whole_or_part

WRITERS, SAMPLERS = 8, 2


def seconds(default):
    return float(os.environ.get("DISKREPLAY_STRESS_SECONDS", default))


def run_all(path, duration, wide):
    """Run all processes; return the steps of each (writer, lane) and what the samplers saw."""
    work = [(jobs.write, i) for i in range(WRITERS)] + [(jobs.sample, i) for i in range(SAMPLERS)]
    answers = jobs.run_all(path, work, duration, wide)
    counts = {(i, lane): n for i in range(WRITERS) for lane, n in enumerate(answers[i])}
    return counts, answers[WRITERS:]


@pytest.mark.slow(turns=4)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("wide", [False, True])
def test_every_step_is_found_once_and_no_unpublished_one_is_sampled(tmp_store, wide):
    path, duration = tmp_store, seconds(whole_or_part(30, 3))
    dr.create(path, coded_schema(wide), segment_steps=5000, chunk_bytes=1 << 16).close()
    counts, samplers = run_all(path, duration, wide)
    with dr.open(path) as store:
        assert check_coded_store(store) == {key: (0, count) for key, count in counts.items() if count}
    for seen in samplers:
        assert seen["batches"] > 0
        for key, newest in seen["newest"].items():
            assert newest < counts[tuple(map(int, key.split()))]
