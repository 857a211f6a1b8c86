"""Double DQN with 5-step targets and prioritized replay learns CartPole-v1.

Each step of the game is appended to a store on disk as it was; the 5-step returns are computed when a batch is drawn.
`diskreplay demo` does the same with four processes that play while another one learns.

    python examples/dqn_per.py [--small] [--seed 0] [--path cartpole.replay]
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import diskreplay as dr

GAMMA, N_STEP, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 0.99, 5, 128, 1e-3, 0.005
STEPS, STEPS_FIRST, STEPS_PER_UPDATE, STEPS_PER_EVALUATION = 60_000, 1_000, 4, 1_000
EPSILON = dr.Linear(1.0, 0.05, 10_000)  # a schedule is a function of a count, of steps here
EVALUATION_EPISODES, ENOUGH_RETURN = 20, 475.0


class QNetwork(nn.Module):
    """The values of both actions."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0, 1.0, 10.0, 1.0]))  # brings observations to one range
        self.layers = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, obs: Tensor) -> Tensor:
        """Compute (batch, 2) values of (batch, 4) observations."""
        values: Tensor = self.layers(obs * self.scale)
        return values


class Learner:
    """Double DQN (van Hasselt et al. 2016) on batches of prioritized n-step transitions."""

    def __init__(self, store: dr.Store, seed: int, updates: int) -> None:
        self.online, self.target = QNetwork(), QNetwork()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), LEARNING_RATE)
        self.sampler = dr.Sampler(
            store,
            dr.Transitions(n_step=N_STEP, gamma=GAMMA),
            dr.Prioritized(alpha=0.6, beta=dr.Linear(0.4, 1.0, updates)),
            batch_size=BATCH_SIZE,
            seed=seed,
        )

    def update(self) -> float:
        """Take one gradient step, say the errors to the sampler, and return the loss."""
        batch = self.sampler.sample()
        with torch.no_grad():
            best = self.online(batch.next_obs).argmax(1, keepdim=True)  # chosen by one network, valued by the other
            goal = batch.reward + batch.discount * self.target(batch.next_obs).gather(1, best)[:, 0]
        td_error = self.online(batch.obs).gather(1, batch.action[:, None])[:, 0] - goal
        loss = (batch.weight * td_error.square()).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 10.0)
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        self.sampler.update_priorities(batch.index, td_error)
        return loss.item()

    @torch.no_grad()
    def act(self, obs: np.ndarray) -> np.ndarray:
        """Choose the best actions of a batch of observations."""
        return self.online(torch.from_numpy(obs)).argmax(1).numpy()


def evaluate(learner: Learner, seed: int) -> float:
    """Play episodes with the greedy policy, all at once, and return their mean return."""
    envs = gym.make_vec("CartPole-v1", EVALUATION_EPISODES, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    playing, returns = np.ones(EVALUATION_EPISODES, bool), np.zeros(EVALUATION_EPISODES)
    while playing.any():
        obs, reward, terminated, truncated, _ = envs.step(learner.act(obs))
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def train(store: dr.Store, steps: int, seed: int) -> float:
    """Play, learn and return the last evaluation's mean return."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    learner = Learner(store, seed, updates=steps // STEPS_PER_UPDATE)
    print(learner.sampler)  # what is drawn, and what it means
    env = dr.RecordEpisodes(gym.make("CartPole-v1"), store)  # appends every step
    obs, _ = env.reset(seed=seed)
    updates, loss, mean_return = 0, float("nan"), 0.0
    for step in range(1, steps + 1):
        random = rng.random() < EPSILON(step)
        obs, _, terminated, truncated, _ = env.step(int(rng.integers(2) if random else learner.act(obs[None])[0]))
        if terminated or truncated:
            obs, _ = env.reset()
        if step >= min(STEPS_FIRST, steps // 2) and step % STEPS_PER_UPDATE == 0:
            loss, updates = learner.update(), updates + 1
        if step % STEPS_PER_EVALUATION == 0 or step == steps:
            mean_return = evaluate(learner, seed=1_000_000 * (seed + 1) + step)
            print(f"step {step}, update {updates}, loss {loss:.4f}, mean return {mean_return:.1f}", flush=True)
            if mean_return >= ENOUGH_RETURN:
                break
    env.close()
    return mean_return


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="Double DQN with prioritized 5-step replay on CartPole-v1.")
    parser.add_argument("--small", action="store_true", help="a few hundred steps only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the store here and keep it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more only get in each other's way in networks this small
    schema = dr.Schema.from_env(gym.make("CartPole-v1"))
    with tempfile.TemporaryDirectory() as folder, dr.create(args.path or Path(folder, "store"), schema) as store:
        mean_return = train(store, 600 if args.small else STEPS, args.seed)
        learnt = mean_return >= ENOUGH_RETURN
        print(
            f"{'learnt' if learnt else 'not learnt'}: a mean return of {mean_return:.1f} over {EVALUATION_EPISODES} "
            f"episodes, from {len(store)} steps of {store.num_episodes} episodes"
        )
    return learnt or args.small


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
