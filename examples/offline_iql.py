"""Implicit Q-learning (IQL, Kostrikov et al. 2022) learns Pendulum-v1 offline, from a store that a script recorded.

The script swings the pendulum up but does not hold it there, and half of its torques are replaced by random ones. From
these steps alone IQL learns to swing it up and to hold it: better than the recorded episodes, and better than the
script without noise. It never values an action that is not in the store.

Observations and rewards are stored raw and normalized when a batch is drawn. `Sweep` makes a number of epochs, and then
the loop over the sampler ends. Episodes end only by their time limit, so every batch bootstraps: no discount is 0.

    python examples/offline_iql.py [--small] [--seed 0] [--path pendulum.replay]
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

import diskreplay as dr

NUM_ENVS, ROUNDS, EPISODE_STEPS, NOISE = 20, 10, 200, 0.5
EPOCHS, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 40, 256, 1e-3, 0.005
GAMMA, EXPECTILE, TEMPERATURE, LARGEST_WEIGHT = 0.99, 0.8, 10.0, 100.0
UPDATES_PER_EVALUATION, EVALUATION_EPISODES, ENOUGH_RETURN = 1_000, 20, -300.0

Player = Callable[[np.ndarray], np.ndarray]  # (batch, 3) observations in, (batch, 1) torques out


def script(obs: np.ndarray) -> np.ndarray:
    """Push the way it moves, or against that where it has more energy than at rest upright, which is 15."""
    height, _, speed = obs.T
    energy = speed**2 / 2 + 15 * height
    return 2 * np.sign(speed * (15 - energy), dtype=np.float32)[:, None]


def play(envs: gym.vector.VectorEnv, player: Player, episodes: int, seed: int) -> float:
    """Play a number of episodes in each environment, and return their mean return."""
    obs, _ = envs.reset(seed=seed)
    total = 0.0
    # A step that resets the environment follows each episode; its reward is 0.
    for _ in range(episodes * (EPISODE_STEPS + 1) - 1):
        obs, reward, _, _, _ = envs.step(player(obs))
        total += reward.sum()
    envs.close()
    return float(total / (episodes * envs.num_envs))


def collect(store: dr.Store, rounds: int, seed: int) -> float:
    """Record the script with noise, and return the mean return."""
    rng = np.random.default_rng(seed)

    def noisy(obs: np.ndarray) -> np.ndarray:
        random = rng.random((len(obs), 1)) < NOISE
        return np.where(random, rng.uniform(-2, 2, random.shape).astype("f4"), script(obs))

    envs = dr.RecordVectorEpisodes(gym.make_vec("Pendulum-v1", NUM_ENVS), store)
    mean_return = play(envs, noisy, rounds, seed)
    store.refresh()  # to see what was recorded
    return mean_return


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    """Return a network of two hidden layers."""
    return nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, outputs))


class Learner:
    """Implicit Q-learning with two Q functions."""

    def __init__(self, store: dr.Store, epochs: int, seed: int) -> None:
        self.q, self.target = (nn.ModuleList([mlp(4, 1), mlp(4, 1)]) for _ in range(2))
        self.target.load_state_dict(self.q.state_dict())
        self.value, self.policy, self.log_std = mlp(3, 1), mlp(3, 1), nn.Parameter(torch.zeros(1))
        learnt = [*self.q.parameters(), *self.value.parameters(), *self.policy.parameters(), self.log_std]
        self.optimizer = torch.optim.Adam(learnt, LEARNING_RATE)
        self.normalize = dr.Normalize(reward=True, gamma=GAMMA)
        self.sampler = dr.Sampler(
            store,
            dr.Transitions(gamma=GAMMA),
            dr.Sweep(passes=epochs),
            batch_size=BATCH_SIZE,
            seed=seed,
            transform=self.normalize,
        )

    def update(self, batch: dr.Batch) -> float:
        """Take one gradient step, and return the loss."""
        pair = torch.cat([batch.obs, batch.action], dim=1)
        with torch.no_grad():
            goal = batch.reward[:, None] + batch.discount[:, None] * self.value(batch.next_obs)
            q = torch.min(*(network(pair) for network in self.target))
        # An expectile of Q over the actions in the store: close to the value of the best of them (section 4.2).
        advantage = q - self.value(batch.obs)
        value_loss = ((EXPECTILE - (advantage < 0).float()).abs() * advantage.square()).mean()
        q_loss = torch.stack([(network(pair) - goal).square().mean() for network in self.q]).sum()
        # The policy imitates the store, with weights that grow with the advantage of what was done (section 4.3).
        weight = (TEMPERATURE * advantage.detach()).exp().clamp(max=LARGEST_WEIGHT)
        policy_loss = -(weight * self.distribution(batch.obs).log_prob(batch.action)).mean()
        loss = value_loss + q_loss + policy_loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.q.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        return loss.item()

    def distribution(self, obs: Tensor) -> Normal:
        """Compute the distribution of torques of (batch, 3) normalised observations."""
        return Normal(2 * torch.tanh(self.policy(obs)), self.log_std.exp())

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """Choose the likeliest torques of a batch of observations."""
        return self.distribution(torch.from_numpy(self.normalize.normalize_obs(obs))).mean.numpy()


def evaluate(player: Player, seed: int) -> float:
    """Play episodes, all at once, and return their mean return."""
    return play(gym.make_vec("Pendulum-v1", EVALUATION_EPISODES), player, 1, seed)


def train(store: dr.Store, epochs: int, seed: int) -> float:
    """Learn from the store for some epochs; return the mean return of the last evaluation."""
    torch.manual_seed(seed)
    learner = Learner(store, epochs, seed)
    print(learner.sampler)  # what is drawn, and what it means
    updates, mean_return = len(learner.sampler), 0.0
    for update, batch in enumerate(learner.sampler, start=1):
        loss = learner.update(batch)
        if update % UPDATES_PER_EVALUATION == 0 or update == updates:
            mean_return = evaluate(learner.act, seed=1_000_000 * (seed + 1) + update)
            print(f"update {update} of {updates}, loss {loss:.4f}, mean return {mean_return:.1f}", flush=True)
    return mean_return


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="Implicit Q-learning from a store of Pendulum-v1.")
    parser.add_argument("--small", action="store_true", help="an episode each and one epoch, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the store here and keep it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more only get in each other's way in networks this small
    rounds, epochs = (1, 1) if args.small else (ROUNDS, EPOCHS)
    schema = dr.Schema.from_env(gym.make("Pendulum-v1"))
    with tempfile.TemporaryDirectory() as folder, dr.create(args.path or Path(folder, "store"), schema) as store:
        recorded = collect(store, rounds, args.seed)
        print(f"{len(store)} steps of {store.num_episodes} episodes with a mean return of {recorded:.1f}")
        mean_return, scripted = train(store, epochs, args.seed), evaluate(script, args.seed)
    learnt = mean_return >= ENOUGH_RETURN and mean_return > max(recorded, scripted)
    print(
        f"{'learnt' if learnt else 'not learnt'}: a mean return of {mean_return:.1f} over {EVALUATION_EPISODES} "
        f"episodes, from episodes of {recorded:.1f}; the script without noise reaches {scripted:.1f}"
    )
    return learnt or args.small


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
