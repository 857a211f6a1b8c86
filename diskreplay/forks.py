"""Objects that have to be told when their process was forked."""

import os
import weakref
from collections.abc import Callable
from typing import Any


def each_of(alive: weakref.WeakSet[Any]) -> list[Any]:
    """Return what is in a set of objects, to which other threads may be adding some."""
    while True:
        try:
            return list(alive)
        except RuntimeError:  # it changed meanwhile
            continue


def told_of_forks(tell: Callable[[Any], object]) -> weakref.WeakSet[Any]:
    """Return a set of objects for each of which ``tell(object)`` is called in every child that is forked."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    def tell_all() -> None:
        for each in each_of(alive):
            tell(each)

    os.register_at_fork(after_in_child=tell_all)
    return alive
