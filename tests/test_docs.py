"""What the documents show runs, and what they point to exists."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
DOCUMENTS = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]


@pytest.mark.slow
def test_the_readmes_examples_run_one_after_the_other(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.S)
    printed = [run_block(code, tmp_path) for code in blocks]
    assert printed[0].startswith("torch.Size([256, 4, 4])")
    assert printed[1] == "torch.Size([32, 2])\n"
    assert printed[2] == "torch.Size([64, 40, 4])\n"
    assert re.fullmatch(r"torch.Size\(\[256, 4\]\) 0.0\n[1-9][0-9]* steps evicted\n", printed[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "library", "count"),
    [
        ("DataLoader", "torch", 1),
        ("Stable-Baselines3 and CleanRL", "stable_baselines3", 2),
        ("TorchRL", "torchrl", 1),
        ("Tianshou", "tianshou", 1),
    ],
)
def test_the_examples_for_other_libraries_run(tmp_path, section, library, count):
    pytest.importorskip(library, reason=f"needs {library}")
    text = (REPOSITORY / "docs/libraries.md").read_text()
    (below,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.S | re.M)
    blocks = re.findall(r"```python\n(.*?)```", below, re.S)
    printed = [run_block(code, tmp_path) for code in blocks]
    assert len(printed) == count
    assert printed[0] == "1000\n"


def run_block(code, folder):
    assert len(code.splitlines()) <= 25
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:diskreplay", "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document):
    named = re.findall(r"`((?:tests|tools|examples|diskreplay)/[\w/.]+\.\w+)`", document.read_text())
    missing = [name for name in named if not (REPOSITORY / name).exists()]
    assert missing == []


def test_every_module_is_named_once_where_it_belongs():
    text = (REPOSITORY / "docs/architecture.md").read_text()
    sections = re.findall(r"^### (\w+(?:/\w+)*)/\n(.*?)(?=^#)", text, re.S | re.M)
    top = REPOSITORY / "diskreplay"
    packages = {str(path.parent.relative_to(top)): path.parent for path in top.glob("*/**/__init__.py")}
    assert sorted(name for name, _ in sections) == sorted(packages)
    for name, section in sections:
        modules = {path.stem for path in packages[name].glob("*.py")} - {"__init__"}
        assert sorted(re.findall(r"`(\w+)`", section)) == sorted(modules)
