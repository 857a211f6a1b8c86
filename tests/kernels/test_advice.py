"""Advice about memory: both versions give it, and count what the system refuses."""

import mmap

import numpy as np
import pytest

from diskreplay.views.base import POPULATE_READ, WILL_NEED
from tests.kernels.pairs import KERNELS
from tests.testing.support import resident_pages

PAGES = 8


@pytest.mark.parametrize("version", [0, 1])
def test_advice_reaches_the_pages_it_names_and_refusals_are_counted(tmp_path, version):
    advise = KERNELS["advise"][version]
    path = tmp_path / "pages"
    path.write_bytes(bytes(PAGES * mmap.PAGESIZE))
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory:
        memory.madvise(mmap.MADV_RANDOM)
        array = np.frombuffer(memory, np.uint8)
        start = array.ctypes.data
        before = resident_pages(start)
        good = start + np.array([0, 3]) * mmap.PAGESIZE
        sizes = np.array([1, 2]) * mmap.PAGESIZE
        assert advise(good, sizes, WILL_NEED) == 0
        assert advise(good, sizes, POPULATE_READ) == 0
        assert resident_pages(start) >= before + 3
        # Where nothing is mapped, and where no page begins.
        assert advise(np.array([0, start + 1]), np.full(2, mmap.PAGESIZE), WILL_NEED) == 2
        assert advise(np.zeros(0, np.int64), np.zeros(0, np.int64), WILL_NEED) == 0
        del array
