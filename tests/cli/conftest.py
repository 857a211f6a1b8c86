"""What the tests of the command line share: an `info()` of literals, and a way to run the command in this process."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from diskreplay.cli.main import main


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
                timeout=60,
                check=False,
            )
            os.close(inner)
            return done, os.read(outer, 65536)
        finally:
            os.close(outer)

    return run_process


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
        "steps_evicted": 0,
        "steps_lost": 0,
        "steps_unproven": 0,
        "episodes": {"total": 1_005, "open": 2, "terminated": 900, "truncated": 100, "cut": 3},
        "returns": {"count": 1_003, "mean": 101.25, "std": 7.5, "min": -3.0, "median": 99.0, "max": 500.0},
        "lengths": {"count": 1_003, "mean": 1230.5, "std": 0.0, "min": 9, "median": 1000.0, "max": 12_345},
        "segments": [
            {
                "number": 0,
                "writer": 0,
                "lanes": 1,
                "rows": 700_100,
                "steps": 700_000,
                "steps_unproven": 0,
                "state": "sealed",
                "bytes": 10**9,
            },
            {
                "number": 1,
                "writer": 1,
                "lanes": 8,
                "rows": 9,
                "steps": 8,
                "steps_unproven": 0,
                "state": "dead",
                "bytes": 4096,
            },
            {
                "number": 2,
                "writer": 0,
                "lanes": 1,
                "rows": 534_560,
                "steps": 534_559,
                "steps_unproven": 0,
                "state": "writing",
                "bytes": 5,
            },
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
