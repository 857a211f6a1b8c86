"""What keeps a store whole: the independent checker, repair, and backups."""
