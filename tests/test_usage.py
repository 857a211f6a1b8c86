"""Ways of working that users of other buffers know."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import diskreplay
from tests.testing.support import said

ROOT = Path(diskreplay.__file__).parents[1]


@pytest.mark.slow(turns=4)
def test_the_usage_script_runs_and_its_buffers_leave_no_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:diskreplay", str(ROOT / "tests" / "usage.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout.strip(), said(done.stderr)) == ("usage ok", "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("diskreplay-")] == []
