"""Commands that show a store as tables, charts and pictures, and change nothing."""
