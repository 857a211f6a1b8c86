import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.cli.conftest import SCHEMA, small_episode


def on_disk(folder: Path) -> int:
    files = (Path(top) / name for top, _, names in os.walk(folder) for name in names)
    return sum(file.stat().st_blocks * 512 for file in files)


def test_every_byte_is_counted_once(run: Callable, small: Path) -> None:
    with dr.open(small, "a") as store, store.writer() as writer:
        writer.append_episode(**small_episode(0), priority=np.ones(3))
    done = run("du", small, "--json")
    assert (done.code, done.err) == (0, "")
    usage = json.loads(done.out)
    assert usage["bytes"] == on_disk(small)
    assert usage["steps"] == 83
    assert sum(row["bytes"] for row in usage["fields"]) == sum(row["bytes"] for row in usage["segments"])
    beside = usage["quarantine"] + usage["samplers"] + usage["other"]
    assert usage["bytes"] == sum(row["bytes"] for row in usage["segments"]) + beside
    assert [(row["number"], row["steps"]) for row in usage["segments"]] == [(0, 80), (1, 3)]
    fields = {row["field"]: row for row in usage["fields"]}
    assert fields.keys() == {*SCHEMA.leaves, "done", "time", "priority", "documents, counters and checksums"}
    for name, field in fields.items():
        assert field["bytes_per_step"] == field["bytes"] / 83
        if "," not in name:
            assert field["bytes"] == sum(on_disk(small / f"segments/0000000{n}" / name) for n in (0, 1))
    assert fields["obs/image"]["row_bytes"] == 16


def test_the_tables_are_read_by_people(run: Callable, small: Path) -> None:
    done = run("du", small)
    assert (done.code, done.err) == (0, "")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == [str(small)]
    assert "80 steps" in done.out
    assert ["field", "row", "a", "step", "bytes", "share"] in lines
    assert any(line[:3] == ["obs/image", "16", "B"] for line in lines)


def test_what_is_in_quarantine_is_apart(run: Callable, small: Path) -> None:
    (small / "segments/stray").write_bytes(bytes(range(256)) * 20)
    assert run("repair", small).out.startswith("quarantined")
    usage = json.loads(run("du", small, "--json").out)
    assert usage["quarantine"] > 0
    assert usage["bytes"] == on_disk(small)


@pytest.mark.parametrize(("arguments", "shown"), [([], 10), (["--all"], 12)])
def test_the_largest_segments_come_first(run: Callable, tmp_store: Path, arguments: list[str], shown: int) -> None:
    schema = dr.Schema(dr.Field((1000,), "uint8"), dr.Field((), "int64"))
    with dr.create(tmp_store, schema, segment_steps="episode") as store, store.writer() as writer:
        for steps in range(20, 260, 20):
            obs = np.zeros((steps, 1000), "u1")
            writer.append_episode(obs, np.zeros(steps, int), np.zeros(steps), terminated=True)
    sizes = {row["number"]: row["bytes"] for row in json.loads(run("du", tmp_store, "--json").out)["segments"]}
    table = run("du", tmp_store, *arguments).out.split("segments, largest first")[1].splitlines()
    numbers = [int(line.split()[0]) for line in table[2:] if "B" in line]
    assert len(set(sizes.values())) > 2
    assert numbers == sorted(sizes, key=lambda number: -sizes[number])[:shown]
    assert ("2 more; --all lists every one" in table[-2] + table[-1]) is (shown == 10)
