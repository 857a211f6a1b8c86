"""Buffers with the interfaces of well-known ones: replays are in a store, rollouts and pairs in tensors."""

from diskreplay.errors import MissingExtra

with MissingExtra.raised_for("a buffer", "torch"):
    import torch as torch
