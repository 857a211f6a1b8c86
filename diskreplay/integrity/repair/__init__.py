"""Repair of a store, and restoring or deleting segments in quarantine."""
