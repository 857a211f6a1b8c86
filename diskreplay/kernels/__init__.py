"""Kernels: short functions that compute with arrays, each in one thread, and access no files."""
