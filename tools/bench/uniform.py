"""Draw uniform batches of n-step transitions."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import diskreplay as dr
from tools.bench.data import episodes, fill, nstep_rows
from tools.bench.harness import Contestant, Report, Target, in_turn, ratio_table, ratios, timed, timing_table


class Size(NamedTuple):
    """Steps in the store, and batches drawn in a round."""

    steps: int
    batches: int
    batch_size: int = 256
    shortest: int = 10
    longest: int = 500


FULL, TINY = Size(1_000_000, 1000), Size(300, 5, 16, 3, 20)

N_STEP, GAMMA = 5, 0.99
OURS = "diskreplay"
NESTED = ", nested keys"
FLAT_FIELDS = ("obs", "action", "reward", "next_obs", "done")
NESTED_FIELDS = ("observation", "action", ("next", "reward"), ("next", "observation"), ("next", "done"))
OUR_FIELDS = ("obs", "action", "reward", "next_obs", "discount")
FILLED_AT_ONCE = 10_000


def _draw(sample: Callable[[], Any], fields: Sequence[str | tuple[str, ...]]) -> None:
    """Draw a batch and take what a training step reads."""
    batch = sample()
    for field in fields:
        batch[field]


def _peers(size: Size, folder: Path) -> Iterator[Contestant]:
    from tools.bench import torchrl_peer

    columns = nstep_rows(list(episodes(size.steps, size.shortest, size.longest)), N_STEP, GAMMA)
    last = list(torchrl_peer.KINDS)[-1]
    for kind, name in [*((kind, kind) for kind in torchrl_peer.KINDS), (last, last + NESTED)]:
        make = torchrl_peer.nested_rows if name.endswith(NESTED) else torchrl_peer.rows
        buffer = torchrl_peer.buffer(kind, folder / name, size.steps, size.batch_size)
        for start in range(0, size.steps, FILLED_AT_ONCE):
            buffer.extend(make(columns, start, min(start + FILLED_AT_ONCE, size.steps)))
        fields = NESTED_FIELDS if name.endswith(NESTED) else FLAT_FIELDS
        yield Contestant(name, partial(timed, partial(_draw, buffer.sample, fields), [()] * size.batches))


def run(size: Size, rounds: int, folder: Path, peers: bool = True) -> Report:
    """Draw from a store and from the peer's buffers with the same steps."""
    fill(folder / "store", size.steps, size.shortest, size.longest)
    theirs = list(_peers(size, folder)) if peers else []
    with (
        dr.open(folder / "store") as store,
        dr.Sampler(store, dr.Transitions(n_step=N_STEP, gamma=GAMMA), batch_size=size.batch_size, seed=0) as sampler,
    ):
        ours = Contestant(OURS, partial(timed, partial(_draw, sampler.sample, OUR_FIELDS), [()] * size.batches))
        seconds = in_turn([ours, *theirs], rounds)
        made = sampler.stats()
    tables = [timing_table(seconds, f"one batch of {size.batch_size}")]
    targets = []
    if theirs:
        tables.append(ratio_table(seconds, [(OURS, peer.name) for peer in theirs]))
        for peer in theirs:
            median = float(np.median(ratios(seconds, OURS, peer.name)))
            targets.append(Target(f"faster than {peer.name}", median, 4, "times", at_least=True))
    share = made["seconds_planning"] / (made["seconds_planning"] + made["seconds_gathering"])
    return Report(
        f"Uniform batches of {N_STEP}-step transitions",
        tables,
        targets,
        [
            f"{size.steps:,} steps of CartPole's shape in episodes of {size.shortest} to {size.longest} steps, "
            f"{size.batches:,} batches in a round; everything is in the page cache; no prefetching on either side; "
            "CPU tensors.",
            f"The peer has the easiest job: its rows were made {N_STEP}-step ones before they were stored (obs, "
            "action, reward, next_obs, done, flat), as TorchRL's MultiStep transform does on the collector's side. "
            "Ours stores single steps and makes returns, next observations and discounts as it draws.",
            "Every contestant's five tensors are taken from the batch by name.",
            'Nested keys are those that TorchRL\'s own losses read: ("next", "reward") and so on.',
            "A batch of ours also holds terminated, truncated, n_steps, index and weight, and each call looks for new "
            f"steps first. {share:.0%} of its time went into looking and drawing, the rest into gathering.",
            "torch uses its default number of threads; ours gathers with one.",
        ],
    )
