"""Functions that measure a fresh process from inside: `measure` starts one, which prints its result as JSON.

Only sys and time are imported above the functions: a measured import must not happen before.
"""

import sys
from time import perf_counter, process_time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


def measure(what: str, *arguments: object) -> dict[str, float]:
    """Run one of the functions below in a new interpreter."""
    return begin(what, *arguments)()


def begin(what: str, *arguments: object) -> "Callable[[], dict[str, float]]":
    """Start one of the functions below in a new interpreter; return a function that waits for its result."""
    import json
    import os
    import subprocess
    from pathlib import Path

    # PYTHONPATH may name another package: `before` measures earlier revisions with these benches.
    command = [sys.executable, "-P", "-m", "tools.bench.fresh", what, *map(str, arguments)]
    pipe, root = subprocess.PIPE, str(Path(__file__).parents[2])
    found_in = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), root]))
    environment = os.environ | {"PYTHONPATH": found_in}
    process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)

    def answer() -> dict[str, float]:
        out, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{what} failed in its own process:\n{errors}")
        found: dict[str, float] = json.loads(out.splitlines()[-1])  # peers print, too
        return found

    return answer


def answers(waiting: "Iterable[Callable[[], dict[str, float]]]") -> list[dict[str, float]]:
    """Wait for all processes, and return their results; raise the first error when all have ended."""
    found, errors = [], []
    for wait in waiting:
        try:
            found.append(wait())
        except RuntimeError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return found


