from itertools import chain

import numpy as np
from hypothesis import given, settings

from diskreplay.testing import ModelStore
from diskreplay.testing.nested import flat
from diskreplay.testing.scripts import play, random_values
from diskreplay.testing.strategies import schemas, writer_plans

FEW = settings(max_examples=40, deadline=None)


@FEW
@given(schemas())
def test_random_values_have_the_shapes_and_dtypes_of_the_schema(schema):
    values = {
        **flat(random_values(schema.obs, np.random.default_rng(0), (5,)), "obs"),
        **flat(random_values(schema.action, np.random.default_rng(0), (5,)), "action"),
    }

    for leaf, array in values.items():
        field = schema.leaves[leaf]
        assert (array.dtype, array.shape) == (field.dtype, (5, *field.shape))


@FEW
@given(schemas(), writer_plans(max_lanes=5, max_steps=10))
def test_every_planned_step_is_played_once_in_order(schema, plan):
    store = ModelStore()
    behind = play(plan, schema, [store.writer(plan.num_envs)], first_serial=100)

    planned = sum(episode.steps for lane in plan.lanes for episode in lane)
    lanes = [[int(s.extra["serial"]) for e in lane.episodes for s in e.steps] for lane in store.lanes()]
    assert behind == 100 + planned
    assert len(store) == planned
    assert sorted(chain.from_iterable(lanes)) == list(range(100, behind))
    assert all(serials == sorted(serials) for serials in lanes)
    assert not plan.close or all(episode.ended for episode in store.episodes)


@FEW
@given(schemas(), writer_plans(max_lanes=3, max_steps=10))
def test_the_same_plan_plays_the_same_calls(schema, plan):
    stores = [ModelStore(), ModelStore()]
    for store in stores:
        play(plan, schema, [store.writer(plan.num_envs)])

    one, other = (
        [(e.ended, e.cut, e.final is None, [s.obs[k].tobytes() for s in e.steps for k in s.obs]) for e in s.episodes]
        for s in stores
    )
    assert one == other
