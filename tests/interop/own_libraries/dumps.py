"""The common part of programs that use other libraries: random images, and files of the values that they read.

These programs run in an environment that has neither this package nor pytest. NumPy alone is there for certain.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

# Steps and ends of the episodes that are written, the last one of a single step.
EPISODES = [(4, "terminated"), (9, "truncated"), (3, "terminated"), (1, "truncated")]


def save(path: Path, episodes: Iterable[Mapping[str, Any]]) -> None:
    """Save the values of episodes, by the paths that an import gives them. Texts are arrays of texts."""
    found = {
        f"{number}/{name}": np.asarray(value) for number, each in enumerate(episodes) for name, value in each.items()
    }
    np.savez(path, **found)


def load(path: Path) -> list[dict[str, Any]]:
    """Return what `save` has saved."""
    found: dict[int, dict[str, Any]] = {}
    with np.load(path) as arrays:
        for name, value in arrays.items():
            number, _, path_in_store = name.partition("/")
            found.setdefault(int(number), {})[path_in_store] = value
    return [found[number] for number in range(len(found))]


def smooth(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return images of even squares, which a lossy codec changes less than noise."""
    *many, height, width, channels = shape
    coarse = rng.integers(0, 256, (*many, height // 8 + 1, width // 8 + 1, channels), np.uint8)
    return coarse.repeat(8, -3).repeat(8, -2)[..., :height, :width, :]


def main(write: Callable[[Path], None], read: Callable[[Path], Iterable[Mapping[str, Any]]]) -> None:
    """Run the command line: `write FOLDER` makes a folder of data sets, `read SET DUMP` reads one."""
    job, *paths = sys.argv[1:]
    if job == "write":
        write(Path(paths[0]))
    else:
        save(Path(paths[1]), read(Path(paths[0])))
