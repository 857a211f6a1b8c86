"""Statistics of features, as LeRobot keeps them of each episode and of the whole data set."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.interop.exchange.episode_data import Json
from diskreplay.interop.lerobot import images
from diskreplay.interop.lerobot.features import Column, is_channels_first

Numbers = NDArray[np.float64]
Statistics = dict[str, Numbers]

# Images of an episode that are looked at, and the longest side of these: of more, pixels are left out.
_MOST_IMAGES, _LONGEST_SIDE = 64, 128


def of_rows(rows: NDArray[Any]) -> Statistics:
    """Return least, greatest, mean, standard deviation and count of rows, over all axes but the last, as LeRobot does.

    Rows are of ``(T, *shape)``; those of scalars are one column.
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
    """Return the same of each channel of some of the images, with pixels from 0 to 1, as ``(channels, 1, 1)``."""
    some = rows[np.linspace(0, len(rows) - 1, min(len(rows), _MOST_IMAGES)).astype(np.int64)]
    some = images.as_rows_first(some, channels_first)
    stride = -(-max(some.shape[1:3]) // _LONGEST_SIDE)
    pixels = some[:, ::stride, ::stride].reshape(-1, some.shape[3])
    found = {name: values[:, None, None] / 255 for name, values in of_rows(pixels).items() if name != "count"}
    return {**found, "count": np.array([len(some)], np.float64)}


def of_column(column: Column, rows: NDArray[Any]) -> Statistics:
    """Return the statistics of a column."""
    if column.kind in ("image", "video"):
        return of_images(rows, is_channels_first(column.field.shape))
    return of_rows(rows.reshape(len(rows), *column.shape))


def merged(one: Statistics, other: Mapping[str, Numbers]) -> Statistics:
    """Return the statistics of both."""
    count = one["count"] + other["count"]
    share = other["count"] / count
    apart = other["mean"] - one["mean"]
    variance = one["std"] ** 2 * (1 - share) + other["std"] ** 2 * share + apart**2 * share * (1 - share)
    return {
        "min": np.minimum(one["min"], other["min"]),
        "max": np.maximum(one["max"], other["max"]),
        "mean": one["mean"] + apart * share,
        "std": np.sqrt(variance),
        "count": count,
    }


def as_json(found: Mapping[str, Statistics]) -> dict[str, Json]:
    """Return statistics by feature as JSON, counts as integers."""
    return {
        key: {
            name: values.astype(np.int64 if name == "count" else np.float64).tolist() for name, values in each.items()
        }
        for key, each in found.items()
    }


def agree(found: Mapping[str, Statistics], noted: Mapping[str, Json]) -> bool:
    """Tell whether statistics that were noted are those of the same rows, images aside."""
    try:
        return found.keys() == noted.keys() and all(
            np.allclose(np.ravel(noted[key][name]), np.ravel(values), rtol=1e-4, atol=1e-6)
            for key, each in found.items()
            for name, values in each.items()
            if name in ("min", "max", "mean") and each["mean"].shape[1:] != (1, 1)
        )
    except (KeyError, TypeError, ValueError):
        return False
