import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.cli.conftest import EPISODES, SCHEMA, small_episode, write_small


def test_a_store_and_its_copy_do_not_differ(run: Callable, small: Path) -> None:
    to = small.with_name("copy")
    assert run("copy", small, to).code == 0
    assert run("diff", small, to) == (0, "no differences\n", "")
    assert run("diff", to, small, "--json") == (0, "[]\n", "")


def changed(name: str, number: int, change: Callable[[Any], Any]) -> dict[int, dict[str, Any]]:
    episode = small_episode(number)
    return {number: {**episode, name: change(episode[name])}}


def set_item(at: Any, value: Any) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array = array.copy()
        array[at] = value
        return array

    return change


def with_image(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda obs: {**obs, "image": change(obs["image"])}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "what", "a", "b"),
    [
        (changed("reward", 1, set_item(7, -0.5)), "episode 1, step 7, reward", 2.875, -0.5),
        (changed("action", 3, set_item((2, 1), np.nan)), "episode 3, step 2, action[1]", ..., None),
        (changed("log_prob", 0, set_item(0, -0.0)), "episode 0, step 0, extra/log_prob", 0.0, -0.0),
        (
            changed("obs", 4, with_image(lambda image: set_item(2, image[2] ^ 1)(image))),
            "episode 4, final observation, obs/image[0, 0]",
            ...,
            ...,
        ),
        (changed("terminated", 3, lambda _: False), "episode 3, terminated", True, False),
        (changed("truncated", 2, lambda _: True), "episode 2, cut", True, False),
        (changed("episode", 0, lambda values: {**values, "goal": [0, 1]}), "episode 0, episode/goal", [0, 0], [0, 1]),
        (changed("episode", 5, lambda _: {"seed": 1}), "episode 5, episode/seed", None, 1),
        ({1: {**small_episode(1), "priority": np.ones(60)}}, "episode 1, step 0, priority", None, 1.0),
    ],
)
def test_the_first_difference_of_episodes_is_named(
    run: Callable, small: Path, change: dict[int, dict[str, Any]], what: str, a: Any, b: Any
) -> None:
    other = small.with_name("other")
    with dr.create(other, SCHEMA, capacity=1000) as store, store.writer() as writer:
        for e in range(len(EPISODES)):
            writer.append_episode(**(small_episode(e) | change.get(e, {})))
    done = run("diff", small, other, "--json")
    assert (done.code, done.err) == (1, "")
    (found,) = json.loads(done.out)
    assert found["what"] == what
    for value, expected in ((found["a"], a), (found["b"], b)):
        assert expected is ... or value == expected
    assert run("diff", small, other).out.startswith(f"{what}: ")


def test_a_final_observation_that_is_missing_is_a_difference(run: Callable, tmp_path: Path) -> None:
    schema = dr.Schema(dr.Field((), "int64"), dr.Field((), "int64"))
    for name, obs in (("a", [0, 1, 2]), ("b", [0, 1])):
        with dr.create(tmp_path / name, schema) as store, store.writer() as writer:
            writer.append_episode(obs, [0, 0], [0.0, 0.0], terminated=True)
    done = run("diff", tmp_path / "a", tmp_path / "b")
    assert done == (1, "episode 0, final observation, obs: 2 and -\n", "")


def test_schemas_limits_and_counts_are_compared(run: Callable, small: Path) -> None:
    other = small.with_name("other")
    write_small(other, range(4), max_age_s=9e9)
    assert run("diff", small, other).out.splitlines() == [
        "capacity: 1000 and -",
        "max_age_s: - and 9000000000.0",
        "steps: 80 and 72",
        "episodes: 6 and 4",
    ]
    third = small.with_name("third")
    dr.create(third, dr.Schema(SCHEMA.obs, dr.Field((), "int64"))).close()
    lines = run("diff", small, third).out.splitlines()
    assert lines[0].startswith("schema: action: Field(shape=(2,), dtype=dtype('float32')")
    assert [line.split(": ")[1] for line in lines if line.startswith("schema")] == [
        "action",
        "extra/log_prob",
        "episode/seed",
        "episode/lr",
        "episode/goal",
    ]
