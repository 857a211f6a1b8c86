"""Fields of a batch that are nested in dicts and tuples, leaf by leaf."""

from collections.abc import Callable
from typing import Any

__all__ = ["leaves_of", "map_leaves"]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of what a function returns for each leaf."""
    if isinstance(tree, dict):
        return {name: map_leaves(function, below) for name, below in tree.items()}
    if isinstance(tree, tuple):
        return type(tree)(map_leaves(function, below) for below in tree)
    return function(tree)


def leaves_of(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in its order."""
    found: list[Any] = []
    map_leaves(found.append, tree)
    return found
