"""`--where`: which episodes an expression chooses, and the place of what is wrong with one."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import diskreplay as dr
from tests.cli.conftest import EPISODES, RETURNS


def chosen(run: Callable, path: Path, expression: str) -> list[int]:
    """Return the places of the episodes that an expression chooses."""
    done = run("episodes", path, f"--where={expression}", "--json")
    assert (done.code, done.err) == (0, "")
    return [episode["index"] for episode in json.loads(done.out)]


def refused(run: Callable, path: Path, expression: str) -> str:
    """Return the line that says what is wrong with an expression."""
    done = run("episodes", path, f"--where={expression}")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    return done.err.removeprefix("diskreplay: ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("length > 4", [1, 3, 5]),
        ("total_reward > 20", [1, 3, 5]),
        ("total_reward / length >= 4", [1, 3, 4, 5]),
        ("length * 2 - 1 == 5 + 2", [2]),
        ("-length > -5", [0, 2, 4]),
        ("terminated", [0, 3]),
        ("truncated", [1, 2, 4, 5]),
        ("cut", [2, 4]),
        ("truncated and not cut", [1, 5]),
        ("open", []),
        ("ended == 'cut'", [2, 4]),
        ("ended in ('terminated', 'truncated')", [0, 1, 3, 5]),
        ("ended not in ['cut']", [0, 1, 3, 5]),
        ("length in {3, 2 + 2}", [0, 2]),
        ("3 <= length < 6", [0, 2, 3]),
        ("seed == 7", [0]),
        ("seed != 7", [1, 3, 4]),
        ("seed < 10 or seed is None", [0, 1, 2, 5]),
        ("seed is not None and not seed < 10", [3, 4]),
        (f"seed == {2**53 + 1}", [3]),
        ("not seed < 10", [2, 3, 4, 5]),
        ("seed in (5, 7)", [0, 1]),
        ("seed - 5 == 0", [1]),
        ("seed", [0, 1, 3, 4]),
        ("lr == 0.1", [1]),
        ("goal[0] > 0 and goal[1] <= -3", [3, 4]),
        ("episode['goal'][-1] == -1", [1]),
        ("segment == 0 and lane == 0", [0, 1, 2, 3, 4, 5]),
        ("id == 0", [0]),
        ("start_time <= end_time", [0, 1, 2, 3, 4, 5]),
        ("length / 0 > 1 or length / 0 <= 1", []),
        ("True", [0, 1, 2, 3, 4, 5]),
        ("  length\n", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_an_expression_chooses_episodes(run: Callable, small: Path, expression: str, expected: list[int]) -> None:
    assert chosen(run, small, expression) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("lenght > 3", "unknown name 'lenght'; known are total_reward, length, .*, seed, lr, goal (at column 1 of"),
        ("1 < 2 and sed", "unknown name 'sed'; known are .* (at column 11 of '1 < 2 and sed')"),
        ("'é' == ended and sed", "unknown name 'sed'; known are .* (at column 18 of"),
        ("return > 20", "'return' is called total_reward (at column 1 of 'return > 20')"),
        ("length > 3 and return > 20", "'return' is called total_reward (at column 16 of"),
        ("ret > 20", "'ret' is called total_reward (at column 1 of"),
        ("not returns", "'returns' is called total_reward (at column 5 of"),
        ("steps < 3 or len > 5", "'steps' is called length (at column 1 of"),
        ("seed > 1 and len > 5", "'len' is called length (at column 14 of"),
        ("episode['length'] > 3", "unknown name 'length'; known are"),
        ("seed.real", "seed.real is not supported in an expression (at column 1 of 'seed.real')"),
        ("abs(seed)", "abs(seed) is not supported in an expression (at column 1 of"),
        ("2 ** 99 > seed", "2 ** 99 is not supported in an expression"),
        ("(lambda: 1)()", "(lambda: 1)() is not supported in an expression"),
        ("[seed for seed in (1, 2)]", ".* is not supported in an expression"),
        ("f'{seed}'", ".* is not supported in an expression"),
        ("seed == None", "None is not supported in an expression (at column 9 of"),
        ("seed is 3", "is compares only with None (at column 9 of"),
        ("length > 'a'", "'a' is a text, but a number is needed (at column 10 of"),
        ("ended", "ended is a text, but a number is needed"),
        ("'a' + ended == 'b'", "'a' is a text, but a number is needed"),
        ("ended in 'cutting'", "'cutting' is not a list, such as (1, 2)"),
        ("goal > 3", "goal has values of shape (2,); name one, as in goal[0] (at column 1 of"),
        ("goal[2] > 3", "goal has no 2"),
        ("goal['x'] > 3", "goal has no 'x'"),
        ("seed[0]", "seed has no 0"),
        ("goal[length]", "length is not a number or a text (at column 6 of"),
        ("1 +", "invalid syntax (at column 3 of '1 +')"),
        ("", "invalid syntax"),
        ("seed = 3", "invalid syntax.*"),
        ("(" * 300 + ")" * 300, "too many nested parentheses"),
        ("-" * 9000 + "1", "'--------------------'... is nested too deep"),
    ],
)
def test_what_is_no_expression_is_refused_with_its_place(
    run: Callable, small: Path, expression: str, message: str
) -> None:
    parts = "(.*)".join(re.escape(part) for part in message.split(".*"))
    assert re.match(f"--where: {parts}", refused(run, small, expression))


def test_a_field_with_the_name_of_a_property_is_named_by_episode(run: Callable, tmp_store: Path) -> None:
    schema = dr.Schema(
        dr.Field((), "int64"),
        dr.Field((), "int64"),
        episode={"id": {"a": dr.Field((2, 2), "int64"), "b": (dr.Field((), "bool"),)}},
    )
    values = {"id": {"a": [[1, 2], [3, 4]], "b": (True,)}}
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        writer.append_episode([0, 0], [0], [0.0], terminated=True, episode=values)
    for expression in (
        "id == 0",
        "episode['id']['a'][1][0] == 3",
        "episode['id']['b'][0]",
        "episode['id']['b']['0']",
    ):
        assert chosen(run, tmp_store, expression) == [0]
    assert "episode['id'] has several values; name one" in refused(run, tmp_store, "episode['id']")


NUMBERS = st.integers(-9, 9).map(str) | st.sampled_from(["length", "total_reward", "seed", "0.5"])
TERMS = st.recursive(
    NUMBERS,
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
    max_leaves=6,
)
COMPARISONS = st.tuples(TERMS, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), TERMS).map(" ".join)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: (
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})")
        | inner.map(lambda c: f"not ({c})")
    ),
    max_leaves=5,
)


@pytest.fixture
def numbers(tmp_store: Path) -> tuple[Path, list[dict[str, float]]]:
    """A store of episodes with the values that those expressions name, and these."""
    rng = np.random.default_rng(0)
    schema = dr.Schema(
        obs=dr.Field((), "uint8"),
        action=dr.Field((), "uint8"),
        reward=dr.Field((), "float64"),
        episode={"seed": dr.Field((), "int64")},
    )
    found = []
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for _ in range(30):
            length, seed = int(rng.integers(1, 10)), int(rng.integers(-3, 4))
            reward = np.append(np.zeros(length - 1), rng.choice([rng.uniform(-9, 9), rng.integers(-9, 10)]))
            zeros = np.zeros(length, np.uint8)
            writer.append_episode(zeros, zeros, reward, terminated=True, episode={"seed": seed})
            found.append({"length": length, "total_reward": float(reward[-1]), "seed": seed})
    return tmp_store, found


def says(text: str, values: dict[str, float]) -> bool | None:
    """Return the answer of Python; None where it divides by zero: such a comparison is false here."""
    try:
        return bool(eval(text, {"__builtins__": {}}, dict(values)))
    except ZeroDivisionError:
        return None


@given(CONDITIONS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_python_says_is_what_an_expression_says(run: Callable, numbers: tuple, text: str) -> None:
    path, values = numbers
    expected = {at: says(text, value) for at, value in enumerate(values)}
    found = chosen(run, path, text)
    assert [at for at in found if expected[at] is not None] == [at for at, is_so in expected.items() if is_so]


def test_every_property_is_that_of_the_episode(run: Callable, small: Path) -> None:
    with dr.open(small) as store:
        facts = [(int(episode.ids[0]), float(episode.times[-1])) for episode in store.episodes]
    for at, ((steps, how, *_), total, (first, end)) in enumerate(zip(EPISODES, RETURNS, facts, strict=True)):
        assert at in chosen(run, small, f"length == {steps} and ended == '{how}' and end_time == {end!r}")
        assert chosen(run, small, f"id == {first} and {total - 0.01} < total_reward < {total + 0.01}") == [at]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("return > 2", """the field 'return' is written episode["return"] (at column 1 of"""),
        ("length > 3 score > 2", "invalid syntax (at column 12 of"),
        ("length > 3 reward > 2", "'reward' is called total_reward (at column 12 of"),
    ],
)
def test_a_field_is_never_taken_for_a_wrong_name(run: Callable, tmp_store: Path, expression: str, message: str) -> None:
    schema = dr.Schema.from_example(obs=0.0, action=0, episode={"return": 0.0, "score": 0.0})
    dr.create(tmp_store, schema).close()
    assert chosen(run, tmp_store, 'episode["return"] > 2 and score > 2') == []
    assert message in refused(run, tmp_store, expression)
