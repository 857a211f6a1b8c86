"""Buffers with the interfaces of well-known ones, each a thin face of a store."""
