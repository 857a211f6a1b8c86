"""Names and texts that somebody hostile put into a store, in what every command prints or writes."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr

HOSTILE = "a\x1b[2J\n<script>alert(1)[red]$x$=1"
FLOAT = dr.Field((), "float64")
LARGE = 1.7e308


@pytest.fixture
def hostile(tmp_store: Path) -> Path:
    """A store with such a name in each part of its schema, and with the largest floats, NaN and inf as values."""
    schema = dr.Schema(
        {HOSTILE: dr.Field((8, 8, 3), "uint8"), "v": FLOAT},
        FLOAT,
        extra={f"x{HOSTILE}": FLOAT},
        episode={HOSTILE: FLOAT},
    )
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for value in (LARGE, -LARGE, np.nan, np.inf):
            writer.append_episode(
                {HOSTILE: np.zeros((4, 8, 8, 3), "u1"), "v": [LARGE, -LARGE, np.nan, np.inf]},
                [LARGE, -LARGE, 0.0],
                [3e38, -3e38, 3e38],
                terminated=True,
                episode={HOSTILE: value},
                **{f"x{HOSTILE}": [LARGE, -LARGE, np.inf]},
            )
    return tmp_store


@pytest.mark.slow
def test_no_command_passes_on_what_a_terminal_or_a_browser_would_obey(
    run: Callable, hostile: Path, tmp_path: Path
) -> None:
    page, svg = tmp_path / "page.html", tmp_path / "plot.svg"
    commands: list[tuple[list[object], int]] = [
        *((["inspect"], 0), (["inspect", "--json"], 0), (["verify", "--deep"], 0), (["du"], 0)),
        *((["episodes", "--sort", HOSTILE], 0), (["episodes", "--csv"], 0), (["episodes", "--json"], 0)),
        *((["show", "0"], 0), (["show", "0", "--json"], 0), (["watch", "--once", "--interval", "0.1"], 0)),
        *((["diff", hostile], 0), (["report", "--out", page], 0), (["plot", "total_reward", "--out", svg], 0)),
        *(
            (["plot", "total_reward"], 0),
            (["plot", "actions"], 0),
            (["frames", "0", "--out", tmp_path / "frames.png"], 0),
        ),
        *((["episodes", "--sort", f"z{HOSTILE}"], 2), (["episodes", "--where", HOSTILE], 2)),
        *((["frames", "0", "--field", "none", "--out", tmp_path / "f.png"], 2), (["show", "0", "--id", HOSTILE], 2)),
    ]
    for (command, *options), code in commands:
        done = run(command, hostile, *options)
        assert done.code == code, (command, options, done)
        assert "\x1b" not in done.out + done.err
        assert done.err.count("\n") == (1 if code else 0), done.err
    for file in (page, svg):
        assert "<script>alert" not in file.read_text()
        assert "\x1b" not in file.read_text()
