"""An experience replay store on disk that a PyTorch trainer samples as if it were in memory.

Everything public is a name of this package. A name's module is imported when the name is first used, so that a
process that only collects experience loads neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diskreplay.buffers.distillation import DistillationBuffer as DistillationBuffer
    from diskreplay.buffers.replay import Experience as Experience, ReplayBuffer as ReplayBuffer
    from diskreplay.buffers.rollout import RolloutBuffer as RolloutBuffer
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
    from diskreplay.format.schema import Schema as Schema
    from diskreplay.format.spaces import Field as Field
    from diskreplay.interop.gymnasium import (
        RecordEpisodes as RecordEpisodes,
        RecordVectorEpisodes as RecordVectorEpisodes,
    )
    from diskreplay.loading.batch import Batch as Batch
    from diskreplay.loading.frames import RandomShift as RandomShift, ToFloat as ToFloat
    from diskreplay.loading.mixed import MixedSampler as MixedSampler
    from diskreplay.loading.normalize import Normalize as Normalize
    from diskreplay.loading.sampler import Sampler as Sampler
    from diskreplay.loading.targets import (
        lambda_returns as lambda_returns,
        nstep_targets as nstep_targets,
        q_lambda_targets as q_lambda_targets,
        retrace_targets as retrace_targets,
        vtrace_targets as vtrace_targets,
    )
    from diskreplay.loading.value_rescaling import rescale_value as rescale_value, unscale_value as unscale_value
    from diskreplay.loading.warmup import warmup as warmup
    from diskreplay.sampling.mixture import Mixture as Mixture
    from diskreplay.sampling.prioritized import Prioritized as Prioritized
    from diskreplay.sampling.recency import Recency as Recency
    from diskreplay.sampling.schedule import Linear as Linear
    from diskreplay.sampling.stratified import Stratified as Stratified
    from diskreplay.sampling.sweep import Sweep as Sweep
    from diskreplay.sampling.uniform import Uniform as Uniform
    from diskreplay.store.limiter import RateLimiter as RateLimiter
    from diskreplay.store.opening import create as create, open as open
    from diskreplay.store.reading.episodes import Episode as Episode
    from diskreplay.store.store import Store as Store
    from diskreplay.store.writing.vector_writer import VectorWriter as VectorWriter
    from diskreplay.store.writing.writer import Writer as Writer
    from diskreplay.verify.files import Problem as Problem
    from diskreplay.views.experiences import nstep_experiences as nstep_experiences
    from diskreplay.views.hindsight import Hindsight as Hindsight
    from diskreplay.views.rollouts import Rollouts as Rollouts
    from diskreplay.views.sequences import Episodes as Episodes, Sequences as Sequences
    from diskreplay.views.transitions import Transitions as Transitions

__version__ = "0.1.0"

# name -> module that defines it; the imports above say the same to type checkers, a test compares the two
_MODULES = {
    "Batch": "diskreplay.loading.batch",
    "BufferFull": "diskreplay.errors",
    "Closed": "diskreplay.errors",
    "DamagedSegmentWarning": "diskreplay.errors",
    "DistillationBuffer": "diskreplay.buffers.distillation",
    "Episode": "diskreplay.store.reading.episodes",
    "Episodes": "diskreplay.views.sequences",
    "Experience": "diskreplay.buffers.replay",
    "Field": "diskreplay.format.spaces",
    "FormatError": "diskreplay.errors",
    "Hindsight": "diskreplay.views.hindsight",
    "InvalidIndex": "diskreplay.errors",
    "Linear": "diskreplay.sampling.schedule",
    "MissingExtra": "diskreplay.errors",
    "MixedSampler": "diskreplay.loading.mixed",
    "Mixture": "diskreplay.sampling.mixture",
    "Normalize": "diskreplay.loading.normalize",
    "NotEnoughData": "diskreplay.errors",
    "Prioritized": "diskreplay.sampling.prioritized",
    "Problem": "diskreplay.verify.files",
    "RandomShift": "diskreplay.loading.frames",
    "RateLimited": "diskreplay.errors",
    "RateLimiter": "diskreplay.store.limiter",
    "ReadOnlyError": "diskreplay.errors",
    "Recency": "diskreplay.sampling.recency",
    "RecordEpisodes": "diskreplay.interop.gymnasium",
    "RecordVectorEpisodes": "diskreplay.interop.gymnasium",
    "ReplayBuffer": "diskreplay.buffers.replay",
    "ReplayError": "diskreplay.errors",
    "RolloutBuffer": "diskreplay.buffers.rollout",
    "Rollouts": "diskreplay.views.rollouts",
    "Sampler": "diskreplay.loading.sampler",
    "Schema": "diskreplay.format.schema",
    "SchemaError": "diskreplay.errors",
    "SegmentGone": "diskreplay.errors",
    "Sequences": "diskreplay.views.sequences",
    "StorageFull": "diskreplay.errors",
    "Store": "diskreplay.store.store",
    "StoreExists": "diskreplay.errors",
    "StoreLocked": "diskreplay.errors",
    "StoreNotFound": "diskreplay.errors",
    "Stratified": "diskreplay.sampling.stratified",
    "Sweep": "diskreplay.sampling.sweep",
    "ToFloat": "diskreplay.loading.frames",
    "Transitions": "diskreplay.views.transitions",
    "Uniform": "diskreplay.sampling.uniform",
    "VectorWriter": "diskreplay.store.writing.vector_writer",
    "Writer": "diskreplay.store.writing.writer",
    "WriterClosed": "diskreplay.errors",
    "create": "diskreplay.store.opening",
    "lambda_returns": "diskreplay.loading.targets",
    "nstep_experiences": "diskreplay.views.experiences",
    "nstep_targets": "diskreplay.loading.targets",
    "open": "diskreplay.store.opening",
    "q_lambda_targets": "diskreplay.loading.targets",
    "rescale_value": "diskreplay.loading.value_rescaling",
    "retrace_targets": "diskreplay.loading.targets",
    "unscale_value": "diskreplay.loading.value_rescaling",
    "vtrace_targets": "diskreplay.loading.targets",
    "warmup": "diskreplay.loading.warmup",
}


def _can_be_imported(name: str) -> bool:
    try:
        __getattr__(name)
    except ImportError:
        return False
    return True


def __getattr__(name: str) -> object:
    if name == "__all__":
        # `from diskreplay import *` leaves out a name whose library is missing. `diskreplay.NAME` says what to install.
        return ["__version__", *filter(_can_be_imported, _MODULES)]
    if name not in _MODULES:
        raise AttributeError(f"module 'diskreplay' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(["__version__", *_MODULES])
