"""DQN in the way of Ape-X (Horgan et al. 2018): four processes explore, each more or less at random, and one learns.

Rewards are rare, and 0.4 steps are drawn for each that is appended: which ones, priorities decide. A collector holds a
step back until its n-step TD error is known, by the values that it acted with, and appends it with that as its initial
priority (section 3). With `--initial largest` it gives none, and new steps begin with the largest priority given. Mean
return and standard error of seeds 0 to 9 after 1,000 updates: 0.716 +- 0.029 with, 0.509 +- 0.055 without (p = 0.002).

    python examples/apex_dqn.py [--small] [--seed 0] [--path rooms.replay] [--initial largest] [--updates 1000]
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import diskreplay as dr

COLLECTORS, EPSILON, EPSILON_ALPHA, N_STEP, PRIORITY_ALPHA, BETA = 4, 0.4, 7.0, 3, 0.6, 0.4
GAMMA, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 0.9, 32, 1e-2, 0.05
UPDATES, UPDATES_PER_ROUND, ROUNDS_PER_EVALUATION, ENOUGH_RETURN = 2_500, 25, 10, 0.9
STEPS_PER_ROUND, POLL_SECONDS = 500, 0.002  # steps of each collector


class FourRooms(gym.Env[np.int64, np.int64]):
    """The rooms of Sutton, Precup and Singh (1999): go up, down, left or right, to the reward in a corner."""

    PLAN = (
        "#############" "#     #     #" "#     #     #" "#           #" "#     #     #" "#     #     #" "## ####     #"
        "#     ### ###" "#     #     #" "#     #     #" "#           #" "#     #    G#" "#############"
    )  # fmt: skip
    CELLS, MOVES, STEPS = tuple(cell for cell, char in enumerate(PLAN) if char == " "), (-13, 13, -1, 1), 50
    observation_space, action_space = gym.spaces.Discrete(len(PLAN)), gym.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.int64, dict[str, Any]]:
        """Start in a random cell, or in that of the option "cell"."""
        super().reset(seed=seed)
        self.steps, self.cell = 0, (options or {}).get("cell") or self.np_random.choice(self.CELLS)
        return np.int64(self.cell), {}

    def step(self, action: np.int64) -> tuple[np.int64, float, bool, bool, dict[str, Any]]:
        """Go to the next cell, unless a wall is there."""
        there = self.cell + self.MOVES[action]
        self.steps, self.cell = self.steps + 1, self.cell if self.PLAN[there] == "#" else there
        found = self.PLAN[self.cell] == "G"
        return np.int64(self.cell), float(found), found, not found and self.steps == self.STEPS, {}


def q_network() -> nn.Sequential:
    """Make a network of the four actions' values in a cell."""
    return nn.Sequential(nn.Embedding(len(FourRooms.PLAN), 64), nn.ReLU(), nn.Linear(64, 4))


@torch.no_grad()
def play(network: nn.Module, epsilon: float, seed: int) -> Iterator[tuple[dict[str, Any], float]]:
    """Play for ever; give each step, as `append` takes it, with its n-step TD error, when that is known."""
    env, rng = FourRooms(), np.random.default_rng(seed)
    env.np_random = rng
    local: list[tuple[dict[str, Any], float]] = []  # the paper's local buffer: steps and the values of their actions
    while True:
        (obs, _), ended = env.reset(), False
        values = network(torch.tensor(obs)).numpy()
        while not ended:
            action = rng.integers(4) if rng.random() < epsilon else values.argmax()
            next_obs, reward, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
            step = dict(obs=obs, action=action, reward=reward, terminated=terminated, truncated=truncated)
            local.append((step | {"next_obs": next_obs}, float(values[action])))
            obs, values = next_obs, network(torch.tensor(next_obs)).numpy()
            while local and (ended or len(local) == N_STEP):
                goal = 0.0 if terminated else float(values.max())
                for step, _ in reversed(local):
                    goal = step["reward"] + GAMMA * goal
                step, value = local.pop(0)
                yield step, goal - value


def collect(path: Path, folder: Path, rounds: int, number: int, seed: int, initial: str) -> None:
    """Be a collector: append STEPS_PER_ROUND steps with each set of parameters that comes into the folder."""
    torch.set_num_threads(1)
    network = q_network()
    steps = play(network, EPSILON ** (1 + number / (COLLECTORS - 1) * EPSILON_ALPHA), seed * COLLECTORS + number)
    with dr.open(path, "a") as store, store.writer() as writer:
        for played in range(rounds):
            while not (parameters := folder / f"parameters-{played}").exists():
                time.sleep(POLL_SECONDS)
            network.load_state_dict(torch.load(parameters))
            for step, td_error in islice(steps, STEPS_PER_ROUND):
                writer.append(**step, priority=td_error if initial == "td" else None)


