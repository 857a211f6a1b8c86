"""Read and write the rows of arrays of h5py and zarr in blocks."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BLOCK_BYTES = 32 << 20


class ColumnReader:
    """An array whose rows are read in ascending order, in blocks that begin at a chunk of ``chunk_rows`` rows."""

    def __init__(self, array: Any, chunk_rows: int, block_bytes: int = _BLOCK_BYTES) -> None:
        self._array, self.shape, self.dtype = array, array.shape, np.dtype(array.dtype)
        self.row_bytes = self.dtype.itemsize * math.prod(array.shape[1:])
        self._chunk = chunk_rows
        self._block_rows = max(1, block_bytes // max(1, self.row_bytes) // chunk_rows) * chunk_rows
        self._start, self._rows = 0, np.empty((0, *self.shape[1:]), self.dtype)

    def __len__(self) -> int:
        return int(self.shape[0])

    def most_bytes(self, rows: int) -> int:
        """Return the largest size in bytes of the block that a call of `read` keeps for ``rows`` rows."""
        return int(self.row_bytes * min(len(self), max(rows + self._chunk - 1, self._block_rows)))

    def read(self, start: int, stop: int, stops: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows from ``start`` to before ``stop``.

        The call reads a larger block of rows, and keeps the block for later calls. The block ends at the end of an
        episode. ``stops`` has the row after each episode's last row.
        """
        if start < self._start or stop > self._start + len(self._rows):
            first = start - start % self._chunk
            whole = int(np.searchsorted(stops, first + self._block_rows, "right")) - 1
            try:
                rows = self._array[first : max(stop, int(stops[max(0, whole)]))]
            except Exception:  # any error of a library or a codec, perhaps in rows after ``stop``
                rows = self._array[first:stop]
            self._start, self._rows = first, np.asarray(rows)
        return self._rows[start - self._start : stop - self._start]


class ColumnWriter:
    """Appends rows to an array of h5py or zarr, from row ``begin`` on, and writes whole blocks of rows.

    The last block may have fewer rows. If row ``begin`` is inside of a block, the earlier rows of this block get the
    value ``fill``.
    """

    def __init__(self, array: Any, block_rows: int, begin: int = 0, fill: float = 0) -> None:
        self._array, self._block_rows = array, block_rows
        self._count = begin % block_rows
        self._start = begin - self._count
        self._waiting = [np.full((self._count, *array.shape[1:]), fill, array.dtype)]

    def append(self, rows: NDArray[Any]) -> None:
        self._waiting.append(rows)
        self._count += len(rows)
        if self._count >= self._block_rows:
            joined = np.concatenate(self._waiting)
            whole = len(joined) - len(joined) % self._block_rows
            self._write(joined[:whole])
            self._start += whole
            self._waiting, self._count = [joined[whole:].copy()], len(joined) - whole

    def finish(self) -> None:
        if self._count:
            self._write(np.concatenate(self._waiting))

    def _write(self, rows: NDArray[Any]) -> None:
        self._array[self._start : self._start + len(rows)] = rows
