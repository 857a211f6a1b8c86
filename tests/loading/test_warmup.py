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
from diskreplay.kernels import jit

path, view, distribution = sys.argv[1], eval(sys.argv[2]), eval(sys.argv[3])
dr.warmup(path, view, distribution)

def refuse(kernel, signature):
    raise AssertionError(f"{kernel.py_func.__name__} was compiled after the warm-up")

jit.compile_kernel = refuse
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("view", "distribution"),
    [
        ("dr.Transitions(n_step=3)", "None"),
        ("dr.Transitions(frame_stack=2)", "dr.Prioritized()"),
        ("dr.Sequences(5, overlap=2)", "dr.Prioritized()"),
        ("dr.Sequences(5, stride=2, cross_episodes=True)", "dr.Prioritized()"),
        ("dr.Transitions()", "dr.Recency(10)"),
        ("dr.Episodes()", "dr.Sweep(4)"),
        ("dr.Transitions()", "dr.Stratified()"),
    ],
)
def test_nothing_is_compiled_after_it(path, view, distribution):
    run_python(SCRIPT, path, view, distribution)


@pytest.mark.slow
def test_nothing_is_compiled_after_it_for_a_store_with_a_capacity(path):
    with dr.open(path, "a") as store:
        store.resize(capacity=30)
    run_python(SCRIPT, path, "dr.Transitions()", "None")


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
    with pytest.raises(ValueError, match="distribution"):
        dr.warmup(path, dr.Transitions(), 0.6)
