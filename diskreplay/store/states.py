"""Saved states of samplers, as a store's user sees them."""

from typing import Any

from diskreplay.errors import ReadOnlyError
from diskreplay.format.root import read_root
from diskreplay.format.states import read_state, write_state


def save_state(store: Any, name: str, tree: Any) -> None:
    """Save a tree of numbers, texts and arrays in a store that is open with mode "a"; see `write_state`.

    Raises
    ------
    ReadOnlyError
        The store was opened with mode "r".
    ValueError
        The name is none.
    StorageFull
        There is no room; what was saved under the name is untouched.
    """
    if store.mode != "a":
        raise ReadOnlyError(f'{store.path} was opened with mode "r"; open it with mode "a" to save a sampler\'s state')
    write_state(read_root(store.path), name, tree)


def load_state(store: Any, name: str) -> Any:
    """Return what was saved last under a name.

    Raises
    ------
    StoreNotFound
        Nothing was.
    FormatError
        It is damaged.
    """
    return read_state(read_root(store.path), name)
