import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.cli.conftest import EPISODES, RETURNS, small_episode


def shown(run: Callable, *arguments: object) -> dict[str, Any]:
    done = run("show", *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


@pytest.mark.parametrize("number", range(len(EPISODES)))
def test_every_value_of_every_step_is_in_the_json(run: Callable, small: Path, number: int) -> None:
    given, (steps, how, seed, has_final) = small_episode(number), EPISODES[number]
    record = shown(run, small, number)
    assert (record["index"], record["length"], record["ended"]) == (number, steps, how)
    assert record["total_reward"] == pytest.approx(RETURNS[number])
    assert record["episode/seed"] == seed
    assert record["episode/goal"] == (None if seed is None else [number, -number])
    assert [step["step"] for step in record["steps"]] == list(range(steps))
    with dr.open(small) as store:
        assert [step["id"] for step in record["steps"]] == store.episodes[number].ids.tolist()
        assert [step["time"] for step in record["steps"]] == store.episodes[number].times.tolist()
    leaves = {
        "obs/image": given["obs"]["image"],
        "obs/state/0": given["obs"]["state"][0],
        "obs/state/1": given["obs"]["state"][1],
        "action": given["action"],
        "reward": given["reward"],
        "extra/log_prob": given["log_prob"],
    }
    for path, values in leaves.items():
        np.testing.assert_array_equal([step[path] for step in record["steps"]], values[:steps])
    assert list(record["steps"][0]) == ["step", "id", "time", *leaves]
    final = record["final_obs"]
    assert (final is not None) is has_final
    for path in list(leaves)[:3] if has_final else []:
        np.testing.assert_array_equal(final[path], leaves[path][-1])


@pytest.mark.parametrize(
    ("steps", "numbers", "has_final"),
    [(":", range(60), True), ("2:4", [2, 3], False), ("-1", [59], True), ("5", [5], False), ("58:", [58, 59], True)],
)
def test_some_steps_and_some_fields(
    run: Callable, small: Path, steps: str, numbers: list[int], has_final: bool
) -> None:
    record = shown(run, small, "1", "--steps", steps, "--field", "log_prob", "--field", "obs/state")
    assert [step["step"] for step in record["steps"]] == list(numbers)
    fields = ["obs/state/0", "obs/state/1"]
    assert list(record["steps"][0]) == ["step", "id", "time", "extra/log_prob", *fields]
    assert (list(record["final_obs"]) if has_final else record["final_obs"]) == (fields if has_final else None)


def test_episodes_are_found_from_the_end_and_by_id(run: Callable, small: Path) -> None:
    assert shown(run, small, -1)["index"] == 5
    assert shown(run, small, "-6")["index"] == 0
    with dr.open(small) as store:
        step = int(store.episodes[3].ids[2])
    assert shown(run, small, step, "--id")["index"] == 3


def test_the_table_is_read_by_people(run: Callable, small: Path) -> None:
    done = run("show", small, 0)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "episode 0 of 6: id 0, segment 0, lane 0, 3 steps, total_reward 3.375, terminated"
    assert lines[1].startswith("episode/seed 7, episode/lr 0, episode/goal [0 0], from 20")
    assert lines[3].split() == ["step", "id", "obs/image", "obs/state/0", "obs/state/1", "action", "reward", "log_prob"]
    assert [line.split()[0] for line in lines[4:]] == ["0", "1", "2", "final"]
    assert lines[5].split()[-2:] == ["1.125", "-0.125"]
    image = small_episode(0)["obs"]["image"][1]
    assert f"4x4, {image.min()} to {image.max()}" in lines[5]
    assert "episode/seed -" in run("show", small, 2).out


def test_a_long_episode_is_cut_short_unless_all_is_asked_for(run: Callable, small: Path) -> None:
    lines = run("show", small, 1).out.splitlines()
    assert lines[-1] == "50 steps of 60 shown (--steps : for all)"
    assert lines[-3].split()[0] == "49"
    assert run("show", small, 1, "--steps", ":").out.splitlines()[-1].split()[0] == "final"
    assert run("show", small, 1, "--steps", "70:").out.splitlines()[-1].startswith("0 steps of 60 shown")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([6], "no episode 6: the store has 6 episodes"),
        ([-7], "no episode -7: the store has 6 episodes"),
        ([10**9, "--id"], "no episode has a step of id 1000000000"),
        ([0, "--field", "colour"], "no field 'colour' in this store; it has obs/image, obs/state/0"),
    ],
)
def test_what_is_not_there_takes_one_line(run: Callable, small: Path, arguments: list[object], message: str) -> None:
    done = run("show", small, *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert done.err.count("\n") == 1


def test_names_from_the_store_are_no_escape_sequences(run: Callable, tmp_store: Path) -> None:
    schema = dr.Schema(dr.Field((), "int64"), dr.Field((), "int64"), extra={"\x1b[2J": dr.Field((), "bool")})
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        writer.append_episode([0, 1], [0], [0.0], terminated=True, **{"\x1b[2J": [True]})
    assert r"\x1b[2J" in run("show", tmp_store, 0).out
    assert "\x1b" not in run("show", tmp_store, 0).out
