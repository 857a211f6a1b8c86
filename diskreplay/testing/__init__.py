"""The test kit: a model of a store, a reference for transitions, functions that compare, and hypothesis strategies.

`diskreplay.testing.strategies` needs hypothesis (the extra "test"), so its names are not in this package. Import them
from that module.
"""

from diskreplay.testing.checks import check_account, check_episode, check_store, check_transitions
from diskreplay.testing.model import ModelEpisode, ModelLane, ModelStep, ModelStore, ModelWriter
from diskreplay.testing.reference import transition

__all__ = [
    "ModelEpisode",
    "ModelLane",
    "ModelStep",
    "ModelStore",
    "ModelWriter",
    "check_account",
    "check_episode",
    "check_store",
    "check_transitions",
    "transition",
]
