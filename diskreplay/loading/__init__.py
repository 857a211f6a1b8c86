"""From a snapshot, a view and a distribution to batches of torch tensors. The core's only user of torch."""
