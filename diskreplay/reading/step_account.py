"""The account of a store's steps: how many steps were inserted, and are visible, hidden, evicted, discarded or lost."""

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from diskreplay.reading.follower import Follower
from diskreplay.reading.snapshot import Snapshot
from diskreplay.segments.documents.limiters import Inserted, RowsOf, StepCounter


class Steps(NamedTuple):
    """The number of steps inserted into a segment or a store, and how many of these steps are in each class.

    The classes are the fields ``visible`` to ``lost``. A step of several classes is only counted in the last one. If
    readers leave out a damaged segment, all its steps count as lost.
    """

    inserted: int = 0
    visible: int = 0
    hidden: int = 0
    evicted: int = 0
    discarded: int = 0
    lost: int = 0

    def by_key(self) -> dict[str, int]:
        return {
            "steps": self.visible,
            "steps_hidden": self.hidden,
            "steps_evicted": self.evicted,
            "steps_discarded": self.discarded,
            "steps_lost": self.lost,
            "steps_inserted": self.inserted,
        }


@dataclass(frozen=True, slots=True)
class StepAccount:
    """The account of a store at one moment.

    Attributes
    ----------
    total : Steps
        The number of steps of the store in each class. `total.inserted` is `counted.ever`: the sum of all classes, plus
        `quarantined`.
    counted : Inserted
        The numbers of steps that rate limiters use: steps ever inserted, and steps still held.
    quarantined : int
        The number of steps in quarantine. The classes do not include these steps.
    segments : dict of int to Steps
        The number of steps in each class, by segment number. A pack has one entry. The segments merged into the pack
        have no entry.
    visible : dict of int to int
        The number of visible steps by segment number, with an entry for each segment in a pack.
    """

    total: Steps
    counted: Inserted
    quarantined: int
    segments: dict[int, Steps]
    visible: dict[int, int]

    def without(self, numbers: Iterable[int]) -> "StepAccount":
        """Return the account after the deletion of these segments: all their steps count as evicted."""
        segments, total = self.segments.copy(), self.total
        for number in numbers:
            gone = segments.pop(number)
            rest = Steps(*(one - other for one, other in zip(total, gone, strict=True)))
            total = rest._replace(inserted=total.inserted, evicted=rest.evicted + gone.inserted)
        return replace(self, total=total, segments=segments)


def read_account(follower: Follower, counter: StepCounter) -> tuple[Snapshot, StepAccount]:
    """Take a new snapshot of a store, and return the snapshot and the account of the same moment.

    If segments are added or deleted during the call, some numbers may be from slightly different moments.
    """
    looks = deque[Snapshot](maxlen=1)

    def look() -> RowsOf:
        looks.append(follower.refresh()[0])
        return looks[-1].rows_of

    counted = counter.read(look)
    return looks[-1], _account(counter, counted, looks[-1], follower.damaged)


def _account(counter: StepCounter, counted: Inserted, snapshot: Snapshot, damaged: Collection[int]) -> StepAccount:
    by_slot = np.stack(snapshot.count_by_segment())
    there, origin = (snapshot.lanes > 0).tolist(), snapshot.origin
    segments, visible = dict[int, Steps](), dict[int, int]()
    for number, count in counter.segments().items():
        slots = [member - origin for member in count.members if 0 <= member - origin < len(there)]
        if number in damaged:
            segments[number] = Steps(count.inserted, lost=count.inserted)
        elif any(there[slot] for slot in slots):
            shown, hidden, discarded, evicted_too = by_slot[:, slots].sum(axis=1).tolist()
            evicted = count.evicted - evicted_too
            segments[number] = Steps(count.inserted, shown, hidden, evicted, discarded, count.lost)
            visible |= {slot + origin: int(by_slot[0, slot]) for slot in slots}
        else:  # the segment will soon be deleted: limits have hidden all its steps
            segments[number] = Steps(count.inserted, evicted=count.inserted)
    total = Steps(*(sum(counts) for counts in zip(Steps(), *segments.values(), strict=True)))
    total = total._replace(inserted=counted.ever, evicted=total.evicted + counter.deleted)
    return StepAccount(total, counted, counter.aside, segments, visible)
