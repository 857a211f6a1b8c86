"""Buffers with the interfaces of well-known buffers. A replay is in a store; rollouts and pairs are in tensors."""

from diskreplay.errors import MissingExtra

with MissingExtra.raised_for("a buffer", "torch"):
    import torch as torch
