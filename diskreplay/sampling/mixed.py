"""Batches from several samplers, for example of demonstrations and of the agent's own experience."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import IterableDataset

from diskreplay.bounded_json import parse_json
from diskreplay.device_tensors import fetched
from diskreplay.distributions.number_arguments import int_argument
from diskreplay.distributions.saved_state import state_of
from diskreplay.errors import InvalidIndex
from diskreplay.sampling.arguments import errors_argument, ids_argument, kind_argument
from diskreplay.sampling.batch import Batch, Kind, Tree, kind_of, map_tree
from diskreplay.sampling.sampler import Sampler
from diskreplay.sampling.sampler_states import Change, as_arrays, as_tensors, mapped, replace_attributes
from diskreplay.schema.schema import TupleRecord

# In a mixed id, this bit and all higher bits are the index of a sampler. The ids of a store reach this bit only after 8
# million segments.
SOURCE_SHIFT = 58
MOST_SOURCES = 1 << (63 - SOURCE_SHIFT)


class MixedSampler(IterableDataset[Batch]):
    """Draws each batch from several samplers, with a fixed share for each.

    A batch has the items of the first sampler, then the items of the second, and so on. The `index` of a batch also
    tells the sampler of each item, so only this mixed sampler can use the `index`. The weight of an item comes from the
    item's sampler.

    The samplers may have different stores, views or distributions. For example, half of a batch may be 1-step
    transitions and the other half 5-step transitions, or sequences may have two lengths. Shorter sequences are padded
    to the length of the longest sequence in the batch, as views pad sequences. A mixed sampler ends when one of its
    samplers ends.

    Samplers with `prefetch` make their parts of the next batches ahead.

    Parameters
    ----------
    samplers : sequence of (Sampler, float)
        Samplers and their shares. The shares need not sum to one. All samplers' batches must have the same fields. The
        mixed sampler does not close its samplers.
    batch_size : int
        Number of items in a batch. If a share is not a whole number of items, it is rounded down. The remaining items
        are assigned to samplers at random, so that each sampler gets its share on average.
    seed : int or None
        Seed of the random assignment of the remaining items. None: a random seed.

    Raises
    ------
    ValueError
        An argument is invalid.

    Examples
    --------
    >>> old = dr.Sampler("cartpole.replay", dr.Transitions(), where=lambda episode: episode.length > 15)
    >>> new = dr.Sampler("cartpole.replay", dr.Transitions())
    >>> dr.MixedSampler([(old, 0.25), (new, 0.75)], batch_size=32, seed=0).sample().batch_size
    32
    """

    def __init__(
        self, samplers: Sequence[tuple[Sampler, float]], *, batch_size: int = 256, seed: int | None = None
    ) -> None:
        self._samplers, shares = _checked(samplers)
        self._shares = shares / shares.sum()
        self._batch_size = int_argument("batch_size", batch_size)
        self._rng = np.random.default_rng(seed)
        # For each of the next batches, the number of items that each sampler gives.
        self._planned: deque[list[int]] = deque()
        # The parts of the next batch that a failed call of `sample` has drawn, by index of the sampler.
        self._drawn: dict[int, Batch] = {}
        for sampler, share in zip(self._samplers, self._shares, strict=True):
            sampler._expect(max(1, int(share * self._batch_size)))

    def __repr__(self) -> str:
        return f"MixedSampler({list(zip(self._samplers, self._shares.tolist(), strict=True))})"

    def sample(self, batch_size: int | None = None, beta: float | None = None) -> Batch:
        """Draw a batch; see `Sampler.sample`. `beta` applies to the samplers whose distribution has weights.

        Raises
        ------
        NotEnoughData
            A sampler has nothing to draw from.
        ValueError
            The samplers' batches differ in their fields.
        """
        size = self._batch_size if batch_size is None else int_argument("batch_size", batch_size)
        if size != self._batch_size:
            return _joined(self._draw([self._counts(size)], beta, {}), self._kind)
        while len(self._planned) <= max(sampler._prefetch for sampler in self._samplers):
            self._planned.append(self._counts(size))
        batch = _joined(self._draw(self._planned, beta, self._drawn), self._kind)
        self._planned.popleft()
        self._drawn = {}
        return batch

    def _draw(self, planned: Sequence[list[int]], beta: float | None, drawn: dict[int, Batch]) -> dict[int, Batch]:
        """Add the missing parts of the first planned batch to `drawn`, by index of the sampler."""
        for source, sampler in enumerate(self._samplers):
            if planned[0][source] and source not in drawn:
                sizes = [counts[source] for counts in planned if counts[source]]
                drawn[source] = sampler._sample_first(sizes, beta if sampler.distribution.weighted else None)
        return drawn

    @property
    def _kind(self) -> Kind:
        return ("mixed", *(sampler.view.kind for sampler in self._samplers))

    def _counts(self, size: int) -> list[int]:
        exact = self._shares * size
        counts = np.floor(exact + 1e-9).astype(np.int64)
        rest = size - int(counts.sum())
        if rest:
            remainders = np.maximum(exact - counts, 0.0)
            chosen = self._rng.choice(len(remainders), rest, p=remainders / remainders.sum())
            counts += np.bincount(chosen, minlength=len(remainders))
        found: list[int] = counts.tolist()
        return found

    def gather(self, ids: Any) -> Batch:
        """Gather the batch of exactly these ids, in their order, as `Sampler.gather` does.

        Raises
        ------
        InvalidIndex
            An id cannot come from a batch of this mixed sampler.
        """
        ids, sources = self._routed(ids)
        parts, places = {}, []
        for source in np.unique(sources).tolist():
            places.append(np.flatnonzero(sources == source))
            parts[source] = self._samplers[source].gather(ids[places[-1]])
        return _joined(parts, self._kind).select(np.argsort(np.concatenate(places), kind="stable"))

    def update_priorities(self, index: Any, td_error: Any, kind: Kind | None = None) -> int:
        """Give each sampler the errors of its own items; see `Sampler.update_priorities`.

        Items of samplers without priorities are ignored. A batch's `kind` is ("mixed", ...), with the kind of each
        sampler's view.

        Returns
        -------
        int
            The number of skipped ids. An id is skipped if it was evicted, if its sampler's view does not know it, or if
            its kind is not the kind of that view.
        """
        kind = kind_of(index) if kind is None else kind_argument(kind)
        index, td_error = fetched(index, td_error)
        kinds = self._kind[1:] if kind is None else kind[1:]
        if kind is not None and (kind[:1] != ("mixed",) or len(kinds) != len(self._samplers)):
            return len(ids_argument(index))
        ids, sources = self._routed(index)
        errors = errors_argument(td_error, len(ids))
        if not np.isfinite(errors).all():
            raise ValueError("td_error must be finite: nothing was updated")
        skipped = 0
        for source in np.unique(sources).tolist():
            sampler = self._samplers[source]
            if sampler.distribution.weighted:
                mine = sources == source
                skipped += sampler.update_priorities(ids[mine], errors[mine], kinds[source])
        return skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the samplers and of the random assignment; see `Sampler.state_dict`.

        If the last call of `sample` failed, the state also has the parts of the batch that the call drew, with all
        fields.
        """
        states = [sampler.state_dict() for sampler in self._samplers]
        planned = np.array(self._planned, np.int64).reshape(-1, len(states))
        rng = json.dumps(self._rng.bit_generator.state)
        # The state has no arrays: numpy lacks some dtypes of tensors, and `torch.load` would have to unpickle arrays.
        parts = {str(source): part for source, part in self._drawn.items()}
        drawn = mapped(parts, torch.Tensor, lambda tensor: tensor.detach().cpu())
        return {"rng": rng, "planned": as_tensors(planned), "drawn": drawn, "samplers": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; see `Sampler.load_state_dict`.

        Raises
        ------
        ValueError
            The state has another number of samplers, or batches drawn ahead with another batch size, or a sampler
            refuses its own state. Nothing was changed.
        """
        with state_of("a mixed sampler"):
            rng, states = np.random.PCG64(), list(state["samplers"])
            rng.state = parse_json(state["rng"])
            planned = np.array(as_arrays(state.get("planned", [])), np.int64).reshape(-1, len(states))
            drawn = {int(source): _nested(fields) for source, fields in (state.get("drawn") or {}).items()}
            asked = dict(enumerate(planned[0].tolist())) if len(planned) else {}
            if any(len(fields["index"]) != asked.get(source) for source, fields in drawn.items()):
                raise ValueError("parts of a batch differ in size from its plan")
        if len(states) != len(self._samplers):
            raise ValueError(
                f"this is the state of {len(states)} samplers, but the mixed sampler has {len(self._samplers)}"
            )
        if (planned < 0).any() or (planned.sum(axis=1) != self._batch_size).any():
            raise ValueError(
                f"this state has batches of {planned.sum(axis=1).tolist()} items drawn ahead, and the batch_size is "
                f"{self._batch_size}: use the same batch_size"
            )
        parts = {
            source: Batch(fields, self._samplers[source].view.kind).to(self._samplers[source]._destination.device)
            for source, fields in drawn.items()
        }
        own = {"_rng": np.random.Generator(rng), "_planned": deque(planned.tolist()), "_drawn": parts}

        def load(number: int, changes: Sequence[Change]) -> None:
            """Load the samplers' states from index `number` on. All samplers are locked until the last load."""
            if number == len(states):
                replace_attributes(changes)
            else:
                self._samplers[number]._load(states[number], lambda more: load(number + 1, [*changes, *more]))

        load(0, [(self, own)])

    def _routed(self, index: Any) -> tuple[Any, Any]:
        """Return the two parts of mixed ids, (n,) each: ids in the samplers' stores, and indices of the samplers."""
        ids = ids_argument(index)
        sources = ids >> SOURCE_SHIFT
        unknown = np.flatnonzero((sources < 0) | (sources >= len(self._samplers)))
        if len(unknown):
            raise InvalidIndex(
                f"id {ids[unknown[0]]} belongs to none of the {len(self._samplers)} samplers: pass ids of mixed batches"
            )
        return ids & ((1 << SOURCE_SHIFT) - 1), sources

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        return self.sample()


def _checked(samplers: Any) -> tuple[list[Sampler], Any]:
    if isinstance(samplers, str) or not isinstance(samplers, Sequence) or not samplers or len(samplers) > MOST_SOURCES:
        raise ValueError(f"samplers must be 1 to {MOST_SOURCES} pairs of a Sampler and its share, not {samplers!r}")
    for pair in samplers:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], Sampler):
            raise ValueError(f"samplers must be pairs of a Sampler and its share, not {pair!r}")
    shares = np.array([share for _, share in samplers], np.float64)
    if not np.isfinite(shares).all() or (shares <= 0).any():
        raise ValueError(f"shares must be positive numbers, not {shares.tolist()}")
    return [sampler for sampler, _ in samplers], shares


