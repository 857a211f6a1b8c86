"""A function that compiles the kernels of a sampler ahead of its first batch."""

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

# The episode of the temporary store is this number of steps longer than an item. So items at the start, in the middle
# and at the end of the episode can be drawn.
_MORE = 8


def warmup(
    store: Store | str | os.PathLike[str] | None = None,
    view: View | None = None,
    distribution: Distribution | None = None,
) -> None:
    """Compile the kernels that samplers use, so that a sampler's first batch does not wait for the compiler.

    Compiled kernels are kept on disk: after the first call on a machine, a call takes a fraction of a second. Without
    arguments, all kernels are compiled.

    With a store and a view, only the kernels of a sampler with these arguments are compiled. The other one-time work of
    a first batch is done, too: batches are drawn from a temporary store with the same schema and one short episode. The
    batches are drawn with a copy of the distribution. If the view has a `value_fn`, it is called with an observation of
    zeros. Of the given store, only the schema and the limits are read.

    Parameters
    ----------
    store : Store or path or None
        The store that will be sampled.
    view : View or None
        The view of the sampler.
    distribution : Distribution or None
        The distribution of the sampler; None is `Uniform`.

    Raises
    ------
    ValueError
        The view or the distribution is invalid, or only one of store and view is given.
    StoreNotFound
        The path has no store.

    Examples
    --------
    >>> dr.warmup(dr.open("cartpole.replay"), dr.Transitions(n_step=5))  # compiles the kernels of such a sampler
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
    store.follow_compiled(of_sampler(distribution.weighted))  # a store with limits needs one more kernel
    with tempfile.TemporaryDirectory(prefix="diskreplay-") as folder, create(f"{folder}/store", schema) as trial:
        sampler = Sampler(trial, view, distribution, batch_size=2, seed=0)
        with sampler, trial.writer() as writer, suppress(NotEnoughData, StopIteration):
            steps = (view.item_steps or 1) + _MORE
            for step in range(steps):
                _append(trial, writer, step == steps - 1)
            for _ in range(2):  # the second batch finds no new steps
                batch = sampler.sample()
            if distribution.weighted:
                sampler.update_priorities(batch.index, np.ones(len(batch.index)))


def _append(store: Store, writer: Writer, ends: bool) -> None:
    schema = store.schema
    zeros = {leaf: np.zeros(field.shape, field.dtype) for leaf, field in schema.step_leaves.items()}
    extra = schema.unflatten("extra", zeros) if schema.extra else {}
    obs, action, reward = (schema.unflatten(part, zeros) for part in ("obs", "action", "reward"))
    writer.append(obs, action, reward, ends, next_obs=obs, **extra)
