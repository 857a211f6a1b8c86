"""A store: opening, limits, eviction, tables, and what goes on in it. It joins reading, writing and integrity."""
