"""The TD errors of a view's items: of windows, made of those of their steps."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from diskreplay.distributions.prioritized import sequence_error
from diskreplay.errors import SegmentGone
from diskreplay.ids import Ints
from diskreplay.reading.snapshot import Snapshot
from diskreplay.sampling.gatherer import Destination, Gatherer
from diskreplay.schema.schema import Schema
from diskreplay.views.base import View

Floats = NDArray[np.float64]

# Windows that are looked at together.
_AT_ONCE = 256


class ItemErrors:
    """What the errors of steps make of the items of one view. Not thread-safe: one sampler, under its lock."""

    def __init__(self, view: View, schema: Schema) -> None:
        self._view, self._schema = view, schema
        self._readers: dict[tuple[str, ...], Gatherer] = {}
        self._has_windows = True  # until a view says that it has none

    def loss_mask(self, snapshot: Snapshot, ids: Ints) -> NDArray[np.bool_] | None:
        """Return which steps of windows count for the loss, (n, length); None where the view has no windows.

        SegmentGone where a segment was evicted since the snapshot.
        """
        found = self._gathered(snapshot, ids, "loss_mask")
        return None if found is None else found[0]

    def initial(self, snapshot: Snapshot, ids: Ints, eta: float) -> Floats:
        """Return the |td| with which items begin, (n,): the initial priorities of their steps.

        Of a window that is eta · max + (1 - eta) · mean over its steps that count for the loss and have one. NaN where
        no step has one, or the segment was evicted since the snapshot.
        """
        blocks = []
        for at in range(0, len(ids), _AT_ONCE):
            try:
                found = self._gathered(snapshot, ids[at : at + _AT_ONCE], "loss_mask", "priority")
            except SegmentGone:
                blocks.append(np.full(len(ids[at : at + _AT_ONCE]), np.nan))
                continue
            if found is None:
                return snapshot.priorities(ids)
            mask, priorities = found
            given = mask & ~np.isnan(priorities)
            blocks.append(np.where(given.any(axis=1), sequence_error(priorities, given, eta), np.nan))
        return np.concatenate(blocks)

    def _gathered(self, snapshot: Snapshot, ids: Ints, *fields: str) -> list[NDArray[Any]] | None:
        """Return these fields of windows; None where the view has none."""
        if self._has_windows and fields not in self._readers:
            try:
                destination = Destination(torch.device("cpu"), 0)
                self._readers[fields] = Gatherer(self._view, self._schema, fields, destination)
            except ValueError:
                self._has_windows = False
        if not self._has_windows:
            return None
        slot, _, _ = self._readers[fields].gather(snapshot, ids)
        paths = [leaf.path for leaf in slot.block.leaves]
        return [slot.block.arrays[paths.index((name,))] for name in fields]
