"""Buffers with well-known interfaces.

A replay buffer keeps its steps in a store. Other buffers keep their steps in tensors only, unless they get a `path`.
"""

from diskreplay.errors import MissingExtra

with MissingExtra.raised_for("a buffer", "torch"):
    import torch as torch
