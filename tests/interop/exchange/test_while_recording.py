"""Exports of a store while its writer appends: whole ended episodes, and a writer that never waits for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.interop.round_trips import PLAIN, SCHEMAS, SCHEMES, adapter, content, random_episode

SCHEMA = SCHEMAS["vectors"]
ENDED = sum(steps for steps, _, _ in PLAIN)


@pytest.fixture(scope="module", params=SCHEMES)
def expected(
    request: pytest.FixtureRequest, kept_store: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[Any]]:
    """The module of each format, and what an import has after an export of a store at rest."""
    module, folder = adapter(request.param), tmp_path_factory.mktemp(request.param)
    module.export_dataset(kept_store("vectors", PLAIN), folder / "set")
    module.import_dataset(folder / "set", folder / "back")
    return module, content(folder / "back")


def append_step(writer: dr.Writer, *, terminated: bool = False) -> None:
    """Append a step to the running episode."""
    writer.append(np.zeros(3), 1, 5.0, terminated, next_obs=np.zeros(3))


@pytest.mark.parametrize("given", ["store", "path"])
def test_an_export_during_a_recording_has_exactly_the_episodes_that_had_ended(
    expected: tuple[Any, list[Any]], given: str, tmp_path: Path
) -> None:
    (module, known), rng = expected, np.random.default_rng(0)
    with dr.create(tmp_path / "store", SCHEMA) as store, store.writer() as writer:
        for each in PLAIN:
            random_episode(SCHEMA, rng, *each).append_to(writer, SCHEMA)
        append_step(writer)
        store.refresh()
        seen: list[int] = []

        def record_on(done: int, _total: int) -> None:
            """End the open episode, and begin another. In this thread a writer that waits would never return."""
            append_step(writer, terminated=True)
            append_step(writer)
            seen.append(done)

        source = store if given == "store" else tmp_path / "store"
        exported = module.export_dataset(source, tmp_path / "set", progress=record_on)
        assert (exported.episodes, exported.steps, exported.open_episodes) == (len(PLAIN), ENDED, 1)
        assert seen[-1] == ENDED
        store.refresh()
        assert store.num_episodes == len(PLAIN) + len(seen) + 1
        assert len(store) == ENDED + 1 + 2 * len(seen)
    module.import_dataset(tmp_path / "set", tmp_path / "back")
    assert content(tmp_path / "back") == known


@pytest.mark.parametrize("scheme", ["npz", "lerobot"])
def test_a_later_export_of_the_same_recording_adds_the_episodes_that_ended_since(scheme: str, tmp_path: Path) -> None:
    module = adapter(scheme)
    with dr.create(tmp_path / "store", SCHEMA) as store, store.writer() as writer:
        for number in range(3):
            append_step(writer, terminated=True)
            append_step(writer)  # of the next episode
            exported = module.export_dataset(tmp_path / "store", tmp_path / f"set-{number}")
            assert (exported.episodes, exported.steps, exported.open_episodes) == (number + 1, 2 * number + 1, 1)
