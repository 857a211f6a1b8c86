"""Adapters between a store and other libraries, written on public names only."""
