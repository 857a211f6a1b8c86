"""Report the progress of imports and exports."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from diskreplay import Schema

Progress = Callable[[int, int], None]
"""Called as ``progress(done, total)``, with numbers of steps."""


class Amount(NamedTuple):
    episodes: int
    steps: int
    nbytes: int  # without compression


@dataclass
class Announced:
    """A receiver of the progress of an import or export.

    Attributes
    ----------
    announce : callable
        Called once, before the first episode, with the plan: the `Planned` of an import or the `Exported` of an export.
    report : callable
        Called as ``report(done, total)``, with two objects of class `Amount`, at the beginning and after each episode.
    """

    announce: Callable[[Any], None]
    report: Callable[[Amount, Amount], None] = lambda done, total: None


class Tally:
    """Counts episodes, and reports the progress after each episode.

    ``done`` has the numbers of episodes and of steps that earlier calls of an import finished.
    """

    def __init__(
        self,
        progress: Progress | Announced | None,
        schema: Schema,
        episodes: int,
        steps: int,
        done: tuple[int, int] = (0, 0),
    ) -> None:
        self._progress, self._step_bytes = progress, step_bytes(schema)
        self._total, self._done = self._amount(episodes, steps), self._amount(*done)
        if isinstance(progress, Announced):
            progress.report(self._done, self._total)

    def _amount(self, episodes: int, steps: int) -> Amount:
        return Amount(episodes, steps, steps * self._step_bytes)

    def add(self, steps: int) -> None:
        self._done = self._amount(self._done.episodes + 1, self._done.steps + steps)
        if isinstance(self._progress, Announced):
            self._progress.report(self._done, self._total)
        elif self._progress is not None:
            self._progress(self._done.steps, self._total.steps)


def step_bytes(schema: Schema) -> int:
    return sum(leaf.row_bytes for leaf in schema.step_leaves.values())
