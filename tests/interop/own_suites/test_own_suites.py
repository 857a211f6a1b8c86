"""The suites of libraries, from checkouts next to this one, with the buffers of this package in place of their own.

The items in TorchRL's suite are no steps, and RLlib's suite needs all of Ray's repository: neither is run here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.testing.support import REPOSITORY

CHECKOUTS = Path(os.environ.get("DISKREPLAY_CHECKOUTS", REPOSITORY.parent))
# checkout -> its library, and the files that are about buffers
SUITES = {
    "stable-baselines3": ("stable_baselines3", "tests/test_buffers.py", "tests/test_her.py"),
    "tianshou": ("tianshou", "test/base/test_collector.py", "test/base/test_buffer.py"),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SUITES)
def test_the_suite_of_a_library_passes_with_buffers_in_a_store(name: str, tmp_path: Path) -> None:
    (library, *files), checkout = SUITES[name], CHECKOUTS / name
    pytest.importorskip(library)
    if not checkout.is_dir():
        pytest.skip(f"needs a checkout of {name} at {checkout}; DISKREPLAY_CHECKOUTS names another folder of checkouts")
    path = os.pathsep.join(map(str, (REPOSITORY, Path(__file__).parent, checkout)))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "in_place_of", *files], cwd=checkout,
        env={**os.environ, "PYTHONPATH": path, "DISKREPLAY_SUITE": name, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stdout
    assert " passed" in found.stdout
