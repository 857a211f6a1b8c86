"""Monitor a store or a sampler in TensorBoard, Weights & Biases or Prometheus.

The tables `STORE` and `SAMPLER` define the names of the numbers in `Store.info` and `Sampler.stats`, for all three
libraries. Importing this module imports none of these libraries: each function takes a writer that the caller made.
"""

import math
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import diskreplay as dr

if TYPE_CHECKING:
    from diskreplay.interop.ray import ShardedSampler

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
# Upper bounds of histogram buckets: 0, 1, 2, 5, 10, ... for steps and versions, 0.0001, 0.0002, ... for priorities.
COUNTS = (0.0, *(float(digit * 10**power) for power in range(10) for digit in (1, 2, 5)))
PRIORITIES = tuple(float(f"{digit}e{power}") for power in range(-4, 4) for digit in (1, 2, 5))
# All states in `Store.info`. A state without segments or writers is reported as 0: otherwise its chart would keep the
# last number.
STATES = {
    "segments": ("sealed", "writing", "dead", "foreign", "unknown", "damaged"),
    "writers": ("alive", "dead", "closed", "unknown"),
}


class Measure(NamedTuple):
    """The description of a number, or of a histogram of numbers, in `Store.info` or `Sampler.stats`.

    ``key`` is the path of the number in the nested dicts. ``name`` and ``unit`` are parts of the metric's name in
    Prometheus. If the path leads to a dict, the keys of this dict are the values of the Prometheus label ``label``.
    ``bounds`` are the upper bounds of a histogram's buckets.
    """

    key: str
    name: str
    unit: str
    kind: str
    help: str
    label: str = ""
    bounds: Sequence[float] = ()

    def metric(self, group: str) -> str:
        """Return the measure's name in Prometheus. ``group`` is "store" or "sampler"."""
        parts = ("diskreplay", group, self.name, self.unit, "total" if self.kind == COUNTER else "")
        return "_".join(filter(None, parts))


