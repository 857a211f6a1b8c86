"""Loss of power: record what a program does to files, and build the folders that a disk could be left with.

A `Recording` takes down every change below a folder: contents in units of a sector, lengths, names, and syncs. What no
sync covered when the power went may be on the disk or not, each unit and each name by itself; of a unit that was
written several times, any version. A rename is one change, which a sync of either folder covers. `states` yields such
folders, `another_boot` lets this process look at one as after the machine's next start.

    with Recording(folder) as recording:
        ...                                  # recording.mark(x) notes what was promised so far
    for state in states(recording, seed=0):
        state.write(elsewhere)
        with another_boot():
            ...                              # open it: what state.marks had promised must be there
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

from tests.crash.inner import another_boot
from tests.crash.recording import LENGTH, Event, Key, Mark, Names, Put, Recording, Sync

__all__ = ["Recording", "State", "another_boot", "states"]

Files = dict[str, bytes | None]
"""Contents by path, None for a folder; folders come before what is in them."""


class State(NamedTuple):
    """What a disk could hold after the power went.

    ``marks`` counts the notes that were made by then, ``why`` says how the state was chosen.
    """

    files: Files
    marks: int
    why: str

    def write(self, folder: Path | str) -> None:
        """Write all of it into a folder that exists."""
        for path, data in self.files.items():
            if data is None:
                os.mkdir(f"{folder}/{path}")
            else:
                with open(f"{folder}/{path}", "wb", buffering=0) as file:
                    file.write(data)


Pick = Callable[[list[Any]], Any]
Take = Callable[[int], bool]


class _Disk:
    """The record up to some point: what is durable, and what may be."""

    def __init__(self, recording: Recording) -> None:
        self._top, self._unit, self._folders = recording.top, recording.unit, recording.folders
        # Of each file: the versions of its units and of its length since the last sync, what that covered first.
        self.versions: dict[int, dict[int, list[Any]]] = {}
        self._newest: dict[int, bytes] = {}
        self.names: list[tuple[Names, bool]] = []
        self.marks = 0

    def apply(self, event: Event) -> None:
        if isinstance(event, Put):
            inode, number = event.key
            default = 0 if number == LENGTH else bytes(len(event.value))
            self.versions.setdefault(inode, {}).setdefault(number, [default]).append(event.value)
            self._newest.pop(inode, None)
        elif isinstance(event, Names):
            self.names.append((event, False))
        elif isinstance(event, Sync):
            self._sync(event.inode)
        else:
            self.marks += 1

    def _sync(self, inode: int | None) -> None:
        for units in self.versions.values() if inode is None else [self.versions.get(inode, {})]:
            for versions in units.values():
                del versions[:-1]
        for i, (names, is_durable) in enumerate(self.names):
            if not is_durable and (inode is None or any(folder == inode for folder, _, _ in names.changes)):
                self.names[i] = names, True

    def pending(self) -> list[Key | int]:
        """Return what no sync covers: keys of units and lengths, and places in `names`."""
        units: list[Key | int] = [
            (inode, number)
            for inode, units in self.versions.items()
            for number, versions in units.items()
            if len(versions) > 1
        ]
        return units + [i for i, (_, is_durable) in enumerate(self.names) if not is_durable]

    def image(self, pick: Pick | None = None, take: Take | None = None, lost: Key | None = None) -> Files:
        """Return the files with the versions that are picked, None for the newest, and the changes of names taken."""
        tree: dict[int, dict[str, int]] = {}
        for i, (names, is_durable) in enumerate(self.names):
            if is_durable or take is None or take(i):
                for folder, name, inode in names.changes:
                    if inode is None:
                        tree.get(folder, {}).pop(name, None)
                    else:
                        tree.setdefault(folder, {})[name] = inode
        files: Files = {}
        self._walk(self._top, "", tree, lambda inode: self._contents(inode, pick, lost), files)
        return files

    def _walk(self, folder: int, path: str, tree: Any, contents: Callable[[int], bytes], files: Files) -> None:
        for name, inode in sorted(tree.get(folder, {}).items()):
            if inode in self._folders:
                files[path + name] = None
                self._walk(inode, f"{path}{name}/", tree, contents, files)
            else:
                files[path + name] = contents(inode)

    def _contents(self, inode: int, pick: Pick | None, lost: Key | None) -> bytes:
        units = self.versions.get(inode, {})
        if pick is None and (lost is None or lost[0] != inode):
            if inode not in self._newest:
                self._newest[inode] = self._join({number: versions[-1] for number, versions in units.items()})
            return self._newest[inode]
        return self._join(
            {
                number: versions[0] if (inode, number) == lost else versions[-1] if pick is None else pick(versions)
                for number, versions in units.items()
            }
        )

    def _join(self, units: dict[int, Any]) -> bytes:
        length = units.get(LENGTH, 0)
        data = bytearray(length)
        for number, unit in units.items():
            if number != LENGTH and (start := number * self._unit) < length:
                data[start : start + len(unit)] = unit[: length - start]
        return bytes(data)


def states(
    recording: Recording, seed: int, subsets: int = 200, singles: bool = True, every: int = 1
) -> Iterator[State]:
    """Yield states that a loss of power during the recording could leave, each different one once.

    - after each event: all of it on the disk;
    - before each sync and mark, and at the end: nothing that no sync covers, and with ``singles`` all but one unit or
      name of that;
    - at ``subsets`` random points a random part of it, which may be older versions of units.

    Of all these, many of which are alike, only each ``every``-th is made.
    """
    rng = random.Random(seed)
    disk, seen, number = _Disk(recording), set(), 0
    begin = recording.events.index(Sync(None)) + 1
    for event in recording.events[:begin]:
        disk.apply(event)
    events = recording.events[begin:]
    points = sorted(rng.choices(range(len(events) + 1), k=subsets))
    for position in range(len(events) + 1):
        here: list[tuple[str, Callable[[], Files]]] = []
        if position == 0 or not isinstance(events[position - 1], Sync):
            here.append(("all", disk.image))
        if position == len(events) or isinstance(events[position], Sync | Mark):
            here.append(("none", partial(disk.image, _oldest, _never)))
            here += _without_one(disk) if singles else []
        while points and points[0] == position:
            points.pop(0)
            here.append(("some", partial(_random_image, disk, rng)))
        for why, image in here:
            number += 1
            if (number - 1) % every:
                continue
            files = image()
            key = hash((disk.marks, tuple(files.items())))
            if key not in seen:
                seen.add(key)
                yield State(files, disk.marks, f"{why} at event {position} of {len(events)}")
        if position < len(events):
            disk.apply(events[position])


def _without_one(disk: _Disk) -> Iterable[tuple[str, Callable[[], Files]]]:
    for missing in disk.pending():
        if isinstance(missing, int):
            names = disk.names[missing][0].changes
            yield f"without the names {names}", partial(disk.image, take=partial(ne, missing))
        else:
            yield f"without unit {missing}", partial(disk.image, lost=missing)


def _random_image(disk: _Disk, rng: random.Random) -> Files:
    share = rng.choice([0.1, 0.5, 0.9])

    def pick(versions: list[Any]) -> Any:
        return versions[-1] if rng.random() < share else rng.choice(versions)

    return disk.image(pick, lambda _: rng.random() < share)


def _oldest(versions: list[Any]) -> Any:
    return versions[0]


def _never(_: int) -> bool:
    return False
