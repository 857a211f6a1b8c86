"""`diskreplay diff`: compares two stores, and shows their first difference."""

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.look.show import cell, episode_leaves
from diskreplay.interop.exchange.exporting import in_order
from diskreplay.reading.episodes import Episode
from diskreplay.schema.schema import Schema
from diskreplay.segments.documents.layout import PRIORITY
from diskreplay.segments.documents.root import read_root

_ENDS = ("length", "terminated", "truncated", "cut")


class Difference(NamedTuple):
    """A difference of two stores: its name, and the value in each store; None if a store has no such value."""

    what: str
    a: Any
    b: Any


def diff(
    path: Annotated[Path, typer.Argument(metavar="A", help="The folder of a store.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="The folder of another store.")],
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of differences instead of lines.")] = False,
) -> None:
    """Compare two stores: their schemas, limits, counts and episodes.

    Episodes are compared from the oldest to the first difference: the length, how the episode ended, and every byte of
    every field. Ids, segments and times of publishing are not compared, since a copy has new ones. Exit code 1 if there
    is a difference.
    """
    with dr.open(path) as a, dr.open(other) as b, console.bar("Comparing episodes") as progress:
        found = list(differences(a, b, progress))
    lines = [f"{text.clean(each.what)}: {_shown(each.a)} and {_shown(each.b)}" for each in found] or ["no differences"]
    console.tell([each._asdict() for each in found], lines, json=json, problems=found)


def differences(a: dr.Store, b: dr.Store, progress: console.Report) -> Iterator[Difference]:
    """Yield each difference of schema, limits and counts, and the first difference of episodes."""
    fields = [dict(store.schema.leaves) for store in (a, b)]
    yield from _of_mappings("schema: ", fields[0], fields[1])
    yield from _of_mappings("", vars(read_root(a.path).limits), vars(read_root(b.path).limits))
    counts = [{"steps": len(store), "episodes": store.num_episodes} for store in (a, b)]
    yield from _of_mappings("", *counts)
    if a.schema == b.schema:
        ordered = [in_order(store.episodes) for store in (a, b)]
        total = max(map(len, ordered))
        for number, (one, two) in enumerate(zip_longest(*ordered)):
            if one is None or two is None:
                return  # the numbers of episodes differ: the code above has yielded this
            if found := of_episodes(one, two, a.schema):
                yield found._replace(what=f"episode {number}, {found.what}")
                return
            progress(number + 1, total)


def _of_mappings(prefix: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**a, **b}:
        if (one := a.get(name)) != (two := b.get(name)):
            yield Difference(f"{prefix}{name}", one, two)


def of_episodes(a: Episode, b: Episode, schema: Schema) -> Difference | None:
    ends = [dict(zip(_ENDS, (len(e), e.terminated, e.truncated, e.cut), strict=True)) for e in (a, b)]
    if found := next(_of_mappings("", *ends), None):
        return found
    rows = [{**{path: e.rows(path) for path in schema.step_leaves}, PRIORITY: e[PRIORITY]} for e in (a, b)]
    for path, one in rows[0].items():
        two = rows[1][path]
        if len(one) != len(two):
            finals = [cell(x[len(a)]) if len(x) > len(a) else None for x in (one, two)]
            return Difference(f"final observation, {path}", *finals)
        if (at := first_difference(one, two)) is not None:
            step = "final observation" if at[0] == len(a) else f"step {at[0]}"
            return Difference(f"{step}, {path}{list(at[1:]) or ''}", one[at], two[at])
    values = [episode_leaves(episode, schema) for episode in (a, b)]
    for path, value in values[0].items():
        if _bytes(value) != _bytes(values[1][path]):
            return Difference(path, value, values[1][path])
    return None


def first_difference(a: NDArray[Any], b: NDArray[Any]) -> tuple[int, ...] | None:
    """Return the index of the first value with different bytes in two arrays of equal shape; None if there is none."""
    one, two = (np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, x.itemsize) for x in (a, b))
    places = np.flatnonzero((one != two).any(axis=-1))
    return tuple(int(at) for at in np.unravel_index(places[0], a.shape)) if len(places) else None


def _bytes(value: Any) -> bytes | None:
    return None if value is None else np.asarray(value).tobytes()


def _shown(value: Any) -> str:
    if value is None:
        return text.NOTHING
    if isinstance(value, np.ndarray) and value.ndim:
        return cell(value)
    return text.clean(value)  # not `cell`, because `cell` rounds numbers
