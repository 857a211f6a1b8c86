"""PPO (Schulman et al. 2017) learns CartPole-v1 from a buffer that is filled by eight environments, read and emptied.

A step is added with what was known then, the value and the log probability. Advantages and returns are computed when
the buffer is full, with the values of the observations behind its last steps. CartPole is stopped after 500 steps,
which is no reason to expect nothing more: such an episode is bootstrapped with the value of its final observation.

    python examples/ppo_rollouts.py [--small] [--seed 0] [--path rollouts.replay]
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor, nn
from torch.distributions import Categorical

import diskreplay as dr

NUM_ENVS, NUM_STEPS, ROLLOUTS = 8, 128, 150
GAMMA, GAE_LAMBDA, CLIP, ENTROPY, VALUE_LOSS = 0.99, 0.95, 0.2, 0.01, 0.5
LEARNING_RATE, MINIBATCH, EPOCHS = 1e-3, 256, 6
ROLLOUTS_PER_EVALUATION, EVALUATION_EPISODES, ENOUGH_RETURN = 5, 20, 475.0


class ActorCritic(nn.Module):
    """A policy and a value function, each with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def policy(self, obs: Tensor) -> Categorical:
        """Compute the distribution of actions of (batch, 4) observations."""
        return Categorical(logits=self.actor(obs))

    def value(self, obs: Tensor) -> Tensor:
        """Compute the values of (batch, 4) observations, (batch,)."""
        values: Tensor = self.critic(obs)[:, 0]
        return values


class Collector:
    """Plays the environments on and on, a buffer's length at a time."""

    def __init__(self, buffer: dr.RolloutBuffer, seed: int) -> None:
        # Nothing is reset unasked, so what `step` returns is always the observation that the action led to.
        makers = [lambda: gym.make("CartPole-v1")] * NUM_ENVS
        self.envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.DISABLED)
        self.buffer, self.steps, self.episodes = buffer, 0, 0
        self.obs, _ = self.envs.reset(seed=seed)

    @torch.no_grad()
    def collect(self, network: ActorCritic) -> None:
        """Fill the empty buffer, and compute its advantages."""
        for _ in range(NUM_STEPS):
            obs = torch.from_numpy(self.obs)
            policy = network.policy(obs)
            action = policy.sample()
            next_obs, reward, terminated, truncated, _ = self.envs.step(action.numpy())
            ended = terminated | truncated
            numbers = reward, terminated, network.value(obs), policy.log_prob(action)
            self.buffer.add(self.obs, action, *numbers, truncated=truncated, final_observations=next_obs)
            self.obs, self.steps, self.episodes = next_obs, self.steps + NUM_ENVS, self.episodes + int(ended.sum())
            if ended.any():
                self.obs, _ = self.envs.reset(options={"reset_mask": ended})
        # Where the last step ended an episode this is the value of the next one's start, and not used.
        last_values = network.value(torch.from_numpy(self.obs))
        # At a time limit, what the final observation is worth (partial-episode bootstrapping, Pardo et al. 2018).
        self.buffer.compute_returns_and_advantages(last_values, GAMMA, GAE_LAMBDA, value_fn=network.value)


def loss_of(network: ActorCritic, batch: dr.Batch) -> Tensor:
    """Compute the clipped objective (section 3) with a value loss and a bonus for entropy (equation 9), to minimize."""
    policy = network.policy(batch.observations)
    # A batch's scalars are (batch, 1), and a Categorical wants its actions without that axis.
    ratio = torch.exp(policy.log_prob(batch.actions[:, 0])[:, None] - batch.log_probs)
    advantage = (batch.advantages - batch.advantages.mean()) / (batch.advantages.std() + 1e-8)
    gain = torch.min(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
    value_loss = (network.value(batch.observations)[:, None] - batch.returns).square().mean()
    return VALUE_LOSS * value_loss - gain - ENTROPY * policy.entropy().mean()


@torch.no_grad()
def evaluate(network: ActorCritic, seed: int) -> float:
    """Play episodes with the likeliest actions, all at once, and return their mean return."""
    envs = gym.make_vec("CartPole-v1", EVALUATION_EPISODES, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    playing, returns = np.ones(EVALUATION_EPISODES, bool), np.zeros(EVALUATION_EPISODES)
    while playing.any():
        action = network.actor(torch.from_numpy(obs)).argmax(1).numpy()
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())


def train(buffer: dr.RolloutBuffer, rollouts: int, seed: int) -> float:
    """Collect and learn in turns; return the last evaluation's mean return."""
    torch.manual_seed(seed)
    network = ActorCritic()
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    collector, mean_return, updates = Collector(buffer, seed), 0.0, 0
    for rollout in range(1, rollouts + 1):
        collector.collect(network)
        # In another order each epoch, across steps and environments.
        for batch in buffer.sample().minibatches(MINIBATCH, EPOCHS, seed=seed + rollout):
            loss = loss_of(network, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 0.5)
            optimizer.step()
            updates += 1
        buffer.clear()  # the policy has changed: what the old one did is of no more use
        if rollout % ROLLOUTS_PER_EVALUATION == 0 or rollout == rollouts:
            mean_return = evaluate(network, seed=1_000_000 * (seed + 1) + rollout)
            print(f"rollout {rollout}, update {updates}, loss {loss:.4f}, mean return {mean_return:.1f}", flush=True)
            if mean_return >= ENOUGH_RETURN:
                break
    collector.envs.close()
    print(
        f"{'learnt' if mean_return >= ENOUGH_RETURN else 'not learnt'}: a mean return of {mean_return:.1f} over "
        f"{EVALUATION_EPISODES} episodes, from {collector.steps} steps and {collector.episodes} ended episodes"
    )
    return mean_return


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="PPO on CartPole-v1.")
    parser.add_argument("--small", action="store_true", help="two rollouts only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the buffer's store here and keep it, with the newest rollouts")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more only get in each other's way in networks this small
    with dr.RolloutBuffer(NUM_ENVS, NUM_STEPS, obs_shape=(4,), action_shape=(), path=args.path) as buffer:
        mean_return = train(buffer, 2 if args.small else ROLLOUTS, args.seed)
    return mean_return >= ENOUGH_RETURN or args.small


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
