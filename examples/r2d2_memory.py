"""A recurrent Q-learner in the way of R2D2 (Kapturowski et al. 2019) learns to remember.

A sign at the entrance of a corridor says on which side all of its doors open. Each step leads on, whatever the action,
and what is seen later does not depend on the sign: a policy without memory opens half of the doors on average.

The corridor is longer than the windows that are learnt from, and most of these begin behind the sign. What it said is
then only in the recurrent state that the player stored with each step: it is read at the window's start, and a burn-in
brings it up to date.

    python examples/r2d2_memory.py [--small] [--seed 0] [--path corridor.replay]
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import diskreplay as dr

LENGTH, OVERLAP, BURN_IN, BATCH_SIZE = 16, 8, 4, 32
GAMMA, N_STEP, LEARNING_RATE, TARGET_RATE, EPSILON, HIDDEN = 0.9, 3, 1e-3, 0.02, 0.2, 32
EPISODES, EPISODES_FIRST, EPISODES_PER_EVALUATION, UPDATES_PER_EPISODE = 600, 20, 50, 4
EVALUATION_EPISODES, ENOUGH_DOORS = 50, 0.98


class Corridor(gym.Env[np.ndarray, np.int64]):
    """A corridor of 40 steps: an observation is (sign left, sign right, door), an action the side to try."""

    STEPS, DOORS = 40, 0.2

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Put up a sign that is seen now and not again."""
        super().reset(seed=seed)
        self.steps, self.side, self.at_door = 0, int(self.np_random.integers(2)), False
        return np.eye(3, dtype=np.float32)[self.side], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Try the door, where there is one, and go on."""
        reward = (1.0 if action == self.side else -1.0) if self.at_door else 0.0
        self.steps += 1
        self.at_door = bool(self.np_random.random() < self.DOORS)
        return np.array([0, 0, self.at_door], np.float32), reward, self.steps == self.STEPS, False, {}


class RecurrentQ(nn.Module):
    """The values of both actions after each of some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.memory, self.values = nn.GRU(3, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 2)

    def forward(self, obs: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute (batch, length, 2) values, and the state behind the last step, (1, batch, HIDDEN)."""
        outputs, state = self.memory(obs, state)
        return self.values(outputs), state


def unroll(network: RecurrentQ, batch: dr.Batch) -> Tensor:
    """Compute the values of a window's observations and of the one behind it, (batch, LENGTH + 1, 2).

    The burn-in only brings the stored state up to date (section 3). A window that starts its episode needs none, and
    its first steps are learnt like the others.
    """
    obs = torch.cat([batch.obs, batch.next_obs[:, -1:]], dim=1)
    early, state = network(obs[:, :BURN_IN], batch.recurrent_state.transpose(0, 1).contiguous())
    state = torch.where(batch.is_first[:, :1], state, state.detach())
    late, _ = network(obs[:, BURN_IN:], state)
    return torch.cat([early, late], dim=1)


class Learner:
    """Double Q-learning with n-step targets inside windows."""

    def __init__(self, store: dr.Store, seed: int) -> None:
        self.online, self.target = RecurrentQ(), RecurrentQ()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), LEARNING_RATE)
        view = dr.Sequences(LENGTH, OVERLAP, BURN_IN, start_only=("recurrent_state",))
        distribution = dr.Prioritized(alpha=0.9, beta=0.6, eta=0.9)  # the paper's
        self.sampler = dr.Sampler(store, view, distribution, batch_size=BATCH_SIZE, seed=seed)

    def update(self) -> float:
        """Take one gradient step, say the errors of all steps to the sampler, and return the loss."""
        batch = self.sampler.sample()
        values = unroll(self.online, batch)
        with torch.no_grad():
            best = values.argmax(2, keepdim=True)
            ahead = unroll(self.target, batch).gather(2, best)[:, :, 0]
            goal = dr.nstep_targets(batch.reward, batch.terminated, ahead, N_STEP, GAMMA, mask=batch.mask)
        td_error = values[:, :-1].gather(2, batch.action[:, :, None])[:, :, 0] - goal
        counts = batch.loss_mask * batch.weight[:, None]
        loss = (counts * td_error.square()).sum() / batch.loss_mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        self.sampler.update_priorities(batch.index, td_error)  # a window's is eta * max + (1 - eta) * mean
        return loss.item()


@torch.no_grad()
def play(
    env: gym.Env, network: RecurrentQ, epsilon: float, rng: np.random.Generator, remember: bool = True
) -> list[float]:
    """Play an episode, recording the state before each step; return the rewards at its doors."""
    obs, _ = env.reset()
    state, rewards, ended = torch.zeros(1, 1, HIDDEN), [], False
    while not ended:
        if isinstance(env, dr.RecordEpisodes):
            env.set_extra(recurrent_state=state[:, 0])
        values, state = network(torch.from_numpy(obs)[None, None], state if remember else torch.zeros_like(state))
        action = rng.integers(2) if rng.random() < epsilon else values.argmax().item()
        at_door = obs[2] > 0
        obs, reward, ended, _, _ = env.step(np.int64(action))
        rewards += [float(reward)] if at_door else []
    return rewards


def evaluate(network: RecurrentQ, episodes: int, seed: int, remember: bool = True) -> float:
    """Return the share of doors that the greedy policy opens; without `remember` its state is wiped at each step."""
    env, rng = Corridor(), np.random.default_rng(seed)
    env.reset(seed=seed)
    rewards = [reward for _ in range(episodes) for reward in play(env, network, 0.0, rng, remember)]
    return float(np.mean(np.array(rewards) > 0))


def train(store: dr.Store, episodes: int, seed: int) -> RecurrentQ:
    """Play and learn until it is learnt, or so many episodes are played."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    learner = Learner(store, seed)
    print(learner.sampler)  # what is drawn, and what it means
    env = dr.RecordEpisodes(Corridor(), store)
    env.reset(seed=seed)
    loss = float("nan")
    for episode in range(1, episodes + 1):
        play(env, learner.online, EPSILON, rng)
        for _ in range(UPDATES_PER_EPISODE if episode > min(EPISODES_FIRST, episodes // 2) else 0):
            loss = learner.update()
        if episode % EPISODES_PER_EVALUATION == 0 or episode == episodes:
            share = evaluate(learner.online, EVALUATION_EPISODES, seed=1_000_000 * (seed + 1) + episode)
            print(f"episode {episode}, loss {loss:.4f}, doors opened {share:.1%}", flush=True)
            if share >= ENOUGH_DOORS:
                break
    env.close()
    return learner.online


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="Recurrent Q-learning from sequences on a task of memory.")
    parser.add_argument("--small", action="store_true", help="a few episodes only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the store here and keep it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more only get in each other's way in networks this small
    schema = dr.Schema.from_env(Corridor(), extra={"recurrent_state": dr.Field((1, HIDDEN), "float32")})
    with tempfile.TemporaryDirectory() as folder, dr.create(args.path or Path(folder, "store"), schema) as store:
        played, judged = (12, 10) if args.small else (EPISODES, 200)
        network = train(store, played, args.seed)
        with_memory, without = (evaluate(network, judged, args.seed, remember) for remember in (True, False))
        learnt = with_memory >= ENOUGH_DOORS
        print(
            f"{'learnt' if learnt else 'not learnt'}: {with_memory:.1%} of the doors opened, {without:.1%} with the "
            f"state wiped at each step, from {len(store)} steps of {store.num_episodes} episodes"
        )
    return learnt or args.small


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
