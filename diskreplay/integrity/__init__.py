"""The integrity of a store: an independent checker, repair, and backups."""
