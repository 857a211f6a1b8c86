"""Makes the store of this format version that later releases have to read; run once, when a version is released.

    python -m tests.compat.make_store

It writes ``stores/v1/store.tar.gz``, and what `read` and `read_batches` find in it into ``stores/v1/expected.json``,
with the format version in place of 1. Both are committed and stay as they are from the first release of that version
on: `tools/release` checks that no store has changed since. Before it, they may be made anew when the format changes.
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.inner import FORMAT_VERSION, pretend, table_all
from tests.testing.on_disk import flip

STORES = Path(__file__).parent / "stores"
FOLDER = STORES / f"v{FORMAT_VERSION}"
LIMITER, STATE = "pace", "run"


def schema() -> dr.Schema:
    """A nested observation, wide and narrow fields, extra fields, and values of an episode."""
    return dr.Schema(
        obs={"image": dr.Field((2, 3), "uint8"), "speed": dr.Field((2,), "float32")},
        action=dr.Field((), "int64"),
        extra={"log_prob": dr.Field((), "float32")},
        episode={"seed": dr.Field((), "int64")},
    )


def observation(serial: int) -> dict[str, Any]:
    """The observation number ``serial``."""
    return {"image": np.full((2, 3), serial % 251, np.uint8), "speed": np.float32([serial / 4, -serial])}


def append(writer: Any, first: int, steps: int, end: str | None, seed: int | None = None, final: bool = True) -> None:
    """Append an episode of steps numbered from ``first`` on; with the end None it stays open."""
    for serial in range(first, first + steps):
        last = serial == first + steps - 1
        writer.append(
            observation(serial),
            serial * 3,
            serial / 8,
            last and end == "terminated",
            last and end == "truncated",
            next_obs=observation(serial + 1) if final or not last else None,
            episode={"seed": seed} if last and end and end != "cut" and seed is not None else None,
            log_prob=-serial / 16,
        )
    if end == "cut":
        writer.end_episode(episode=None if seed is None else {"seed": seed})


def make(path: Path) -> None:
    """Make the store, whose small segments have tables of their episodes, too."""
    store = dr.create(path, schema(), chunk_bytes=256)
    with store.writer(durability="none") as writer:  # segment 0: one lane, every way to end, two marks
        append(writer, 0, 12, "terminated", seed=7)
        append(writer, 100, 5, "truncated", final=False)
        writer.flush()
        append(writer, 200, 40, "cut", seed=8)
        append(writer, 300, 3, "truncated", seed=9)
        writer.flush()
        append(writer, 400, 6, None)
    with store.writer(num_envs=3, durability="none") as lanes:  # segment 1: lanes of different lengths
        for step in range(10):
            lanes.append(
                {name: np.stack([observation(1000 * (1 + lane) + step)[name] for lane in range(3)]) for name in _NAMES},
                np.arange(3) * 1000 + step,
                np.arange(3) + step / 8,
                np.array([step == 4, step == 9, False]),
                np.array([False, False, step == 7]),
                next_obs={
                    name: np.stack([observation(1000 * (1 + lane) + step + 1)[name] for lane in range(3)])
                    for name in _NAMES
                },
                mask=np.array([True, step > 2, True]),
                log_prob=np.zeros(3, np.float32),
            )
    with store.writer(durability="none") as writer:  # segment 2: its first three episodes are going to be damaged
        for episode in range(4):
            append(writer, 5000 + 100 * episode, 25, "terminated", seed=50 + episode)
    store.refresh()
    assert store.evict(lambda episode: episode["seed"] == 9) == 3
    store.close()
    flip(path / "segments/00000002/reward/c.0.0", 10, 1)
    assert dr.open(path, "a").repair()
    with dr.open(path, "a") as store, _sampler(store) as sampler:
        for _ in range(5):
            batch = sampler.sample()
            sampler.update_priorities(batch.index, np.arange(8) / 4)
        sampler.save(STATE)
    # Segment 3: its writer dies in the middle of the third episode, of which a mark covers four steps.
    assert _run("die", path) == -signal.SIGKILL


_NAMES = ("image", "speed")


def _die(path: Path) -> None:
    writer = dr.open(path, "a").writer(durability="none")
    append(writer, 7000, 8, "terminated", seed=70)
    append(writer, 7100, 8, "truncated", seed=71)
    append(writer, 7200, 4, None)
    writer.flush()
    append(writer, 7204, 3, None)
    os.kill(os.getpid(), signal.SIGKILL)


def _sampler(store: dr.Store) -> dr.Sampler:
    limiter = dr.RateLimiter(10.0, 8, 1e6, name=LIMITER)
    distribution = dr.Prioritized(alpha=0.7, beta=dr.Linear(0.4, 1.0, 100))
    return dr.Sampler(store, dr.Transitions(n_step=3, gamma=0.5), distribution, batch_size=8, seed=3, limiter=limiter)


# --- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Any]:
    """Return all that a store of `make` shows, as JSON has it; it is opened with mode "r" only."""
    with warnings.catch_warnings(), dr.open(path) as store:
        warnings.simplefilter("error")
        return {
            "uuid": store.uuid,
            "steps": len(store),
            "episodes": [read_episode(episode) for episode in store.episodes],
            "segments": [{key: segment[key] for key in _SEGMENT} for segment in store.info()["segments"]],
            "quarantine": [[entry.segment, entry.steps, entry.where, entry.reason] for entry in store.quarantine],
            "steps_evicted": store.info()["steps_evicted"],
            "steps_lost": store.info()["steps_lost"],
            "problems": [[problem.kind, problem.where] for problem in store.verify(deep=True)],
        }


_SEGMENT = ("number", "state", "steps", "lanes")


def read_episode(episode: dr.Episode) -> dict[str, Any]:
    """Return an episode as JSON has it."""
    seed = episode["seed"]
    return {
        "ids": episode.ids.tolist(),
        "ended": [episode.terminated, episode.truncated, episode.cut],
        "obs": {name: episode.obs[name].tolist() for name in _NAMES},
        "action": episode.action.tolist(),
        "reward": episode.reward.tolist(),
        "log_prob": episode["log_prob"].tolist(),
        "seed": None if seed is None else int(seed),
    }


def read_batches(path: Path) -> list[dict[str, Any]]:
    """Return the batches that follow the saved state; the limiter counts them, so this is done in a copy."""
    dr.open(path, "a").close()  # seals what a dead writer left, which would go on in the background
    with dr.open(path, "a") as store, _sampler(store) as sampler:
        sampler.load(STATE)
        return [read_batch(sampler.sample()) for _ in range(2)]


def read_batch(batch: dr.Batch) -> dict[str, Any]:
    """Return a batch as JSON has it."""
    names = ("index", "action", "reward", "discount", "n_steps", "terminated", "truncated", "weight")
    return {name: batch[name].tolist() for name in names} | {
        f"{part}/{name}": batch[part][name].tolist() for part in ("obs", "next_obs") for name in _NAMES
    }


def unpack(folder: Path, *, modes: bool, kept: Path = FOLDER) -> Path:
    """Unpack a kept store in a folder and return its path; without the modes of its files, all may be written."""
    with tarfile.open(kept / "store.tar.gz") as archive:
        archive.extractall(folder, filter="fully_trusted" if modes else "data")
    return folder / "store"


def _run(what: str, path: Path) -> int:
    return subprocess.run([sys.executable, "-m", __spec__.name, what, str(path)], check=False).returncode


def main() -> None:
    """Make the store, pack it, and write down what it shows elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "made"
        assert _run("make", path) == 0
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tarfile.open(FOLDER / "store.tar.gz", "w:gz", compresslevel=9) as archive:
            archive.add(path, "store", filter=_without_owner)
        path = unpack(Path(folder), modes=False)
        expected = read(path)
        expected["batches"] = read_batches(path)
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=None, separators=(",", ":")) + "\n")


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        with pytest.MonkeyPatch.context() as patch:
            pretend(patch)
            table_all(patch)
            {"make": make, "die": _die}[sys.argv[1]](Path(sys.argv[2]))
