"""Every kernel by name.

A kernel is compiled, or loaded, when it is first asked for, and numba is imported with the first: nobody waits for what
a view and a distribution do not need. Stores are followed without any, by the twins of a few kernels.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

Kernel = Callable[..., Any]

# name -> module
MODULES = {
    "advise": "advice",
    "bind_table": "gather",
    "discounted": "discounted",
    "draw": "draw",
    "find_windows": "find_windows",
    "follow": "follow",
    "freeze": "freeze",
    "gae": "gae",
    "gather": "gather",
    "hide_oldest": "hide_oldest",
    "ids_at": "ids_at",
    "initial_priorities": "initial",
    "locate": "pages",
    "nstep": "nstep",
    "offer": "offer",
    "powers": "powers",
    "random_ids": "ids_at",
    "sort_runs": "starts",
    "starts": "starts",
    "stream": "stream",
    "sumtree_find": "sumtree",
    "sumtree_set": "sumtree",
    "update": "update",
    "weights": "powers",
}


@cache
def chosen(name: str) -> Kernel:
    """Return the compiled kernel of this name, or raise MissingExtra where numba cannot be imported."""
    from diskreplay.kernels import jit

    return jit.ready(getattr(import_module(f"diskreplay.kernels.{MODULES[name]}"), name))
