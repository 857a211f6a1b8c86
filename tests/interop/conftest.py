"""Fixtures of the tests of adapters."""

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Train small networks in one thread: more of them are slower, and much slower where others compute, too."""
    torch = pytest.importorskip("torch")  # not at the top: some adapters are tested without it
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
