"""Distributions over ids: which ids are drawn, and with which weights. They do not read observations or rewards."""
