"""The learner of the demo: that of `examples/dqn_per.py`, while collectors are still writing the store.

`diskreplay/cli/dqn_per.py` is a link to the example: a wheel holds no examples, and this way there is one text.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import diskreplay as dr
from diskreplay.cli.demo_collector import Layer, Policy
from diskreplay.cli.dqn_per import EPSILON, STEPS_FIRST, STEPS_PER_UPDATE, Learner, QNetwork, evaluate

BETA_UPDATES = 5_000  # until the weights correct the whole bias of the priorities
ROUND = 25  # updates between two policies that are published
EVALUATE_EVERY = 250  # updates
EVALUATION_SEED = 1 << 40  # far from the collectors' seeds
WAIT_SECONDS = 0.01


@dataclass(frozen=True)
class Progress:
    """How far the learner is; `greedy_return` is the latest evaluation's."""

    steps: int = 0
    updates: int = 0
    epsilon: float = 1.0
    loss: float | None = None
    greedy_return: float | None = None


def policy_layers(network: QNetwork) -> list[Layer]:
    """Copy weights and biases to numpy, with the scale in the first of them."""
    layers = [layer for layer in network.layers if isinstance(layer, nn.Linear)]
    scales = [network.scale, *[torch.ones(()) for _ in layers[1:]]]
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
    learner = Learner(store, seed, BETA_UPDATES)
    updates, loss, greedy_return = 0, None, None
    while True:
        needed = STEPS_FIRST + STEPS_PER_UPDATE * updates
        epsilon, allowed = EPSILON(needed), -(-(needed + STEPS_PER_UPDATE * ROUND) // collectors)
        Policy(policy_layers(learner.online), epsilon, allowed).publish(file)
        while len(store) < needed:
            yield Progress(len(store), updates, epsilon, loss, greedy_return)
            time.sleep(WAIT_SECONDS)
            store.refresh()
        for _ in range(ROUND):
            loss = learner.update()
        updates += ROUND
        if updates % EVALUATE_EVERY == 0:
            greedy_return = evaluate(learner, EVALUATION_SEED + seed * 1_000_000 + updates)
        yield Progress(len(store), updates, epsilon, loss, greedy_return)
