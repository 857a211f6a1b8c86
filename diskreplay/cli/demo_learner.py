"""The learner of the demo: double DQN with 5-step targets and prioritized replay (Schaul et al. 2016).

It samples a store that collectors are still writing.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

import diskreplay as dr
from diskreplay.cli.demo_collector import ENVIRONMENT, Layer, Policy

BATCH_SIZE, LEARNING_RATE, TARGET_RATE, GAMMA, N_STEP = 128, 1e-3, 0.005, 0.99, 5
ALPHA, BETA = 0.6, dr.Linear(0.4, 1.0, 5_000)  # of the priorities, and of the weights: by updates
STEPS_FIRST = 1_000  # collected before the first update
STEPS_PER_UPDATE = 4  # collected for each update
ROUND = 25  # updates between two policies that are published
EVALUATE_EVERY = 250  # updates
EVALUATION_EPISODES, EVALUATION_SEED = 20, 1 << 40  # far from the collectors' seeds
EPSILON_END, EPSILON_STEPS = 0.05, 10_000
WAIT_SECONDS = 0.01


@dataclass(frozen=True)
class Progress:
    """How far the learner is; `greedy_return` is the latest evaluation's."""

    steps: int = 0
    updates: int = 0
    epsilon: float = 1.0
    loss: float | None = None
    greedy_return: float | None = None


class QNetwork(nn.Module):
    """The values of both actions, from observations scaled to about the same range."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([2.0, 1.0, 10.0, 1.0]))
        self.layers = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))

    def forward(self, obs: Tensor) -> Tensor:
        """Compute (batch, 2) values of (batch, 4) observations."""
        values: Tensor = self.layers(obs * self.scale)
        return values

    def arrays(self) -> list[Layer]:
        """Copy weights and biases to numpy, with the scale in the first of them."""
        layers = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        scales = [self.scale, *[torch.ones(()) for _ in layers[1:]]]
        return [
            ((layer.weight.detach() * scale).numpy(), layer.bias.detach().clone().numpy())
            for layer, scale in zip(layers, scales, strict=True)
        ]


def learn(store: dr.Store, file: Path, seed: int, collectors: int) -> Iterator[Progress]:
    """Learn as long as asked for more, and tell the progress now and then.

    Each round publishes the policy to `file`, waits until the collectors have played what the round before allowed,
    and updates the network ROUND times.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the collectors need the other cores, and threads waiting for each other are far slower
    online, target = QNetwork(), QNetwork()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), LEARNING_RATE)
    sampler = dr.Sampler(
        store,
        dr.Transitions(n_step=N_STEP, gamma=GAMMA),
        dr.Prioritized(alpha=ALPHA, beta=BETA),
        batch_size=BATCH_SIZE,
        seed=seed,
    )
    updates, loss, greedy_return = 0, None, None
    while True:
        needed = STEPS_FIRST + STEPS_PER_UPDATE * updates
        epsilon = max(EPSILON_END, 1 - (1 - EPSILON_END) * needed / EPSILON_STEPS)
        Policy(online.arrays(), epsilon, -(-(needed + STEPS_PER_UPDATE * ROUND) // collectors)).publish(file)
        while len(store) < needed:
            yield Progress(len(store), updates, epsilon, loss, greedy_return)
            time.sleep(WAIT_SECONDS)
            store.refresh()
        for _ in range(ROUND):
            batch = sampler.sample()
            loss, td_error = update(online, target, optimizer, batch)
            sampler.update_priorities(batch.index, td_error)
        updates += ROUND
        if updates % EVALUATE_EVERY == 0:
            greedy_return = evaluate(online, EVALUATION_SEED + seed * 1_000_000 + updates)
        yield Progress(len(store), updates, epsilon, loss, greedy_return)


def update(
    online: QNetwork, target: QNetwork, optimizer: torch.optim.Optimizer, batch: dr.Batch
) -> tuple[float, Tensor]:
    """Take one gradient step, let the target network follow, and return the loss and each item's error."""
    with torch.no_grad():
        best = online(batch.next_obs).argmax(1, keepdim=True)  # chosen by one network, valued by the other
        goal = batch.reward + batch.discount * target(batch.next_obs).gather(1, best)[:, 0]
    value = online(batch.obs).gather(1, batch.action[:, None])[:, 0]
    td_error = value.detach() - goal
    loss = (batch.weight * (value - goal).square()).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(online.parameters(), 10.0)
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(target.parameters(), online.parameters(), strict=True):
            slow.lerp_(fast, TARGET_RATE)
    return loss.item(), td_error


@torch.no_grad()
def evaluate(network: QNetwork, seed: int) -> float:
    """Play episodes with the greedy policy, all at once, and return their mean return."""
    envs = gym.make_vec(ENVIRONMENT, EVALUATION_EPISODES, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    playing, returns = np.ones(EVALUATION_EPISODES, bool), np.zeros(EVALUATION_EPISODES)
    while playing.any():
        action = network(torch.from_numpy(obs)).argmax(1).numpy()
        obs, reward, terminated, truncated, _ = envs.step(action)
        returns += reward * playing
        playing &= ~(terminated | truncated)
    envs.close()
    return float(returns.mean())