def _joined(parts: Mapping[int, Batch], kind: Kind) -> Batch:
    """Return one batch with the items of all `parts` (by index of the sampler). Pad shorter sequences."""
    batches = list(parts.values())
    sizes, lengths = [batch.batch_size for batch in batches], [_length(batch) for batch in batches]

    def concatenated(*tensors: torch.Tensor) -> torch.Tensor:
        if len({tensor.shape[1:] for tensor in tensors}) == 1:
            return torch.cat(tensors)
        if [tensor.shape[1] for tensor in tensors] != lengths:
            raise _different(batches)
        found = tensors[0].new_zeros((sum(sizes), max(lengths), *tensors[0].shape[2:]))
        for rows, tensor, length in zip(found.split(sizes), tensors, lengths, strict=True):
            rows[:, :length] = tensor
        return found

    def set_final(obs: torch.Tensor, next_obs: torch.Tensor) -> None:
        for rows, last, length in zip(obs.split(sizes), next_obs.split(sizes), lengths, strict=True):
            if length < max(lengths):
                rows[:, length] = last[:, length - 1]

    if any(_form(batch) != _form(batches[0]) for batch in batches):
        raise _different(batches)
    fields: dict[str, Tree] = {}
    for name in batches[0]:
        trees = [batch[name] for batch in batches]
        if name == "index":
            trees = [tree | (source << SOURCE_SHIFT) for source, tree in zip(parts, trees, strict=True)]
        fields[name] = map_tree(concatenated, *trees)
    if len(set(lengths)) > 1 and {"obs", "next_obs"} <= fields.keys():
        map_tree(set_final, fields["obs"], fields["next_obs"])
    return Batch(fields, kind)


def _nested(plain: Any) -> Tree:
    """Return `plain`, a value of a saved state, as a tree of tensors. The lists in `plain` stand for tuples."""
    if isinstance(plain, list):
        return TupleRecord(map(_nested, plain))
    if isinstance(plain, Mapping):
        return {name: _nested(below) for name, below in plain.items()}
    return torch.as_tensor(plain)


def _length(batch: Batch) -> int:
    return int(batch["mask"].shape[1]) if "mask" in batch else 0


def _form(batch: Batch) -> Any:
    """Return the dtype, ndim, shape after the second axis, and device of each field, which all batches must share."""
    return {
        name: map_tree(lambda tensor: (tensor.dtype, tensor.ndim, tensor.shape[2:], tensor.device), batch[name])
        for name in batch
    }


def _different(batches: Sequence[Batch]) -> ValueError:
    return ValueError(f"the samplers' batches have different fields: {' and '.join(map(str, batches))}; see `fields`")
