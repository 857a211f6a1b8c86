"""Appending: writers, and the segments they fill."""