STORE = (
    Measure("steps", "visible", "steps", GAUGE, "Steps that can be drawn"),
    Measure("steps_hidden", "hidden", "steps", GAUGE, "Steps beyond the capacity or the maximum age, still on disk"),
    Measure("steps_inserted", "inserted", "steps", COUNTER, "Steps that were ever inserted"),
    Measure("steps_evicted", "evicted", "steps", COUNTER, "Steps that were evicted"),
    Measure("steps_discarded", "discarded", "steps", COUNTER, "Steps of episodes that their writer discarded"),
    Measure("steps_lost", "lost", "steps", GAUGE, "Steps lost to damage"),
    Measure("steps_unproven", "unproven", "steps", GAUGE, "Steps that no mark proves, until repair salvages them"),
    Measure("quarantine/steps", "quarantined", "steps", GAUGE, "Steps in quarantine"),
    Measure("quarantine/segments", "quarantined", "segments", GAUGE, "Segments in quarantine"),
    Measure("quarantine/bytes", "quarantined", "bytes", GAUGE, "Bytes in quarantine"),
    Measure("episodes", "", "episodes", GAUGE, "Episodes, by how they ended", "end"),
    Measure("total_reward", "total_reward", "", GAUGE, "Sum of rewards of ended episodes", "statistic"),
    Measure("length", "length", "steps", GAUGE, "Steps of ended episodes", "statistic"),
    Measure("segments", "", "segments", GAUGE, "Segments, by their state", "state"),
    Measure("writers", "", "writers", GAUGE, "Writers, by their state", "state"),
    Measure("capacity", "capacity", "steps", GAUGE, "Capacity in steps"),
    Measure("capacity_bytes", "capacity", "bytes", GAUGE, "Capacity in bytes"),
    Measure("max_age_s", "max_age", "seconds", GAUGE, "Age beyond which steps are hidden"),
    Measure("bytes_on_disk", "disk", "bytes", GAUGE, "Bytes on disk"),
    Measure("bytes_apparent", "apparent", "bytes", GAUGE, "Apparent bytes of the files, with holes"),
    Measure("holes", "holes", "bytes", GAUGE, "Bytes of holes in the files, which take no disk space"),
)
AGE = Measure("age", "batch_age", "steps", HISTOGRAM, "Steps of the store that are newer than a step", bounds=COUNTS)
STALENESS = Measure(
    "staleness", "batch_staleness", "", HISTOGRAM, "Newest value of a field minus a step's value", "field", COUNTS
)
PRIORITY = Measure("priority", "batch_priority", "", HISTOGRAM, "Priority of an item", bounds=PRIORITIES)
SAMPLER = (
    Measure("batches", "", "batches", COUNTER, "Batches delivered"),
    Measure("batches_per_second", "batches_per_second", "", GAUGE, "Batches per second since the first was requested"),
    Measure("steps", "", "steps", COUNTER, "Environment steps delivered"),
    Measure("steps_per_second", "steps_per_second", "", GAUGE, "Steps per second since the first batch was requested"),
    Measure("replay_ratio", "replay_ratio", "", GAUGE, "Steps delivered per step that is in the store now"),
    Measure("seconds_planning", "planning", "seconds", COUNTER, "Time to draw ids, and to wait for a limiter"),
    Measure("seconds_waiting", "waiting", "seconds", COUNTER, "Time to wait for batches that are made ahead"),
    Measure("seconds_elsewhere", "elsewhere", "seconds", COUNTER, "Time between the calls, spent by the trainer"),
    Measure("seconds_reading", "reading", "seconds", COUNTER, "Time to wait for the disk, of all threads"),
    Measure("seconds_gathering", "gathering", "seconds", COUNTER, "Time to copy rows, of all threads"),
    Measure("seconds_copying", "copying", "seconds", COUNTER, "Time to copy batches to devices other than CUDA"),
    Measure("seconds_transforming", "transforming", "seconds", COUNTER, "Time of transforms, of all threads"),
    Measure("population", "population", "ids", GAUGE, "Ids that can be drawn"),
    Measure("priority_sum", "priority_sum", "", GAUGE, "Sum of the priorities"),
    Measure("steps_not_finite", "not_finite", "steps", GAUGE, "Steps that Normalize leaves out: NaN or infinite"),
    # The following numbers are only in `ShardedSampler.stats`.
    Measure("bytes", "exchanged", "bytes", COUNTER, "Bytes between shards and this trainer"),
    Measure("messages", "exchanged", "messages", COUNTER, "Messages between shards and this trainer"),
    Measure("redrawn", "redrawn", "ids", COUNTER, "Items redrawn from other shards for a shard that did not answer"),
    Measure("updates_sent", "updates_sent", "ids", COUNTER, "Priorities sent to shards"),
    Measure("updates_lost", "updates_lost", "ids", COUNTER, "Priorities for shards that did not answer"),
    Measure("updates_skipped", "updates_skipped", "ids", COUNTER, "Priorities that shards skipped"),
    Measure("oldest_update_s", "oldest_update", "seconds", GAUGE, "Longest time that a priority waited to be sent"),
    Measure("missing", "missing", "shards", GAUGE, "Shards that do not answer"),
    Measure("shards/population", "shard_population", "ids", GAUGE, "Ids of a shard that can be drawn", "shard"),
    Measure("shards/mass", "shard_mass", "", GAUGE, "Sum of the priorities of a shard", "shard"),
    AGE,
    STALENESS,
    PRIORITY,
)


class TensorBoardWriter(Protocol):
    """The methods of a `SummaryWriter` of `torch.utils.tensorboard` or tensorboardX that this module calls."""

    def add_scalar(self, tag: str, value: Any, step: int, /) -> object: ...
    def add_histogram(self, tag: str, values: Any, step: int, /) -> object: ...


class WandbRun(Protocol):
    def log(self, data: dict[str, Any], step: int | None = None) -> object: ...


class TextFile(Protocol):
    def write(self, text: str, /) -> object: ...


