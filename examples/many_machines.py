"""Double DQN on CartPole-v1: two nodes play, each into a store of its own, and one learner draws from both.

On a laptop it starts Ray and both nodes are the laptop. On a cluster it runs unchanged, with a node for each collector
if there are two: `ray job submit --working-dir examples -- python many_machines.py`.

    python examples/many_machines.py [--small] [--seed 0] [--path cartpole-nodes]
"""

import argparse
import copy
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import ray
import torch
from torch import nn

import diskreplay as dr
from diskreplay.interop.ray import ShardedSampler, ShardedStore

COLLECTORS, GAMMA, N_STEP, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 2, 0.99, 5, 128, 1e-3, 0.005
ROUNDS, STEPS_PER_ROUND, STEPS_PER_UPDATE, ROUNDS_PER_EVALUATION = 150, 250, 4, 2  # steps of each collector
EPSILON = dr.Linear(1.0, 0.05, 20)  # over rounds
EVALUATION_EPISODES, ENOUGH_RETURN = 20, 475.0


def q_network() -> nn.Sequential:
    """Make a network of the values of both actions."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


@torch.no_grad()
def best_actions(network: nn.Module, obs: np.ndarray) -> np.ndarray:
    """Choose the best actions of a batch of observations."""
    scale = np.array([2.0, 1.0, 10.0, 1.0], np.float32)  # brings observations to one range
    actions: np.ndarray = network(torch.from_numpy(obs * scale)).argmax(1).numpy()
    return actions


class Collector:
    """Plays on its node, into the store on the node's disk, of which it knows nothing but the path."""

    def __init__(self, path: str, number: int, seed: int) -> None:
        torch.set_num_threads(1)
        env = gym.make("CartPole-v1")
        self._store = dr.create(path, dr.Schema.from_env(env), exist_ok=True)
        self._env = dr.RecordEpisodes(env, self._store)  # appends every step
        self._rng = np.random.default_rng((seed, number))
        self._obs, _ = self._env.reset(seed=seed * COLLECTORS + number)

    def play(self, network: nn.Module, epsilon: float, steps: int) -> int:
        """Play some steps with a policy, and return how many steps the store has."""
        for _ in range(steps):
            random = self._rng.random() < epsilon
            action = self._rng.integers(2) if random else best_actions(network, self._obs[None])[0]
            self._obs, _, terminated, truncated, _ = self._env.step(int(action))
            if terminated or truncated:
                self._obs, _ = self._env.reset()
        self._store.refresh()
        return len(self._store)


class Learner:
    """Double DQN (van Hasselt et al. 2016) on batches of prioritized n-step transitions of all nodes."""

    def __init__(self, store: ShardedStore, seed: int, updates: int) -> None:
        self.online = q_network()
        self.target = copy.deepcopy(self.online)
        self.optimizer = torch.optim.Adam(self.online.parameters(), LEARNING_RATE)
        self.scale = torch.tensor([2.0, 1.0, 10.0, 1.0])
        view = dr.Transitions(n_step=N_STEP, gamma=GAMMA)
        distribution = dr.Prioritized(alpha=0.6, beta=dr.Linear(0.4, 1.0, updates))
        # On one machine: dr.Sampler(store, view, distribution, batch_size=BATCH_SIZE, seed=seed)
        self.sampler = ShardedSampler(store, view, distribution, batch_size=BATCH_SIZE, seed=seed)

    def update(self) -> float:
        """Take one gradient step, say the errors to the sampler, and return the loss."""
        batch = self.sampler.sample()
        obs, next_obs = batch.obs * self.scale, batch.next_obs * self.scale
        with torch.no_grad():
            best = self.online(next_obs).argmax(1, keepdim=True)  # chosen by one network, valued by the other
            goal = batch.reward + batch.discount * self.target(next_obs).gather(1, best)[:, 0]
        td_error = self.online(obs).gather(1, batch.action[:, None])[:, 0] - goal
        loss = (batch.weight * td_error.square()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        self.sampler.update_priorities(batch.index, td_error)
        return float(loss.detach())


def evaluate(network: nn.Module, seed: int) -> float:
    """Play episodes with the greedy policy, all at once, and return their mean return."""
    envs = gym.make_vec("CartPole-v1", EVALUATION_EPISODES, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    playing, returns = np.ones(EVALUATION_EPISODES, bool), np.zeros(EVALUATION_EPISODES)
    while playing.any():
        obs, reward, terminated, truncated, _ = envs.step(best_actions(network, obs))
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def placed(folder: Path, nodes: Sequence[str], seed: int) -> tuple[list[str], list[Any]]:
    """Start a collector on each node; return the paths of their stores, and the collectors."""
    paths = [str(folder / f"node{number}") for number in range(len(nodes))]
    made = ray.remote(Collector)
    collectors = [
        made.options(num_cpus=0, resources={f"node:{node}": 0.001}).remote(path, number, seed)
        for number, (path, node) in enumerate(zip(paths, nodes, strict=True))
    ]
    return paths, collectors


def train(folder: Path, rounds: int, seed: int) -> tuple[float, int]:
    """Play and learn in rounds; return the last evaluation's mean return, and how many steps there are."""
    torch.manual_seed(seed)
    alive = sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
    nodes = [alive[number % len(alive)] for number in range(COLLECTORS)]
    paths, collectors = placed(folder, nodes, seed)
    updates = COLLECTORS * STEPS_PER_ROUND // STEPS_PER_UPDATE
    network = q_network()
    ray.get([collector.play.remote(network, 1.0, STEPS_PER_ROUND) for collector in collectors])
    with ShardedStore(paths, nodes) as store:
        learner, mean_return, steps = Learner(store, seed, rounds * updates), 0.0, 0
        for number in range(1, rounds + 1):
            policy = ray.put(learner.online)
            playing = [collector.play.remote(policy, EPSILON(number), STEPS_PER_ROUND) for collector in collectors]
            losses = [learner.update() for _ in range(updates)]  # meanwhile
            steps = sum(ray.get(playing))
            if number % ROUNDS_PER_EVALUATION == 0 or number == rounds:
                mean_return = evaluate(learner.online, seed=1_000_000 * (seed + 1) + number)
                missing = learner.sampler.stats()["missing"] or "none"
                print(
                    f"round {number}, {steps} steps, loss {losses[-1]:.4f}, mean return {mean_return:.1f}, "
                    f"missing shards: {missing}",
                    flush=True,
                )
                if mean_return >= ENOUGH_RETURN:
                    break
        learner.sampler.close()
    return mean_return, steps


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="Double DQN on CartPole-v1 with two collecting nodes, on Ray.")
    parser.add_argument("--small", action="store_true", help="two rounds only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the stores below this folder of their nodes and keep them")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ray.init()  # on a cluster, the one that the job was submitted to
    with tempfile.TemporaryDirectory() as folder:
        mean_return, steps = train((args.path or Path(folder)).absolute(), 2 if args.small else ROUNDS, args.seed)
        learnt = mean_return >= ENOUGH_RETURN
        print(
            f"{'learnt' if learnt else 'not learnt'}: a mean return of {mean_return:.1f} over {EVALUATION_EPISODES} "
            f"episodes, from {steps} steps in {COLLECTORS} stores"
        )
        ray.shutdown()
    return learnt or args.small


if __name__ == "__main__":
    raise SystemExit(0 if main() else 1)
