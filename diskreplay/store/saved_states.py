"""Saved states of samplers, as a store's user sees them."""

from typing import Any

from diskreplay.errors import ReadOnlyError
from diskreplay.folders import shown_paths
from diskreplay.format.state_files import delete_state, read_state, write_state


@shown_paths()
def save_state(store: Any, name: str, tree: Any) -> None:
    """Save a tree of numbers, texts and arrays in a store that is open with mode "a"; see `write_state`.

    Raises ReadOnlyError where it was opened with mode "r", and what `write_state` does.
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

    Raises ReadOnlyError where the store was opened with mode "r", and what `delete_state` does.
    """
    _check_writable(store, "delete")
    delete_state(store._root, name)


@shown_paths()
def load_state(store: Any, name: str) -> Any:
    """Return what was saved last under a name.

    Raises StoreNotFound where nothing was, FormatError where it is damaged, or a state of another store.
    """
    return read_state(store._root, name)
