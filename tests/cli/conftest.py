"""What the tests of the command line share: an `info()` of literals, and a way to run the command in this process."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.commands import main

# Of the store of the fixture `small`.
SCHEMA = dr.Schema(
    obs={"image": dr.Field((4, 4), "uint8"), "state": (dr.Field((2,), "float32"), dr.Field((), "bool"))},
    action=dr.Field((2,), "float32"),
    extra={"log_prob": dr.Field((), "float64")},
    episode={"seed": dr.Field((), "int64"), "lr": dr.Field((), "float32"), "goal": dr.Field((2,), "float32")},
)
# Its episodes, oldest first: steps, how each ends, its seed (None: no episode values), whether it has a final
# observation. The reward of step t of episode e is 1 + e + t / 8.
EPISODES = [
    (3, "terminated", 7, True),
    (60, "truncated", 5, True),
    (4, "cut", None, False),
    (5, "terminated", 2**53 + 1, False),
    (2, "cut", 2**53, True),
    (6, "truncated", None, True),
]
RETURNS = [steps * (1 + e) + steps * (steps - 1) / 16 for e, (steps, *_) in enumerate(EPISODES)]


def small_episode(e: int) -> dict[str, Any]:
    """The arguments of `append_episode` for an episode of `small`."""
    steps, how, seed, has_final = EPISODES[e]
    rows, t = steps + has_final, np.arange(steps)
    rng = np.random.default_rng(e)
    state = rng.normal(size=(rows, 2)).astype("f4"), rng.random(rows) < 0.5
    return {
        "obs": {"image": rng.integers(0, 256, (rows, 4, 4)).astype("u1"), "state": state},
        "action": rng.normal(size=(steps, 2)).astype("f4"),
        "reward": (1 + e + t / 8).astype("f4"),
        "terminated": how == "terminated",
        "truncated": how == "truncated",
        "log_prob": -t / 8,
        "episode": None if seed is None else {"seed": seed, "lr": 0.1 * e, "goal": [e, -e]},
    }


def write_small(path: Path, numbers: range = range(len(EPISODES)), **options: Any) -> None:
    """Make a store of some of the episodes of `small`."""
    with dr.create(path, SCHEMA, **options) as store, store.writer() as writer:
        for e in numbers:
            writer.append_episode(**small_episode(e))


@pytest.fixture
def small(tmp_store: Path) -> Path:
    """A store at rest of six episodes with nested observations, extra and episode fields."""
    write_small(tmp_store, capacity=1000)
    return tmp_store


class Done(NamedTuple):
    """What a run of the command line left."""

    code: int
    out: str
    err: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run `diskreplay` with these arguments in this process."""
    monkeypatch.delenv("DISKREPLAY_TRACEBACK", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)

    def run_main(*arguments: object) -> Done:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capfd.readouterr())

    return run_main


@pytest.fixture
def run_in_terminal() -> Callable[..., tuple[subprocess.CompletedProcess[bytes], bytes]]:
    """Run `diskreplay` in a process whose stderr is a terminal; returns it, and what the terminal was sent."""

    def run_process(*arguments: object) -> tuple[subprocess.CompletedProcess[bytes], bytes]:
        outer, inner = pty.openpty()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "diskreplay", *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=inner,
                env=os.environ | {"TERM": "xterm"},
                timeout=600,
                check=False,
            )
            os.close(inner)
            return done, os.read(outer, 65536)
        finally:
            os.close(outer)

    return run_process


def segment(number: int, **said: Any) -> dict[str, Any]:
    """What `Store.info()` might say of a segment of which no step has left."""
    without = ("steps_hidden", "steps_evicted", "steps_discarded", "steps_lost", "steps_unproven", "merged")
    return {"number": number, **dict.fromkeys(without, 0), **said}


@pytest.fixture
def info() -> dict[str, Any]:
    """What `Store.info()` might say of a store with one living and one dead writer."""
    return {
        "path": "/data/store",
        "format_version": 1,
        "created": 1767225600.0,
        "schema": {
            "obs": {
                "dict": {
                    "image": {"shape": [84, 84], "dtype": "uint8", "space": {"type": "Box", "low": 0, "high": 255}},
                    "state": {"tuple": [{"shape": [4], "dtype": "float32"}, {"shape": [], "dtype": "bool"}]},
                }
            },
            "action": {"shape": [], "dtype": "int64", "space": {"type": "Discrete", "n": 7, "start": 0}},
            "reward": {"shape": [], "dtype": "float32"},
            "extra": {"log_prob": {"shape": [], "dtype": "float32"}},
            "episode": {"seed": {"shape": [], "dtype": "int64"}},
        },
        "capacity": 2_000_000,
        "capacity_bytes": None,
        "max_age_s": None,
        "steps": 1_234_567,
        "steps_hidden": 0,
        "steps_evicted": 0,
        "steps_discarded": 0,
        "steps_lost": 0,
        "steps_inserted": 1_234_567,
        "steps_unproven": 0,
        "episodes": {"total": 1_005, "open": 2, "terminated": 900, "truncated": 100, "cut": 3},
        "total_reward": {"count": 1_003, "mean": 101.25, "std": 7.5, "min": -3.0, "median": 99.0, "max": 500.0},
        "length": {"count": 1_003, "mean": 1230.5, "std": 0.0, "min": 9, "median": 1000.0, "max": 12_345},
        "segments": [
            segment(0, writer=0, lanes=1, rows=700_100, steps=700_000, state="sealed", bytes=10**9),
            segment(1, writer=1, lanes=8, rows=9, steps=8, state="dead", bytes=4096),
            segment(2, writer=0, lanes=1, rows=534_560, steps=534_559, state="writing", bytes=5),
        ],
        "writers": [
            {"writer": 0, "state": "alive", "segments": 2, "lanes": 1, "steps": 1_234_559},
            {"writer": 1, "state": "dead", "segments": 1, "lanes": 8, "steps": 8},
        ],
        "quarantine": {"steps": 0, "segments": 0, "bytes": 0, "entries": []},
        "bytes_on_disk": 12_345_678_901,
        "bytes_apparent": 13_000_000_000,
        "holes": 654_321_099,
    }


COMMANDS = (
    *("demo", "doctor", "inspect", "episodes", "show", "plot", "frames", "watch", "report", "du", "diff", "verify"),
    *("repair", "evict", "compact", "backup", "copy", "merge", "import", "export"),
)


def on_a_terminal(question: bytes, answer: bytes, *arguments: object) -> tuple[int, bytes, bytes]:
    """Answer a question of `diskreplay` on a terminal; return its exit code, its output, and the words before that."""
    outer, inner = pty.openpty()
    try:
        command = [sys.executable, "-m", "diskreplay", *map(str, arguments)]
        with subprocess.Popen(command, stdin=inner, stderr=inner, stdout=subprocess.PIPE) as child:
            os.close(inner)
            asked = b""
            while question not in asked:
                asked += os.read(outer, 65536)
            os.write(outer, answer)
            out, _ = child.communicate(timeout=600)
    finally:
        os.close(outer)
    return child.returncode, out, asked
