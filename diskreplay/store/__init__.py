"""The store: opening, limits, eviction, tables and activity. This package uses reading, writing and integrity."""
