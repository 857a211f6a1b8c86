"""Monitoring: each number of a store and a sampler by name, and histograms of a batch that equal plain counts."""

import io
import json
import math
import os
import re
import stat
import subprocess
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop.monitor import to_prometheus, to_tensorboard, to_wandb
from tests.testing.support import REPOSITORY
from tests.testing.without import STORE, run_without

SCHEMA = dr.Schema(
    obs=dr.Field((2,), "float32"),
    action=dr.Field((), "int64"),
    extra={
        "version": dr.Field((), "int64"),
        "value": dr.Field((), "float32"),
        "state": dr.Field((3,), "float32"),
        "parts": {"inner": dr.Field((), "float32")},
    },
)
NOT_NUMBERS = {"format_version"}  # of the format, not of the store
VIEWS = (dr.Transitions(n_step=2), dr.Sequences(length=4, overlap=2), dr.Episodes(), dr.Rollouts(5))


class Recorder:
    """A writer and a run that keep what they are given."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}
        self.histograms: dict[str, np.ndarray] = {}
        self.steps: list[int | None] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert tag not in self.scalars
        self.scalars[tag] = value
        self.steps.append(step)

    def add_histogram(self, tag: str, values: np.ndarray, step: int) -> None:
        assert tag not in self.histograms
        self.histograms[tag] = values
        self.steps.append(step)

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        self.scalars |= {tag: value for tag, value in data.items() if not isinstance(value, tuple)}
        self.histograms |= {tag: value[1] for tag, value in data.items() if isinstance(value, tuple)}
        self.steps.append(step)


class Source:
    """Something with the statistics of a sampler over many machines."""

    def __init__(self, **stats: Any) -> None:
        self._stats = stats

    def stats(self) -> dict[str, Any]:
        return self._stats


SHARDED = {
    **{"batches": 7, "batches_per_second": 2.5, "seconds_waiting": 1.25, "bytes": 2**40, "messages": 9, "redrawn": 1},
    **{"updates_sent": 4, "updates_lost": 2, "updates_skipped": 0, "oldest_update_s": 0.5},
    **{"population": 30, "priority_sum": math.nan, "missing": [1]},
    "shards": [
        {"path": "a", "address": "x", "mass": 10.5, "population": 10, "missing": None},
        {"path": "b", "address": "y", "mass": 20.0, "population": 20, "missing": "it left", "missing_s": 3.0},
    ],
}


def append(store: dr.Store, lengths: list[int], version: int, writer: dr.Writer | None = None) -> None:
    with store.writer() if writer is None else nullcontext(writer) as writer:
        for length in lengths:
            versions = np.full(length, version)
            state, parts = np.zeros((length, 3)), {"inner": np.zeros(length)}
            extra = {"version": versions, "value": np.zeros(length), "state": state, "parts": parts}
            obs, action, reward = np.zeros((length + 1, 2)), np.zeros(length, int), np.ones(length)
            writer.append_episode(obs, action, reward, terminated=True, **extra)
            version += 1
    store.refresh()


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    with dr.create(tmp_store, SCHEMA, capacity=60, segment_steps=16) as store:
        append(store, [20, 9, 13, 25, 11], version=3)
        yield store


def numbers_of(tree: Mapping[str, Any], above: str) -> dict[str, float]:
    found = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= numbers_of(value, f"{above}/{key}")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value):
            found[f"{above}/{key}"] = value
    return found


def recorded(source: Any, **options: Any) -> Recorder:
    recorder = Recorder()
    to_tensorboard(source, recorder, **options)
    return recorder


def exposition(source: Any, **options: Any) -> str:
    text = io.StringIO()
    to_prometheus(source, text, **options)
    return text.getvalue()


def test_each_number_of_a_store_has_its_path_as_its_name(store: dr.Store) -> None:
    info = store.info()
    counted = {
        f"store/{name}/{state}": sum(entry["state"] == state for entry in info[name])
        for name in ("segments", "writers")
        for state in {entry["state"] for entry in info[name]}
    }
    del info["schema"], info["segments"], info["writers"]
    for name in ("total_reward", "length"):
        assert info[name].pop("count") == info["episodes"]["total"]  # of ended episodes: there is no other
    assert info["episodes"].pop("total") == sum(info["episodes"].values())
    scalars = recorded(store).scalars
    expected = numbers_of({key: value for key, value in info.items() if key not in NOT_NUMBERS}, "store") | counted
    assert expected["store/steps_evicted"] + expected["store/steps_hidden"] == 78 - 60
    assert expected.items() <= scalars.items()
    of_states = re.compile("store/(segments|writers)/")
    others = scalars.keys() - expected.keys()
    assert others
    assert all(of_states.match(tag) and scalars[tag] == 0 for tag in others)


def test_each_number_of_a_sampler_has_its_path_as_its_name(store: dr.Store) -> None:
    transform = dr.Normalize(obs=True)
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8, transform=transform) as sampler:
        sampler.sample()
        stats = sampler.stats()
        assert {"steps_not_finite", "priority_sum", "seconds_reading"} <= stats.keys()
        assert recorded(sampler).scalars == numbers_of(stats, "sampler")


def test_each_number_of_a_sharded_sampler_is_there() -> None:
    stats = {**SHARDED, "missing": 1}
    shards = stats.pop("shards")
    of_shards = {
        f"sampler/shards/{key}/{number}": shard[key]
        for number, shard in enumerate(shards)
        for key in ("mass", "population")
    }
    assert recorded(Source(**SHARDED)).scalars == numbers_of(stats, "sampler") | of_shards


def test_states_of_this_store_are_counted_from_zero_on(store: dr.Store) -> None:
    with store.writer() as writer:
        writer.append(
            np.zeros(2), 0, 0.0, False, next_obs=np.zeros(2), version=9, value=0, state=np.zeros(3), parts={"inner": 0}
        )
        during = recorded(store).scalars
    after = recorded(store).scalars
    assert during.keys() == after.keys()
    assert (during["store/writers/alive"], after["store/writers/alive"]) == (1, 0)
    assert (during["store/segments/writing"], after["store/segments/dead"]) == (1, 0)


def test_an_own_step_and_prefix_are_used_and_else_the_count_of_the_source(store: dr.Store) -> None:
    with dr.Sampler(store, dr.Transitions(), batch_size=8) as sampler:
        sampler.sample(), sampler.sample()
        assert set(recorded(sampler).steps) == {2}
        assert set(recorded(store).steps) == {78}
        own = recorded(sampler, step=5, prefix="critic/")
    assert set(own.steps) == {5}
    assert {tag.partition("/")[0] for tag in (*own.scalars, *own.histograms)} == {"critic"}


@pytest.mark.parametrize("view", VIEWS, ids=str)
def test_ages_and_staleness_are_of_the_last_batch(store: dr.Store, view: Any) -> None:
    every = np.concatenate([episode.ids for episode in store.episodes])
    versions = np.concatenate([episode["version"] for episode in store.episodes])
    newest_first = {step: age for age, step in enumerate(every[::-1].tolist())}
    version_of = dict(zip(every.tolist(), versions.tolist(), strict=True))
    with dr.Sampler(store, view, batch_size=16, seed=0, prefetch=1) as sampler:
        for _ in range(2):
            index = sampler.sample().index.numpy().ravel().tolist()
            found = recorded(sampler, staleness="version").histograms
            assert found.keys() == {"sampler/age", "sampler/staleness/version"}
            assert found["sampler/age"].tolist() == [newest_first[step] for step in index]
            assert found["sampler/staleness/version"].tolist() == [7 - version_of[step] for step in index]


def test_staleness_grows_with_the_version_of_the_newest_episode(store: dr.Store) -> None:
    store.resize(capacity=1000)
    with dr.Sampler(store, dr.Transitions(), batch_size=16, seed=0) as sampler:
        sampler.sample()
        before = recorded(sampler, staleness=["version", "value"]).histograms
        append(store, [1], version=50)
        after = recorded(sampler, staleness=["version", "value"]).histograms
    assert before.keys() == {"sampler/age", "sampler/staleness/version", "sampler/staleness/value"}
    assert (after["sampler/staleness/version"] - before["sampler/staleness/version"]).tolist() == [43.0] * 16
    assert (after["sampler/age"] - before["sampler/age"]).tolist() == [1] * 16
    append(store, [1], version=1)  # of an actor that was behind: the batch knows better
    with dr.Sampler(store, dr.Transitions(), batch_size=64, seed=0) as sampler:
        assert 50 in sampler.sample().version
        assert recorded(sampler, staleness="version").histograms["sampler/staleness/version"].min() == 0


def test_the_newest_version_is_that_of_the_youngest_episode_of_any_writer(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as first, store.writer() as second:
        for version, writer in enumerate([first, second, first]):
            append(store, [4], version, writer)
        assert store.episodes[-1]["version"][-1] == 1
        with dr.Sampler(store, dr.Transitions(), batch_size=1, seed=0) as sampler:
            version = 2
            while version == 2:  # that batch would know better
                version = sampler.sample(1).version.item()
            found = recorded(sampler, staleness="version").histograms["sampler/staleness/version"]
    assert found.tolist() == [2 - version]


def test_staleness_is_that_within_the_batch_if_all_episodes_are_evicted_meanwhile(
    store: dr.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = dr.Sampler.gather

    def gather_and_evict(sampler: dr.Sampler, *args: Any, **kwargs: Any) -> Any:
        batch = gather(sampler, *args, **kwargs)
        store.evict(lambda episode: True)
        return batch

    monkeypatch.setattr(dr.Sampler, "gather", gather_and_evict)
    with dr.Sampler(store, dr.Transitions(), batch_size=16, seed=0) as sampler:
        versions = sampler.sample().version.numpy()
        found = recorded(sampler, staleness="version").histograms["sampler/staleness/version"]
    assert store.num_episodes == 0
    assert found.tolist() == (versions.max() - versions).tolist()


def test_priorities_are_of_the_last_batch(store: dr.Store) -> None:
    distribution = dr.Prioritized(alpha=0.5, eps=1e-12)
    with dr.Sampler(store, dr.Transitions(), distribution, batch_size=16, seed=0) as sampler:
        sampler.update_priorities(sampler.ids(), np.arange(1.0, sampler.sampleable + 1))
        numbers = dict(zip(sampler.ids().tolist(), range(1, sampler.sampleable + 1), strict=True))
        index = sampler.sample().index.tolist()
        found = recorded(sampler).histograms["sampler/priority"]
    np.testing.assert_allclose(found, [math.sqrt(numbers[step]) for step in index])


def test_monitoring_changes_no_draw_and_no_count(store: dr.Store) -> None:
    runs = []
    for monitored in (False, True):
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8, seed=0, prefetch=2) as sampler:
            drawn = []
            for number in range(5):
                batch = sampler.sample()
                drawn += [batch.index.tolist(), batch.weight.tolist()]
                sampler.update_priorities(batch.index, np.arange(8.0) + number)
                if monitored:
                    to_tensorboard(sampler, Recorder(), staleness="version")
                    exposition(sampler)
            runs.append((drawn, sampler.stats()["batches"], sampler.stats()["steps"]))
    assert runs[0] == runs[1]


def test_without_a_batch_or_with_an_evicted_one_there_are_no_histograms(store: dr.Store) -> None:
    sampler = dr.Sampler(store, dr.Transitions(), batch_size=64, seed=0)
    before = recorded(sampler, staleness="version")
    assert before.histograms == {}
    sampler.sample()
    assert recorded(sampler).histograms
    append(store, [30, 40], version=9)  # the capacity hides all others
    evicted = recorded(sampler, staleness="version")
    assert evicted.histograms == {}
    assert evicted.scalars["sampler/batches"] == 1
    sampler.sample()
    assert recorded(sampler).histograms
    sampler.close()
    closed = recorded(sampler, staleness="version")
    assert (closed.histograms, closed.scalars["sampler/batches"]) == ({}, 2)


def test_fields_of_the_store_named_like_fields_on_request_are_no_ages_and_priorities(tmp_store: Path) -> None:
    number = dr.Field((), "float32")
    schema = dr.Schema(obs=number, action=number, extra={"age": number, "probability": number})
    with dr.create(tmp_store, schema) as store:
        with store.writer() as writer:
            own = {"age": np.full(5, -1.0), "probability": np.full(5, 9.0)}
            writer.append_episode(np.zeros(6), np.zeros(5), np.zeros(5), terminated=True, **own)
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=4) as sampler:
            sampler.sample()
            assert recorded(sampler).histograms == {}
            assert recorded(sampler, staleness="age").histograms["sampler/staleness/age"].tolist() == [0.0] * 4


@pytest.mark.parametrize("name", ["nothing", "state", "parts", "obs", "version/x"])
def test_staleness_names_a_field_with_one_number_a_step(store: dr.Store, name: str) -> None:
    message = rf"^staleness must name an extra field with one number a step, of \['version', 'value'\], not '{name}'$"
    with dr.Sampler(store, dr.Transitions()) as sampler, pytest.raises(ValueError, match=message):
        to_tensorboard(sampler, Recorder(), staleness=name)


def test_staleness_is_refused_for_a_source_without_batches(store: dr.Store) -> None:
    for source in (store, Source(**SHARDED)):
        with pytest.raises(ValueError, match=r"^staleness='version' needs the batches of a Sampler: leave it out for "):
            to_tensorboard(source, Recorder(), staleness="version")


def test_a_source_is_a_store_or_a_sampler() -> None:
    for write in (to_tensorboard, to_wandb, to_prometheus):
        with pytest.raises(ValueError, match=r"^the source must be a Store or a Sampler, not 'runs/a'$"):
            write("runs/a", Recorder())


def test_weights_and_biases_gets_all_in_one_log(store: dr.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.SimpleNamespace(Histogram=lambda values: ("histogram", values))
    monkeypatch.setitem(sys.modules, "wandb", library)
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8) as sampler:
        sampler.sample()
        run, written = Recorder(), recorded(sampler, staleness="version", prefix="mine")
        to_wandb(sampler, run, 12, staleness="version", prefix="mine")
        to_wandb(sampler, no_step := Recorder())
    assert (run.steps, no_step.steps) == ([12], [None])
    assert run.scalars == written.scalars
    assert run.histograms.keys() == written.histograms.keys()
    assert all(run.histograms[tag].tolist() == values.tolist() for tag, values in written.histograms.items())


SHARDED_TEXT = r"""# HELP diskreplay_sampler_batches_total Batches delivered.
# TYPE diskreplay_sampler_batches_total counter
diskreplay_sampler_batches_total{run="a\\b\n\"c\""} 7
# HELP diskreplay_sampler_batches_per_second Batches per second since the first was requested.
# TYPE diskreplay_sampler_batches_per_second gauge
diskreplay_sampler_batches_per_second{run="a\\b\n\"c\""} 2.5
# HELP diskreplay_sampler_oldest_update_seconds Longest time that a priority waited to be sent.
# TYPE diskreplay_sampler_oldest_update_seconds gauge
diskreplay_sampler_oldest_update_seconds{run="a\\b\n\"c\""} +Inf
# HELP diskreplay_sampler_shard_mass Sum of the priorities of a shard.
# TYPE diskreplay_sampler_shard_mass gauge
diskreplay_sampler_shard_mass{run="a\\b\n\"c\"",shard="0"} 1e+300
diskreplay_sampler_shard_mass{run="a\\b\n\"c\"",shard="1"} -3
"""


def test_the_text_for_prometheus_has_help_type_unit_and_labels() -> None:
    shards = [{"mass": 1e300, "population": math.nan}, {"mass": -3.0, "population": math.nan}]
    numbers = {"batches": 7, "batches_per_second": 2.5, "oldest_update_s": math.inf}
    text = exposition(Source(**numbers, missing=[], shards=shards), labels={"run": 'a\\b\n"c"'})
    missing = [line for line in text.splitlines(keepends=True) if "missing_shards" in line]
    assert missing[-1] == 'diskreplay_sampler_missing_shards{run="a\\\\b\\n\\"c\\""} 0\n'
    assert text.replace("".join(missing), "") == SHARDED_TEXT


def test_a_histogram_for_prometheus_counts_from_the_smallest_on(store: dr.Store) -> None:
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=64, seed=0) as sampler:
        sampler.sample()
        values = recorded(sampler, staleness="version").histograms
        text = exposition(sampler, staleness="version")
    names = {
        "age_steps": values["sampler/age"],
        "staleness": values["sampler/staleness/version"],
        "priority": values["sampler/priority"],
    }
    for name, expected in names.items():
        series = re.findall(rf'(?m)^diskreplay_sampler_batch_{name}_bucket{{.*le="(.*)"}} (\d+)$', text)
        assert len(series) > 20
        assert series[-1] == ("+Inf", "64")
        assert [int(count) for _, count in series] == [np.sum(expected <= float(bound)) for bound, _ in series]
        assert len({count for _, count in series}) > (name != "priority") + 1
        (total,) = re.findall(rf"(?m)^diskreplay_sampler_batch_{name}_sum{{.*}} (\S+)$", text)
        assert float(total) == pytest.approx(expected.sum())
        assert f"\ndiskreplay_sampler_batch_{name}_count" in text
    assert len(re.findall(r'(?m)^diskreplay_sampler_batch_staleness_\w+{.*field="version".*$', text)) > 20


def test_no_two_measures_share_a_name_for_prometheus(store: dr.Store) -> None:
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8, transform=dr.Normalize()) as sampler:
        sampler.sample()
        of_all = {**sampler.stats(), **{key: value for key, value in SHARDED.items() if key != "priority_sum"}}
        text = exposition(store) + exposition(sampler, staleness="version")
    types = re.findall(r"(?m)^# TYPE (\S+) (\S+)$", text)
    # A name is described once in a text; a name that only sharded samplers have is added here.
    types += [one for one in re.findall(r"(?m)^# TYPE (\S+) (\S+)$", exposition(Source(**of_all))) if one not in types]
    suffixes = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    series = [name + suffix for name, kind in types for suffix in suffixes[kind]]
    assert len(series) > 45
    assert len(series) == len(set(series))
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in types)


def test_a_file_for_prometheus_is_replaced_whole_and_readable(store: dr.Store, tmp_path: Path) -> None:
    path = tmp_path / "prom/store.prom"
    path.parent.mkdir()
    old_mask = os.umask(0o022)
    try:
        to_prometheus(store, path)
    finally:
        os.umask(old_mask)
    first, old = path.read_text(), path.stat().st_ino
    assert first == exposition(store)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    with path.open() as reader:  # as a collector that began before
        to_prometheus(store, str(path), labels={"run": "b"})
        assert reader.read() == first
    assert path.stat().st_ino != old
    assert 'run="b"' in path.read_text()
    second = path.read_text()
    with pytest.raises(UnicodeEncodeError):
        to_prometheus(store, path, labels={"run": "\udcff"})
    assert path.read_text() == second
    assert os.listdir(path.parent) == ["store.prom"]


def test_a_path_that_is_no_text_is_a_label_all_the_same(tmp_path: Path) -> None:
    with dr.create(Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")), SCHEMA) as store:
        assert '/\ufffd"} 0\n' in exposition(store)


@pytest.mark.parametrize("name", ["store", "le", "field", "shard", "", "1st", "a-b", "__own", "ä"])
def test_a_label_that_is_taken_or_no_name_is_refused(store: dr.Store, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^labels has '{name}': use letters, digits and underscores, and none of "):
        exposition(store, labels={name: "x"})


def test_a_store_is_monitored_without_torch_and_no_library_is_loaded(tmp_path: Path) -> None:
    code = """
