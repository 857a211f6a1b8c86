"""File systems of a test's own, in a file that is mounted; what a machine does not allow is skipped by name."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

LOOP_MIB = {"ext4": 24, "xfs": 320, "btrfs": 128}
"""Kinds of file systems that are made in a file, and the least that each needs."""

KINDS = ("tmpfs", *LOOP_MIB)


@contextmanager
def mounted(folder: Path, kind: str) -> Iterator[Path]:
    """Mount a new file system of a kind for a block, in a folder that is made below ``folder``."""
    point = folder / f"mounted-{kind}"
    if kind == "tmpfs":
        command = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(point)]
    else:
        image = folder / f"{kind}.image"
        _make(kind, image)
        command = ["mount", "-o", "loop", str(image), str(point)]
    if shutil.which("mount") is None:
        pytest.skip("mount is not installed")
    point.mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"{kind} cannot be mounted here: {done.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True)


def _make(kind: str, image: Path) -> None:
    maker = shutil.which(f"mkfs.{kind}", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if maker is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    with open(image, "wb") as file:
        file.truncate(LOOP_MIB[kind] << 20)
    done = subprocess.run([maker, "-q", str(image)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mkfs.{kind} does not work here: {done.stderr.strip()}")
