"""Memory in large pages."""

from types import SimpleNamespace

import numpy as np
import pytest

from diskreplay.kernels import huge_pages
from diskreplay.kernels.huge_pages import LARGE_PAGE, give_back_free, zeros

MANY = 1 << 20


@pytest.mark.parametrize("count", [0, 1, 1000, LARGE_PAGE // 4])
def test_arrays_are_zeros_that_do_not_overlap_and_start_at_a_cache_line(count):
    found = zeros((count, np.float64), (7, np.int32), (count, np.int32))
    assert [(array.shape, array.dtype) for array in found] == [
        ((count,), np.float64),
        ((7,), np.int32),
        ((count,), np.int32),
    ]
    assert all(array.ctypes.data % 64 == 0 for array in found)
    for number, array in enumerate(found):
        assert not array.any()
        array[:] = number + 1
    assert all((array == number + 1).all() for number, array in enumerate(found))
    del found[:2]
    assert (found[0] == 3).all()


def test_free_memory_is_given_back_where_the_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    give_back_free(MANY)
    calls: list[int] = []
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: SimpleNamespace(malloc_trim=calls.append))
    give_back_free(10)
    assert not calls
    give_back_free(MANY)
    assert calls == [0]
    monkeypatch.setattr(huge_pages.ctypes, "CDLL", lambda _: SimpleNamespace())
    give_back_free(MANY)
