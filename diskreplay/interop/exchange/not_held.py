"""What a format cannot hold of the episodes of a store, found before the first of them is written."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from diskreplay import Episode, Schema
from diskreplay.interop.exchange.episode_data import HIDDEN, PRIORITY, Json

FINAL_OBS, NO_FINAL_OBS = "final_obs", "no_final_obs"
ENDS, CUT, NOTES, SCHEMA, METADATA = "ends", "cut", "notes", "schema", "metadata"
"""Names of data other than leaves that a format may lack, with "priority" and "hidden".

The observation after the last step, or an episode without it (its last observation is repeated); an episode that is
both terminated and truncated, or neither; one that is neither alone; notes of episodes; the schema; and what an import
noted of the whole data set. "hidden" are the marks of hidden steps.
"""


class NotHeld(NamedTuple):
    """Something that a format cannot hold: its name, and why."""

    name: str
    reason: str


def find_not_held(
    schema: Schema,
    episodes: Sequence[Episode],
    notes: Mapping[int, Json],
    noted: Mapping[str, Json],
    lacking: Mapping[str, str],
) -> list[NotHeld]:
    """Return what a format lacks and some episode has.

    Episodes are read until all of it is found. Of the arrays of their steps, only priorities are read.

    Parameters
    ----------
    schema, episodes
        The schema of the store, and the episodes that are exported.
    notes, noted : mapping
        What the store's own import had noted: of episodes by the id of their first step, and of the data set.
    lacking : mapping of str to str
        The reasons by paths of leaves and by the names above.

    Raises
    ------
    SegmentGone
        An episode has left the store since the snapshot.
    """
    # A format lacks marks of hidden steps only if some are hidden.
    found = {SCHEMA, HIDDEN} | ({METADATA} if noted else set()) | (schema.step_leaves.keys() if episodes else set())
    for episode in episodes:
        missing = lacking.keys() - found
        if not missing:
            break
        found |= _names_of(episode, schema, missing)
        if notes.get(int(episode.ids[0])) is not None:
            found.add(NOTES)
    return [NotHeld(name, reason) for name, reason in lacking.items() if name in found]


def _names_of(episode: Episode, schema: Schema, among: Set[str]) -> set[str]:
    """Return which names an episode has a value of, but the leaves of steps and notes; it is read for those given."""
    is_cut = episode.cut
    is_truncated = episode.truncated and not is_cut
    fields = (schema.leaves.keys() - schema.step_leaves.keys()) & among
    found = {path for path in fields if episode[path.split("/")[1]] is not None}
    found.add(FINAL_OBS if episode.has_final_obs else NO_FINAL_OBS)
    if episode.terminated == is_truncated:
        found |= {ENDS} if episode.terminated else {ENDS, CUT}
    if PRIORITY in among and not np.isnan(episode[PRIORITY]).all():
        found.add(PRIORITY)
    return found
