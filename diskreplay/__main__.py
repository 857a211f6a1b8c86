"""`python -m diskreplay` is the `diskreplay` command."""

import sys

from diskreplay.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
