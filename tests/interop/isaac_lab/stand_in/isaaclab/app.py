"""In place of the launcher of the simulator."""

import argparse
from types import SimpleNamespace


class AppLauncher:
    """Launches nothing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.app = SimpleNamespace(close=lambda: None)

    @staticmethod
    def add_app_launcher_args(parser: argparse.ArgumentParser) -> None:
        """Add the option that the example reads."""
        parser.add_argument("--device", default="cpu")
