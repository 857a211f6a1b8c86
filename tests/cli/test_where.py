import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.cli.where import PROPERTIES, compile_where
from tests.cli.conftest import EPISODES, RETURNS, SCHEMA


@pytest.fixture
def store(small: Path) -> Iterator[dr.Store]:
    with dr.open(small) as store:
        yield store


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
def test_an_expression_chooses_episodes(store: dr.Store, expression: str, expected: list[int]) -> None:
    where = compile_where(expression, store.schema)
    assert [at for at, episode in enumerate(store.episodes) if where(episode)] == expected


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
        ("seed.real", "seed.real is not part of these expressions (at column 1 of 'seed.real')"),
        ("abs(seed)", "abs(seed) is not part of these expressions (at column 1 of"),
        ("2 ** 99 > seed", "2 ** 99 is not part of these expressions"),
        ("(lambda: 1)()", "(lambda: 1)() is not part of these expressions"),
        ("[seed for seed in (1, 2)]", ".* is not part of these expressions"),
        ("f'{seed}'", ".* is not part of these expressions"),
        ("seed == None", "None is not part of these expressions (at column 9 of"),
        ("seed is 3", "only None is compared by is (at column 9 of"),
        ("length > 'a'", "'a' is a text, and a number is needed (at column 10 of"),
        ("ended", "ended is a text, and a number is needed"),
        ("'a' + ended == 'b'", "'a' is a text, and a number is needed"),
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
def test_what_is_no_expression_is_refused_with_its_place(expression: str, message: str) -> None:
    parts = "(.*)".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(dr.SchemaError, match=f"^--where: {parts}"):
        compile_where(expression, SCHEMA)


def test_a_field_with_the_name_of_a_property_is_named_by_episode(tmp_store: Path) -> None:
    schema = dr.Schema(
        dr.Field((), "int64"),
        dr.Field((), "int64"),
        episode={"id": {"a": dr.Field((2, 2), "int64"), "b": (dr.Field((), "bool"),)}},
    )
    values = {"id": {"a": [[1, 2], [3, 4]], "b": (True,)}}
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        writer.append_episode([0, 0], [0], [0.0], terminated=True, episode=values)
        store.refresh()
        (episode,) = store.episodes
        for expression in (
            "id == 0",
            "episode['id']['a'][1][0] == 3",
            "episode['id']['b'][0]",
            "episode['id']['b']['0']",
        ):
            assert compile_where(expression, schema)(episode) is True
        with pytest.raises(dr.SchemaError, match=r"episode\['id'\] has several values; name one"):
            compile_where("episode['id']", schema)


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


class Fake:
    """An episode of values that an expression may ask for."""

    def __init__(self, length: int, total_reward: float, seed: int) -> None:
        self.length, self.total_reward, self.seed = length, total_reward, seed

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, name: str) -> int:
        return {"seed": self.seed}[name]


@given(CONDITIONS, st.integers(1, 9), st.floats(-9, 9), st.integers(-3, 3))
def test_what_python_says_is_what_an_expression_says(text: str, length: int, total_reward: float, seed: int) -> None:
    values = {"length": length, "total_reward": total_reward, "seed": seed}
    try:
        expected = bool(eval(text, {"__builtins__": {}}, values))
    except ZeroDivisionError:
        return  # comparisons with it are false, which Python cannot say
    episode = Fake(length, total_reward, seed)
    assert compile_where(text, SCHEMA)(episode) is expected  # type: ignore[arg-type]


def test_every_property_is_that_of_the_episode(store: dr.Store) -> None:
    for (steps, how, *_), total_reward, episode in zip(EPISODES, RETURNS, store.episodes, strict=True):
        assert PROPERTIES["length"][1](episode) == steps
        assert PROPERTIES["ended"][1](episode) == how
        assert math.isclose(float(PROPERTIES["total_reward"][1](episode) or 0), total_reward)
        assert PROPERTIES["id"][1](episode) == episode.ids[0]
        assert PROPERTIES["end_time"][1](episode) == episode.times[-1]


def test_it_serves_as_any_where_does(store: dr.Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), where=compile_where("seed in (5, 7)", store.schema))
    assert sampler.sampleable == 3 + 60
    sampler.close()


def test_an_expression_that_is_none_takes_one_line(run: Callable, small: Path) -> None:
    done = run("episodes", small, "--where", "sed > 1")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("diskreplay: --where: unknown name 'sed'; known are ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("return > 2", """the field 'return' is written episode["return"] (at column 1 of"""),
        ("length > 3 score > 2", "invalid syntax (at column 12 of"),
        ("length > 3 reward > 2", "'reward' is called total_reward (at column 12 of"),
    ],
)
def test_a_field_is_never_taken_for_a_wrong_name(expression: str, message: str) -> None:
    schema = dr.Schema.from_example(obs=0.0, action=0, episode={"return": 0.0, "score": 0.0})
    compile_where('episode["return"] > 2 and score > 2', schema)
    with pytest.raises(dr.SchemaError, match=re.escape(message)):
        compile_where(expression, schema)
