"""Statistics of features, as LeRobot keeps them for each episode and for the whole data set."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.interop.exchange.episode_data import Json
from diskreplay.interop.lerobot import images
from diskreplay.interop.lerobot.features import Column, is_channels_first

Numbers = NDArray[np.float64]
Statistics = dict[str, Numbers]

# At most `_MOST_IMAGES` images of an episode are used for statistics. Images with a side of more than `_LONGEST_SIDE`
# pixels are subsampled.
_MOST_IMAGES, _LONGEST_SIDE = 64, 128


def of_rows(rows: NDArray[Any]) -> Statistics:
    """Return minimum, maximum, mean and standard deviation over all axes but the last, and the number of rows.

    LeRobot computes the same statistics. Rows are ``(T, *shape)``; a scalar counts as a vector of one number.
    """
    numbers = rows.reshape(-1, rows.shape[-1] if rows.ndim > 1 else 1)
    mean = numbers.mean(0, dtype=np.float64)
    spread = numbers - mean
    spread *= spread
    return {
        "min": numbers.min(0).astype(np.float64),
        "max": numbers.max(0).astype(np.float64),
        "mean": mean,
        "std": np.sqrt(spread.mean(0)),
        "count": np.array([len(rows)], np.float64),
    }


def of_images(rows: NDArray[np.uint8], channels_first: bool) -> Statistics:
    """Return the statistics of each channel, ``(channels, 1, 1)``, for pixels scaled to the range 0 to 1."""
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), _MOST_IMAGES)).astype(np.int64)]
    some = images.as_rows_first(some, channels_first)
    stride = -(-max(some.shape[1:3]) // _LONGEST_SIDE)
    pixels = some[:, ::stride, ::stride].reshape(-1, some.shape[3])
    found = {name: values[:, None, None] / 255 for name, values in of_rows(pixels).items() if name != "count"}
    return {**found, "count": np.array([len(some)], np.float64)}


def of_column(column: Column, rows: NDArray[Any]) -> Statistics:
    if column.kind in ("image", "video"):
        return of_images(rows, is_channels_first(column.field.shape))
    return of_rows(rows.reshape(len(rows), *column.shape))


def of_counter(first: float, last: float, count: int) -> Statistics:
    """Return the statistics of ``count`` numbers that rise evenly from ``first`` to ``last``."""
    spread = (last - first) * np.sqrt((count + 1) / (12 * (count - 1))) if count > 1 else 0.0
    found = {"min": first, "max": last, "mean": (first + last) / 2, "std": spread, "count": count}
    return {name: np.array([value], np.float64) for name, value in found.items()}


def merged(parts: Mapping[str, Numbers]) -> Statistics:
    """Return the statistics of all rows; ``parts`` has the statistics of several sets of rows, ``(sets, *shape)``."""
    counts = parts["count"].reshape(-1, *[1] * (parts["mean"].ndim - 1))
    shares = counts / counts.sum()
    mean = (parts["mean"] * shares).sum(0)
    variance = ((parts["std"] ** 2 + (parts["mean"] - mean) ** 2) * shares).sum(0)
    return {
        "min": parts["min"].min(0),
        "max": parts["max"].max(0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": parts["count"].sum(0),
    }


def stacked(parts: Sequence[Statistics]) -> Statistics:
    return {name: np.stack([part[name] for part in parts]) for name in parts[0]}


def as_json(found: Mapping[str, Statistics]) -> dict[str, Json]:
    return {
        key: {
            name: values.astype(np.int64 if name == "count" else np.float64).tolist() for name, values in each.items()
        }
        for key, each in found.items()
    }


def agree(found: Mapping[str, Statistics], noted: Mapping[str, Json]) -> bool:
    """Tell whether the statistics of written rows agree with the imported statistics; images are not compared."""
    try:
        return found.keys() == noted.keys() and all(
            np.allclose(np.ravel(noted[key][name]), np.ravel(values), rtol=1e-4, atol=1e-6)
            for key, each in found.items()
            for name, values in each.items()
            if name in ("min", "max", "mean") and each["mean"].shape[1:] != (1, 1)
        )
    except (KeyError, TypeError, ValueError):
        return False
