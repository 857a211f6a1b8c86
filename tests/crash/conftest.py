"""Crash tests are about every file that a segment may have."""

import pytest


@pytest.fixture(autouse=True)
def _with_tables(tables_of_few_rows: None) -> None:
    """Have segments of few rows keep tables of their episodes, too."""
