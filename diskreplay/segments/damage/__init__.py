"""Damage: damaged files and copies, rows without proof, and the quarantine."""
