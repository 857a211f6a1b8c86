"""Sampling: batches of torch tensors from a snapshot, a view and a distribution. Writing and reading need no torch."""

from diskreplay.errors import MissingExtra

with MissingExtra.raised_for("sampling", "torch"):
    import torch as torch
