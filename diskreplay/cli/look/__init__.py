"""Commands that look at a store and change nothing: tables, charts and pictures of what it holds."""
