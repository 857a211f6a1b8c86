"""What the documents show runs, and what they point to exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def test_the_readmes_example_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S).group(1)
    assert len(code.splitlines()) <= 25
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:diskreplay", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("torch.Size([256, 4, 4])")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    named = re.findall(r"`((?:tests|tools|diskreplay)/[\w/.]+\.\w+)`", document.read_text())
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    assert missing == []
