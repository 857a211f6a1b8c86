"""Readers of saved states; an invalid state raises a ValueError that names the state."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.bounded_json import parse_json

# The errors that reading an invalid state may raise.
INVALID = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def state_of(what: str) -> Iterator[None]:
    """Turn `INVALID` errors of a `with` block that reads a state into a ValueError that names `what`."""
    try:
        yield
    except INVALID as error:
        # The message of a ValueError is clear. Any other message, such as that of a KeyError, needs the type of the
        # error.
        why = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"this is not a state of {what}: {why}") from None


def kind_of(text: str) -> tuple[Any, ...]:
    try:
        parts = parse_json(text)
    except ValueError:
        parts = None
    if not isinstance(parts, list):
        raise ValueError(f"{text!r:.80} is not a kind of id")
    return tuple(parts)


def columns(state: Mapping[str, Any], names: Iterable[str]) -> list[NDArray[np.int64]]:
    """Return int64 copies of the arrays `names` of a state; raise one of `INVALID` if their lengths differ."""
    found = [np.array(state[name], np.int64) for name in names]
    if not found or any(column.ndim != 1 or column.shape != found[0].shape for column in found):
        raise ValueError("columns must have one axis and one length")
    return found


def bits(masks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the bits of each mask, the lowest first: (n, 64)."""
    return np.unpackbits(masks.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").astype(np.bool_)


def masks(bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the masks, (n,), that have these bits, (n, 64), the lowest first."""
    found: NDArray[np.int64] = np.packbits(bits, axis=1, bitorder="little").view(np.int64).reshape(-1)
    return found


def is_priority_table(state: Mapping[str, Any]) -> bool:
    return {"page", "first", "stride", "known", "values"} <= state.keys()


def saved_priorities(table: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the ids in the state of a table of priorities, and their |td| + eps, both (n,).

    Raises one of `INVALID` if `table` is invalid.
    """
    first, stride, known = columns(table, ("first", "stride", "known"))
    page, row = np.nonzero(bits(known))
    values = np.array(table["values"], np.float64)
    if values.shape != page.shape:
        raise ValueError(f"{len(page)} ids have {len(values)} priorities")
    return first[page] + row * stride[page], values
