"""Windows whose number of steps is drawn anew for each item of each batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diskreplay.ids import Ints
from diskreplay.kernels import gathering as cols
from diskreplay.reading.snapshot import Snapshot
from diskreplay.views.base import Block
from diskreplay.views.gather_plan import GatherPlan
from diskreplay.views.parallel_copy import CopyThreads
from diskreplay.views.windows import Bounds, Copy


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
        self._least, self._most = least, bounds.n
        self._entropy: int | None = None
        self._limits = np.zeros(0, np.int64)

    def seed(self, entropy: int | None) -> None:
        """Say what the next `gather`, and no later one, draws from; None: it draws nothing."""
        self._entropy = entropy

    def gather(self, snapshot: Snapshot, ids: Ints, block: Block, threads: CopyThreads | None = None) -> None:
        """Draw the steps of the windows of these ids, and copy and sum them into the arrays of a block."""
        entropy, self._entropy = self._entropy, None
        self._record[cols.LIMITS] = 0
        if entropy is not None:
            generator = np.random.Generator(np.random.PCG64(entropy))
            limits = generator.integers(self._least, self._most, len(ids), endpoint=True)
            self._record[cols.LIMITS], self._limits = limits.ctypes.data, limits
        super().gather(snapshot, ids, block, threads)

    def _reached(self, copies: Sequence[Copy]) -> list[Copy]:
        """Return copies of the rows behind a window wherever it may end: from 1 to the most steps from its first."""
        found = []
        for copy in copies:
            if copy.begin == cols.AFTER:
                length = copy.length + self._most - 1
                copy = Copy(copy.leaf, cols.ROW, cols.FRAMES_STOP, copy.offset + 1, length, copy.target)
            found.append(copy)
        return found
