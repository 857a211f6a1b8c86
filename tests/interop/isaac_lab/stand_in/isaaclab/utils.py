"""Classes of configurations."""

import copy
from dataclasses import dataclass, field
from typing import Any


def configclass(cls: type) -> Any:
    """Make a dataclass, with a copy of each default for each instance, whether it has a type or not."""
    names = [name for name in vars(cls) if not name.startswith("_")]
    cls.__annotations__ = {name: Any for name in names} | vars(cls).get("__annotations__", {})
    for name in names:
        default = vars(cls)[name]
        setattr(cls, name, field(default_factory=lambda default=default: copy.deepcopy(default)))
    return dataclass(cls)
