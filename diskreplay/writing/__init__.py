"""Appending: writers, the segments that they fill, rate limiters, marks and seals in the background."""
