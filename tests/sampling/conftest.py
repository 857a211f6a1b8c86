"""Fixtures of samplers that make batches ahead."""

import pytest


@pytest.fixture
def threads_make_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have threads make all batches that samplers prefetch, small ones too."""
    monkeypatch.setattr("diskreplay.sampling.prefetcher.LEAST_FOR_A_THREAD", 0)
