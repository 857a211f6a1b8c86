"""The commands on real stores: at rest, being written by another process, damaged, and not stores at all."""

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.cli.conftest import COMMANDS, EPISODES

SCHEMA = dr.Schema(
    obs={"image": dr.Field((4, 4), "uint8"), "state": dr.Field((2,), "float32")},
    action=dr.Field((), "int64"),
    extra={"log_prob": dr.Field((), "float32")},
)
# What the writer below is given, oldest first: steps, then how the episode ends.
ENDS = [
    (3, "terminated"),
    (5, "truncated"),
    (4, "cut"),
    (1, "terminated"),
    (7, "truncated without a final observation"),
]


def observation(step: int) -> dict[str, Any]:
    return {"image": np.full((4, 4), step % 256), "state": [step, -step]}


def write_episodes(writer: dr.Writer) -> list[dict[str, Any]]:
    """Write the episodes of ENDS and three steps of an open one; return what `episodes --json` should say of them."""
    expected = []
    for steps, how in [*ENDS, (3, "open")]:
        for step in range(steps):
            last = step == steps - 1
            writer.append(
                observation(step),
                step,
                reward=1.5,
                terminated=last and how == "terminated",
                truncated=last and how.startswith("truncated"),
                next_obs=None if how.endswith("observation") else observation(step + 1),
                log_prob=-0.5,
            )
        if how == "cut":
            writer.end_episode()
        expected.append(
            {
                "index": len(expected),
                "length": steps,
                "hidden_steps": 0,
                "total_reward": 1.5 * steps,
                "terminated": how == "terminated",
                "truncated": how.startswith("truncated") or how == "cut",
                "cut": how == "cut",
                "open": how == "open",
            }
        )
    return expected


@pytest.fixture
def filled(tmp_store: Path) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """A store whose writer is alive in this process, and what its episodes are."""
    with dr.create(tmp_store, SCHEMA, capacity=1000) as store, store.writer() as writer:
        yield tmp_store, write_episodes(writer)


