"""Windows whose number of steps is drawn anew for each item of each batch."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np

from diskreplay.kernels import gathering as kernel
from diskreplay.store.reading.snapshot import Snapshot
from diskreplay.views.base import Block, Ints
from diskreplay.views.gather_plan import GatherPlan
from diskreplay.views.page_ranges import NO_PAGES, Pages, wide_pages
from diskreplay.views.windows import Bounds, Copy, Windows


class RandomSteps(GatherPlan):
    """A gather plan of windows of `least` to `bounds.n` steps, each number with the same probability.

    All are found with the most steps, and then end earlier. `gather` draws only when `seed` came before it; else they
    have the most steps. For the other arguments see `GatherPlan`.
    """

    def __init__(
        self,
        least: int,
        copies: Sequence[Copy],
        view: Any,
        bounds: Bounds,
        summands: Sequence[tuple[str, np.dtype[Any], Any]],
        gamma: float,
        discount: tuple[str, np.dtype[Any]] | None,
        computed: Mapping[str, int],
    ) -> None:
        super().__init__(copies, view, bounds, summands, gamma, discount, computed)
        self._least, self._searched = least, bounds
        self._reached = [_all_ends(copy, bounds.n) if copy.begin == kernel.AFTER else copy for copy in copies]
        self._entropy: int | None = None

    def seed(self, entropy: int) -> None:
        """Say what the next `gather`, and no later one, draws from."""
        self._entropy = entropy

    def gather(self, snapshot: Snapshot, ids: Ints, block: Block, helper: Executor | None = None) -> None:
        """Draw the steps of the windows of these ids, and copy and sum them into the arrays of a block."""
        entropy, self._entropy = self._entropy, None
        self._record[kernel.LIMITS] = 0
        if entropy is not None:
            generator = np.random.Generator(np.random.PCG64(entropy))
            limits = generator.integers(self._least, self._searched.n, len(ids), endpoint=True)
            self._record[kernel.LIMITS] = limits.ctypes.data
        super().gather(snapshot, ids, block, helper)

    def pages(self, snapshot: Snapshot, ids: Ints) -> Pages:
        """Return where the wide rows of these ids lie, wherever their windows will end. Any thread may ask."""
        windows = Windows(len(ids))
        if windows.find(snapshot, ids, *self._searched) >= 0:
            return NO_PAGES  # `gather` says what is wrong
        return wide_pages(snapshot, windows, self._reached)


def _all_ends(copy: Copy, most: int) -> Copy:
    """Return a copy of what one from the row behind a window may need, for windows of 1 to `most` steps."""
    offset, length = copy.offset + 1, copy.length + most - 1
    return copy._replace(begin=kernel.ROW, stop=kernel.FRAMES_STOP, offset=offset, length=length)
