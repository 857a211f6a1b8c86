"""Stores to be merged into packs, with everything in them, and all that a reader sees of one."""

from pathlib import Path
from typing import Any

import diskreplay as dr
from diskreplay.testing.nested import flat
from tests.crash.power import another_boot
from tests.crash.workloads import create, write_single, write_vector


def ignore(told: object) -> None:
    """What the workloads tell is of no interest here."""


def write_more(path: Path, first: int) -> None:
    """Have two writers of a boot, one with lanes, and one of another boot write all that there is to write.

    Their numbers are ``first``, which is odd, and those behind it. Those with odd ones give priorities.
    """
    with dr.open(path, "a") as store:
        write_single(store, ignore, first)
        write_vector(store, ignore, first + 1)
    with another_boot(f"boot {first}"), dr.open(path, "a") as store:
        write_vector(store, ignore, first + 2)


def make_store(path: Path, **kwargs: Any) -> None:
    """Make a store of a dozen sealed segments of three writers and two boots, without a capacity."""
    create(path, **{"capacity": None, "chunk_bytes": 4096, **kwargs}).close()
    write_more(path, 1)


def contents(store: dr.Store) -> list[tuple[Any, ...]]:
    """Return all that is to be read of each episode of the current snapshot of a coded store."""
    return [
        (
            *(episode.ids.tolist(), episode.terminated, episode.truncated, episode.cut, episode.segment, episode.lane),
            *(episode.times.tolist(), episode["priority"].tobytes(), episode["last"]),
            {
                leaf: (x.shape, x.tobytes())
                for root, value in _values(episode).items()
                for leaf, x in flat(value, root).items()
            },
        )
        for episode in store.episodes
    ]


def _values(episode: Any) -> dict[str, Any]:
    return {"obs": episode.obs, "action": episode.action, "reward": episode.reward, "check": episode["check"]}


def folders(path: Path) -> list[int]:
    """Return the numbers of the segments that have a folder."""
    return sorted(int(folder.name) for folder in (path / "segments").glob("0*"))