class Observed(NamedTuple):
    """The numbers of a store or a sampler at one time.

    ``group`` is "store" or "sampler". ``step`` is the number of steps inserted into a store, or the number of batches
    delivered by a sampler. An entry of ``values`` has three parts: a measure, the value of the measure's label (""
    without a label), and the number. For a histogram, the third part is an array.
    """

    group: str
    step: int
    path: str | None
    values: list[tuple[Measure, str, Any]]

    def by_tag(self, prefix: str | None) -> Iterator[tuple[Measure, str, Any]]:
        """Yield each measure, with a tag such as ``sampler/age``, and its number.

        Tags begin with ``prefix``, or with the group if ``prefix`` is None.
        """
        prefix = self.group if prefix is None else prefix.rstrip("/")
        for measure, label, value in self.values:
            yield measure, "/".join(filter(None, (prefix, measure.key, label))), value


def to_tensorboard(
    source: "dr.Store | dr.Sampler | ShardedSampler",
    writer: TensorBoardWriter,
    step: int | None = None,
    *,
    staleness: str | Sequence[str] = (),
    prefix: str | None = None,
) -> None:
    """Write the numbers of a store or a sampler to TensorBoard.

    Each number of `Store.info` or `Sampler.stats` is a scalar, such as ``store/steps_hidden`` and
    ``sampler/replay_ratio``. Values of None and NaN are left out. Segments and writers are counted by state.

    A `Sampler` also has histograms of the last batch that it delivered:

    - ``sampler/age``: for each step of the batch, the number of newer steps in the store.
    - ``sampler/priority``: the priorities, if ids are drawn by priorities.
    - ``sampler/staleness/NAME``: see `staleness`.

    If items are sequences, only their first steps are counted. Histograms do not change the sampler. There are no
    histograms before the first batch, or if a step of the last batch was evicted.

    Call this function every few seconds, not for each batch: a call for a sampler takes milliseconds, and a call for a
    store looks at all files of the store.

    Parameters
    ----------
    source : Store, Sampler or ShardedSampler
        The store or sampler.
    writer : SummaryWriter
        The writer of `torch.utils.tensorboard` or of tensorboardX, or any object with the same methods.
    step : int or None
        The step that TensorBoard shows for the numbers. None: the number of batches that the sampler delivered, or the
        number of steps that were inserted into the store.
    staleness : str or sequence of str
        Names of extra fields, such as the version of the policy that acted. The histogram ``sampler/staleness/NAME``
        has, for each step of the batch, the newest value minus the step's value. The newest value is the maximum over
        the steps of the batch and the last step of the newest episode.
    prefix : str or None
        The first part of each name. Give each store or sampler of a run its own prefix. None: "store" or "sampler".

    Raises
    ------
    ValueError
        The source is neither a store nor a sampler, or a name in `staleness` is not an extra field with one number a
        step. Or the source is not a `Sampler`, and `staleness` is given.
    """
    observed = observe(source, staleness)
    at = observed.step if step is None else step
    for measure, tag, value in observed.by_tag(prefix):
        if measure.kind == HISTOGRAM:
            writer.add_histogram(tag, value, at)
        else:
            writer.add_scalar(tag, value, at)


def to_wandb(
    source: "dr.Store | dr.Sampler | ShardedSampler",
    run: WandbRun,
    step: int | None = None,
    *,
    staleness: str | Sequence[str] = (),
    prefix: str | None = None,
) -> None:
    """Log the numbers of a store or a sampler to a run of Weights & Biases, with one call of `run.log`.

    Names, histograms, parameters and errors are the same as for `to_tensorboard`, except that `step` is passed to
    `run.log`. If `step` is None, the run counts its own steps.

    Raises
    ------
    MissingExtra
        There are histograms to log, and wandb cannot be imported.
    """
    logged: dict[str, Any] = {}
    for measure, tag, value in observe(source, staleness).by_tag(prefix):
        logged[tag] = _wandb_histogram(value) if measure.kind == HISTOGRAM else value
    run.log(logged, step=step)


def _wandb_histogram(values: NDArray[Any]) -> Any:
    with dr.MissingExtra.raised_for("a histogram of Weights & Biases", "wandb"):
        import wandb  # the caller has imported wandb to make the run
    return wandb.Histogram(values)


