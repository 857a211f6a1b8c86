"""What a repair did to a store, what is wrong after it, and what is in quarantine."""

from dataclasses import dataclass, field

from diskreplay.integrity.verify.files import Problem
from diskreplay.segments.damage.quarantine import Quarantined


@dataclass(frozen=True, slots=True)
class Action:
    """Something that repair did, or would do.

    Attributes
    ----------
    what : str
        ``"sealed"``, ``"salvaged"``, ``"quarantined"``, ``"rebuilt"``, ``"restored"``, ``"recomputed"`` or
        ``"removed"``; ``"refused"`` where more steps would have been set aside than may be.
    where : str
        The file or folder, relative to the store.
    detail : str
        Why, or what became of it.
    steps : int
        How many steps it set aside, or with ``"refused"`` would have.
    """

    what: str
    where: str
    detail: str
    steps: int = 0


@dataclass
class Repaired:
    """What a repair did, what is wrong after it, and what is in quarantine."""

    actions: list[Action] = field(default_factory=list)
    left: list[Problem] = field(default_factory=list)
    quarantine: list[Quarantined] = field(default_factory=list)

    @property
    def steps_lost(self) -> int:
        """How many steps were set aside, or with a dry run would be."""
        return sum(action.steps for action in self.actions if action.what != "refused")

    @property
    def steps_refused(self) -> int:
        """How many steps would have been set aside that were more than may be."""
        return sum(action.steps for action in self.actions if action.what == "refused")


def without(problems: list[Problem], kind: str) -> list[Problem]:
    """Return the findings but those of a kind, about which there is nothing to repair."""
    return [problem for problem in problems if problem.kind != kind]
