"""A store with many small segments, made once: those who merge them get a copy."""

import shutil
from pathlib import Path

import pytest

from tests.testing.merged import make_store


@pytest.fixture(scope="session")
def made_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a store of two dozen sealed segments of three writers and two boots; it is not to be changed."""
    path = tmp_path_factory.mktemp("made") / "store"
    make_store(path)
    return path


@pytest.fixture
def many_segments(made_store: Path, tmp_store: Path) -> Path:
    """Return the path of a copy of that store."""
    shutil.copytree(made_store, tmp_store)
    return tmp_store
