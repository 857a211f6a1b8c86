"""Run contestants in turn in one process, compare them round by round, and write the results."""

import datetime
import gc
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

OURS = "diskreplay"
RESULTS = Path(__file__).parent / "results"
LEAST_ROUNDS = 7
PACKAGES = (
    "diskreplay", "numpy", "numba", "zarr", "torch", "torchrl", "tensordict", "cpprb", "stable-baselines3", "tianshou",
    "ray",
)  # fmt: skip

Seconds = NDArray[np.float64]


class Contestant(NamedTuple):
    """Something that can be timed; `round` makes its calls once and returns the seconds of each of them."""

    name: str
    round: Callable[[], Seconds]


class Table(NamedTuple):
    """Rows of text below a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


class Target(NamedTuple):
    """A figure with its lower or upper bound."""

    what: str
    measured: float
    bound: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the figure is within the bound."""
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound

    def row(self) -> list[str]:
        """Return the cells of a table row."""
        word = "at least" if self.at_least else "at most"
        bound = f"{word} {number(self.bound)} {self.unit}".strip()
        return [self.what, f"{number(self.measured)} {self.unit}".strip(), bound, "yes" if self.met else "**no**"]


@dataclass(frozen=True)
class Report:
    """The results of a bench."""

    title: str
    tables: Sequence[Table]
    targets: Sequence[Target] = ()
    caveats: Sequence[str] = field(default=())

    def markdown(self, command: str, folder: Path) -> str:
        """Return the result page; `folder` is where the bench had its files."""
        parts = [f"# {self.title}", f"Made by `{command}` on {datetime.date.today().isoformat()}. {machine(folder)}"]
        parts += [_table(table) for table in self.tables]
        if self.targets:
            parts.append(_table(Table(["target", "measured", "wanted", "met"], [t.row() for t in self.targets])))
        if self.caveats:
            parts.append("\n".join(f"- {caveat}" for caveat in self.caveats))
        return "\n\n".join(parts) + "\n"


def in_turn(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[Seconds]]:
    """Run all contestants once as a warm-up, then `rounds` times, in the opposite order every other time."""
    seconds: dict[str, list[Seconds]] = {contestant.name: [] for contestant in contestants}
    os.sync()  # else the system writes the files of the set-up in the background, for half a minute
    for number_ in range(-1, rounds):
        for contestant in contestants if number_ % 2 else reversed(contestants):
            # Garbage of one contestant must not be collected in the time of the next.
            gc.collect()
            taken = contestant.round()
            if number_ >= 0:
                seconds[contestant.name].append(taken)
    return seconds


def timed(call: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]) -> Seconds:
    """Make one call for each tuple of arguments; return the seconds of each, with about 50 ns of the clock."""
    clock = perf_counter_ns
    taken = []
    for given in arguments:
        started = clock()
        call(*given)
        taken.append(clock() - started)
    return np.array(taken, np.float64) / 1e9


def draw(sample: Callable[[], Any], fields: Iterable[Any]) -> Any:
    """Draw a batch, take the fields that a training step reads, and return it."""
    batch = sample()
    for field_ in fields:
        batch[field_]
    return batch


def ratios(seconds: dict[str, list[Seconds]], ours: str, peer: str) -> Seconds:
    """Return the ratio of the peer's time to ours in each round; all calls count, the slow ones too."""
    pairs = zip(seconds[ours], seconds[peer], strict=True)
    return np.array([theirs.mean() / own.mean() for own, theirs in pairs])


def faster(
    seconds: dict[str, list[Seconds]], wanted: Mapping[str, float], what: str = "", ours: str = OURS
) -> list[Target]:
    """Return the targets for the median ratio to each peer; peers that did not run are left out."""
    return [
        Target(
            f"{what}faster than {peer}", float(np.median(ratios(seconds, ours, peer))), least, "times", at_least=True
        )
        for peer, least in wanted.items()
        if peer in seconds
    ]


def bandwidth(seconds: dict[str, list[Seconds]], ours: str, limit: str, least: float) -> Target:
    """Return the target for our share of the bandwidth of a copy of the same bytes."""
    share = float(np.median(ratios(seconds, ours, limit)))
    return Target(f"{ours}: bandwidth, of that of a {limit}", share, least, "", at_least=True)


def timing_table(seconds: dict[str, list[Seconds]], what: str) -> Table:
    """Return median, 90th percentile and mean of all calls, in microseconds."""
    rows = []
    for name, rounds in seconds.items():
        calls = np.concatenate(rounds) * 1e6
        cells = [np.median(calls), np.percentile(calls, 90), np.percentile(calls, 99), calls.mean()]
        rows.append([name, *map(number, cells), str(len(calls))])
    return Table([what, "median µs", "p90 µs", "p99 µs", "mean µs", "calls"], rows)


def ratio_table(seconds: dict[str, list[Seconds]], pairs: Iterable[tuple[str, str]]) -> Table:
    """Return the median ratio of each pair (ours, peer) with its least and greatest."""
    rows = []
    for ours, peer in pairs:
        found = ratios(seconds, ours, peer)
        cells = [np.median(found), found.min(), found.max()]
        rows.append([ours, peer, *map(number, cells), str(len(found))])
    return Table(["this", "is faster than", "times (median)", "least", "most", "rounds"], rows)


def number(value: Any) -> str:
    """Return three significant digits, and all digits before the point."""
    value = float(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def machine(folder: Path) -> str:
    """Describe the hardware and the versions, but nothing that identifies the machine."""
    versions = [f"{name} {found}" for name in PACKAGES if (found := _version(name))]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_cpu_model()}, {os.cpu_count()} cores, {memory:.0f} GiB; {platform.system()}, files on "
        f"{_file_system(folder)}; Python {platform.python_version()}, {', '.join(versions)}."
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _file_system(folder: Path) -> str:
    """Return the type of the file system that holds a folder, such as ext4."""
    path = str(folder.resolve())
    found = ("", "an unknown file system")
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(found[0]):
            found = (point, kind)
    return found[1]


def _table(table: Table) -> str:
    lines = ["| " + " | ".join(table.header) + " |", "| --- " + "| ---: " * (len(table.header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in table.rows])