def memory() -> dict[str, float]:
    """Return VmRSS, VmHWM, RssAnon and RssFile of this process in bytes."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return {name: int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM", "RssAnon", "RssFile")}


def importing() -> dict[str, float]:
    """Import the package, then everything that a collector uses of it."""
    started = perf_counter()
    import diskreplay as dr

    package = perf_counter()
    for name in ("Field", "Schema", "create", "open", "Store", "Writer", "VectorWriter"):
        getattr(dr, name)
    return {"package": package - started, "collector": perf_counter() - started}


def opening(path: str) -> dict[str, float]:
    """Open a store; the package is imported before."""
    import diskreplay as dr

    load = dr.open
    started = perf_counter()
    store = load(path)
    opened = perf_counter()
    steps = len(store)
    return {"open": opened - started, "steps": steps, "episodes": store.num_episodes}


def reading(path: str, distribution: str) -> dict[str, float]:
    """Return the private memory of opening a store, drawing a first batch, and updating priorities."""
    import torch

    import diskreplay as dr
    from diskreplay.kernels import table

    view = dr.Transitions(n_step=5)
    table.get_kernel("random_ids")
    torch.zeros(256).sum()
    before = memory()["RssAnon"]
    store = dr.open(path)
    opened = memory()["RssAnon"]
    sampler = dr.Sampler(store, view, getattr(dr, distribution)(), batch_size=256, seed=0)
    batch = sampler.sample()
    if sampler.distribution.weighted:
        sampler.update_priorities(batch.index, batch.weight)
    after = memory()["RssAnon"]
    return {"open": opened - before, "sample": after - before, "batch": batch.batch_size, "steps": len(store)}


def collecting(path: str, steps: str) -> dict[str, float]:
    """Append steps; return the memory of the process before, after, and at most."""
    start = memory()["VmRSS"]
    import diskreplay as dr

    with dr.open(path, mode="a") as store, store.writer() as writer:
        imported = memory()["VmRSS"]
        import numpy as np

        obs = np.arange(4, dtype=np.float32)
        for t in range(int(steps)):
            writer.append(obs, t & 1, 1.0, t % 200 == 199, next_obs=obs)
        now = memory()
    loaded = sum(name in sys.modules for name in ("torch", "numba"))
    return {"interpreter": start, "opened": imported, **now, "most": memory()["VmHWM"], "heavy": loaded}


def appending(path: str, seconds: str) -> dict[str, float]:
    """Append steps at full speed for some seconds; return the steps/s."""
    import numpy as np

    import diskreplay as dr

    obs, count = np.arange(4, dtype=np.float32), 0
    with dr.open(path, mode="a") as store, store.writer() as writer:
        started = perf_counter()
        while perf_counter() < started + float(seconds):
            for t in range(255):
                writer.append(obs, t & 1, 1.0, t == 254, next_obs=obs)
            count += 255
        return {"steps": count / (perf_counter() - started)}


def merging(path: str, seconds: str, episode_steps: str, appends: str, first_s: str) -> dict[str, float]:
    """Merge old segments from ``first_s`` seconds on; append at full speed, or wait; return the steps/s.

    It ends after some seconds, or when everything is merged.
    """
    import threading
    import time

    import numpy as np

    import diskreplay as dr
    from diskreplay.writing.merging import background

    background._FIRST_S = float(first_s)
    steps, count = int(episode_steps), 0
    block = np.zeros((steps + 1, 4), np.float32), np.zeros(steps, np.int64), np.zeros(steps, np.float32)
    with dr.open(path, mode="a") as store, store.writer() as writer:
        with store.writer() as first:  # sealing its segment starts the check for segments to merge
            first.append_episode(*block, terminated=True)
        threads = [thread for thread in threading.enumerate() if thread.name == "diskreplay-compaction"]
        started = perf_counter()
        while (taken := perf_counter() - started) < float(seconds) and all(thread.is_alive() for thread in threads):
            if appends == "True":
                writer.append_episode(*block, terminated=True)
                count += steps
            else:
                time.sleep(0.01)  # leave the processor to the merging process and the sampler
        return {"steps": count / taken, "seconds": taken}


def collecting_slowly(path: str, seconds: str, compaction: str) -> dict[str, float]:
    """Append at most 250 steps/s to a new store, ten to a segment; return the time of the slowest append."""
    import time

    import numpy as np

    import diskreplay as dr

    names = [f"value {number}" for number in range(8)]
    schema = dr.Schema(
        obs=dr.Field((8,), "float32"),
        action=dr.Field((), "int64"),
        reward=dr.Field((), "float32"),
        extra={name: dr.Field((), "float32") for name in names},
    )
    how = "manual" if compaction == "manual" else "auto"
    obs, extra, taken = np.zeros(8, np.float32), dict.fromkeys(names, 0.0), list[float]()
    with dr.create(path, schema, segment_steps="episode", compaction=how) as store, store.writer() as writer:
        until = perf_counter() + float(seconds)
        while (began := perf_counter()) < until:
            writer.append(obs, 0, 0.0, len(taken) % 10 == 9, next_obs=obs, **extra)
            taken.append(perf_counter() - began)
            time.sleep(0.004)
    return {"slowest": max(taken), "p99": float(np.percentile(taken, 99)), "appends": len(taken)}


def many_writing(folder: str, stores: str, segments: str, seconds: str) -> dict[str, float]:
    """Write to many stores in one process; return the number of processes that merge at once, and their memory.

    It ends after some seconds, or when everything is merged.
    """
    import os
    import time
    from contextlib import ExitStack, suppress

    import numpy as np

    import diskreplay as dr
    from diskreplay.writing.merging import background

    background._FIRST_S = 0.1
    schema = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"), reward=dr.Field((), "float32"))
    block = np.zeros((11, 4), np.float32), np.zeros(10, np.int64), np.zeros(10, np.float32)
    most = nbytes = merged = 0
    with ExitStack() as stack:
        paths = [f"{folder}/{number}" for number in range(int(stores))]
        every = [stack.enter_context(dr.create(path, schema, segment_steps="episode")) for path in paths]
        for store in every:
            with store.writer() as writer:
                for _ in range(int(segments)):
                    writer.append_episode(*block, terminated=True)
        until = perf_counter() + float(seconds)
        while perf_counter() < until and merged < len(paths):
            found = []
            for task in os.listdir("/proc/self/task"):
                with suppress(OSError), open(f"/proc/self/task/{task}/children") as children:
                    found += children.read().split()
            taken = 0
            for child in found:
                with suppress(OSError), open(f"/proc/{child}/statm") as statm:
                    taken += int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
            most, nbytes = max(most, len(found)), max(nbytes, taken)
            merged = sum(len(os.listdir(f"{path}/segments")) < int(segments) // 2 for path in paths)
            time.sleep(0.01)
    return {"most": most, "bytes": nbytes, "merged": merged}


def sampling(path: str, seconds: str, kept: str) -> dict[str, float]:
    """Draw batches while other processes append; return the time of the first one, and the batches/s of the rest."""
    import os

    if kept:
        os.environ["NUMBA_CACHE_DIR"] = kept
    import numpy as np
    import torch  # noqa: F401

    import diskreplay as dr

    started, taken = perf_counter(), []
    with dr.Sampler(path, dr.Transitions(n_step=3), batch_size=256, seed=0) as sampler:
        while True:
            try:
                sampler.sample()
                break
            except dr.NotEnoughData:
                pass
        first = began = perf_counter()
        while began < first + float(seconds):
            sampler.sample().obs.sum()
            now = perf_counter()
            taken.append(now - began)
            began = now
    high = float(np.percentile(taken, 99)) if taken else 0.0
    return {"first": first - started, "batches": len(taken) / max(began - first, 1e-9), "p99": high}


def starting(path: str) -> dict[str, float]:
    """Read a store's files, then open it and draw a first batch; return the seconds of each part."""
    import os

    import numpy as np
    import torch  # noqa: F401

    import diskreplay as dr
    from diskreplay.kernels import table

    load, view, sampler_of = dr.open, dr.Transitions(n_step=3), dr.Sampler
    for name in ("gather", "random_ids"):
        table.get_kernel(name)
    times = [perf_counter()]
    segments = [entry.path for entry in os.scandir(f"{path}/segments") if entry.is_dir()]
    for segment in segments:
        np.fromfile(f"{segment}/zarr.json", "u1")
        np.fromfile(f"{segment}/committed/c.0", "i8")
        for entry in os.scandir(f"{segment}/done"):
            if entry.name.startswith("c."):
                np.count_nonzero(np.fromfile(entry.path, "u1"))
    times.append(perf_counter())
    store = load(path)
    times.append(perf_counter())
    steps = len(store)
    times.append(perf_counter())
    episodes = store.num_episodes
    times.append(perf_counter())
    sampler = sampler_of(store, view, batch_size=256, seed=0)
    times.append(perf_counter())
    sampler.sample()
    times.append(perf_counter())
    names = ("limit", "open", "len", "num_episodes", "sampler", "sample")
    parts = {name: stop - start for name, start, stop in zip(names, times, times[1:], strict=False)}
    return {**parts, "steps": steps, "episodes": episodes, "segments": len(segments)}


