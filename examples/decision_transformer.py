"""A Decision Transformer (Chen et al. 2021) learns offline, from a store of mostly poor play, to play well.

One in ten of the recorded episodes of CartPole-v1 is by a good controller. The others are by controllers that lean to
one side, each by its own amount, and mostly leave the track after 100 to 200 steps. All take some random actions.

Two networks learn to predict the next action from the last five steps. One is given the return-to-go of each step, too;
the other is not, which makes it behaviour cloning. Asked for a return of 500, the Decision Transformer plays like the
good controller, and the clone like the majority.

    python examples/decision_transformer.py [--small] [--seed 0] [--path cartpole.replay]
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

EPISODES, GOOD_SHARE, LEANS, NOISE = 300, 0.1, (0.1, 0.25), 0.05
CONTEXT, WIDTH, LAYERS, HEADS, MAX_STEPS, RETURN_SCALE = 5, 64, 2, 2, 500, 100.0
UPDATES, BATCH_SIZE, LEARNING_RATE = 2_000, 64, 2e-3
EVALUATION_EPISODES, TARGETS, ENOUGH_RETURN = 20, (150, 500), 400.0


def collect(store: dr.Store, episodes: int, seed: int) -> float:
    """Record episodes, each by a controller of its own; return their mean return."""
    rng = np.random.default_rng(seed)
    env = dr.RecordEpisodes(gym.make("CartPole-v1"), store)
    env.reset(seed=seed)
    for _ in range(episodes):
        lean = 0.0 if rng.random() < GOOD_SHARE else rng.uniform(*LEANS)
        (position, velocity, angle, turning), ended = env.reset()[0], False
        while not ended:
            action = int(angle + 0.3 * turning + 0.03 * position + 0.1 * velocity + lean > 0)
            action = int(rng.integers(2)) if rng.random() < NOISE else action
            (position, velocity, angle, turning), _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
    env.close()
    store.refresh()  # to see what was recorded
    return len(store) / episodes  # CartPole pays 1 a step


class DecisionTransformer(nn.Module):
    """Predicts actions from the last steps, each of which is three tokens: return-to-go, observation and action."""

    def __init__(self, conditioned: bool) -> None:
        super().__init__()
        self.conditioned = conditioned
        self.embed_return, self.embed_obs = nn.Linear(1, WIDTH), nn.Linear(4, WIDTH)
        self.embed_action, self.embed_step = nn.Embedding(2, WIDTH), nn.Embedding(MAX_STEPS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, return_to_go: Tensor, obs: Tensor, action: Tensor, step: Tensor) -> Tensor:
        """Compute the logits of the actions of (batch, length) steps, (batch, length, 2)."""
        told = return_to_go / RETURN_SCALE if self.conditioned else torch.zeros_like(return_to_go)
        tokens = self.embed_return(told[:, :, None]), self.embed_obs(obs), self.embed_action(action)
        sequence = (torch.stack(tokens, dim=2) + self.embed_step(step)[:, :, None]).flatten(1, 2)
        # No token sees a later one: an action is predicted from what was known before it, at its observation's token.
        mask = nn.Transformer.generate_square_subsequent_mask(sequence.shape[1])
        return self.head(self.layers(sequence, mask, is_causal=True)[:, 1::3])


def train(store: dr.Store, conditioned: bool, updates: int, seed: int) -> DecisionTransformer:
    """Learn to predict the actions of windows, which may begin at any step of an episode."""
    torch.manual_seed(seed)
    network = DecisionTransformer(conditioned)
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, updates)
    fields = ("...", "return_to_go", "step")
    sampler = dr.Sampler(store, dr.Sequences(CONTEXT, stride=1), batch_size=BATCH_SIZE, fields=fields, seed=seed)
    losses = []
    for update in range(1, updates + 1):
        batch = sampler.sample()
        logits = network(batch.return_to_go, batch.obs, batch.action, batch.step)
        # Episodes shorter than a window are padded.
        loss = nn.functional.cross_entropy(logits[batch.mask], batch.action[batch.mask])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 0.25)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if update % 500 == 0 or update == updates:
            name = "Decision Transformer" if conditioned else "behaviour cloning"
            print(f"{name}: update {update}, loss {np.mean(losses[-100:]):.4f}", flush=True)
    return network.eval()


@torch.no_grad()
def evaluate(network: DecisionTransformer, target: float, seed: int) -> float:
    """Ask for a return, play episodes with the likeliest actions, all at once, and return their mean return."""
    envs = gym.make_vec("CartPole-v1", EVALUATION_EPISODES, vectorization_mode="vector_entry_point")
    obs, _ = envs.reset(seed=seed)
    playing, returns = np.ones(EVALUATION_EPISODES, bool), np.zeros(EVALUATION_EPISODES)
    step, seen = 0, list[list[Tensor]]()
    while playing.any():
        # What is left of the return that was asked for. The token of the action is not seen before it is chosen.
        left = torch.from_numpy(target - returns).float()
        unknown, steps = (torch.full((EVALUATION_EPISODES,), number) for number in (0, step))
        seen = [*seen[1 - CONTEXT :], [left, torch.from_numpy(obs), unknown, steps]]
        action = network(*(torch.stack(part, dim=1) for part in zip(*seen, strict=True)))[:, -1].argmax(1)
        seen[-1][2] = action
        obs, reward, terminated, truncated, _ = envs.step(action.numpy())
        returns += reward * playing
        playing &= ~(terminated | truncated)
        step += 1
    envs.close()
    return float(returns.mean())


def main(arguments: Sequence[str] | None = None) -> bool:
    """Run the example; return whether it learnt what it should."""
    parser = argparse.ArgumentParser(description="A Decision Transformer on a store of CartPole-v1.")
    parser.add_argument("--small", action="store_true", help="few episodes and updates only, to see that it runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--path", type=Path, help="make the store here and keep it")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more only get in each other's way in networks this small
    schema = dr.Schema.from_env(gym.make("CartPole-v1"))
    episodes, updates = (10, 5) if args.small else (EPISODES, UPDATES)
    with tempfile.TemporaryDirectory() as folder, dr.create(args.path or Path(folder, "store"), schema) as store:
        recorded = collect(store, episodes, args.seed)
        print(f"{len(store)} steps of {store.num_episodes} episodes with a mean return of {recorded:.1f}")
        transformer, clone = (train(store, conditioned, updates, args.seed) for conditioned in (True, False))
    seed = 1_000_000 * (args.seed + 1)
    for target in TARGETS:
        reached = evaluate(transformer, target, seed)
        print(f"Decision Transformer, asked for {target}: a mean return of {reached:.1f}", flush=True)
    cloned = evaluate(clone, TARGETS[-1], seed)
    learnt = reached >= ENOUGH_RETURN and reached > cloned
    print(
        f"{'learnt' if learnt else 'not learnt'}: a mean return of {reached:.1f} over {EVALUATION_EPISODES} episodes, "
        f"{cloned:.1f} by behaviour cloning, from episodes of {recorded:.1f}"
    )
    return learnt or args.small


if __name__ == "__main__":
    sys.exit(0 if main() else 1)
