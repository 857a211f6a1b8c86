"""The command line: `main` runs it, and the other modules have the commands."""
