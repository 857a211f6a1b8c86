"""`warmup`: what a sampler needs is compiled before it is made."""

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.support import append_numbered, run_python, serial_schema

# Everything that a view and a distribution need; afterwards nothing may be compiled or loaded any more.
SCRIPT = """
import sys
import numpy as np
import diskreplay as dr
from diskreplay.kernels import cache

path, view, distribution = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])
dr.warmup(path, view, distribution)

def refuse(module, name):
    raise AssertionError(f"{name} was compiled after the warm-up")

cache.compile_kernel = refuse
with dr.open(path) as store, dr.Sampler(store, view, distribution, batch_size=4, seed=0) as sampler:
    for _ in range(3):
        batch = sampler.sample()
    if isinstance(distribution, dr.Prioritized):
        sampler.update_priorities(batch.index, np.ones(4))
"""


@pytest.fixture
def path(tmp_store):
    schema = serial_schema(extra={"pair": (dr.Field((2,), "float32"), dr.Field((), "int64"))})
    with dr.create(tmp_store, schema) as store, store.writer() as writer:
        for first in range(0, 60, 20):
            append_numbered(writer, range(first, first + 20), pair=(np.zeros(2), 0))
    return tmp_store


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize(
    ("view", "distribution", "capacity"),
    [
        ("dr.Transitions(n_step=3)", "None", None),
        ("dr.Transitions(frame_stack=2)", "dr.Prioritized()", None),
        ("dr.Sequences(5, overlap=2)", "dr.Prioritized()", None),
        ("dr.Sequences(5, stride=2, cross_episodes=True)", "dr.Prioritized()", None),
        ("dr.Transitions()", "dr.Recency(10)", None),
        ("dr.Episodes()", "dr.Sweep(4)", None),
        ("dr.Transitions()", "dr.Stratified()", None),
        ("dr.Transitions()", "None", 30),
    ],
)
def test_nothing_is_compiled_after_it(path, view, distribution, capacity):
    with dr.open(path, "a") as store:
        store.resize(capacity=capacity)
    run_python(SCRIPT, path, view, distribution)


@pytest.mark.slow(turns=4)
def test_without_arguments_nothing_is_compiled_after_it_whatever_is_sampled(path):
    script = SCRIPT.replace("dr.warmup(path, view, distribution)", "dr.warmup()")
    run_python(script, path, "dr.Sequences(5, overlap=2)", "dr.Prioritized()")
    run_python(script, path, "dr.Transitions()", "dr.Stratified()")


def test_neither_the_store_nor_the_distribution_is_changed(path):
    distribution = dr.Prioritized()
    with dr.open(path) as store:
        before = store.info()
        dr.warmup(store, dr.Transitions(), distribution)
        assert store.info() == before
    assert distribution.is_new


def test_what_is_no_store_view_or_distribution_is_refused(path):
    with pytest.raises(dr.StoreNotFound):
        dr.warmup(path.parent / "nowhere", dr.Transitions())
    with pytest.raises(ValueError, match="view"):
        dr.warmup(path, "transitions")
    with pytest.raises(ValueError, match=r"^warmup has no view: give a store and a view, or no argument at all$"):
        dr.warmup(path)
    with pytest.raises(ValueError, match="^warmup has no store"):
        dr.warmup(view=dr.Transitions())
    with pytest.raises(ValueError, match="distribution"):
        dr.warmup(path, dr.Transitions(), 0.6)