def to_prometheus(
    source: "dr.Store | dr.Sampler | ShardedSampler",
    writer: TextFile | str | os.PathLike[str],
    *,
    staleness: str | Sequence[str] = (),
    labels: Mapping[str, str] | None = None,
) -> None:
    """Write the numbers of a store or a sampler in Prometheus' text format, version 0.0.4.

    Names of numbers are, for example, ``diskreplay_store_visible_steps`` and
    ``diskreplay_sampler_planning_seconds_total``. The label ``store`` is the store's path. Histograms, `staleness` and
    errors are as for `to_tensorboard`. A histogram describes the last batch only, not all batches so far: query the
    histogram without ``rate()``.

    Parameters
    ----------
    writer : file or path
        A file that is open for text, or a path. A file at this path is replaced by one rename, as the textfile
        collector of node_exporter requires. Write at most one store and one sampler to an open file, since Prometheus
        allows each name once in a file.
    labels : mapping of str to str, or None
        Labels for every number, such as the name of the run.

    Raises
    ------
    ValueError
        As for `to_tensorboard`. Or a name in `labels` is invalid in Prometheus, or this function itself sets that
        label.
    """
    observed, given = observe(source, staleness), _check_labels(labels or {})
    common = {**given, **({} if observed.path is None else {"store": observed.path})}
    text = "".join(f"{line}\n" for line in _exposition(observed, common))
    if isinstance(writer, str | os.PathLike):
        _replace_file(Path(writer), text)
    else:
        writer.write(text)


def observe(source: Any, staleness: str | Sequence[str] = ()) -> Observed:
    names = (staleness,) if isinstance(staleness, str) else tuple(staleness)
    path, histograms = None, dict[str, Any]()
    table: Sequence[Measure]
    if isinstance(source, dr.Store):
        group, table, found, path = "store", STORE, _store_numbers(source.info()), source.path
    elif callable(getattr(source, "stats", None)):
        group, table, found = "sampler", SAMPLER, _sampler_numbers(source.stats())
        if isinstance(source, dr.Sampler):
            path = source.store.path
            histograms = _histograms(source, names, weighted=math.isfinite(found["priority_sum"]))
    else:
        raise ValueError(f"the source must be a Store or a Sampler, not {source!r}")
    if names and not (group == "sampler" and path is not None):
        raise ValueError(f"staleness={staleness!r} needs the batches of a Sampler: leave it out for {source!r}")
    flat = dict(_flat({**found, **histograms}))
    values = [(measure, label, flat[key]) for measure in table for label, key in _places(measure, flat)]
    step = int(flat["steps_inserted" if group == "store" else "batches"])
    return Observed(group, step, None if path is None else os.fsencode(path).decode("utf-8", "replace"), values)


