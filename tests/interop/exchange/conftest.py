"""Stores that tests of all formats read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interop.round_trips import EPISODES, make_store


@pytest.fixture(scope="session")
def kept_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a store as `make_store` does, once for all tests that only read it."""
    made = dict[str, Path]()

    def make(case: str, episodes: list[tuple[int, str, bool]] = EPISODES, **options: Any) -> Path:
        key = repr((case, episodes, options))
        if key not in made:
            made[key] = make_store(tmp_path_factory.mktemp("kept") / "store", case, episodes, **options)
        return made[key]

    return make
