"""Compare the kernels of a batch, compiled for several processors and run on this one.

A compiler turns a choice that depends on data into a conditional jump or a conditional move, by its model of the target
processor. A jump is mispredicted on random data, which takes longer than the rest of a search. Each target has its own
process with its own kernels. Every call draws other ids.
"""

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import GAMMA, N_STEP, SCHEMA, fill, single_steps
from tools.bench.harness import Contestant, Report, Seconds, Table, Target, in_turn, number

HOST = "host"
WANTED = 1.3
# The share of a kernel's calls in a round that counts; the system interrupted the slowest calls.
COUNTED = 0.95
# Kernels that a first batch calls once, with all data.
FIRST, FIRST_KERNELS = "first batch", ("starts", "sync_priorities", "sumtree_set")


class Size(NamedTuple):
    """Steps in the stores, the longest episode, batches of each case in a round, new samplers, and processors."""

    steps: int
    longest: int
    batches: int
    fresh: int
    processors: Sequence[str]
    batch_size: int = 256


FULL = Size(200_000, 50, 300, 5, (HOST, "znver3", "znver4", "skylake", "x86-64-v3", "sapphirerapids", "emeraldrapids"))
TINY = Size(300, 20, 3, 1, (HOST, "x86-64-v3"), 16)


class _Worker:
    """A process whose kernels are compiled for a processor; it runs a round when it gets a line."""

    def __init__(self, name: str, folder: Path, size: Size) -> None:
        self.name, self.kernels = name, list[str]()
        chosen = {} if name == HOST else {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ""}
        environment = {key: value for key, value in os.environ.items() if not key.startswith("NUMBA_CPU_")}
        environment |= {**chosen, "NUMBA_CACHE_DIR": str(folder / "kept")}
        self._errors = folder / "errors"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tools.bench.processors", str(folder), json.dumps(size)],
                env=environment, cwd=Path(__file__).parents[2], stderr=errors, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip

    def ready(self) -> bool:
        """Wait for the kernels; return whether this machine can run them."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            if self._process.wait() == -signal.SIGILL:
                return False
            raise RuntimeError(f"{self.name} failed in its own process:\n{self._errors.read_text()}")
        self.kernels = json.loads(line)
        return True

    def round(self) -> Seconds:
        """Return the seconds of a call of each kernel, NaN without a call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return np.array([found.get(kernel, np.nan) for kernel in self.kernels])

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Compare processors with each other; there is no peer."""
    del peers
    fill(folder / "store", size.steps, 10, size.longest)
    with ExitStack() as stack:
        started = []
        for name in size.processors:
            own = folder / name
            own.mkdir()
            started.append(_Worker(name, own, size))
            stack.callback(started[-1].close)
        workers = [worker for worker in started if worker.ready()]
        seconds = in_turn([Contestant(worker.name, worker.round) for worker in workers], rounds)
    names = [worker.name for worker in workers]
    taken = np.array([seconds[name] for name in names])  # processor, round, kernel
    called = ~np.isnan(taken).any(axis=(0, 1))
    kernels = [kernel for kernel, was_called in zip(workers[0].kernels, called, strict=True) if was_called]
    # Median ratios to the time of each other target, and the largest: the ratio to the fastest target.
    beside = np.median(taken[:, None, :, called] / taken[None, :, :, called], axis=2)
    worst = beside.max(axis=1)
    missing = [name for name in size.processors if name not in names]
    return Report(
        "Kernels of a batch, compiled for several processors",
        [
            Table(
                ["one call, µs", *names],
                [
                    [kernel, *map(number, microseconds)]
                    for kernel, microseconds in zip(
                        kernels, np.median(taken[:, :, called], axis=1).T * 1e6, strict=True
                    )
                ],
            ),
            Table(
                ["times as long as compiled for the best processor", *names],
                [[kernel, *map(number, worst[:, k])] for k, kernel in enumerate(kernels)],
            ),
        ],
        [
            Target(
                f"{HOST}: {name}, times as long as for the best processor",
                max(worst[0, k] for k, kernel in enumerate(kernels) if kernel.startswith(f"{name}, ")),
                WANTED,
                "times",
            )
            for name in dict.fromkeys(kernel.split(", ")[0] for kernel in kernels)
        ]
        + [
            Target(f"{name}: {kernels[worst[at].argmax()]}, its slowest", worst[at].max(), WANTED, "times")
            for at, name in enumerate(names)
            if name != HOST
        ],
        [
            f"All kernels run on this machine; '{HOST}' are those that it compiles for itself. A name is one of "
            "`NUMBA_CPU_NAME`, and stands for the instructions of such a processor and the times that LLVM expects.",
            f"Batches of {size.batch_size} from {size.steps:,} steps in episodes of 10 to {size.longest}. Times are of "
            "calls within real batches, each with other ids than the one before, without the slowest twentieth.",
            "Processors with vectors of 512 bits are ahead where kernels compute: `weights`.",
            *(
                [f"Left out, since this machine lacks some of its instructions: {', '.join(missing)}."]
                if missing
                else []
            ),
        ],
    )


class _Times:
    """Measures each call of a kernel that the package makes."""

    def __init__(self) -> None:
        self.case, self._calls = "", defaultdict[str, list[int]](list)

    def install(self) -> None:
        """Replace the kernels of all imported modules by measured ones."""
        from diskreplay.kernels import table

        get: Callable[[str], Callable[..., Any]] = table.get_kernel
        for module in [module for path, module in sys.modules.items() if path.startswith("diskreplay.")]:
            if module is not table and vars(module).get("get_kernel") is get:
                module.get_kernel = partial(self._measured, get)  # type: ignore[attr-defined]

    def _measured(self, get: Callable[[str], Callable[..., Any]], name: str) -> Callable[..., Any]:
        kernel, calls, clock = get(name), self._calls, perf_counter_ns

        def call(*arguments: Any) -> Any:
            started = clock()
            found = kernel(*arguments)
            taken = clock() - started
            if FIRST not in self.case or name in FIRST_KERNELS:
                calls[f"{name}, {self.case}"].append(taken)
            return found

        return call

    def taken(self) -> dict[str, float]:
        """Return the mean seconds of each kernel's calls, without the slowest ones, and forget them."""
        found = {}
        for name, calls in self._calls.items():
            fastest = np.sort(calls)[: max(int(len(calls) * COUNTED), 1)]
            found[name] = float(fastest.mean()) / 1e9
        self._calls.clear()
        return found