def listed(run: Callable, *arguments: object) -> list[dict[str, Any]]:
    done = run("episodes", *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def inspected(run: Callable, path: Path) -> dict[str, Any]:
    done = run("inspect", path, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def without_place(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k not in ("id", "segment", "lane", "start")} for record in records]


def test_episodes_lists_what_was_written(run: Callable, filled: tuple[Path, list]) -> None:
    path, expected = filled
    records = listed(run, path)
    assert without_place(records) == expected
    with dr.open(path) as store:
        assert [record["id"] for record in records] == [int(episode.ids[0]) for episode in store.episodes]
    assert {(record["segment"], record["lane"]) for record in records} == {(0, 0)}
    assert [record["id"] for record in records] == [record["start"] for record in records]


def test_episodes_shows_episode_fields_and_sorts_by_them(run: Callable, small: Path) -> None:
    records = listed(run, small)
    seeds = [seed for _, _, seed, _ in EPISODES]
    assert [record["episode/seed"] for record in records] == seeds
    goals = [None if seed is None else [e, -e] for e, seed in enumerate(seeds)]
    assert [record["episode/goal"] for record in records] == goals
    for name in ("seed", "episode/seed"):
        assert [record["index"] for record in listed(run, small, "--sort", name)] == [1, 0, 4, 3, 2, 5]
        assert [record["index"] for record in listed(run, small, "--sort", name, "--desc")] == [3, 4, 0, 1, 5, 2]
    lines = [line.split() for line in run("episodes", small).out.splitlines()]
    assert lines[0][-4:] == ["ended", "seed", "lr", "goal"]
    assert lines[2][-4:] == ["5", "0.1", "[1", "-1]"]
    assert lines[3][-4:] == ["cut", "-", "-", "-"]
    for name in ("colour", "goal", "episode/length"):
        done = run("episodes", small, "--sort", name)
        assert (done.code, done.out) == (2, "")
        assert f"{name!r} is not one of age, segment, lane, length, hidden_steps, total_reward, seed, lr" in done.err


def test_episodes_takes_an_expression(run: Callable, small: Path) -> None:
    where = "total_reward > 20 and seed >= 6"
    assert [record["index"] for record in listed(run, small, "--where", where)] == [3]
    chosen = listed(run, small, "--where", "length < 6", "--sort", "length", "--desc", "--limit", "2")
    assert [record["index"] for record in chosen] == [3, 2]
    assert listed(run, small, "--where", "length < 6", "--min-length", "6") == []
    assert run("episodes", small, "--where", where).out.splitlines()[-1].startswith("1 episode of 6; mean length 5,")


def test_episodes_as_csv(run: Callable, small: Path) -> None:
    done = run("episodes", small, "--csv")
    assert (done.code, done.err) == (0, "")
    rows, records = list(csv.DictReader(io.StringIO(done.out))), listed(run, small)
    assert list(rows[0]) == list(records[0])
    assert len(rows) == len(records) == 6
    for row, record in zip(rows, records, strict=True):
        assert float(row["total_reward"]) == record["total_reward"]
        assert row["episode/seed"] == ("" if record["episode/seed"] is None else str(record["episode/seed"]))
        assert row["episode/goal"] == ("" if record["episode/goal"] is None else json.dumps(record["episode/goal"]))
        assert row["cut"] == str(record["cut"])


def test_inspect_prints_what_info_says(run: Callable, filled: tuple[Path, list]) -> None:
    path, expected = filled
    shown = inspected(run, path)
    with dr.open(path) as store:
        said = json.loads(json.dumps(store.info()))
    for moving in ("bytes_on_disk", "bytes_apparent", "holes"):
        assert shown.pop(moving) >= 0
        said.pop(moving)
    assert shown == said
    assert shown["schema"] == SCHEMA.to_json()
    assert shown["capacity"] == 1000
    assert shown["steps"] == sum(record["length"] for record in expected)
    assert shown["episodes"]["total"] == 6
    assert shown["episodes"]["open"] == 1
    assert shown["episodes"]["cut"] == 1
    assert shown["length"] == {
        "count": 5,
        "mean": 4.0,
        "std": pytest.approx(2.0),
        "min": 1,
        "median": 4.0,
        "max": 7,
    }
    assert shown["total_reward"]["max"] == 10.5
    assert [writer["state"] for writer in shown["writers"]] == ["alive"]
    assert [segment["state"] for segment in shown["segments"]] == ["writing"]


def test_an_empty_store_can_be_inspected(run: Callable, tmp_store: Path) -> None:
    dr.create(tmp_store, SCHEMA).close()
    shown = inspected(run, tmp_store)
    assert shown["steps"] == 0
    assert shown["total_reward"] is None
    done = run("inspect", tmp_store)
    assert (done.code, done.err) == (0, "")
    assert "segments" not in done.out.splitlines()  # no empty table
    assert not any(line.startswith("writers") and "0" not in line for line in done.out.splitlines())
    assert listed(run, tmp_store) == []
    done = run("episodes", tmp_store)
    assert (done.code, done.out.splitlines()[-1]) == (0, "0 episodes")


@pytest.mark.parametrize("rewards", [["nan", "inf", "-inf", 3.0], ["inf", "-inf", 3.0]])
def test_rewards_that_are_no_numbers_become_null(run: Callable, tmp_store: Path, rewards: list[str | float]) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        for reward in rewards:
            writer.append(observation(0), 0, float(reward), True, next_obs=observation(1), log_prob=0.0)
    assert [record["total_reward"] for record in listed(run, tmp_store)] == [None] * (len(rewards) - 1) + [3.0]
    returns = inspected(run, tmp_store)["total_reward"]
    assert (returns["count"], returns["mean"]) == (len(rewards), None)
    assert run("inspect", tmp_store).code == 0
    done = run("episodes", tmp_store, "--sort", "total_reward")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("mean total_reward nan\n")


def test_inspecting_writes_nothing(run: Callable, filled: tuple[Path, list]) -> None:
    path, _ = filled

    def state() -> dict[str, tuple[int, int]]:
        return {str(p): (p.stat().st_mtime_ns, p.stat().st_size) for p in sorted(path.rglob("*"))}

    before = state()
    assert run("inspect", path).code == 0
    assert run("episodes", path).code == 0
    assert state() == before


@pytest.mark.slow
def test_a_pager_that_has_seen_enough_is_no_error(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        for step in range(2000):
            writer.append(observation(step), 0, 1.0, True, next_obs=observation(step), log_prob=0.0)
    command = [sys.executable, "-m", "diskreplay", "episodes", str(tmp_store), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        assert listing.stdout is not None
        assert listing.stderr is not None
        assert listing.stdout.readline() == b"[\n"
        listing.stdout.close()
        assert listing.stderr.read() == b""
    assert listing.returncode == 141


# Commands that do not open an existing store, and the arguments of others after the path of a store.
WITHOUT_STORE = {"demo", "doctor", "import"}
ARGUMENTS: dict[str, list[object]] = {
    "export": ["npz:set-of-nothing"],
    "show": [0],
    "evict": ["--where", "cut"],
    "copy": ["copy-of-nothing"],
    "backup": ["backup-of-nothing"],
    "merge": ["b", "merged"],
    "diff": ["b"],
    "plot": ["total_reward"],
    "frames": [0, "--out", "strip.png"],
}


def a_file(path: Path) -> None:
    path.write_text("not a folder")


def an_empty_folder(path: Path) -> None:
    path.mkdir()


def another_zarr_group(path: Path) -> None:
    path.mkdir()
    (path / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {"mine": 1}}')


def a_store_without_its_first_half(path: Path) -> None:
    dr.create(path, SCHEMA).close()
    metadata = path / "zarr.json"
    metadata.write_text(metadata.read_text()[500:])


def a_store_of_a_newer_format(path: Path) -> None:
    dr.create(path, SCHEMA).close()
    metadata = path / "zarr.json"
    document = json.loads(metadata.read_text())
    document["attributes"]["format_version"] = 99
    metadata.write_text(json.dumps(document))


def a_store_without_counters(path: Path) -> None:
    dr.create(path, SCHEMA).close()
    for file in (path / "counters").iterdir():
        if file.is_file():
            file.unlink()


def nothing(path: Path) -> None:
    assert not path.exists()


def a_link_to_itself(path: Path) -> None:
    os.symlink(path, path)


NO_FOLDERS_OF_A_STORE = nothing, a_file, an_empty_folder
DAMAGED = (
    *(a_link_to_itself, another_zarr_group),
    *(a_store_without_its_first_half, a_store_of_a_newer_format, a_store_without_counters),
)
REPAIRING = "verify", "repair"
CASES = [
    *(pytest.param(make, command) for make in NO_FOLDERS_OF_A_STORE for command in REPAIRING),
    *(
        pytest.param(make, command, marks=pytest.mark.slow)
        for make in NO_FOLDERS_OF_A_STORE + DAMAGED
        for command in COMMANDS
        if command not in {*REPAIRING, *WITHOUT_STORE}
    ),
]


@pytest.mark.parametrize(("make", "command"), CASES)
def test_what_is_no_store_takes_one_line_and_exit_code_2(
    run: Callable, tmp_store: Path, make: Callable[[Path], None], command: str
) -> None:
    make(tmp_store)
    done = run(command, tmp_store, *ARGUMENTS.get(command, ()))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("diskreplay: ")
    assert done.err.count("\n") == 1
    assert str(tmp_store) in done.err
    assert "unexpected" not in done.err


def test_tables_become_paragraphs_on_a_narrow_terminal(
    run: Callable, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "40")
    wide = json.loads(run("episodes", small, "--json").out)
    rows = run("episodes", small).out.split("\n\n")[0]
    assert max(map(len, rows.splitlines())) <= 40
    words = rows.split()
    assert words.count("index") == len(wide)
    for row in wide:  # no word is split
        assert str(row["id"]) in words
    rows = run("show", small, 0).out.split("\n\n")[1]
    assert max(map(len, rows.splitlines())) <= 40
    assert rows.split().count("step") == 4  # with the final observation
    monkeypatch.setenv("COLUMNS", "200")
    assert run("episodes", small).out.split().count("index") == 1
