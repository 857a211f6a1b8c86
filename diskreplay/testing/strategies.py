"""Hypothesis strategies for schemas, and for plans of episodes and writers.

Hypothesis draws the structure (shapes, lengths, ends, whether lanes are skipped) and shrinks it. The numbers in the
arrays come from a seeded generator (see `scripts`), because shrinking these numbers would not make a failure clearer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from diskreplay.schema.schema import Field, Schema
from diskreplay.testing.scripts import EpisodePlan, WriterPlan

DTYPES = tuple(
    ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"]
)
REWARD_DTYPES = ("float16", "float32", "float64", "int8", "int64", "uint8")
KEYS = ("image", "state", "0", "c", "x-1", "a b", "ü", "c.0.0")
ENDS = ("terminated", "truncated", "both", "cut", "open")


def fields(dtypes: Sequence[str] = DTYPES, max_dims: int = 2, max_side: int = 4) -> st.SearchStrategy[Field]:
    shapes = st.lists(st.integers(1, max_side), max_size=max_dims).map(tuple)
    return st.builds(Field, shapes, st.sampled_from(dtypes))


def trees(max_leaves: int = 4) -> st.SearchStrategy[Any]:
    return st.recursive(
        fields(),
        lambda below: (
            st.dictionaries(st.sampled_from(KEYS), below, min_size=1, max_size=3)
            | st.lists(below, min_size=1, max_size=3).map(tuple)
        ),
        max_leaves=max_leaves,
    )


def schemas() -> st.SearchStrategy[Schema]:
    """Draw schemas. Each schema has the int64 extra field "serial", which identifies a step."""
    extra = st.dictionaries(st.sampled_from(("log_prob", "hidden state")), trees(2), max_size=2)
    episode = st.dictionaries(st.sampled_from(("seed", "task")), fields(max_dims=1), max_size=2)
    rewards = st.sampled_from(REWARD_DTYPES).map(lambda dtype: Field((), dtype))
    serial = {"serial": Field((), "int64")}
    return st.builds(
        Schema, trees(), trees(2), rewards, extra=extra.map(lambda drawn: {**drawn, **serial}), episode=episode
    )


def episode_plans(max_steps: int = 40) -> st.SearchStrategy[EpisodePlan]:
    """Draw plans of episodes with 1 to `max_steps` steps; plans with at most 6 steps are frequent."""
    steps = st.integers(1, 6) | st.integers(1, max_steps)
    flags = [st.booleans() for _ in range(4)]
    return st.builds(EpisodePlan, steps, st.sampled_from(ENDS), *flags)


def writer_plans(max_lanes: int = 16, max_steps: int = 40, max_episodes: int = 4) -> st.SearchStrategy[WriterPlan]:
    """Draw plans of writers. `num_envs` is 1 to `max_lanes`, or None for a writer without an axis of lanes."""
    lane = st.lists(episode_plans(max_steps), max_size=max_episodes).map(tuple)

    def of_width(num_envs: int | None) -> st.SearchStrategy[WriterPlan]:
        lanes = st.lists(lane, min_size=num_envs or 1, max_size=num_envs or 1).map(tuple)
        when = st.sampled_from(("never", "always", "sometimes"))
        seeds = st.integers(0, 2**32 - 1)
        return st.builds(WriterPlan, st.just(num_envs), lanes, when, st.booleans(), st.booleans(), seeds, when)

    return st.one_of(st.none(), st.integers(1, max_lanes)).flatmap(of_width)
