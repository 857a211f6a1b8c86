"""Arrays as columns of Arrow."""

import numpy as np
import pytest

import diskreplay as dr

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")

from diskreplay.interop.arrow_arrays import from_arrow, to_arrow  # noqa: E402


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(5,), (5, 3), (5, 2, 3, 4), (0, 3), (1, 1)])
def test_an_array_comes_back_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    rows = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    column = to_arrow(rows)
    assert len(column) == shape[0]
    for found in (column, pa.chunked_array([column, column[:0]]), column[:3]):
        back = from_arrow(found, "x")
        assert back.dtype == rows.dtype
        np.testing.assert_array_equal(back, rows[: len(found)])


def test_a_part_of_a_column_is_its_own_rows() -> None:
    rows = np.arange(24).reshape(6, 2, 2)
    np.testing.assert_array_equal(from_arrow(to_arrow(rows)[2:5], "x"), rows[2:5])
    chunks = pa.chunked_array([to_arrow(rows)[4:], to_arrow(rows)[:1]])
    np.testing.assert_array_equal(from_arrow(chunks, "x"), rows[[4, 5, 0]])
    assert from_arrow(pa.chunked_array([], to_arrow(rows).type), "x").shape == (0, 2, 2)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array(["a"]), "the column x has values of the type string, of which no array can be made"),
        (pa.array([1, None]), "the column x lacks 1 values"),
        (pa.array([[1], None], pa.list_(pa.int8(), 1)), "the column x lacks 1 values"),
        (pa.array([[1, 2], [3]]), "the column x has values of the type list.*, of which no array can be made"),
    ],
)
def test_what_is_no_array_is_refused(column: pa.Array, said: str) -> None:
    with pytest.raises(dr.FormatError, match=f"^{said}$"):
        from_arrow(column, "x")
