"""A store: opening, limits, eviction, tables and activity. It joins reading, writing and integrity."""