def _serve(folder: Path, size: Size) -> None:
    """Run a round for each line that comes."""
    view = dr.Transitions(n_step=N_STEP, gamma=GAMMA)
    kinds: dict[str, Callable[[], Any]] = {
        "uniform": dr.Uniform,
        "prioritized": dr.Prioritized,
        "not stratified": lambda: dr.Prioritized(stratified=False),
        "recency": lambda: dr.Recency(size.steps / 4),
        "sweep": lambda: dr.Sweep(passes=None),
    }
    options: dict[str, Any] = {"batch_size": size.batch_size, "seed": 0}
    errors = np.random.default_rng(0)
    times = _Times()

    def draw(sampler: dr.Sampler) -> None:
        index = sampler.sample().index
        if sampler.distribution.weighted:
            sampler.update_priorities(index, errors.random(len(index)))

    def grow() -> Iterator[None]:
        """Append a step to full stores, and draw from them."""
        steps = chain.from_iterable(single_steps(size.steps, 10, size.longest, seed) for seed in range(1 << 20))
        with ExitStack() as stack:
            full = {}
            for kind in ("uniform", "prioritized"):
                store = stack.enter_context(dr.create(folder / kind, SCHEMA, capacity=size.steps))
                writer = stack.enter_context(store.writer())
                for _ in range(size.steps):
                    writer.append(*next(steps))
                full[kind] = writer, stack.enter_context(dr.Sampler(store, view, kinds[kind](), **options))
            while True:
                for kind, (writer, sampler) in full.items():
                    times.case = f"{kind}, in turn with an append"
                    for _ in range(size.batches):
                        writer.append(*next(steps))
                        draw(sampler)
                yield

    def rest() -> Iterator[None]:
        """Draw from a store that does not change; also the first batch of new samplers of each kind."""
        with ExitStack() as stack:
            store = stack.enter_context(dr.open(folder.parent / "store"))
            samplers = {
                kind: stack.enter_context(dr.Sampler(store, view, make(), **options)) for kind, make in kinds.items()
            }
            while True:
                for kind, sampler in samplers.items():
                    times.case = f"{kind}, at rest"
                    for _ in range(size.batches):
                        draw(sampler)
                    times.case = f"{kind}, {FIRST}"
                    for _ in range(size.fresh):
                        with dr.Sampler(store, view, kinds[kind](), **options) as fresh:
                            draw(fresh)
                yield

    # Import the modules of a first batch before kernels are measured.
    with dr.open(folder.parent / "store") as store:
        for make in kinds.values():
            with dr.Sampler(store, view, make(), **options) as sampler:
                draw(sampler)
    times.install()
    cases = grow(), rest()

    def one_round() -> dict[str, float]:
        for case in cases:
            next(case)
        return times.taken()

    print(json.dumps(sorted(one_round())), flush=True)
    for _ in sys.stdin:
        print(json.dumps(one_round()), flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), Size(*json.loads(sys.argv[2])))