def first_batch(path: str, kind: str, kept: str) -> dict[str, float]:
    """Draw a first batch, with compiled kernels kept in a folder."""
    import os

    os.environ["NUMBA_CACHE_DIR"] = kept
    import numpy as np
    import torch  # noqa: F401

    import diskreplay as dr

    store = dr.open(path)
    started = perf_counter()
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()
    numba = perf_counter() - started
    started, cpu = perf_counter(), process_time()
    # Import the reader of a store here, too: its import compiles some kernels.
    view = dr.Sequences(length=8, overlap=4) if kind == "sequences" else dr.Transitions(n_step=3)
    distribution = dr.Uniform() if kind in ("uniform", "sequences") else dr.Prioritized()
    sampler = dr.Sampler(store, view, distribution, batch_size=256, seed=0)
    batch = sampler.sample()
    if kind == "updated":
        sampler.update_priorities(batch.index, np.ones(batch.batch_size))
    return {"first": perf_counter() - started, "cpu": process_time() - cpu, "numba": numba}


def drawing(bench: str, what: str, *arguments: str) -> dict[str, float]:
    """Run a function of a bench in this process."""
    from importlib import import_module

    answer: dict[str, float] = getattr(import_module(f"tools.bench.{bench}"), what)(*arguments)
    return answer


MEASURES = {
    "importing": importing,
    "opening": opening,
    "reading": reading,
    "collecting": collecting,
    "drawing": drawing,
    "starting": starting,
    "appending": appending,
    "merging": merging,
    "collecting_slowly": collecting_slowly,
    "many_writing": many_writing,
    "sampling": sampling,
    "first_batch": first_batch,
}

if __name__ == "__main__":
    answer = MEASURES[sys.argv[1]](*sys.argv[2:])
    import json

    print(json.dumps(answer))
