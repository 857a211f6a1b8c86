"""Hypothesis strategies of fake snapshots: hypothesis draws the structure, a seeded generator the numbers."""

import numpy as np
from hypothesis import strategies as st

import diskreplay as dr
from tests.views.fakes import ENDS, SCHEMA, Segment, Snapshot, episode

ended_plans = st.tuples(st.integers(1, 9), st.sampled_from(ENDS), st.booleans())
open_plans = st.tuples(st.integers(1, 9), st.just("open"), st.booleans())


@st.composite
def segments(draw: st.DrawFn, schema: dr.Schema) -> Segment:
    sealed = draw(st.booleans())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lanes = []
    for _ in range(draw(st.integers(1, 4))):
        plans = draw(st.lists(ended_plans, max_size=4))
        if not sealed and draw(st.booleans()):
            plans.append(draw(open_plans))
        lanes.append([episode(schema, *plan, rng) for plan in plans])
    return Segment(lanes, sealed, draw(st.sampled_from((1, 2, 4, 8, 64))), apart=sealed and draw(st.booleans()))


@st.composite
def snapshots(draw: st.DrawFn, schema: dr.Schema = SCHEMA) -> Snapshot:
    """Draw a snapshot of one to three segments, some evicted, with or without hidden steps."""
    parts = draw(st.lists(st.none() | segments(schema), min_size=1, max_size=3))
    whole = Snapshot(schema, parts)
    frontier = draw(st.sampled_from([0, *sorted(whole.model)])) if draw(st.booleans()) else 0
    kept = [draw(st.integers(0, int(rows))) for rows in whole.committed] if draw(st.booleans()) else None
    order = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return Snapshot(schema, parts, frontier, discovery=order, kept=kept)
