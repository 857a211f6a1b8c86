"""What public objects print as: in a shell something that says what they are, in a notebook a short table."""

import inspect
import operator
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.testing.pages import Page

SCHEMA = dr.Schema(
    {"<i>": dr.Field((2,), "float32"), "pair": (dr.Field((), "bool"), dr.Field((3, 3), "uint8"))}, dr.Field((), "int64")
)


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    """A store of two episodes."""
    with dr.create(tmp_store, SCHEMA, capacity=1_000) as store:
        with store.writer() as writer:
            for _ in range(2):
                obs = {"<i>": np.zeros((4, 2)), "pair": (np.zeros(4, bool), np.zeros((4, 3, 3), "u1"))}
                writer.append_episode(obs, [0, 1, 2], [1, 1, 1], terminated=True)
        store.refresh()
        yield store


def objects(store: dr.Store, folder: Path, stack: ExitStack) -> list[Any]:
    """An object or more of each public class, closed by the stack."""
    sampler = stack.enter_context(closing(dr.Sampler(store, dr.Transitions(), batch_size=2, seed=0)))
    recorded = []
    for env, wrapper in [
        (gymnasium.make("CartPole-v1"), dr.RecordEpisodes),
        (gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"), dr.RecordVectorEpisodes),
    ]:
        played = stack.enter_context(dr.create(folder / wrapper.__name__, dr.Schema.from_env(env)))
        recorded.append(stack.enter_context(closing(wrapper(env, played))))
    buffers = [
        dr.ReplayBuffer(9, path=folder / "replay"),
        dr.RolloutBuffer(1, 2, path=folder / "rollout"),
        dr.DistillationBuffer(9, path=folder / "distillation"),
    ]
    for buffer in buffers:
        stack.enter_context(closing(buffer))
    writers = [stack.enter_context(store.writer()), stack.enter_context(store.writer(num_envs=2))]
    return [
        *(store, store.schema, store.schema.reward, store.episodes[0], sampler, dr.Batch({"index": torch.arange(2)})),
        *(*writers, dr.RateLimiter(1.0, 1, 1.0), dr.Problem("kind", "where", "detail")),
        *(dr.Transitions(), dr.Sequences(), dr.Episodes(), dr.Rollouts(2), dr.Hindsight(reward_fn=operator.eq)),
        *(dr.Uniform(), dr.Prioritized(), dr.Recency(10), dr.Sweep(), dr.Stratified(), dr.Linear(0, 1, 2)),
        *(dr.Normalize(), dr.RandomShift(4), dr.ToFloat(), dr.Mixture([(dr.Uniform(), 1.0)])),
        *(dr.MixedSampler([(sampler, 0.5), (sampler, 0.5)], batch_size=4), dr.Experience(0, 1, 2, 3, False)),
        *(*recorded, *buffers),
    ]


def test_each_public_object_prints_as_what_it_is(store: dr.Store, tmp_path: Path) -> None:
    classes = {
        name
        for name in dir(dr)
        if inspect.isclass(kind := getattr(dr, name)) and not issubclass(kind, (dr.ReplayError, Warning))
    }
    with ExitStack() as stack:
        every = objects(store, tmp_path, stack)
        assert {type(each).__name__ for each in every} == classes, "add the new classes to `objects` above"
        for each in [*every, *(getattr(dr, name) for name in dir(dr)), store.episodes]:
            shown = repr(each)
            assert " object at 0x" not in shown
            assert 3 < len(shown) < 500


def test_a_store_and_its_schema_are_tables_in_a_notebook(store: dr.Store) -> None:
    page = Page(store._repr_html_())
    facts = dict(zip(page.words[1:13:2], page.words[2:14:2], strict=True))
    assert page.words[0] == "Store"
    assert facts == {
        **{"path": str(store.path), "mode": "a", "uuid": store.uuid},
        **{"steps": "6", "episodes": "2", "capacity": "1,000"},
    }
    fields = page.words[page.words.index("Schema") :]
    assert fields[1:9] == ["field", "shape", "dtype", "bytes a step", "obs/<i>", "(2,)", "float32", "8"]
    assert fields == Page(store.schema._repr_html_()).words
    store.close()
    closed = Page(store._repr_html_()).words
    assert closed[closed.index("steps") + 1] == "closed"


def test_a_long_schema_is_not_shown_whole() -> None:
    schema = dr.Schema({str(i): dr.Field((), "bool") for i in range(500)}, dr.Field((), "int64"))
    page = Page(schema._repr_html_())
    assert "452 more are not shown" in page.words
    assert len(page.all("tr")) == 51


def test_a_batch_is_a_table_of_its_tensors_in_a_notebook(store: dr.Store) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=2, seed=0) as sampler:
        page = Page(sampler.sample()._repr_html_())
    assert page.words[:9] == ["Batch of 2", "field", "shape", "dtype", "device", "obs/<i>", "(2, 2)", "float32", "cpu"]
    at = page.words.index("obs/pair/1")
    assert page.words[at : at + 4] == ["obs/pair/1", "(2, 3, 3)", "uint8", "cpu"]
    assert "reward" in page.words
