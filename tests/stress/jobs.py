"""What the processes of the stress tests run."""

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import diskreplay as dr
from tests.testing.coded import check_coded_batch, coded_obs, coded_step, codes_of, make_codes, split_codes


def episode_length(counter: int) -> int:
    """Return the length of the episode that starts at a step: 1 to 60, the same for whoever asks."""
    return 1 + (counter * 2654435761 >> 7) % 60


def start_together(gate: Any) -> None:
    """Say that this process is ready, and wait until all are."""
    gate.send("ready")
    gate.recv()
    gate.close()


def run_all(
    path: Path, work: Sequence[tuple[Callable[..., None], int]], seconds: float, wide: bool = False
) -> list[Any]:
    """Run functions with a number each, in processes of their own that begin together; return what they left."""
    context = multiprocessing.get_context("spawn")
    # Pipes and not a Barrier, whose shared memory stays open as long as this process lives.
    gates = [context.Pipe() for _ in work]
    results = [path.parent / f"result-{i}.json" for i in range(len(work))]
    processes = [
        context.Process(target=target, args=(str(path), number, seconds, wide, gate, str(result)))
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
    return [json.loads(result.read_text()) for result in results]


def write(path: str, number: int, seconds: float, wide: bool, gate: Any, result: str) -> None:
    """Append until the time is up; leave the number of steps of each lane in the file `result`."""
    store = dr.open(path, mode="a")
    kinds = (_write_steps, _write_steps, _write_lanes, _write_blocks, _write_without_next)
    start_together(gate)
    until = time.monotonic() + seconds
    with store:
        counts = kinds[number % len(kinds)](store, number, until, wide)
    Path(result).write_text(json.dumps(counts))


def _write_steps(store: Any, number: int, until: float, wide: bool, given: bool = True) -> list[int]:
    counter = 0
    with store.writer() as writer:
        while time.monotonic() < until:
            for left in reversed(range(episode_length(counter))):
                following = {"next_obs": coded_obs(make_codes(number, 0, counter + 1), wide)} if given else {}
                ends = {"terminated": left == 0 and counter % 3 > 0, "truncated": left == 0 and counter % 3 == 0}
                values = {"episode": {"last": counter}} if left == 0 else {}
                writer.append(**coded_step(make_codes(number, 0, counter), wide), **ends, **following, **values)
                counter += 1
    return [counter]


def _write_without_next(store: Any, number: int, until: float, wide: bool) -> list[int]:
    return _write_steps(store, number, until, wide, given=False)


def _write_lanes(store: Any, number: int, until: float, wide: bool, lanes: int = 4) -> list[int]:
    counters = np.zeros(lanes, np.int64)
    rng = np.random.default_rng(number)
    index = np.arange(lanes)
    with store.writer(num_envs=lanes) as writer:
        while time.monotonic() < until:
            mask = rng.random(lanes) < 0.8
            codes = make_codes(number, index, counters)
            writer.append(
                **coded_step(codes, wide),
                terminated=rng.random(lanes) < 0.05,
                truncated=rng.random(lanes) < 0.02,
                next_obs=coded_obs(codes + 1, wide),
                mask=mask,
            )
            counters += mask
    return counters.tolist()


def _write_blocks(store: Any, number: int, until: float, wide: bool) -> list[int]:
    counter = 0
    with store.writer() as writer:
        while time.monotonic() < until:
            length = episode_length(counter)
            block = coded_step(make_codes(number, 0, np.arange(counter, counter + length)), wide, block=True)
            block["obs"] = coded_obs(make_codes(number, 0, np.arange(counter, counter + length + 1)), wide)
            writer.append_episode(**block, terminated=counter % 2 == 0)
            counter += length
    return [counter]


def sample(path: str, number: int, seconds: float, wide: bool, gate: Any, result: str) -> None:
    """Sample until the time is up and check every transition; leave what was seen in the file `result`."""
    n_step = 1 + 4 * number
    store = dr.open(path)
    sampler = dr.Sampler(store, dr.Transitions(n_step=n_step, gamma=1.0), batch_size=64, seed=number)
    start_together(gate)
    until = time.monotonic() + seconds
    batches, newest = 0, {}
    while time.monotonic() < until:
        try:
            batch = sampler.sample().numpy()
        except dr.NotEnoughData:
            continue
        check_coded_batch(batch)
        batches += 1
        for writer, lane, counter in zip(*map(np.ndarray.tolist, split_codes(codes_of(batch))), strict=True):
            newest[f"{writer} {lane}"] = max(newest.get(f"{writer} {lane}", 0), counter)
    sampler.close()
    store.close()
    Path(result).write_text(json.dumps({"batches": batches, "newest": newest}))
