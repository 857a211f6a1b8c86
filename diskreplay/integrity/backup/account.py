"""What a backup has done so far, and what it did in the end."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from diskreplay.folders import shown
from diskreplay.integrity.verify.files import Problem

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Backup:
    """What `Store.backup` made.

    Attributes
    ----------
    path : Path
        The folder of the new store.
    segments : int
        How many segments it has.
    steps : int
        The visible steps in them.
    steps_hidden, steps_evicted, steps_discarded, steps_lost, steps_in_quarantine : int
        The steps that were inserted and are not visible, each in one class, as `Store.info` counts them.
    steps_inserted : int
        The steps that were ever inserted: the sum of the others. All are 0 if no reader can open the backup.
    bytes : int
        What its files take on disk, shared ones included.
    bytes_shared : int
        Those of them that are the original's, too: in files that were cloned or linked.
    bytes_copied : int
        Those of them that were written. What an earlier, interrupted call had left is in neither of the two.
    problems : list of Problem
        What is damaged in the original, and so in the backup: it was copied as it is.
    """

    path: Path
    segments: int
    steps: int
    steps_hidden: int
    steps_evicted: int
    steps_discarded: int
    steps_lost: int
    steps_in_quarantine: int
    steps_inserted: int
    bytes: int
    bytes_shared: int
    bytes_copied: int
    problems: list[Problem] = field(default_factory=list)


class Account:
    """Counts the bytes that are done, and collects problems. Not thread-safe.

    ``progress`` is called with the bytes that are done, and all that were there when the backup began; what is copied
    for a second time does not count.

    Attributes
    ----------
    kept : int
        Bytes on disk of the files that were in the copy already.
    """

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._done, self._progress = total, 0, progress
        self.kept = 0
        self._problems: dict[str, list[Problem]] = {}

    def advance(self, nbytes: int) -> None:
        """Count bytes on disk."""
        self._done = min(self._done + nbytes, self._total)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def finish(self) -> None:
        """Count everything as done."""
        self.advance(self._total)

    def begin(self, where: str) -> None:
        """Forget the problems of a part of the store, which is copied from now on."""
        self._problems.pop(where, None)

    def note(self, where: str, kind: str, name: str, detail: object) -> None:
        """Note what is wrong in a part of the store: with the file that has this path in it, or with the part."""
        path = os.path.join(where, name) if name else where
        self._problems.setdefault(where, []).append(Problem(kind, path, shown(str(detail))))

    @property
    def problems(self) -> list[Problem]:
        """All problems, by path."""
        found = [problem for some in self._problems.values() for problem in some]
        return sorted(found, key=lambda problem: (problem.where, problem.kind))
