"""`diskreplay copy` and `merge`: write episodes of stores to a new store."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

import diskreplay as dr
from diskreplay.arguments import compression_argument
from diskreplay.cli import console, text
from diskreplay.cli.where import Where, compile_where
from diskreplay.errors import SegmentGone
from diskreplay.folders import hidden_sibling
from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.interop.exchange.exporting import choose
from diskreplay.reading.episodes import Episode
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import Limits, Root, check_local, read_root
from diskreplay.segments.files.durable import sync_folder

Target = Annotated[Path, typer.Argument(metavar="TO", help="The folder of the new store; nothing may be there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Write nothing; only print the number of episodes and steps.")]


def copy(path: console.StorePath, to: Target, where: Where = None, dry_run: DryRun = False) -> None:
    """Copy the ended episodes of a store, or a selection of them, to a new store.

    The new store has the same schema, limits and settings. It keeps every value, final observations, episode fields,
    and how each episode ended. One writer appends the episodes, oldest first, so ids and times are new. Saved states of
    samplers, notes of imported data and open episodes are left out. The new store appears at its path when it is
    complete.
    """
    _run([path], to, where, dry_run, read_root(path.absolute()).limits)


def merge(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATHS... TO", help="At least two stores, then the folder of the new one.")
    ],
    where: Where = None,
    dry_run: DryRun = False,
) -> None:
    """Merge the ended episodes of stores with equal schemas into a new store.

    Episodes are copied as by `copy`. The new store has the settings of the first store, but no limits, since limits
    could evict merged episodes. `Store.resize` sets limits later. An episode that is in several stores is copied once
    for each store.
    """
    *sources, to = paths
    if len(sources) < 2:
        raise typer.BadParameter("merge needs at least two stores, and the folder of the new store")
    _run(sources, to, where, dry_run, Limits(None, None, None))


def _run(paths: Sequence[Path], to: Path, where: str | None, dry_run: bool, limits: Limits) -> None:
    check_local(to)
    if os.path.lexists(to):
        raise dr.StoreExists(f"{to} exists already; give the path of a new store")
    with ExitStack() as stack:
        stores = [stack.enter_context(dr.open(path)) for path in paths]
        for store in stores[1:]:
            if store.schema != stores[0].schema:
                raise dr.SchemaError(
                    f"{store.path} has a different schema from {stores[0].path}; "
                    f"`diskreplay diff {text.clean(stores[0].path)} {text.clean(store.path)}` shows the difference"
                )
        condition = None if where is None else compile_where(where, stores[0].schema)
        chosen, open_count = choose(chain.from_iterable(store.episodes for store in stores), condition)
        copied = chosen
        if not dry_run:
            with console.bar("Copying steps") as progress, new_store(to, read_root(stores[0].path), limits) as target:
                copied = write(target, chosen, progress)
    amount = f"{text.plural(len(copied), 'episode')} of {text.plural(sum(map(len, copied)), 'step')}"
    line = f"would be copied  {amount}" if dry_run else f"copied  {amount}  to {text.clean(to)}"
    if open_count:
        line += f"; {text.plural(open_count, 'open episode')} left out"
    if gone := len(chosen) - len(copied):
        line += f"; {text.plural(gone, 'episode')} evicted meanwhile"
    console.emit(line)


@contextmanager
def new_store(to: Path, like: Root, limits: Limits) -> Iterator[dr.Store]:
    """Yield a new store at a hidden path. The end of the `with` block moves the store to ``to``.

    The new store has the schema and settings of ``like``.
    """
    building = hidden_sibling(to.absolute(), f".new-{os.getpid()}")
    try:
        with dr.create(
            building,
            like.schema,
            **vars(limits),
            chunk_bytes=like.chunk_bytes,
            segment_steps=like.segment_steps,  # type: ignore[arg-type]
            compression=compression_argument(like.compression),
            compaction=layout.AUTO if like.compacts else layout.MANUAL,
            validate=like.validate,  # type: ignore[arg-type]
        ) as store:
            yield store
        os.rename(building, to)
        sync_folder(building.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write(target: dr.Store, episodes: Sequence[Episode], progress: console.Report) -> list[Episode]:
    total, done, copied = sum(map(len, episodes)), 0, []
    with target.writer(durability="none") as writer:
        for episode in episodes:
            with suppress(SegmentGone):
                EpisodeData.of(episode, target.schema).append_to(writer, target.schema)
                copied.append(episode)
            done += len(episode)
            progress(done, total)
    return copied
