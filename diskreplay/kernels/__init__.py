"""Kernels: short serial functions of arrays. They access no files."""
