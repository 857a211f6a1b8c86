"""Kernels: short functions that compute with arrays, each in one thread. They access no files."""
