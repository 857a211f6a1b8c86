"""Saved states of samplers, as a store's user sees them."""

from typing import Any

from diskreplay.errors import ReadOnlyError
from diskreplay.folders import shown_paths
from diskreplay.format.state_files import delete_state, read_state, write_state


@shown_paths()
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
    StoreNotFound
        The store was deleted or replaced since it was opened.
    """
    _check_writable(store, "save")
    write_state(store._root, name, tree)


def _check_writable(store: Any, verb: str) -> None:
    if store.mode != "a":
        raise ReadOnlyError(
            f'{store.path} was opened with mode "r"; open it with mode "a" to {verb} a sampler\'s state'
        )


@shown_paths()
def remove_state(store: Any, name: str) -> None:
    """Delete what is saved under a name; see `delete_state`.

    Raises
    ------
    ReadOnlyError
        The store was opened with mode "r".
    StoreNotFound
        Nothing is saved under it.
    """
    _check_writable(store, "delete")
    delete_state(store._root, name)


@shown_paths()
def load_state(store: Any, name: str) -> Any:
    """Return what was saved last under a name.

    Raises
    ------
    StoreNotFound
        Nothing was.
    FormatError
        It is damaged, or a state of another store.
    """
    return read_state(store._root, name)
