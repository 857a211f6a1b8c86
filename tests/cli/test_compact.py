from collections.abc import Callable
from pathlib import Path

import pytest

import diskreplay as dr
from tests.cli.conftest import EPISODES, small_episode
from tests.testing.merged import folders

WHAT = f"{len(EPISODES)} segments of {sum(steps for steps, *_ in EPISODES)} steps"


@pytest.fixture
def many(tmp_path: Path, small: Path) -> Path:
    """A store of the episodes of `small`, each in a segment of its own."""
    path = tmp_path / "many"
    with dr.open(small) as like:
        schema = like.schema
    with (
        dr.create(path, schema, segment_steps="episode", compaction="manual") as store,
        store.writer() as writer,
    ):
        for number in range(len(EPISODES)):
            writer.append_episode(**small_episode(number))
    return path


def test_a_dry_run_tells_and_changes_nothing(run: Callable, many: Path) -> None:
    before = {str(p): p.stat().st_mtime_ns for p in many.rglob("*")}
    code, out, errors = run("compact", many, "--dry-run")
    assert (code, errors) == (0, "")
    assert out.startswith(f"would be merged  {WHAT}, ")
    assert {str(p): p.stat().st_mtime_ns for p in many.rglob("*")} == before


def test_segments_become_one(run: Callable, many: Path) -> None:
    code, out, _ = run("compact", many)
    assert (code, len(folders(many))) == (0, 1)
    assert out.startswith(f"merged  {WHAT}, ")
    assert run("compact", many) == (0, "nothing to merge\n", "")
    assert '"segments": 0' in run("compact", many, "--json")[1]


@pytest.mark.parametrize("given", ["gzip", "zstd:", "zstd:x", "zstd:99"])
def test_what_is_no_compression_is_one_line(run: Callable, many: Path, given: str) -> None:
    code, out, errors = run("compact", many, "--compression", given)
    assert (code, out) == (2, "")
    assert errors.count("\n") == 1
    assert "zstd:3" in errors
    assert len(folders(many)) == len(EPISODES)
