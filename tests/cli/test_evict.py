from collections.abc import Callable
from pathlib import Path

import pytest

import diskreplay as dr
from tests.cli.conftest import EPISODES, on_a_terminal, small_episode


def lengths(path: Path) -> list[int]:
    with dr.open(path) as store:
        return [len(episode) for episode in store.episodes]


EVERY = [steps for steps, *_ in EPISODES]


def test_a_dry_run_tells_and_changes_nothing(run: Callable, small: Path) -> None:
    before = {str(p): p.stat().st_mtime_ns for p in small.rglob("*")}
    done = run("evict", small, "--where", "cut", "--dry-run")
    assert done == (0, "would be evicted  2 episodes of 6 steps\n", "")
    assert {str(p): p.stat().st_mtime_ns for p in small.rglob("*")} == before


def test_without_a_yes_nothing_is_evicted(run: Callable, small: Path) -> None:
    done = run("evict", small, "--where", "cut")
    assert done == (1, "not evicted  2 episodes of 6 steps\nto evict them use --yes\n", "")
    assert lengths(small) == EVERY


def test_what_is_met_is_evicted(run: Callable, small: Path) -> None:
    done = run("evict", small, "--where", "cut", "--yes")
    assert done == (0, "evicted  6 steps\n", "")
    assert lengths(small) == [3, 60, 5, 6]
    assert run("evict", small, "--where", "cut", "--yes") == (0, "nothing to evict\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("answer", "is_yes"), [(b"y\n", True), (b"\n", False)])
def test_on_a_terminal_episodes_are_evicted_after_a_yes(small: Path, answer: bytes, is_yes: bool) -> None:
    code, _, asked = on_a_terminal(b"[y/N] ", answer, "evict", small, "--where", "cut")
    assert b"Evict 2 episodes of 6 steps for good?" in asked
    assert code == 1 - is_yes
    assert lengths(small) == ([3, 60, 5, 6] if is_yes else EVERY)


def test_episodes_of_segments_that_are_written_stay(run: Callable, small: Path) -> None:
    with dr.open(small, "a") as store, store.writer() as writer:
        writer.append_episode(**small_episode(2))
        done = run("evict", small, "--where", "cut", "--yes")
        assert (done.code, done.out) == (0, "evicted  6 steps\n")
        assert done.err == "diskreplay: 1 episode would stay, in segments that still have a writer\n"
        assert lengths(small) == [3, 60, 5, 6, 4]


def test_a_wrong_expression_evicts_nothing(run: Callable, small: Path) -> None:
    done = run("evict", small, "--where", "cutt", "--yes")
    assert (done.code, done.out) == (2, "")
    assert "unknown name 'cutt'" in done.err
    assert lengths(small) == EVERY
