"""A collector of the demo: one process that plays CartPole with the trainer's policy and appends to the store.

It imports neither torch nor numba: the policy is three matrix products in numpy.
"""

import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

import diskreplay as dr

ENVIRONMENT = "CartPole-v1"
POLL_SECONDS = 0.005

Floats = NDArray[np.float32]
Layer = tuple[Floats, Floats]  # weight (outputs, inputs) and bias (outputs,)


@dataclass(frozen=True)
class Policy:
    """What the trainer publishes: an epsilon-greedy policy, and how far collectors may go with it.

    Parameters
    ----------
    layers : sequence of (weight, bias)
        The Q network: linear layers with a ReLU between them.
    epsilon : float
        How often an action is random.
    allowed : int
        Steps that each collector may have taken since it started, so that collectors keep pace with the trainer.
    """

    layers: Sequence[Layer]
    epsilon: float
    allowed: int

    def q_values(self, obs: Floats) -> Floats:
        """Compute the value of each action."""
        *hidden, (weight, bias) = self.layers
        for inner_weight, inner_bias in hidden:
            obs = np.maximum(inner_weight @ obs + inner_bias, 0)
        return weight @ obs + bias

    def act(self, obs: Floats, rng: np.random.Generator) -> int:
        """Choose an action."""
        values = self.q_values(obs)
        return int(rng.integers(len(values)) if rng.random() < self.epsilon else values.argmax())

    def publish(self, file: Path) -> None:
        """Replace the published policy; a collector reads the one before or this one, never half of each."""
        unfinished = file.with_suffix(".new")
        unfinished.write_bytes(pickle.dumps(self))
        os.replace(unfinished, file)

    @staticmethod
    def load(file: Path) -> "Policy":
        """Read the published policy."""
        policy: Policy = pickle.loads(file.read_bytes())
        return policy


def schema() -> dr.Schema:
    """Read the schema of the store off the environment."""
    return dr.Schema.from_env(gym.make(ENVIRONMENT))


def policies(file: Path, trainer: Connection) -> Iterator[Policy]:
    """Wait for each policy that the trainer publishes; ends when the trainer stops or is no more.

    `trainer` is the end of a pipe that never carries anything: it becomes readable when the other end is closed.
    """
    seen = None
    while not trainer.poll(POLL_SECONDS):
        try:
            status = file.stat()
        except FileNotFoundError:
            continue
        if seen != (status.st_ino, status.st_mtime_ns):
            seen = status.st_ino, status.st_mtime_ns
            yield Policy.load(file)


def collect(path: Path, file: Path, trainer: Connection, seed: int) -> None:
    """Play as far as each policy allows and append every step to the store."""
    env, rng, taken = gym.make(ENVIRONMENT), np.random.default_rng(seed), 0
    obs, _ = env.reset(seed=seed)
    with dr.open(path, "a") as store, store.writer() as writer:
        for policy in policies(file, trainer):
            while taken < policy.allowed:
                action = policy.act(obs, rng)
                next_obs, reward, terminated, truncated, _ = env.step(action)
                writer.append(obs, action, reward, terminated, truncated, next_obs=next_obs)
                obs = env.reset()[0] if terminated or truncated else next_obs
                taken += 1


def run(path: Path, file: Path, trainer: Connection, seed: int, complaint: Path) -> None:
    """Be the process: collect, and leave a line about what went wrong for the trainer to show."""
    try:
        collect(path, file, trainer, seed)
    except Exception as error:
        complaint.write_text(f"{type(error).__name__}: {error}")
        raise SystemExit(1) from None
