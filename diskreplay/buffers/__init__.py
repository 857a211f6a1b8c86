"""Buffers with the interfaces of well-known ones, each a thin face of a store."""

from diskreplay.errors import MissingExtra

with MissingExtra.raised_for("a buffer", "torch"):
    import torch as torch
