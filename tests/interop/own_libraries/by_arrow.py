"""Exports in Parquet, read by pyarrow, and compared with what pandas and Polars read of numbers and flags."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dumps
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq


def array(column: Any, shape: list[int], dtype: str) -> np.ndarray:
    """Return the rows of a column: numbers, nested lists of them, or bytes."""
    column = column.combine_chunks()
    if pa.types.is_fixed_size_binary(column.type):
        return np.frombuffer(b"".join(column.to_pylist()), dtype).reshape(-1, *shape)
    return np.array(column.to_pylist(), dtype).reshape(-1, *shape)


def read(folder: Path) -> Iterator[dict[str, Any]]:
    steps, episodes = pq.read_table(folder / "steps"), pq.read_table(folder / "episodes")
    for name in ("reward", "step", "hidden"):
        expected = steps[name].to_numpy()
        np.testing.assert_array_equal(pd.read_parquet(folder / "steps")[name].to_numpy(), expected)
        files = sorted((folder / "steps").glob("*.parquet"))
        np.testing.assert_array_equal(pl.read_parquet(files, columns=[name])[name].to_numpy(), expected)
    leaves = json.loads((folder / "leaves.json").read_text())
    numbers = steps["episode"].to_numpy()
    for row in episodes.to_pylist():
        rows = steps.filter(pa.array(numbers == row["episode"]))
        found = {path: array(rows[path], *leaf) for path, leaf in leaves.items() if path in rows.column_names}
        for path, value in row.items():
            if path in leaves and value is not None and not (isinstance(value, list) and None in np.ravel(value)):
                shape, dtype = leaves[path]
                made = np.frombuffer(value, dtype) if isinstance(value, bytes) else np.array(value, dtype)
                one = made.reshape(shape)
                found[path] = np.concatenate([found[path], one[None]]) if path in found else one
        yield found | {name: np.bool_(row[name]) for name in ("terminated", "truncated")}


if __name__ == "__main__":
    dumps.main(lambda folder: None, read)
