"""Every field of every transition equals the reference loop, over random schemas, episodes and views."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st

import diskreplay as dr
from diskreplay.testing import ModelStore, check_store
from diskreplay.testing.scripts import play
from diskreplay.testing.strategies import schemas, writer_plans
from tests.testing.support import check_views, quiet, scratch
from tests.tiers import whole_or_part

views = st.tuples(st.none() | st.integers(1, 20), st.sampled_from((0.0, 0.9, 0.99, 1.0)), st.integers(1, 5))


def compare(schema, plans, chunk_bytes, segment_steps, views):
    """Play the plans on a store and on a model; return how many transitions were equal."""
    with scratch() as folder:
        store = dr.create(Path(folder) / "store", schema, chunk_bytes=chunk_bytes, segment_steps=segment_steps)
        model, writers, serial = ModelStore(), [], 0
        with store:
            for plan in plans:
                writers.append(store.writer(plan.num_envs))
                serial = play(plan, schema, [model.writer(plan.num_envs), quiet(writers[-1])], serial)
            store.refresh()
            ids = check_store(store, model, length_cuts=segment_steps is not None)
            count = check_views(store, model, ids, views)
            for writer in writers:
                writer.close()
        return count


def check_random_stores(number, examples, max_steps):
    """Compare random stores, the same for the same number; return how many transitions they had."""
    counts = []

    # The smallest chunk holds 4 to 256 rows of these fields: episodes are up to several chunks long.
    @seed(number)
    @settings(
        max_examples=examples,
        derandomize=False,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(
        schema=schemas(),
        plans=st.lists(writer_plans(max_steps=max_steps), min_size=1, max_size=2),
        chunk_bytes=st.sampled_from((256, 1024, 4096)),
        segment_steps=st.none() | st.integers(1, 200) | st.just("episode"),
        views=st.lists(views, min_size=2, max_size=4),
    )
    def check(schema, plans, chunk_bytes, segment_steps, views):
        counts.append(compare(schema, plans, chunk_bytes, segment_steps, views))

    check()
    return sum(counts)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_random_transitions_equal_the_reference_loop():
    # How many a store has depends on what hypothesis makes of a seed, which is another thing in each of its versions.
    wanted, compared, number = whole_or_part(100_000, 2_000), 0, 0
    while compared < wanted:
        number += 1
        compared += check_random_stores(number, examples=whole_or_part(40, 10), max_steps=200)
