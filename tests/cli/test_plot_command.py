"""`diskreplay plot`: what it prints and saves, and its refusals."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr

WHAT = ("actions", "ages", "length", "rewards", "total_reward")


@pytest.fixture
def learned(small: Path) -> Path:
    """The store with priorities that two samplers saved: step i of the transitions has i + 1, windows have 7."""
    with dr.open(small, "a") as store:
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(eps=0.5), seed=0) as sampler:
            ids = sampler.ids()
            sampler.update_priorities(ids, np.arange(len(ids)) + 0.5)
            sampler.save("one")
            sampler.view = dr.Episodes()
            sampler.update_priorities(sampler.ids(), np.full(sampler.sampleable, 6.5))
            sampler.save("both")
        with dr.Sampler(store, dr.Transitions(), seed=0) as uniform:
            uniform.save("uniform")
    return small


def test_priorities_are_drawn_and_saved(run: Callable, learned: Path) -> None:
    done = run("plot", learned, "priorities", "--where", "length > 50")
    assert (done.code, done.err) == (0, "")
    assert "priorities of 121 ids" in done.out.splitlines()[0]
    done = run("plot", learned, "priorities", "--sampler", "one")
    assert "priorities of 79 ids, one" in done.out.splitlines()[0]
    for arguments, message in (
        (["priorities", "--sampler", "nobody"], "has no sampler state named 'nobody'; it has both, one, uniform"),
        (["priorities", "--sampler", "uniform"], "no priorities of these steps were saved by sampler uniform"),
        (["priorities", "--where", "length > 100"], "no priorities of these steps were saved by any sampler"),
        (["total_reward", "--sampler", "one"], "--sampler is for priorities, not total_reward"),
    ):
        done = run("plot", learned, *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert message in done.err


@pytest.mark.parametrize("what", WHAT)
def test_it_is_drawn_in_a_terminal_or_a_pipe(run: Callable, small: Path, what: str) -> None:
    done = run("plot", small, what)
    assert (done.code, done.err) == (0, "")
    assert "\x1b" not in done.out
    lines = done.out.splitlines()
    assert 20 < len(lines) < 25
    assert max(map(len, lines)) <= 80
    title = {
        "total_reward": "total_reward of 6 episodes",
        "length": "length of 6",
        "actions": "action",
    }
    assert title.get(what, {"rewards": "reward", "ages": "ages of steps"}.get(what, "")) in lines[0]


@pytest.mark.slow
@pytest.mark.parametrize("what", WHAT)
def test_it_is_saved_as_a_picture(run: Callable, small: Path, tmp_path: Path, what: str) -> None:
    png, svg = tmp_path / "plot.png", tmp_path / "plot.svg"
    assert run("plot", small, what, "--out", png) == (0, f"saved {png}\n", "")
    from PIL import Image

    with Image.open(png) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (675, 1200, 3)
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10
    assert run("plot", small, what, "--where", "length > 3", "--out", svg).code == 0
    assert svg.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["total_reward", "--where", "length > 100"], "there is no episode to plot"),
        (["rewards", "--where", "length > 100"], "there is no episode to plot"),
        (["actions", "--field", "colour"], "no field 'colour' in this store"),
    ],
)
def test_what_cannot_be_plotted_takes_one_line(run: Callable, small: Path, arguments: list[str], message: str) -> None:
    done = run("plot", small, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1
