"""Every kernel beside its plain twin. The twin is the oracle in tests, and the fallback where numba is missing.

A kernel is compiled, or loaded, when it is first asked for, and numba is imported with the first: nobody waits for what
a view and a distribution do not need.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any

Kernel = Callable[..., Any]

# name -> module; the twin is there too, as name_plain
_MODULES = {
    "advise": "advice",
    "bind_table": "gather",
    "draw": "draw",
    "episode_offset": "episode_offset",
    "find_windows": "find_windows",
    "follow": "follow",
    "freeze": "freeze",
    "gae": "gae",
    "gather": "gather",
    "hide_oldest": "hide_oldest",
    "ids_at": "ids_at",
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


class _Kernels(Mapping[str, tuple[Kernel, Kernel]]):
    """Pairs of a kernel and its twin by name."""

    def __getitem__(self, name: str) -> tuple[Kernel, Kernel]:
        jit = _jit()
        module = import_module(f"diskreplay.kernels.{_MODULES[name]}")
        kernel = getattr(module, name)
        return jit.ready(kernel) if jit.COMPILED else kernel, getattr(module, f"{name}_plain")

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


KERNELS = _Kernels()


@cache
def chosen(name: str) -> Kernel:
    """Return the compiled kernel, or its twin where nothing is compiled."""
    return KERNELS[name][0 if _jit().COMPILED else 1]


def _jit() -> Any:
    from diskreplay.kernels import jit

    return jit
