"""Distributions over ids: which are drawn, with what weight. They know nothing of data."""
