"""Every kernel by name.

A kernel is compiled, or loaded, when it is first asked for, and numba is imported with the first: nobody waits for what
a view and a distribution do not need. Stores are followed without any, by the twins of a few kernels.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

Kernel = Callable[..., Any]

# name -> module; of `follow`, `freeze` and `hide_oldest`, which `advance` calls, only tests ask by name
MODULES = {
    "advance": "advance",
    "advance_hiding": "advance_hiding",
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
    "largest_given": "largest",
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

CHECK = False
"""Whether `unchecked` is the same as `chosen`."""


@cache
def chosen(name: str) -> Kernel:
    """Return the compiled kernel of this name, or raise MissingExtra where numba cannot be imported."""
    from diskreplay.kernels import jit
    from diskreplay.kernels.cache import compiling

    with compiling:  # to import its module, too, takes locks that a forked child would wait for
        return jit.ready(getattr(import_module(f"diskreplay.kernels.{MODULES[name]}"), name))


@cache
def unchecked(name: str) -> Kernel:
    """Return the compiled kernel of this name, which does not look at the types of its arguments.

    To look takes a third to a half of the call of a small kernel. What is of another type, shape or order in memory
    than the kernel was compiled for would be misread: this is for what is called at every batch with arrays that the
    package has made itself. Tests check nevertheless: see `CHECK`.
    """
    kernel = chosen(name)
    from diskreplay.kernels import jit, numba_private

    if CHECK or jit.INTERPRETED:
        return kernel

    return numba_private.entry_point(kernel)
