"""How far an export came: what one that was interrupted goes on from, where its files do not tell."""

from pathlib import Path
from typing import NamedTuple

from diskreplay.interop.exchange.side_folder import replace_file

CHECKPOINT_BYTES = 64 << 20
"""A writer whose files tell nothing makes a checkpoint whenever it has been given so many bytes."""


class Checkpoint(NamedTuple):
    """What of a data set is written: so many whole episodes, which have so many steps."""

    episodes: int = 0
    steps: int = 0

    @classmethod
    def read(cls, file: Path) -> "Checkpoint":
        """Return that of a file; nothing is written where there is none, or it is damaged."""
        try:
            return cls(*map(int, file.read_text().split()))
        except (OSError, ValueError, TypeError):
            return cls()

    def write(self, file: Path) -> None:
        """Put it in place of the one before; what it says is in the files already."""
        replace_file(file, f"{self.episodes} {self.steps}".encode())
