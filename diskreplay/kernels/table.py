"""All kernels by name.

A kernel is compiled or loaded at its first use, and numba is imported with the first kernel. So a sampler does not wait
for kernels that its view and distribution do not need. Until a sampler loads numba, stores are read without numba:
`advance` and `advance_hiding` run as plain Python, with `follow_plain` in place of `follow`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from diskreplay.errors import MissingExtra

Kernel = Callable[..., Any]

# The module of each kernel. The kernels in `_WITH_CALLERS` are parts of other kernels; only tests get them by name.
MODULES = {
    "advance": "advance",
    "advance_hiding": "advance",
    "advise": "huge_pages",
    "copy_runs": "copying",
    "discounted": "returns",
    "draw": "priorities",
    "fill_grid": "runs",
    "find_runs": "copying",
    "find_windows": "gathering",
    "follow": "following",
    "freeze": "advance",
    "gae": "returns",
    "gather": "gather",
    "hide_oldest": "hiding",
    "ids_at": "ids_at",
    "initial_priorities": "priorities",
    "largest_given": "priority_pages",
    "locate": "priority_pages",
    "nstep": "returns",
    "powers": "sumtree",
    "random_ids": "ids_at",
    "starts": "runs",
    "stream": "copying",
    "sumtree_find": "sumtree",
    "sumtree_set": "sumtree",
    "sync_priorities": "priorities",
    "update": "priorities",
    "weights": "sumtree",
    "write_lanes": "copying",
}

_made: dict[str, Kernel] = {}

_OF_ALL_SAMPLERS = "starts", "random_ids", "gather"
_OF_WEIGHTED_ONES = "powers", "sumtree_set", "update", "weights", "draw", "sync_priorities"

# Kernels that are called for each batch. Their callers make the arguments, or check them; see `_entry_of`.
_OF_EACH_BATCH = "advance", "advance_hiding", *_OF_ALL_SAMPLERS, "sync_priorities", "draw", "weights"

# The kernels that take longest to compile are at both ends of EVERY: one process begins at the start, and a second
# process begins at the end.
_FIRST, _LAST = ("advance", "advance_hiding", *_OF_ALL_SAMPLERS), _OF_WEIGHTED_ONES
_WITH_CALLERS = "follow", "freeze", "hide_oldest", "stream", "sumtree_find"
EVERY = (*_FIRST, *(name for name in MODULES if name not in (*_FIRST, *_LAST, *_WITH_CALLERS)), *_LAST)
"""The kernels that samplers need, without kernels that are compiled as parts of their callers."""


@cache
def get_kernel(name: str) -> Kernel:
    with MissingExtra.raised_for("sampling", "torch"):
        from diskreplay.kernels.cache import compile_kernel, compiling, is_disabled

    with compiling:  # importing a module takes locks, too, and a forked child would wait for them forever
        if is_disabled():
            return getattr(import_module(f"diskreplay.kernels.{MODULES[name]}"), name)
        kernel = compile_kernel(MODULES[name], name)
        _made[name] = _entry_of(kernel) if name in _OF_EACH_BATCH else kernel
        return _made[name]


def _entry_of(kernel: Any) -> Kernel:
    """Return a kernel without numba's check of the argument types, which takes 0.3 µs a call.

    The documentation of numba does not name `get_overload`, so a version without this method may come.
    """
    find = getattr(kernel, "get_overload", None)
    found: Kernel = kernel if find is None else find(kernel.signatures[0])
    return found


def if_made(name: str) -> Kernel | None:
    """Return the compiled kernel `name` without waiting, or None if this process does not have it yet."""
    return _made.get(name)


def of_sampler(weighted: bool) -> tuple[str, ...]:
    return _OF_ALL_SAMPLERS + (_OF_WEIGHTED_ONES if weighted else ())


def compile_all(names: Sequence[str]) -> None:
    with MissingExtra.raised_for("sampling", "torch"):
        from diskreplay.kernels.cache import Several

    for name in Several(names):
        get_kernel(name)


def help_compiling(names: Sequence[str]) -> None:
    """Compile the kernels `names`, from the last to the first.

    Raises filelock.Timeout if another helping process is already running.
    """
    from diskreplay.kernels.cache import helper_lock

    with helper_lock():
        for name in reversed(names):
            get_kernel(name)
