"""Eight writers and two samplers on one store at once."""

import json
import multiprocessing
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
    context = multiprocessing.get_context("spawn")
    # Pipes and not a Barrier, whose shared memory stays open as long as this process lives.
    gates = [context.Pipe() for _ in range(WRITERS + SAMPLERS)]
    results = [path.parent / f"result-{i}.json" for i in range(WRITERS + SAMPLERS)]
    work = [(jobs.write, i) for i in range(WRITERS)] + [(jobs.sample, i) for i in range(SAMPLERS)]
    processes = [
        context.Process(target=target, args=(str(path), number, duration, wide, gate, str(result)))
        for (target, number), (_, gate), result in zip(work, gates, results, strict=True)
    ]
    for process in processes:
        process.start()
    for _, gate in gates:
        gate.close()  # so that a process that ends early is an EOFError here and no wait without end
    for ours, _ in gates:
        assert ours.recv() == "ready"
    for ours, _ in gates:
        ours.send("go")
        ours.close()
    for process in processes:
        process.join()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.close()
    assert codes == [0] * len(processes)
    answers = [json.loads(result.read_text()) for result in results]
    counts = {(i, lane): n for i in range(WRITERS) for lane, n in enumerate(answers[i])}
    return counts, answers[WRITERS:]


def check_all(path, duration, wide):
    dr.create(path, coded_schema(wide), segment_steps=5000, chunk_bytes=1 << 16).close()
    counts, samplers = run_all(path, duration, wide)
    with dr.open(path) as store:
        assert check_coded_store(store) == {key: (0, count) for key, count in counts.items() if count}
    for seen in samplers:
        assert seen["batches"] > 0
        for key, newest in seen["newest"].items():
            assert newest < counts[tuple(map(int, key.split()))]


@pytest.mark.slow
def test_every_step_is_found_once_and_no_unpublished_one_is_sampled(tmp_store):
    check_all(tmp_store, seconds(3), wide=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_step_is_found_once_and_no_unpublished_one_is_sampled_for_longer(tmp_store):
    check_all(tmp_store, seconds(whole_or_part(30, 8)), wide=False)
