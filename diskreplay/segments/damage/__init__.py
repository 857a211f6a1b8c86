"""Damage of segments, unproven rows, and the quarantine."""
