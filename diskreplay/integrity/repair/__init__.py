"""Repair of a store, and the ways out of quarantine."""
