"""Arrays as columns of Arrow."""

import math

import numpy as np
import pytest

import diskreplay as dr

pa = pytest.importorskip("pyarrow", reason="needs pyarrow")

from diskreplay.interop.arrow_arrays import from_arrow, to_arrow, with_missing, without_missing  # noqa: E402


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
        (pa.array(["a"]), "the column x has values of the type string, which cannot become an array"),
        (pa.array([1, None]), "the column x has 1 null values"),
        (pa.array([[1], None], pa.list_(pa.int8(), 1)), "the column x has 1 null values"),
        (pa.array([[1, 2], [3]]), "the column x has values of the type list.*, which cannot become an array"),
    ],
)
def test_what_is_no_array_is_refused(column: pa.Array, said: str) -> None:
    with pytest.raises(dr.FormatError, match=f"^{said}$"):
        from_arrow(column, "x")


@pytest.mark.parametrize("there", [[True, False, True], [False, False], [True]])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_rows_that_are_missing_are_known(there: list[bool], shape: tuple[int, ...]) -> None:
    rows = np.arange(np.count_nonzero(there) * math.prod(shape), dtype="f4").reshape(-1, *shape)
    column = with_missing(to_arrow(rows), np.array(there))
    assert len(column) == len(there)
    assert column.null_count == (0 if shape else there.count(False))  # a list that is null needs pyarrow 26 in Parquet
    found, known = without_missing(pa.chunked_array([column]))
    assert known.tolist() == there
    np.testing.assert_array_equal(from_arrow(found, "x"), rows)


def test_a_list_that_is_null_is_missing_and_one_with_a_number_is_not() -> None:
    column = pa.chunked_array([pa.array([[1, 2], None, [None, None], [3, None]], pa.list_(pa.int8(), 2))])
    rows, there = without_missing(column)
    assert there.tolist() == [True, False, False, True]
    with pytest.raises(dr.FormatError, match="^the column x has 1 null values$"):
        from_arrow(rows, "x")
