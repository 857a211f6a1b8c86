"""Saved states are read here: what is not one is a ValueError that says of what."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diskreplay.bounded_json import parse_json

# What reading an invalid state may raise.
INVALID = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@contextmanager
def state_of(what: str) -> Iterator[None]:
    """Raise a ValueError that names `what` where reading a state of it in this block fails."""
    try:
        yield
    except INVALID as error:
        # What is a ValueError of ours says enough; of the others the type is half of the message.
        why = str(error) if type(error) is ValueError else repr(error)
        raise ValueError(f"this is no state of {what}: {why}") from None


def kind_of(text: str) -> tuple[Any, ...]:
    """Return the kind of id that was written as JSON; ValueError where this is none."""
    try:
        parts = parse_json(text)
    except ValueError:
        parts = None
    if not isinstance(parts, list):
        raise ValueError(f"{text!r:.80} is no kind of id")
    return tuple(parts)


def columns(state: Mapping[str, Any], names: Iterable[str]) -> list[NDArray[np.int64]]:
    """Return copies of columns of one length; one of `INVALID` where they are not that."""
    found = [np.array(state[name], np.int64) for name in names]
    if not found or any(column.ndim != 1 or column.shape != found[0].shape for column in found):
        raise ValueError("columns must have one axis and one length")
    return found


def bits(masks: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the bits of each mask, the lowest first: (n, 64)."""
    return np.unpackbits(masks.view(np.uint8).reshape(-1, 8), axis=1, bitorder="little").astype(np.bool_)


def masks(bits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return masks that have these bits, (n, 64), the lowest first: (n,)."""
    found: NDArray[np.int64] = np.packbits(bits, axis=1, bitorder="little").view(np.int64).reshape(-1)
    return found


def is_priority_table(state: Mapping[str, Any]) -> bool:
    """Tell whether this is the state of a table of priorities; see `PriorityTable.state_dict`."""
    return {"page", "first", "stride", "known", "values"} <= state.keys()


def saved_priorities(table: Mapping[str, Any]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the ids of the state of a table of priorities, and the |td| + eps of each, (n,) both.

    One of `INVALID` where it is no such state.
    """
    first, stride, known = columns(table, ("first", "stride", "known"))
    page, row = np.nonzero(bits(known))
    values = np.array(table["values"], np.float64)
    if values.shape != page.shape:
        raise ValueError(f"{len(page)} ids have {len(values)} priorities")
    return first[page] + row * stride[page], values