class Learner:
    """Double DQN on batches of prioritized n-step transitions."""

    def __init__(self, store: dr.Store, seed: int, updates: int) -> None:
        self.online, self.target = q_network(), q_network()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), LEARNING_RATE)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.0, updates)
        view, distribution = dr.Transitions(n_step=N_STEP, gamma=GAMMA), dr.Prioritized(PRIORITY_ALPHA, BETA)
        # New steps count when a round is complete: so what is learnt does not depend on how fast the machine is.
        self.sampler = dr.Sampler(store, view, distribution, batch_size=BATCH_SIZE, seed=seed, refresh=False)

    def update(self) -> float:
        """Take one gradient step, say the errors to the sampler, and return the loss."""
        batch = self.sampler.sample()
        with torch.no_grad():
            best = self.online(batch.next_obs).argmax(1, keepdim=True)
            goal = batch.reward + batch.discount * self.target(batch.next_obs).gather(1, best)[:, 0]
        td_error = self.online(batch.obs).gather(1, batch.action[:, None])[:, 0] - goal
        loss = (batch.weight * td_error.square()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        self.sampler.update_priorities(batch.index, td_error)
        return float(loss.detach())


def evaluate(network: nn.Module) -> float:
    """Return the greedy policy's mean return over one episode from each cell."""
    env, total = FourRooms(), 0.0
    policy = network(torch.arange(len(env.PLAN))).argmax(1).numpy()
    for cell in env.CELLS:
        (obs, _), ended = env.reset(options={"cell": cell}), False
        while not ended:
            obs, reward, terminated, truncated, _ = env.step(policy[obs])
            total, ended = total + reward, terminated or truncated
    return total / len(env.CELLS)


def train(store: dr.Store, folder: Path, updates: int, seed: int, initial: str) -> float:
    """Learn a number of updates from what collectors append; return the last evaluation's mean return."""
    torch.manual_seed(seed)
    learner, rounds = Learner(store, seed, updates), 1 + max(updates // UPDATES_PER_ROUND, 1)
    arguments = [(store.path, folder, rounds, number, seed, initial) for number in range(COLLECTORS)]
    collectors = [get_context("spawn").Process(target=collect, args=each, daemon=True) for each in arguments]
    for collector in collectors:
        collector.start()
    for played in range(rounds):
        torch.save(learner.online.state_dict(), folder / "unfinished")
        (folder / "unfinished").replace(folder / f"parameters-{played}")  # who finds it finds all of it
        losses = [learner.update() for _ in range(UPDATES_PER_ROUND if played else 0)]  # from the rounds before
        while len(store) < (played + 1) * COLLECTORS * STEPS_PER_ROUND:
            if any(collector.exitcode for collector in collectors):
                raise RuntimeError("a collector died")
            time.sleep(POLL_SECONDS)
            store.refresh()
        if played == rounds - 1 or (played and played % ROUNDS_PER_EVALUATION == 0):
            mean_return = evaluate(learner.online)
            print(f"round {played}, loss {losses[-1]:.5f}, mean return {mean_return:.3f}", flush=True)
    for collector in collectors:
        collector.join()
    return mean_return


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="Ape-X-style DQN with four collector processes in four rooms.")
    parser.add_argument("--small", action="store_true", help="a few updates only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the store here and keep it")
    parser.add_argument("--initial", choices=["td", "largest"], default="td", help="with which priority steps begin")
    parser.add_argument("--updates", type=int, default=UPDATES, help=f"in rounds of {UPDATES_PER_ROUND}")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the collectors need the other cores
    updates, schema = 2 * UPDATES_PER_ROUND if args.small else args.updates, dr.Schema.from_env(FourRooms())
    with tempfile.TemporaryDirectory() as folder, dr.create(args.path or Path(folder, "store"), schema) as store:
        mean_return = train(store, Path(folder), updates, args.seed, args.initial)
        learnt = mean_return >= ENOUGH_RETURN
        print(
            f"{'learnt' if learnt else 'not learnt'}: a mean return of {mean_return:.3f} over {len(FourRooms.CELLS)} "
            f"episodes, from {len(store)} steps of {store.num_episodes} episodes"
        )
    return learnt or args.small


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
