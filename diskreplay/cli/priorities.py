"""The priorities in what samplers have saved in a store."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.bounded_json import parse_json
from diskreplay.cli import text
from diskreplay.distributions.saved_state import is_priority_table, saved_priorities, state_of
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.documents.state_files import state_names

Saved = dict[str, tuple[NDArray[np.int64], NDArray[np.float64]]]


def read_priorities(store: dr.Store, samplers: Sequence[str]) -> Saved:
    """Return ids and priorities |td| + eps of each table that samplers have saved, all samplers or those named."""
    found: Saved = {}
    for name in samplers or state_names(read_root(store.path)):
        state = store.load_sampler_state(name)
        tables = list(_tables(state, ""))
        for kind, table in tables:
            with state_of(f"the sampler {name!r}"):
                label = name if len(tables) == 1 else f"{name}: {kind}"
                found[text.clean(label)] = saved_priorities(table)
    return found


def _tables(tree: Any, key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tables of priorities in a state, each with the kind of its ids."""
    if not isinstance(tree, Mapping):
        return
    if is_priority_table(tree):
        yield _kind(key), tree
        return
    for name, below in tree.items():
        yield from _tables(below, name)


def _kind(key: str) -> str:
    try:
        return " ".join(map(str, parse_json(key)))
    except (ValueError, TypeError):
        return key