import io
from diskreplay.interop.monitor import to_prometheus

with dr.open(path) as store:
    to_prometheus(store, text := io.StringIO())
assert not set(NAMES) & set(sys.modules)
print(text.getvalue().splitlines()[2].split()[-1])
"""
    libraries = ["torch", "numba", "tensorboard", "tensorboardX", "wandb", "prometheus_client"]
    assert run_without(libraries, STORE + code, tmp_path / "store") == "8"


@pytest.mark.slow
def test_a_histogram_of_weights_and_biases_says_which_extra_has_the_library(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = """
from diskreplay.interop.monitor import to_wandb

with dr.Sampler(path, dr.Transitions(), batch_size=2) as sampler:
    sampler.sample()
    print(message(lambda: to_wandb(sampler, None)))
"""
    assert run_without(["wandb"], STORE + code, tmp_path / "store") == (
        "a histogram of Weights & Biases needs a library that cannot be imported (No module named 'wandb'): "
        'pip install "diskreplay[wandb]"'
    )


# --- with the libraries ----------------------------------------------------------------------------------------------


def test_the_parser_of_prometheus_reads_all_of_it(store: dr.Store) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8) as sampler:
        sampler.sample()
        text = exposition(store, labels={"run": 'a "b"\\\n'}) + exposition(sampler, staleness="version")
    families = {family.name: family for family in parser.text_string_to_metric_families(text)}
    assert len(families) > 30
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert sum(len(family.samples) for family in families.values()) == len(lines)
    assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
    assert all(family.documentation.endswith(".") for family in families.values())
    (sample,) = families["diskreplay_store_inserted_steps"].samples
    assert (sample.value, sample.labels) == (78, {"run": 'a "b"\\\n', "store": str(store.path)})
    ends = {sample.labels["end"]: sample.value for sample in families["diskreplay_store_episodes"].samples}
    assert ends["terminated"] == store.num_episodes


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torch.utils.tensorboard", "tensorboardX"])
def test_tensorboard_reads_back_what_was_written(store: dr.Store, tmp_path: Path, library: str) -> None:
    pytest.importorskip(library)
    pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8) as sampler:
        sampler.sample()
        expected = recorded(sampler, staleness="version")
    seen = run_with(WITH_TENSORBOARD.format(library=library), store.path, tmp_path / "events")
    assert seen["scalars"].keys() == recorded(store).scalars.keys() | expected.scalars.keys()
    assert seen["scalars"]["store/steps"] == [[78, 60.0]]
    assert seen["scalars"]["sampler/batches"] == [[1, 1.0]]
    assert seen["histograms"] == {tag: [[1, 8.0]] for tag in expected.histograms}


SAMPLED = """
import json, sys
import diskreplay as dr
from diskreplay.interop.monitor import to_tensorboard, to_wandb

