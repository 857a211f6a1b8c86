"""Compile beforehand what a sampler needs."""

import copy
import os
import tempfile
from contextlib import suppress

import numpy as np

from diskreplay.distributions.base import Distribution
from diskreplay.errors import NotEnoughData
from diskreplay.kernels.table import EVERY, compile_all, of_sampler
from diskreplay.sampling.arguments import distribution_argument, store_argument, view_argument
from diskreplay.sampling.sampler import Sampler
from diskreplay.store.opening import create, open as open_store
from diskreplay.store.store import Store
from diskreplay.views.base import View
from diskreplay.writing.writer import Writer

# Steps of an episode, beside those of a sample: what begins, goes on and ends is all there.
_MORE = 8


def warmup(
    store: Store | str | os.PathLike[str] | None = None,
    view: View | None = None,
    distribution: Distribution | None = None,
) -> None:
    """Compile what samplers need, so that a first batch does not wait for that.

    Kernels are kept on disk: after the first time on a machine this takes a fraction of a second. Without arguments all
    kernels are compiled, whatever will be sampled.

    With a store and a view only what such a sampler needs is compiled, and whatever else its first batch does is done
    too. A store of the same schema with one short episode is made in a temporary folder and sampled; the store itself
    is only asked for its schema and whether it hides steps, and the distribution is copied. A `value_fn` is called,
    with an observation of zeros.

    Parameters
    ----------
    store : Store or path or None
        The store that is going to be sampled.
    view : View or None
        What an id will mean.
    distribution : Distribution or None
        Which ids will be drawn; None is `Uniform`.

    Raises
    ------
    ValueError
        The view or the distribution is invalid, or one of the store and the view is missing.
    StoreNotFound
        There is no store at the path.
    """
    if store is None and view is None and distribution is None:
        compile_all(EVERY)
        return
    if store is None or view is None:
        missing = "store" if store is None else "view"
        raise ValueError(f"warmup has no {missing}: give a store and a view, or no argument at all")
    if isinstance(store, str | os.PathLike):
        with open_store(store) as opened:
            warmup(opened, view, distribution)
        return
    schema, view = store_argument(store).schema, view_argument(view)
    distribution = copy.deepcopy(distribution_argument(distribution))
    store.follow_compiled(of_sampler(distribution.weighted))  # of one with limits by another kernel than the one below
    with tempfile.TemporaryDirectory(prefix="diskreplay-") as folder, create(f"{folder}/store", schema) as trial:
        sampler = Sampler(trial, view, distribution, batch_size=2, seed=0)
        with sampler, trial.writer() as writer, suppress(NotEnoughData, StopIteration):
            steps = (view.item_steps or 1) + _MORE
            for step in range(steps):
                _append(trial, writer, step == steps - 1)
            for _ in range(2):  # what is new, and what is at rest
                batch = sampler.sample()
            if distribution.weighted:
                sampler.update_priorities(batch.index, np.ones(len(batch.index)))


def _append(store: Store, writer: Writer, ends: bool) -> None:
    """Append a step of zeros."""
    schema = store.schema
    zeros = {leaf: np.zeros(field.shape, field.dtype) for leaf, field in schema.step_leaves.items()}
    extra = schema.unflatten("extra", zeros) if schema.extra else {}
    obs, action, reward = (schema.unflatten(part, zeros) for part in ("obs", "action", "reward"))
    writer.append(obs, action, reward, ends, next_obs=obs, **extra)
