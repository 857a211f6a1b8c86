"""Data sets that other libraries write at two of their versions: every value as the library reads it, both ways."""

from pathlib import Path

import pytest

from tests.interop.own_libraries.compare import CASES, compare
from tests.tiers import NIGHTLY


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_every_value_is_that_of_the_library_in_an_import_and_in_an_export(case: str, tmp_path: Path) -> None:
    if not NIGHTLY:
        pytest.skip("installs a library from PyPI: tools/nightly does")
    counts = list(compare(*CASES[case], tmp_path))
    assert counts
    for each in counts:
        found = [number for number in (each.values_in, each.values_out) if number is not None]
        assert min(found, default=0) > 0, each.name
