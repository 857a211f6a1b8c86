"""From a snapshot, a view and a distribution to batches of torch tensors. The core's only user of torch."""

from diskreplay.errors import MissingExtra

with MissingExtra.raised_for("sampling", "torch"):
    import torch as torch