def _store_numbers(info: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Store.info` with segments and writers counted by state, and without redundant sums."""
    counted = {
        name: {**dict.fromkeys(states, 0), **Counter(entry["state"] for entry in info[name])}
        for name, states in STATES.items()
    }
    parts = {
        name: {key: value for key, value in (info[name] or {}).items() if key not in ("total", "count")}
        for name in ("episodes", "total_reward", "length")
    }
    return {**info, **counted, **parts}


def _sampler_numbers(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a sampler's `stats`, nested as in the table `SAMPLER`.

    For a `ShardedSampler`, ``missing`` is the number of missing shards, and ``shards`` maps each measure to a dict of
    numbers by shard.
    """
    if "shards" not in stats:
        return dict(stats)
    by_shard = {key: {str(n): shard[key] for n, shard in enumerate(stats["shards"])} for key in ("population", "mass")}
    return {**stats, "missing": len(stats["missing"]), "shards": by_shard}


def _flat(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}/")
        elif isinstance(value, np.ndarray) or (isinstance(value, Real) and not math.isnan(value)):
            yield f"{above}{key}", value


def _places(measure: Measure, flat: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not measure.label:
        if measure.key in flat:
            yield "", measure.key
        return
    above = f"{measure.key}/"
    for key in flat:
        if key.startswith(above):
            yield key.removeprefix(above), key


def _histograms(sampler: "dr.Sampler", names: Sequence[str], weighted: bool) -> dict[str, Any]:
    """Return an array for each histogram, with a number for each item of the sampler's last batch."""
    extra = sampler.store.schema.extra
    for name in names:
        field = extra.get(name)
        if not isinstance(field, dr.Field) or field.shape or field.dtype.kind not in "biuf":
            known = [key for key, one in extra.items() if isinstance(one, dr.Field) and not one.shape]
            raise ValueError(f"staleness must name an extra field with one number a step, of {known}, not {name!r}")
    # The names of batch fields that the histograms need. If an extra field has one of these names, `gather` cannot
    # return the batch field, and the histogram is left out.
    wanted = [("age",), ("probability", "priority_sum")][: 1 + weighted]
    requested = [name for group in wanted if extra.keys().isdisjoint(group) for name in group]
    try:
        batch = sampler.gather(fields=[*requested, *names]).numpy()
        stale = {name: _staleness(sampler, name, batch) for name in names}
    except (dr.Closed, dr.NotEnoughData, dr.InvalidIndex, dr.SegmentGone):
        return {}
    found = {"staleness": stale, **({"age": batch["age"].ravel()} if "age" in requested else {})}
    if "probability" in requested:
        found["priority"] = batch["probability"] * batch["priority_sum"]
    return found


def _staleness(sampler: "dr.Sampler", name: str, batch: Mapping[str, Any]) -> NDArray[np.float64]:
    values: NDArray[np.float64] = batch[name].astype(np.float64)
    if values.ndim > batch["index"].ndim:  # take only the first step of a window
        values = values[:, 0]
    snapshot = sampler.store.snapshot  # the lines below need the same snapshot: other threads may refresh the store
    first, steps = snapshot.episodes.first, snapshot.episodes.steps
    newest = -np.inf
    if len(first):  # there may be no episode: all may be evicted since the batch was gathered
        # Take the newest episode by its time: the episode with the largest ids may be old, if there are several
        # writers.
        youngest = int(np.argmax(snapshot.times(first)))
        newest = float(snapshot.rows(f"extra/{name}", int(first[youngest]), int(steps[youngest]))[-1])
    return float(np.max(values, initial=newest)) - values.ravel()


def _check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    own = {"store", "le", *(measure.label for measure in (*STORE, *SAMPLER))}
    for name in labels:
        if not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name) or name in own:
            taken = ", ".join(sorted(own - {""}))
            raise ValueError(f"labels has {name!r}: use letters, digits and underscores, and none of {taken}")
    return {name: str(value) for name, value in labels.items()}


def _exposition(observed: Observed, common: Mapping[str, str]) -> Iterator[str]:
    described = ""
    for measure, label, value in observed.values:
        metric = measure.metric(observed.group)
        labels = {**common, **({measure.label: label} if label else {})}
        if metric != described:
            yield f"# HELP {metric} {measure.help}{', of the last batch' if measure.kind == HISTOGRAM else ''}."
            yield f"# TYPE {metric} {measure.kind}"
            described = metric
        if measure.kind != HISTOGRAM:
            yield f"{metric}{_braces(labels)} {_number(value)}"
            continue
        below = np.searchsorted(np.sort(value), measure.bounds, "right").tolist()
        for bound, count in (*zip(measure.bounds, below, strict=True), (math.inf, len(value))):
            yield f"{metric}_bucket{_braces({**labels, 'le': _number(bound)})} {count}"
        yield f"{metric}_sum{_braces(labels)} {_number(value.sum())}"
        yield f"{metric}_count{_braces(labels)} {len(value)}"


def _braces(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    pairs = [f'{name}="{value.translate(escapes)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _number(value: Any) -> str:
    number = float(value)
    if math.isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return str(int(number)) if number.is_integer() and abs(number) < 2**63 else repr(number)


def _replace_file(path: Path, text: str) -> None:
    """Replace a file by one rename.

    The name of the temporary file does not end in ``.prom``, so that no collector reads it.
    """
    other = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        other.write_text(text, encoding="utf-8")
        other.replace(path)
    except BaseException:
        other.unlink(missing_ok=True)
        raise
