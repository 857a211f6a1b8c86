"""`tools/release` refuses a checkout of which no release should be made, before it builds anything."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYOUT = "diskreplay/segments/documents/layout.py"
VENV = f'root="$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)"\npython={sys.executable}\n'
FILES = {
    ".gitignore": "__pycache__/\n",
    "tools/_venv": VENV,
    "pyproject.toml": '[project]\nversion = "1.2.0"\n',
    "diskreplay/__init__.py": '__version__ = "1.2.0"\n',
    LAYOUT: "FORMAT_VERSION = 1\n",
    "CHANGELOG.md": "# Changelog\n\n## 1.2.0 (2030-01-31)\n",
    "tests/compat/stores/v1/store.tar.gz": "a store",
}


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that is ready but for what a test changes."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copy(ROOT / "tools/release", tmp_path / "tools/release")
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def commit(checkout: Path) -> None:
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "all")


def changed(name: str, text: str) -> Callable[[Path], None]:
    def change(checkout: Path) -> None:
        (checkout / name).write_text(text)
        commit(checkout)

    return change


def change_a_store(checkout: Path) -> None:
    git(checkout, "tag", "v1.1.0")
    changed("tests/compat/stores/v1/store.tar.gz", "another")(checkout)


REFUSALS: dict[str, Callable[[Path], object]] = {
    "the working tree has changes: commit them first": lambda checkout: (checkout / "new").write_text(""),
    "diskreplay/__init__.py has another version than 1.2.0": changed("diskreplay/__init__.py", '__version__ = "1"\n'),
    "CHANGELOG.md says nothing of 1.2.0": changed("CHANGELOG.md", "## 1.1.0 (2029-01-31)\n"),
    'CHANGELOG.md has no heading "## 1.2.0 (YYYY-MM-DD)"': changed("CHANGELOG.md", "## 1.2.0 (unreleased)\n"),
    "v1.2.0 is tagged already": lambda checkout: git(checkout, "tag", "v1.2.0"),
    "tests/compat/stores has no store of format v2": changed(
        "diskreplay/segments/documents/layout.py", "FORMAT_VERSION = 2\n"
    ),
    "tests/compat/stores has changed since v1.1.0": change_a_store,
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("message", REFUSALS)
def test_a_checkout_that_is_not_ready_is_refused(checkout: Path, message: str) -> None:
    REFUSALS[message](checkout)
    done = subprocess.run([checkout / "tools/release"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"tools/release: {message}\n")
    assert not (checkout / "dist").exists()