store, folder = dr.open(sys.argv[1]), sys.argv[2]
sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8)
sampler.sample()
"""
WITH_TENSORBOARD = (
    SAMPLED
    + """
from {library} import SummaryWriter
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

with SummaryWriter(folder) as writer:
    to_tensorboard(store, writer)
    to_tensorboard(sampler, writer, staleness="version")
events = EventAccumulator(folder)
events.Reload()
tags = events.Tags()
scalars = {{tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in tags["scalars"]}}
histograms = {{
    tag: [[event.step, event.histogram_value.num] for event in events.Histograms(tag)] for tag in tags["histograms"]
}}
print(json.dumps({{"scalars": scalars, "histograms": histograms}}))
"""
)
# The file of a run is a log of LevelDB: blocks of 32 KiB, records in parts with 7 bytes before each.
WITH_WANDB = (
    SAMPLED
    + """
from pathlib import Path
import wandb
from wandb.proto.wandb_internal_pb2 import Record

run = wandb.init(mode="offline", project="monitor", dir=folder)
to_wandb(sampler, run, 4, staleness="version")
to_wandb(store, run, 5)
run.finish()
wandb.teardown()  # what it buffers is in the file only then
(path,) = Path(folder).glob("wandb/offline-run-*/*.wandb")
data, at, parts, seen = path.read_bytes(), 7, b"", {}
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
        continue
    length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    parts += data[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):
        record = Record()
        record.ParseFromString(parts)
        parts = b""
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            seen[items["_step"]] = items
print(json.dumps(seen))
"""
)


def run_with(program: str, store: Path, folder: Path) -> dict[str, Any]:
    """Run a program, whose libraries leave threads and processes behind; return the JSON that it prints last."""
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", program, str(store), str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_the_file_of_an_offline_run_of_weights_and_biases_has_it(store: dr.Store, tmp_path: Path) -> None:
    pytest.importorskip("wandb.proto.wandb_internal_pb2")
    with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=8) as sampler:
        sampler.sample()
        expected = recorded(sampler, staleness="version")
    seen = run_with(WITH_WANDB, store.path, tmp_path / "run")
    assert seen.keys() == {"4", "5"}
    scalars = recorded(store).scalars
    assert scalars.keys() <= seen["5"].keys()
    assert expected.scalars.keys() <= seen["4"].keys()
    assert json.loads(seen["5"]["store/steps"]) == 60
    assert len(expected.histograms) == 3
    for tag in expected.histograms:
        assert json.loads(seen["4"][f"{tag}/_type"]) == "histogram"
        assert sum(json.loads(seen["4"][f"{tag}/values"])) == 8
