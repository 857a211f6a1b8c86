"""The store: opening, limits, eviction, tables and activity.

This package uses the packages `reading`, `writing` and `integrity`.
"""
