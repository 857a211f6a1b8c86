"""Steps with the size of CartPole's, or with frames, the same in every run."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr

Array = NDArray[Any]

SCHEMA = dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"))
ROW_BYTES = 4 * 4 + 8 + 4 + 1  # obs, action, reward, done
FRAME_SCHEMA = dr.Schema(obs=dr.Field((84, 84), "uint8"), action=dr.Field((), "int64"))


N_STEP, GAMMA = 5, 0.99
READ_BACK = (
    "Everything is in the page cache. Ours was dropped from it once after it was written: what is read back from disk "
    "through a narrow mapping is kept in large pages, as for a trainer that starts later. The pages that a writer "
    "has touched are small, and thousands of them are more than a processor remembers at a time."
)


class Size(NamedTuple):
    """Steps in the store, and batches drawn in a round."""

    steps: int
    batches: int
    batch_size: int = 256
    shortest: int = 10
    longest: int = 500


class Steps(NamedTuple):
    """One episode: obs (T + 1, 4) float32 or (T + 1, 84, 84) uint8, action (T,) int64, reward (T,) float32."""

    obs: Array
    action: Array
    reward: Array
    terminated: bool

    def __len__(self) -> int:
        """Return T."""
        return len(self.reward)


def episodes(steps: int, shortest: int, longest: int, seed: int = 0) -> Iterator[Steps]:
    """Yield random episodes of `shortest` to `longest` steps, `steps` in total; every tenth one is truncated."""
    rng = np.random.default_rng(seed)
    made = count = 0
    while made < steps:
        length = min(int(rng.integers(shortest, longest + 1)), steps - made)
        obs = rng.standard_normal((length + 1, 4), np.float32)
        action = rng.integers(0, 2, length)
        reward = rng.standard_normal(length, np.float32)
        yield Steps(obs, action, reward, terminated=count % 10 != 9)
        made, count = made + length, count + 1


def frame_episodes(steps: int, shortest: int, longest: int) -> Iterator[Steps]:
    """Yield the same with frames for observations, 512 different ones in turn."""
    pool = np.random.default_rng(0).integers(0, 256, (512, *FRAME_SCHEMA.obs.shape), np.uint8)
    shown = 0
    for episode in episodes(steps, shortest, longest):
        obs = pool[np.arange(shown, shown + len(episode) + 1) % len(pool)]
        yield Steps(obs, *episode[1:])
        shown += len(obs)


def fill(path: Path, steps: int, shortest: int, longest: int) -> None:
    """Make a store of small steps."""
    write(path, SCHEMA, episodes(steps, shortest, longest))


def write(path: Path, schema: dr.Schema, found: Iterable[Steps]) -> None:
    """Make a store of these episodes."""
    with dr.create(path, schema) as store, store.writer() as writer:
        for episode in found:
            append_whole(writer, episode)


def drop(path: Path) -> None:
    """Drop a store's files from the page cache, so that the next reader reads them from disk."""
    for file in path.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def append_whole(writer: Any, episode: Steps) -> None:
    """Append a whole episode."""
    writer.append_episode(
        episode.obs,
        episode.action,
        episode.reward,
        terminated=episode.terminated,
        truncated=not episode.terminated,
    )


def single_steps(steps: int, shortest: int, longest: int, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """Yield obs, action, reward, terminated, truncated, next_obs of each step, numbers as Python objects."""
    for episode in episodes(steps, shortest, longest, seed):
        last = len(episode) - 1
        for t in range(len(episode)):
            ended = t == last
            yield (
                episode.obs[t],
                int(episode.action[t]),
                float(episode.reward[t]),
                ended and episode.terminated,
                ended and not episode.terminated,
                episode.obs[t + 1],
            )


def single_frames(steps: int, shortest: int, longest: int, seed: int = 0) -> Iterator[tuple[Any, ...]]:
    """Yield the same with frames (84, 84) uint8 for observations, 64 different ones in turn."""
    frames = list(np.random.default_rng(seed).integers(0, 256, (64, *FRAME_SCHEMA.obs.shape), np.uint8))
    for t, step in enumerate(single_steps(steps, shortest, longest, seed)):
        yield (frames[t % 64], *step[1:5], frames[(t + 1) % 64])


def nstep_rows(found: Iterable[Steps], n: int, gamma: float) -> dict[str, Array]:
    """Return the rows of all episodes, joined."""
    parts = [nstep_rows_of(episode, n, gamma) for episode in found]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def nstep_rows_of(episode: Steps, n: int, gamma: float, stack: int = 1) -> dict[str, Array]:
    """Return obs, action, n-step reward, the obs after n steps, and done for every step of an episode.

    With a stack, observations are (steps, stack, *shape), the oldest first; the episode's first one repeats.
    """
    length = len(episode)
    t = np.arange(length)
    after = np.minimum(t + n, length)
    padded = np.concatenate([episode.reward.astype(np.float64), np.zeros(n)])
    returns = sum(gamma**i * padded[i : i + length] for i in range(n))
    shown = (lambda at: at) if stack == 1 else (lambda at: np.maximum(at[:, None] + np.arange(1 - stack, 1), 0))
    return {
        "obs": episode.obs[shown(t)],
        "action": episode.action,
        "reward": np.asarray(returns, np.float32),
        "next_obs": episode.obs[shown(after)],
        "done": (after == length) & episode.terminated,
    }


def read_files(folder: Path) -> None:
    """Read all files, so that they are in the page cache: the system may drop files that are not read."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(8 << 20):
                    pass
