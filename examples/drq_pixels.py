"""A DQN with random shifts, as in DrQ (Kostrikov et al. 2021), learns from pixels to catch a ball.

The ball falls at a slant and bounces off the walls, and the paddle is too slow to just follow it. One frame does not
show which way the ball moves; three do. Each frame is stored once, as uint8: frame stacks, random shifts and floats are
made when a batch is drawn.

    python examples/drq_pixels.py [--small] [--seed 0] [--path catch.replay]
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
from gymnasium.wrappers import FrameStackObservation
from torch import Tensor, nn

import diskreplay as dr

STACK, PAD, GAMMA, N_STEP, BATCH_SIZE, LEARNING_RATE, TARGET_RATE = 3, 4, 0.99, 3, 64, 5e-4, 0.01
STEPS, STEPS_FIRST, STEPS_PER_UPDATE, STEPS_PER_EVALUATION = 20_000, 1_000, 4, 2_000
EPSILON = dr.Linear(1.0, 0.05, 6_000)  # a schedule is a function of a count, of steps here
EVALUATION_EPISODES, ENOUGH_CAUGHT = 100, 0.95


class Catch(gym.Env[np.ndarray, np.int64]):
    """A ball and a paddle in frames of 48 x 48 pixels; an action moves the paddle left, not at all, or right."""

    SIZE, BALL, PADDLE, FALL, STEP, SLANT = 48, 4, 10, 4, 2, 4

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (self.SIZE, self.SIZE), np.uint8)
        self.action_space = gym.spaces.Discrete(3)

    def frame(self) -> np.ndarray:
        """Draw what is seen."""
        frame = np.zeros((self.SIZE, self.SIZE), np.uint8)
        frame[self.y : self.y + self.BALL, self.x : self.x + self.BALL] = 255
        frame[-self.BALL :, self.paddle : self.paddle + self.PADDLE] = 255
        return frame

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Put the ball anywhere at the top, and the paddle in the middle."""
        super().reset(seed=seed)
        self.x, self.y = int(self.np_random.integers(self.SIZE - self.BALL + 1)), 0
        self.slant = int(self.np_random.integers(-self.SLANT, self.SLANT + 1))
        self.paddle = (self.SIZE - self.PADDLE) // 2
        return self.frame(), {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Move both; when the ball is down the reward is 1 if it was caught, else -1."""
        self.paddle = min(max(self.paddle + self.STEP * (int(action) - 1), 0), self.SIZE - self.PADDLE)
        self.x, self.y, wall = self.x + self.slant, self.y + self.FALL, self.SIZE - self.BALL
        if not 0 <= self.x <= wall:
            self.x, self.slant = (-self.x if self.x < 0 else 2 * wall - self.x), -self.slant
        landed = self.y == self.SIZE - self.BALL
        caught = self.paddle - self.BALL < self.x < self.paddle + self.PADDLE
        return self.frame(), (1.0 if caught else -1.0) if landed else 0.0, landed, False, {}


class QNetwork(nn.Sequential):
    """The values of the three actions, (batch, 3), of (batch, 3, 48, 48) stacks of frames."""

    def __init__(self) -> None:
        convolutions = nn.Conv2d(STACK, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU(), nn.Flatten()
        super().__init__(*convolutions, nn.Linear(32 * 5 * 5, 128), nn.ReLU(), nn.Linear(128, 3))


class Learner:
    """Double DQN (van Hasselt et al. 2016) on shifted stacks of frames."""

    def __init__(self, store: dr.Store, seed: int) -> None:
        self.online, self.target = QNetwork(), QNetwork()
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), LEARNING_RATE)
        self.sampler = dr.Sampler(
            store,
            dr.Transitions(n_step=N_STEP, gamma=GAMMA, frame_stack=STACK),
            batch_size=BATCH_SIZE,
            seed=seed,
            # obs and next_obs are shifted independently: values are to depend on neither shift.
            transform=[dr.RandomShift(PAD), dr.ToFloat()],
        )

    def update(self) -> float:
        """Take one gradient step, and return the loss."""
        batch = self.sampler.sample()
        with torch.no_grad():
            best = self.online(batch.next_obs).argmax(1, keepdim=True)
            goal = batch.reward + batch.discount * self.target(batch.next_obs).gather(1, best)[:, 0]
        loss = nn.functional.smooth_l1_loss(self.online(batch.obs).gather(1, batch.action[:, None])[:, 0], goal)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(fast, TARGET_RATE)
        return loss.item()

    @torch.no_grad()
    def act(self, stack: np.ndarray) -> int:
        """Choose the best action for a stack of frames, (3, 48, 48) uint8."""
        frames: Tensor = torch.from_numpy(stack)[None] / 255
        return int(self.online(frames).argmax())


def evaluate(learner: Learner, seed: int) -> float:
    """Return the share of balls that the greedy policy catches."""
    env, caught = FrameStackObservation(Catch(), STACK), 0
    env.reset(seed=seed)
    for _ in range(EVALUATION_EPISODES):
        (stack, _), ended = env.reset(), False
        while not ended:
            stack, reward, ended, _, _ = env.step(np.int64(learner.act(stack)))
            caught += float(reward) > 0
    return caught / EVALUATION_EPISODES


def train(store: dr.Store, steps: int, seed: int) -> float:
    """Play, learn and return the share that was caught in the last evaluation."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    learner = Learner(store, seed)
    print(learner.sampler)  # what is drawn, and what it means
    # Single frames are recorded; the player sees stacks as the view makes them for the learner.
    env = FrameStackObservation(dr.RecordEpisodes(Catch(), store), STACK)
    stack, _ = env.reset(seed=seed)
    updates, loss, caught = 0, float("nan"), 0.0
    for step in range(1, steps + 1):
        action = rng.integers(3) if rng.random() < EPSILON(step) else learner.act(stack)
        stack, _, landed, _, _ = env.step(np.int64(action))
        if landed:
            stack, _ = env.reset()
        if step >= min(STEPS_FIRST, steps // 2) and step % STEPS_PER_UPDATE == 0:
            loss, updates = learner.update(), updates + 1
        if step % STEPS_PER_EVALUATION == 0 or step == steps:
            caught = evaluate(learner, seed=1_000_000 * (seed + 1) + step)
            print(f"step {step}, update {updates}, loss {loss:.4f}, caught {caught:.1%}", flush=True)
            if caught >= ENOUGH_CAUGHT:
                break
    env.close()
    return caught


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="DrQ-style DQN on a game of 48 x 48 pixels.")
    parser.add_argument("--small", action="store_true", help="a few hundred steps only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the store here and keep it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        dr.create(args.path or Path(folder, "store"), dr.Schema.from_env(Catch())) as store,
    ):
        caught = train(store, 400 if args.small else STEPS, args.seed)
        learnt = caught >= ENOUGH_CAUGHT
        print(
            f"{'learnt' if learnt else 'not learnt'}: {caught:.1%} of {EVALUATION_EPISODES} balls caught, "
            f"from {len(store)} frames of {store.num_episodes} episodes"
        )
    return learnt or args.small


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
