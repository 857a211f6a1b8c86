"""The command line: `main` starts it, then one module a command."""
