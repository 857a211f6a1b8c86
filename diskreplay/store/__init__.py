"""The store: opening, limits, eviction, tables and activity. It uses reading, writing and integrity."""
