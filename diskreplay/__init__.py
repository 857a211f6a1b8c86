"""An experience replay store on disk that a PyTorch trainer samples as if it were in memory.

All public names can be imported from this package. A name's module is imported when the name is first used. A process
that only collects experience loads neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskreplay.buffers.distillation import DistillationBuffer as DistillationBuffer
    from diskreplay.buffers.replay import Experience as Experience, ReplayBuffer as ReplayBuffer
    from diskreplay.buffers.rollout import RolloutBuffer as RolloutBuffer
    from diskreplay.distributions.base import Uniform as Uniform
    from diskreplay.distributions.mixture import Mixture as Mixture
    from diskreplay.distributions.number_arguments import Linear as Linear
    from diskreplay.distributions.prioritized import Prioritized as Prioritized
    from diskreplay.distributions.recency import Recency as Recency
    from diskreplay.distributions.stratified import Stratified as Stratified
    from diskreplay.distributions.sweep import Sweep as Sweep
    from diskreplay.errors import (
        BufferFull as BufferFull,
        Closed as Closed,
        DamagedSegmentWarning as DamagedSegmentWarning,
        FormatError as FormatError,
        InvalidIndex as InvalidIndex,
        MissingExtra as MissingExtra,
        NotEnoughData as NotEnoughData,
        RateLimited as RateLimited,
        ReadOnlyError as ReadOnlyError,
        ReplayError as ReplayError,
        SchemaError as SchemaError,
        SegmentGone as SegmentGone,
        StorageFull as StorageFull,
        StoreExists as StoreExists,
        StoreLocked as StoreLocked,
        StoreNotFound as StoreNotFound,
        WriterClosed as WriterClosed,
    )
    from diskreplay.integrity.verify.files import Problem as Problem
    from diskreplay.interop.gymnasium import (
        RecordEpisodes as RecordEpisodes,
        RecordVectorEpisodes as RecordVectorEpisodes,
    )
    from diskreplay.reading.episodes import Episode as Episode
    from diskreplay.sampling.batch import Batch as Batch
    from diskreplay.sampling.mixed import MixedSampler as MixedSampler
    from diskreplay.sampling.normalize import Normalize as Normalize
    from diskreplay.sampling.sampler import Sampler as Sampler
    from diskreplay.sampling.targets import (
        lambda_returns as lambda_returns,
        nstep_targets as nstep_targets,
        q_lambda_targets as q_lambda_targets,
        rescale_value as rescale_value,
        retrace_targets as retrace_targets,
        unscale_value as unscale_value,
        vtrace_targets as vtrace_targets,
    )
    from diskreplay.sampling.transforms import RandomShift as RandomShift, ToFloat as ToFloat
    from diskreplay.sampling.warmup import warmup as warmup
    from diskreplay.schema.schema import Schema as Schema
    from diskreplay.schema.spaces import Field as Field
    from diskreplay.store.opening import create as create, open as open
    from diskreplay.store.store import Store as Store
    from diskreplay.views.hindsight import Hindsight as Hindsight
    from diskreplay.views.rollouts import Rollouts as Rollouts
    from diskreplay.views.sequences import Episodes as Episodes, Sequences as Sequences
    from diskreplay.views.transitions import Transitions as Transitions, nstep_experiences as nstep_experiences
    from diskreplay.writing.limiter import RateLimiter as RateLimiter
    from diskreplay.writing.vector_writer import VectorWriter as VectorWriter
    from diskreplay.writing.writer import Writer as Writer

__version__ = "0.1.0"

# The module that defines each public name. A test compares these names with the imports above. Type checkers read those
# imports.
_MODULES = {
    "Batch": "diskreplay.sampling.batch",
    "BufferFull": "diskreplay.errors",
    "Closed": "diskreplay.errors",
    "DamagedSegmentWarning": "diskreplay.errors",
    "DistillationBuffer": "diskreplay.buffers.distillation",
    "Episode": "diskreplay.reading.episodes",
    "Episodes": "diskreplay.views.sequences",
    "Experience": "diskreplay.buffers.replay",
    "Field": "diskreplay.schema.spaces",
    "FormatError": "diskreplay.errors",
    "Hindsight": "diskreplay.views.hindsight",
    "InvalidIndex": "diskreplay.errors",
    "Linear": "diskreplay.distributions.number_arguments",
    "MissingExtra": "diskreplay.errors",
    "MixedSampler": "diskreplay.sampling.mixed",
    "Mixture": "diskreplay.distributions.mixture",
    "Normalize": "diskreplay.sampling.normalize",
    "NotEnoughData": "diskreplay.errors",
    "Prioritized": "diskreplay.distributions.prioritized",
    "Problem": "diskreplay.integrity.verify.files",
    "RandomShift": "diskreplay.sampling.transforms",
    "RateLimited": "diskreplay.errors",
    "RateLimiter": "diskreplay.writing.limiter",
    "ReadOnlyError": "diskreplay.errors",
    "Recency": "diskreplay.distributions.recency",
    "RecordEpisodes": "diskreplay.interop.gymnasium",
    "RecordVectorEpisodes": "diskreplay.interop.gymnasium",
    "ReplayBuffer": "diskreplay.buffers.replay",
    "ReplayError": "diskreplay.errors",
    "RolloutBuffer": "diskreplay.buffers.rollout",
    "Rollouts": "diskreplay.views.rollouts",
    "Sampler": "diskreplay.sampling.sampler",
    "Schema": "diskreplay.schema.schema",
    "SchemaError": "diskreplay.errors",
    "SegmentGone": "diskreplay.errors",
    "Sequences": "diskreplay.views.sequences",
    "StorageFull": "diskreplay.errors",
    "Store": "diskreplay.store.store",
    "StoreExists": "diskreplay.errors",
    "StoreLocked": "diskreplay.errors",
    "StoreNotFound": "diskreplay.errors",
    "Stratified": "diskreplay.distributions.stratified",
    "Sweep": "diskreplay.distributions.sweep",
    "ToFloat": "diskreplay.sampling.transforms",
    "Transitions": "diskreplay.views.transitions",
    "Uniform": "diskreplay.distributions.base",
    "VectorWriter": "diskreplay.writing.vector_writer",
    "Writer": "diskreplay.writing.writer",
    "WriterClosed": "diskreplay.errors",
    "create": "diskreplay.store.opening",
    "lambda_returns": "diskreplay.sampling.targets",
    "nstep_experiences": "diskreplay.views.transitions",
    "nstep_targets": "diskreplay.sampling.targets",
    "open": "diskreplay.store.opening",
    "q_lambda_targets": "diskreplay.sampling.targets",
    "rescale_value": "diskreplay.sampling.targets",
    "retrace_targets": "diskreplay.sampling.targets",
    "unscale_value": "diskreplay.sampling.targets",
    "vtrace_targets": "diskreplay.sampling.targets",
    "warmup": "diskreplay.sampling.warmup",
}


def _can_be_imported(name: str) -> bool:
    try:
        __getattr__(name)
    except ImportError:
        return False
    return True


def __getattr__(name: str) -> object:
    if name == "__all__":
        # `from diskreplay import *` skips names that need a missing library. `diskreplay.NAME` raises MissingExtra.
        return ["__version__", *filter(_can_be_imported, _MODULES)]
    if name not in _MODULES:
        raise AttributeError(f"module 'diskreplay' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_MODULES])
