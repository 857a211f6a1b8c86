"""A model of the cost of batches from many shards, with the code that splits them: 1,000 shards, 10^12 steps."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from diskreplay.interop.ray.draw_rounds import MASS_AGE_S, importance_weights, split_batch
from tools.bench.harness import Contestant, Report, Table, Target, in_turn, number, timed, timing_table


class Size(NamedTuple):
    """Numbers of shards, their total steps, simulated batches, and their size."""

    shards: tuple[int, ...]
    steps: int
    batches: int
    batch_size: int = 256


FULL, TINY = Size((1, 4, 16, 64, 256, 1000), 10**12, 2000), Size((1, 4), 10**6, 20, 16)

AHEAD = 8  # batches asked for in one message
ROW_BYTES = 4 * 84 * 84 * 2 + 8 + 4 + 4 + 1 + 1 + 8  # a transition of four frames, and its scalars
TOLD_BYTES = 8 + 8  # of each item: id and probability
MESSAGE_BYTES = 1_000  # of a request and its answer without arrays, pickled
ANSWER_BYTES_PER_BATCH = 24  # mass, population and the size of a part
TABLE_BYTES = 18.2  # of memory for each id that has a priority: 8 raw, 9.1 in the tree, 1 of its page
STEPS_PER_SECOND = 5_000.0  # appended on each node
BATCHES_PER_SECOND = 100.0


def simulate(shards: int, size: Size, rng: np.random.Generator) -> dict[str, float]:
    """Simulate draws from growing shards of unequal masses, by the masses that each shard told last."""
    per_round = AHEAD
    true = rng.dirichlet(np.full(shards, 2.0)) * size.steps
    known, heard = true.copy(), np.zeros(shards)
    growth = STEPS_PER_SECOND * rng.uniform(0.0, 2.0, shards)
    messages = pings = now = 0.0
    off, weight_error = [], []
    for _ in range(size.batches // per_round):
        counts = np.stack([split_batch(rng, size.batch_size, known) for _ in range(per_round)])
        asked = counts.any(axis=0)
        messages += asked.sum()
        old = ~asked & (now - heard > MASS_AGE_S)
        pings += old.sum()
        off.append(0.5 * np.abs(known / known.sum() - true / true.sum()).sum())
        # Weights come from the probabilities of the draw, and are exact. How far off would weights be that
        # take the known masses for the true ones?
        drawn = np.flatnonzero(counts[0])
        within = 1.0 / true[drawn]
        exact = importance_weights(known[drawn] / known.sum() * within, 1.0)
        naive = importance_weights(np.full(len(drawn), 1.0 / known.sum()), 1.0)
        weight_error.append(float(np.abs(exact - naive).max()))
        now += per_round / BATCHES_PER_SECOND
        true += growth * per_round / BATCHES_PER_SECOND
        told = asked | old
        known[told], heard[told] = true[told], now
    batches = size.batches // per_round * per_round
    bytes_of_items = size.batch_size * (ROW_BYTES + TOLD_BYTES)
    overhead = (messages + pings) / batches * MESSAGE_BYTES + messages / batches * per_round * ANSWER_BYTES_PER_BATCH
    return {
        "messages": messages / batches,
        "pings": pings / batches,
        "bytes": bytes_of_items + overhead,
        "overhead": overhead / bytes_of_items,
        "off": float(np.mean(off)),
        "weight_error": float(np.max(weight_error)),
        "table": size.steps / shards * TABLE_BYTES / 2**30,
    }


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Simulate each number of shards, and time the code that splits a batch."""
    rng = np.random.default_rng(0)
    found = {shards: simulate(shards, size, rng) for shards in size.shards}
    rows = [
        [
            str(shards), number(one["messages"]), number(one["pings"]), number(one["bytes"] / 1e6),
            f"{one['overhead']:.2%}", f"{one['off']:.1e}", f"{one['weight_error']:.1e}", number(one["table"]),
        ]
        for shards, one in found.items()
    ]  # fmt: skip
    header = [
        "shards", "requests a batch", "mass requests a batch", "MB a batch", "of it overhead",
        "distance of the draw", "error of weights by old masses", "GiB of priorities a shard",
    ]  # fmt: skip
    masses = {shards: rng.dirichlet(np.full(shards, 2.0)) * size.steps for shards in size.shards}
    calls = [()] * size.batches
    seconds = in_turn(
        [
            Contestant(f"{shards} shards", partial(timed, partial(split_batch, rng, size.batch_size, own), calls))
            for shards, own in masses.items()
        ],
        rounds,
    )
    most = max(found)
    return Report(
        f"A model of batches from up to {most:,} shards",
        [Table(header, rows), timing_table(seconds, f"splitting one batch of {size.batch_size}")],
        [
            Target(f"requests a batch with {most} shards", found[most]["messages"], float(size.batch_size), ""),
            Target("distance of the draw from that by true masses", found[most]["off"], 1e-3, ""),
        ],
        [
            f"{size.steps:.0e} steps in all, unequally; {STEPS_PER_SECOND:,.0f} steps a second are appended on each "
            f"node, on average, and {BATCHES_PER_SECOND:.0f} batches of {size.batch_size} transitions of four frames "
            f"are drawn. {AHEAD} are asked for in one message.",
            "Nothing is sent: requests are counted by the split of the sampler itself, bytes by their layout.",
            "The distance is the total variation between the shards' shares in the draw and those of their true "
            "masses. The error is that of weights which take the old masses for true; those of the sampler have none.",
        ],
    )
