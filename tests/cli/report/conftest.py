"""Stores that reports are made of."""

from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr

HOSTILE = "<img src=x onerror=alert(1)>"
IMAGES = dr.Schema(
    {f"$x$ {HOSTILE}": dr.Field((4,), "float32"), "image": dr.Field((12, 10, 3), "uint8")},
    dr.Field((), "int64"),
    extra={HOSTILE: dr.Field((3, 2, 2, 2), "float64"), "flag\u202e": dr.Field((), "bool")},
    episode={"<i>": dr.Field((2,), "float64")},
)


def write_images(path: Path) -> None:
    """Make a store of images whose fields have hostile names, and whose rewards are not all numbers."""
    rng = np.random.default_rng(0)
    with dr.create(path, IMAGES, capacity=500) as store, store.writer(num_envs=2) as writer:
        for e in range(12):
            steps = int(rng.integers(2, 40))
            obs = {
                f"$x$ {HOSTILE}": rng.normal(size=(steps + 1, 4)) * 10.0 ** (e - 6),
                "image": rng.integers(0, 256, (steps + 1, 12, 10, 3)).astype("u1"),
            }
            writer.append_episode(
                e % 2,
                obs,
                rng.integers(0, 300, steps),
                np.where(rng.random(steps) < 0.2, [np.nan, np.inf, 1e30, 2.0][e % 4], 1.0),
                terminated=e % 3 == 0,
                truncated=e % 3 == 1,
                episode={"<i>": [1, 2]} if e % 2 else None,
                **{HOSTILE: rng.normal(size=(steps, 3, 2, 2, 2)), "flag\u202e": rng.random(steps) < 0.5},
            )


def write_vectors(path: Path, episodes: int = 20, steps: int = 30) -> None:
    """Make a store of vectors by two writers, with initial priorities; the return of episode e is e * steps."""
    schema = dr.Schema(dr.Field((3,), "float32"), dr.Field((2,), "float32"), episode={"policy": dr.Field((), "int64")})
    rng = np.random.default_rng(0)
    with dr.create(path, schema) as store:
        for half in (range(episodes // 2), range(episodes // 2, episodes)):
            with store.writer() as writer:
                for e in half:
                    writer.append_episode(
                        rng.normal(size=(steps + 1, 3)),
                        rng.normal(size=(steps, 2)),
                        np.full(steps, e),
                        terminated=e % 2 == 0,
                        truncated=e % 2 == 1,
                        priority=np.full(steps, 1.0 + e),
                        episode={"policy": e},
                    )


@pytest.fixture
def images(tmp_store: Path) -> Path:
    """A store of images with hostile names."""
    write_images(tmp_store)
    return tmp_store


@pytest.fixture
def vectors(tmp_path: Path) -> Path:
    """A store of vectors."""
    write_vectors(tmp_path / "vectors")
    return tmp_path / "vectors"
