"""Helpers that several test modules share: schemas, digests of a folder, processes, comparisons of views."""

import gc
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing import ModelStore, check_transitions
from diskreplay.testing.model import ModelEpisode
from tests.testing.on_disk import POSITION_BITS

REPOSITORY = Path(__file__).parents[2]


def serial_schema(obs: Any = None, **kwargs: Any) -> dr.Schema:
    """Return a small schema whose steps are numbered in the extra field "serial"."""
    extra = {"serial": dr.Field((), "int64"), **kwargs.pop("extra", {})}
    return dr.Schema(
        obs=dr.Field((3,), "float32") if obs is None else obs, action=dr.Field((), "int64"), extra=extra, **kwargs
    )


def digest(path: Path) -> dict[str, str]:
    """Return a checksum of every file below `path`; the empty lock files are left out."""
    files = sorted(file for file in Path(path).rglob("*") if file.is_file() and file.name != "lock")
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def append_numbered(writer: Any, serials: Sequence[int], end: str = "terminated", **kwargs: Any) -> None:
    """Append one episode of `serial_schema` steps with these serials; obs, action and reward are made of them."""
    for serial in serials:
        last = serial == serials[-1]
        writer.append(
            np.full(3, serial, np.float32),
            serial,
            float(serial),
            last and end == "terminated",
            last and end == "truncated",
            next_obs=np.full(3, serial + 1, np.float32),
            serial=serial,
            **kwargs,
        )


def run_python(code: str, *args: Any, timeout_s: float = 600, **kwargs: Any) -> str:
    """Run code in a fresh interpreter from the repository's root and return what it printed; fails if it fails."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=timeout_s,
        **kwargs,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def open_descriptors() -> int:
    """Count this process's open descriptors, not the one that lists them."""
    return len(os.listdir("/proc/self/fd")) - 1


def open_files(below: Path | str = "/") -> list[str]:
    """List the files below a folder that this process has open, once a descriptor."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(str(below))]


def mapped_files(below: Path | str = "/") -> list[str]:
    """List the files of this process's mappings below a folder, once a mapping."""
    with open("/proc/self/maps") as maps:
        paths = [line.split(maxsplit=5)[-1].strip() for line in maps]
    return [path for path in paths if path.startswith(str(below))]


def resident_pages(address: int) -> int:
    """Count the pages of the mapping that begins at an address which this process can read without a fault."""
    with open("/proc/self/smaps") as maps:
        lines = iter(maps)
        for line in lines:
            if line.startswith(f"{address:x}-"):
                found = next(line for line in lines if line.startswith("Rss:"))
                return int(found.split()[1]) * 1024 // os.sysconf("SC_PAGESIZE")
    raise AssertionError(f"no mapping begins at {address:#x}")


@contextmanager
def scratch() -> Iterator[str]:
    """Give a folder for one example's stores, in memory where that is possible: making files costs the most."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="diskreplay-test-", dir=memory) as folder:
        yield folder
    # Thousands of tiny chunks an example: what the last ones mapped must not add up to the kernel's limit.
    gc.collect()


def quiet(writer: Any) -> Any:
    """Return the writer, silent about observations that do not continue: plans make them on purpose."""
    return _Quiet(writer)


class _Quiet:
    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._writer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="an appended obs differs|the episode of lane")
                return verb(*args, **kwargs)

        return call


def check_views(store: Any, model: ModelStore, ids: dict[int, int], views: Iterable[tuple]) -> int:
    """Gather every sampleable step of every view (n_step, gamma, frame_stack) and compare it with the reference loop.

    `ids` is what `check_store` returned. A few batches are drawn as well. Returns how many transitions were compared.
    """
    count = 0
    for seed, (n_step, gamma, frame_stack) in enumerate(views):
        starts = {
            ids[int(episode.steps[t].extra["serial"])]: (episode, t)
            for episode in model.episodes
            for t in episode.sampleable(n_step)
        }
        view = dr.Transitions(n_step=n_step, gamma=gamma, frame_stack=frame_stack)
        unsure = _note_parts_before(store, model, ids)
        known = {i: (of, t) for i, (of, t) in starts.items() if of not in unsure or t >= frame_stack - 1}
        sampler = dr.Sampler(store, view, batch_size=32, seed=seed, refresh=False)
        try:
            order = np.random.default_rng(seed).permutation(np.array(list(starts), np.int64))
            for part in np.split(order, range(512, len(order), 512)) if starts else ():
                batch = sampler.gather(part)
                assert batch.numpy()["index"].tolist() == part.tolist()
                count += _check_known(batch, part.tolist(), known, (n_step, gamma, frame_stack))
            if starts:
                batch = sampler.sample()
                drawn = batch.numpy()["index"].tolist()
                assert set(drawn) <= set(starts)
                assert (batch.numpy()["weight"] == 1).all()
                count += _check_known(batch, drawn, known, (n_step, gamma, frame_stack))
            else:
                with pytest.raises(dr.NotEnoughData):
                    sampler.sample()
        finally:
            sampler.close()
    return count


def _check_known(batch: Any, drawn: list[int], known: dict[int, tuple[ModelEpisode, int]], view: tuple) -> int:
    """Compare the transitions of a batch whose ids have a known reference; return how many these are."""
    some = [at for at, i in enumerate(drawn) if i in known]
    return check_transitions(batch.select(some), [known[drawn[at]] for at in some], *view) if some else 0


def _note_parts_before(store: Any, model: ModelStore, ids: dict[int, int]) -> set[ModelEpisode]:
    """Note where stacks read the part before an episode; return the episodes whose part may be there or not."""
    unsure, snapshot = set(), store.snapshot
    for episode in model.episodes:
        part = episode.before
        if part is None or not len(episode):
            continue
        shown = [ids.get(int(of.steps[-1].extra["serial"])) for of in (part, episode)]
        if part.evicted or part.discarded:
            episode.shows_before = False
        elif None in shown:  # it is hidden: its segment may have been deleted
            unsure.add(episode)
        else:
            first, last = (int(i or 0) >> POSITION_BITS for i in shown)
            episode.shows_before = bool((snapshot.lanes[first - snapshot.origin : last - snapshot.origin] > 0).all())
            unsure |= {episode} if part in unsure else set()
    return unsure


def said(stderr: str) -> str:
    """What a process wrote on stderr, but that it compiled kernels: the first of a new version does."""
    return re.sub(r"diskreplay compiles its kernels, .*\n", "", stderr)


def wait_until(condition, at_most_s=600) -> None:
    """Wait for what another thread or process does; it fails where that does not come."""
    until = time.monotonic() + at_most_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def serials(store: dr.Store | Path) -> list[int]:
    """Return the serials of a store's episodes, whole and oldest first; of a path, those that a new reader shows."""
    if not isinstance(store, dr.Store):
        with dr.open(store) as opened:
            return serials(opened)
    return [int(serial) for episode in store.episodes for serial in episode["serial"]]


def visible_serials(store: dr.Store | Path) -> list[int]:
    """Return the same without the steps that are hidden."""
    if not isinstance(store, dr.Store):
        with dr.open(store) as opened:
            return visible_serials(opened)
    return [int(serial) for episode in store.episodes for serial in episode["serial"][episode.hidden_steps :]]
