"""Which array of a D4RL file holds which leaf of a store."""

from collections.abc import Iterable

from diskreplay import Field, Schema
from diskreplay.interop.exchange.episode_data import ACTION, EXTRA, FIELDS, OBS, REWARD
from diskreplay.interop.exchange.field_trees import schema_of_leaves

NAME = "d4rl"
OBSERVATIONS, ACTIONS, REWARDS = "observations", "actions", "rewards"
TERMINALS, TIMEOUTS, NEXT_OBSERVATIONS = "terminals", "timeouts", "next_observations"
METADATA_GROUP, CHUNKS_GROUP = "metadata", "virtual"

# Groups of arrays, or arrays, that are no extra field.
RESERVED = (
    *(OBSERVATIONS, ACTIONS, REWARDS, TERMINALS, TIMEOUTS, NEXT_OBSERVATIONS),
    *(METADATA_GROUP, CHUNKS_GROUP),
)
_ARRAYS = {OBS: OBSERVATIONS, ACTION: ACTIONS, REWARD: REWARDS}
_PARTS = {array: part for part, array in _ARRAYS.items()}


def array_of(path: str) -> str | None:
    """Return the array of a leaf; None where a file has no place for it."""
    part, _, below = path.partition("/")
    if part == EXTRA:
        return None if below.split("/")[0] in RESERVED else below
    return None if part == FIELDS else f"{_ARRAYS[part]}/{below}".rstrip("/")


def leaf_of(array: str) -> str:
    """Return the leaf of an array."""
    first, _, below = array.partition("/")
    return f"{_PARTS[first]}/{below}".rstrip("/") if first in _PARTS else f"{EXTRA}/{array}"


def next_of(path: str) -> str:
    """Return the array of what follows an observation."""
    return f"{NEXT_OBSERVATIONS}{path.removeprefix(OBS)}"


def schema_of(fields: Iterable[tuple[str, Field]]) -> Schema:
    """Return the schema of a file by its arrays of steps; raises SchemaError where a store cannot have one like it."""
    return schema_of_leaves({leaf_of(array): field for array, field in fields})
