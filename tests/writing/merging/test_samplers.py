"""Samplers draw the same batches, to the bit, from segments that were merged and from those that were not."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.sampling.test_sampler_states import DISTRIBUTIONS, VIEWS, bits, collected, learn, map_all

BATCHES, SAVED_AT = 24, 12


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return which values of two batches are not the same."""
    return {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}


def check(folder: Path, view: str, distribution: str, prefetch: int = 0, capacity: int | None = None) -> None:
    """Draw from a store that is not merged, from one that is now and then, and, loaded halfway, from another reader."""
    settings = {"compaction": "manual", "segment_steps": 30 if capacity is None else 10, "capacity": capacity}
    with ExitStack() as stack:

        def sampler(store: dr.Store) -> dr.Sampler:
            found = dr.Sampler(
                store, VIEWS[view](), DISTRIBUTIONS[distribution](), batch_size=16, prefetch=prefetch, seed=5
            )
            stack.callback(found.close)
            return found

        plain, ones = stack.enter_context(collected(folder / "plain", 60, **settings))
        merged, others = stack.enter_context(collected(folder / "merged", 60, **settings))
        samplers, stores, packs = [sampler(plain), sampler(merged)], [plain, merged], 0
        for number in range(BATCHES):
            if number == SAVED_AT:
                samplers[1].save("run")
                stores.append(stack.enter_context(dr.open(folder / "merged")))
                samplers.append(sampler(stores[-1]))
                samplers[-1].load("run")
            found = [one.sample() for one in samplers]
            held = [bits(batch) for batch in found]
            # Packs take numbers of segments, so that later ids differ from those without them.
            if distribution != "recency":  # within a block, ids are in an order that their numbers decide
                assert differing(held[0], held[1]) <= {"/index"}, f"batch {number}"
            for late in held[2:]:
                assert not differing(late, held[1]), f"batch {number} of the sampler that was loaded"
            for one, batch in zip(samplers, found, strict=True):
                learn(one, batch, number)
            for collector in (ones, others):
                collector.grow(6)
            if number % 4 == 3:
                for store in (plain, merged):
                    store._sealer.drain()
                packs += merged.compact()["segments"] > 0
            if capacity is not None:
                for store in stores:
                    map_all(store)
        assert packs > 3
        for collector in (ones, others):
            collector.close()


CASES: list[tuple[str, str, int, int | None]] = [
    *(("transitions", name, 0, None) for name in ("prioritized", "recency", "sweep", "by time", "mixture")),
    *((name, "uniform", 0, None) for name in ("hindsight", "sequences", "across episodes", "rollouts")),
    ("sequences", "prioritized", 2, None),
    *(("transitions", name, 0, 800) for name in ("prioritized", "recency")),  # while old steps leave
]


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize(("view", "distribution", "prefetch", "capacity"), CASES)
def test_the_same_is_drawn(tmp_path: Path, view: str, distribution: str, prefetch: int, capacity: int | None) -> None:
    check(tmp_path, view, distribution, prefetch, capacity)
