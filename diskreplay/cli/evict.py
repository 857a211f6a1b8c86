"""`diskreplay evict`: hides the episodes of a store that an expression chooses, as `Store.evict` does."""

from typing import Annotated

import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.where import Required, compile_where, matching
from diskreplay.store.eviction import chosen_episodes


def evict(
    path: console.StorePath,
    where: Required,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, only tell what would be evicted.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Evict the episodes that meet an expression, for good.

    They are hidden at once, in every process; their bytes are deleted when nothing else is left in their segment.
    Episodes of segments that are still being written stay. Asks on the terminal, unless there is --yes; exit code 1 if
    nothing was evicted for lack of a yes.
    """
    with dr.open(path, "r" if dry_run else "a") as store:
        condition = compile_where(where, store.schema)
        snapshot = store.snapshot
        chosen = chosen_episodes(snapshot, condition)
        what = f"{text.plural(len(chosen), 'episode')} of {text.plural(sum(chosen.values()), 'step')}"
        staying = sum(matching(store.episodes, condition)) - len(chosen)
        if staying:
            console.complain(f"{text.plural(staying, 'episode')} of segments that are being written would stay")
        if dry_run:
            console.emit(f"would be evicted  {what}")
        elif not chosen:
            console.emit("nothing to evict")
        elif yes or console.ask(f"Evict {what} for good?"):
            console.emit(f"evicted  {text.plural(store.evict(condition), 'step')}")
        else:
            console.emit(f"not evicted  {what}\nto evict them say --yes")
            raise typer.Exit(console.PROBLEMS)
