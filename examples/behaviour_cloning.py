"""A network learns to play CartPole-v1 as an expert does, who labels what the network sees (DAgger, Ross et al. 2011).

The buffer begins with the expert's own games. Who learns from these alone never sees what its own mistakes lead to. So
the network plays from then on, and the buffer gets the states that it came to, each with what the expert would have
done there. After each round 20 other games of the network's tell how often it does what the expert would do.

    python examples/behaviour_cloning.py [--small] [--seed 0] [--path labels.replay]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import diskreplay as dr

CAPACITY, EXPERT_GAMES, GAMES, ROUNDS = 50_000, 2, 5, 6
UPDATES, BATCH_SIZE, LEARNING_RATE = 500, 128, 1e-3  # updates a round
EVALUATION_EPISODES, ENOUGH_RETURN, ENOUGH_AGREEMENT = 20, 475.0, 0.95

Player = Callable[[np.ndarray], np.ndarray]  # (batch, 4) observations in, (batch,) actions out


def expert(obs: np.ndarray) -> np.ndarray:
    """Push to the side on which the pole is about to be; a cart off the middle leans back towards it."""
    position, velocity, angle, turning = obs.T
    return (angle + 0.3 * turning + 0.03 * position + 0.1 * velocity > 0).astype(np.int64)


class Student:
    """A network that is to do what the expert would."""

    def __init__(self) -> None:
        self.network = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE)

    def update(self, buffer: dr.DistillationBuffer) -> float:
        """Take one gradient step, and return the loss."""
        obs, expert_action = buffer.sample(BATCH_SIZE)
        loss = nn.functional.cross_entropy(self.network(obs), expert_action)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """Choose the likeliest actions of a batch of observations."""
        return self.network(torch.from_numpy(obs)).argmax(1).numpy()


def play(player: Player, games: int, seed: int) -> np.ndarray:
    """Play games, all at once; return every observation that an action was chosen for, (steps, 4)."""
    envs = gym.make_vec("CartPole-v1", games, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    playing, seen = np.ones(games, bool), []
    while playing.any():
        seen.append(obs[playing])
        obs, _, terminated, truncated, _ = envs.step(player(obs))
        playing &= ~(terminated | truncated)
    envs.close()
    return np.concatenate(seen)


def evaluate(student: Student, seed: int) -> tuple[float, float]:
    """Let the student play; return how often it does what the expert would have done there, and its mean return."""
    obs = play(student.act, EVALUATION_EPISODES, seed)
    # CartPole pays 1 a step.
    return float(np.mean(student.act(obs) == expert(obs))), len(obs) / EVALUATION_EPISODES


def train(buffer: dr.DistillationBuffer, rounds: int, updates: int, seed: int) -> tuple[float, float]:
    """Play, label and learn in turns; return the last evaluation's agreement and mean return."""
    torch.manual_seed(seed)
    student, agreement, mean_return = Student(), 0.0, 0.0
    seeds = iter(range(1_000 * seed, 1_000 * (seed + 1)))  # no game is played twice
    for number in range(rounds):
        # The expert plays the first round and the student all others: beta_i is I(i = 1) (section 3 of the paper).
        obs = play(student.act, GAMES, next(seeds)) if number else play(expert, EXPERT_GAMES, next(seeds))
        buffer.add(obs, expert(obs))
        loss = np.mean([student.update(buffer) for _ in range(updates)])
        agreement, mean_return = evaluate(student, next(seeds))
        print(
            f"round {number}, {'student' if number else 'expert'} played {len(obs)} steps, loss {loss:.4f}, "
            f"agreement {agreement:.1%}, mean return {mean_return:.1f}",
            flush=True,
        )
    return agreement, mean_return


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="Behaviour cloning with DAgger on CartPole-v1.")
    parser.add_argument("--small", action="store_true", help="two rounds and few updates only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="keep the buffer here, behind the states that are there already")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more only get in each other's way in networks this small
    rounds, updates = (2, 10) if args.small else (ROUNDS, UPDATES)
    with dr.DistillationBuffer(CAPACITY, obs_shape=(4,), action_shape=(), path=args.path, seed=args.seed) as buffer:
        agreement, mean_return = train(buffer, rounds, updates, args.seed)
        states = len(buffer)
    learnt = agreement >= ENOUGH_AGREEMENT and mean_return >= ENOUGH_RETURN
    print(
        f"{'learnt' if learnt else 'not learnt'}: the expert's action in {agreement:.1%} of the steps of unseen games, "
        f"a mean return of {mean_return:.1f} over {EVALUATION_EPISODES} episodes, from {states} labelled states"
    )
    return learnt or args.small


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
