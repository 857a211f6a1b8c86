"""Every kernel beside its plain twin."""

from collections.abc import Iterator, Mapping
from importlib import import_module

from diskreplay.kernels.table import MODULES, Kernel, get_kernel


class Pairs(Mapping[str, tuple[Kernel, Kernel]]):
    """Pairs of a kernel and its twin by name."""

    def __getitem__(self, name: str) -> tuple[Kernel, Kernel]:
        module = import_module(f"tests.kernels.plain.{MODULES[name]}")
        return get_kernel(name), getattr(module, f"{name}_plain")

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


KERNELS = Pairs()
