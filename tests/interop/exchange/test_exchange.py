"""What all formats share: imports that go on, exports that appear whole, refusals, and the names of what is lost."""

import errno
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import npz
from diskreplay.interop.exchange.episode_data import EpisodeData
from diskreplay.interop.exchange.exporting import Exported, Format, Plan, export_from
from diskreplay.interop.exchange.importing import EPISODES_A_NOTE, Source, import_into, import_notes
from tests.interop.round_trips import (
    CASES,
    EPISODES,
    NEEDS,
    PLAIN,
    SCHEMAS,
    SCHEMES,
    StopAt,
    content,
    make_store,
    random_episode,
    write_side_folder,
)

LACKING = {
    "obs/state/0": "it has images alone",
    "extra/log_prob": "it has no such column",
    "episode/seed": "it knows no seeds",
    "final_obs": "it ends with the last step",
    "ends": "it has one flag",
    "priority": "it has no priorities",
    "notes": "it has no texts",
    "schema": "it has no spaces",
    "metadata": "it has no place for it",
}


class InMemory:
    """A format that keeps episodes in memory, and fails where it is told to."""

    def __init__(self, lacking: dict[str, str] | None = None, fails_at: int | None = None) -> None:
        self.lacking, self.fails_at = lacking or {}, fails_at
        self.whole: list[EpisodeData] = []

    def write(self, plan: Plan, episodes: Iterable[EpisodeData]) -> None:
        plan.path.mkdir()
        for number, episode in enumerate(episodes):
            if number == self.fails_at:
                raise OSError(errno.EIO, "the disk is gone")
            (plan.path / f"{number}").touch()
            self.whole.append(episode)

    def export_dataset(self, store: Any, path: Path, **options: Any) -> Exported:
        return export_from(store, path, lambda *_: Format(self.lacking, self.write), **options)


def noted_source(episodes: int = 5, name: str = "made", fails_at: int | None = None) -> Source:
    """A data set of which every second episode has notes."""
    schema = SCHEMAS["vectors"]

    def read(first: int) -> Iterator[EpisodeData]:
        for number in range(first, episodes):
            if number == fails_at:
                raise OSError(errno.EIO, "the disk is gone")
            values = random_episode(schema, np.random.default_rng(number), 1 + number % 4, "terminated", True)
            yield EpisodeData(values.steps, True, False, notes=None if number % 2 else {"text": f"episode {number}"})

    steps = sum(1 + number % 4 for number in range(episodes))
    return Source("made", Path(name), schema, episodes, steps, read, {"author": "nobody"})


# --- import ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [0, 1, 3, EPISODES_A_NOTE + 3])
def test_an_import_goes_on_after_the_episodes_that_are_there(tmp_path: Path, fails_at: int) -> None:
    count = EPISODES_A_NOTE + 10
    with pytest.raises(OSError, match="the disk is gone"):
        import_into(tmp_path / "a", noted_source(count, fails_at=fails_at))
    resumed = import_into(tmp_path / "a", noted_source(count))
    assert (resumed.episodes, resumed.resumed) == (count - fails_at, fails_at)
    import_into(tmp_path / "b", noted_source(count))
    assert content(tmp_path / "a") == content(tmp_path / "b")
    with dr.open(tmp_path / "a") as store:
        note, of_episodes = import_notes(store)
        texts = [of_episodes.get(int(episode.ids[0])) for episode in store.episodes]
        assert store.verify(deep=True) == []
    assert (note["complete"], note["metadata"]) == (True, {"author": "nobody"})
    assert texts == [None if n % 2 else {"text": f"episode {n}"} for n in range(count)]


def test_an_import_into_a_store_of_other_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        import_into(tmp_path / "a", noted_source(fails_at=3))
    for other in (noted_source(name="other"), noted_source(6)):
        with pytest.raises(dr.StoreExists, match=r"imported from other data \(format made, source made, .*\); give"):
            import_into(tmp_path / "a", other)
    make_store(tmp_path / "b", "vectors")
    with pytest.raises(dr.StoreExists, match="has steps that no import has written; give the path of a new store$"):
        import_into(tmp_path / "b", noted_source())
    with pytest.raises(dr.StoreExists, match="another schema"):
        import_into(make_store(tmp_path / "c", "images", []), noted_source())


def test_an_import_fills_an_empty_store_of_its_schema(tmp_path: Path) -> None:
    dr.create(tmp_path / "a", SCHEMAS["vectors"], segment_steps="episode").close()
    assert import_into(tmp_path / "a", noted_source()).episodes == 5


def test_an_import_is_not_resumed_where_episodes_were_evicted_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        import_into(tmp_path / "a", noted_source(fails_at=3))
    with dr.open(tmp_path / "a", "a") as store:
        assert store.evict(lambda episode: len(episode) == 2) == 2
    with pytest.raises(dr.StoreExists, match="has lost episodes since its import was interrupted"):
        import_into(tmp_path / "a", noted_source())


def test_an_import_is_not_resumed_where_the_data_have_changed(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone"):
        import_into(tmp_path / "a", noted_source(fails_at=3))
    made = noted_source()
    changed = replace(made, read=lambda first: noted_source(6).read(first + 1))
    with pytest.raises(dr.StoreExists, match="^episode 0 of .* has 1 steps and that of the data set 2: it cannot be"):
        import_into(tmp_path / "a", changed)


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_a_dry_run_names_what_the_format_lacks_of_these_episodes_and_writes_nothing(tmp_path: Path, case: str) -> None:
    store, made = make_store(tmp_path / "store", case, priorities=True), InMemory(LACKING)
    would = made.export_dataset(store, tmp_path / "set", dry_run=True)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    expected = {"final_obs", "ends", "priority", "schema"}
    if case == "nested":
        expected |= {"obs/state/0", "extra/log_prob", "episode/seed"}
    assert {name for name, _ in would.not_held} == expected
    assert dict(would.not_held)["ends"] == "it has one flag"
    assert would == made.export_dataset(store, tmp_path / "set")


@pytest.mark.parametrize(
    ("episodes", "lost"),
    [
        (PLAIN, []),
        ([], []),
        ([(3, "cut", True)], ["ends", "cut"]),
        ([(3, "both", True)], ["ends"]),
        ([(3, "truncated", False)], ["no_final_obs"]),
    ],
)
def test_only_what_some_episode_has_is_named(tmp_path: Path, episodes: list[Any], lost: list[str]) -> None:
    store = make_store(tmp_path / "store", "nested", episodes)
    lacking = dict.fromkeys(("ends", "cut", "no_final_obs", "priority", "notes", "metadata"), "why")
    assert InMemory(lacking).export_dataset(store, tmp_path / "set").not_held == [(name, "why") for name in lost]


@pytest.mark.parametrize(
    ("lacking", "expected"),
    [
        ([], []),
        (["ends", "no_final_obs"], []),
        (["ends", "priority"], ["priority"]),
        (["episode/seed"], ["seed", "seed"]),  # the first of these episodes has no fields
    ],
)
def test_episodes_are_read_for_lacking_names_until_these_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: list[str], expected: list[str]
) -> None:
    store, read, read_field = make_store(tmp_path / "store", "nested", priorities=True), [], dr.Episode.__getitem__

    def noted(episode: dr.Episode, name: str) -> Any:
        read.append(name)
        return read_field(episode, name)

    monkeypatch.setattr(dr.Episode, "__getitem__", noted)
    made = InMemory(dict.fromkeys(lacking, "why"))
    would = made.export_dataset(store, tmp_path / "set", where=lambda episode: len(episode) > 3, dry_run=True)
    assert [name for name, _ in would.not_held] == lacking
    assert read == expected


@pytest.mark.parametrize("fails_at", [0, 5])
def test_an_export_that_fails_leaves_nothing_and_begins_anew(tmp_path: Path, fails_at: int) -> None:
    store, made = make_store(tmp_path / "store", "nested"), InMemory(fails_at=fails_at)
    with pytest.raises(OSError, match="gone"):
        made.export_dataset(store, tmp_path / "above/set")
    assert list((tmp_path / "above").iterdir()) == []
    again = InMemory()
    assert again.export_dataset(store, tmp_path / "above/set").episodes == len(again.whole) == len(EPISODES)
    assert [path.name for path in (tmp_path / "above").iterdir()] == ["set"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_interrupted_export_leaves_nothing_in_any_format(tmp_path: Path, scheme: str) -> None:
    if scheme in NEEDS:
        pytest.importorskip(NEEDS[scheme], reason=f"needs {NEEDS[scheme]}")
    module = import_module(f"diskreplay.interop.{scheme}")
    store = make_store(tmp_path / "store", "vectors", EPISODES * 2)
    with pytest.raises(KeyboardInterrupt):
        module.export_dataset(store, tmp_path / "set.zip", progress=StopAt(60))
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    with pytest.raises((dr.FormatError, dr.StoreNotFound)):
        module.import_dataset(tmp_path / "set.zip", tmp_path / "back")
    done = module.export_dataset(store, tmp_path / "set.zip")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set.zip", "store"]
    assert module.import_dataset(tmp_path / "set.zip", tmp_path / "back").steps == done.steps == 80


def test_a_killed_export_leaves_a_hidden_folder_and_the_next_one_does_without(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors")
    killed = """
import os, signal, sys
from diskreplay.interop import npz
npz.export_dataset(*sys.argv[1:], progress=lambda done, total: done > 10 and os.kill(os.getpid(), signal.SIGKILL))
"""
    arguments = [sys.executable, "-c", killed, str(store), str(tmp_path / "set")]
    assert subprocess.run(arguments, check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".*")
    assert left.name.startswith(".set.new-")
    assert not (tmp_path / "set").exists()
    assert npz.export_dataset(store, tmp_path / "set").episodes == len(EPISODES)


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path: Path) -> None:
    store, target = make_store(tmp_path / "store", "vectors"), tmp_path / ("ü" * 127)
    npz.export_dataset(store, target)
    assert sorted(tmp_path.iterdir()) == [tmp_path / "store", target]
    npz.import_dataset(target, tmp_path / "back")
    assert content(tmp_path / "back") == content(store)


def test_an_export_never_replaces_what_is_there(tmp_path: Path) -> None:
    store, made = make_store(tmp_path / "store", "vectors"), InMemory()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("file", "link", "store"):
        with pytest.raises(dr.StoreExists, match=f"{name} exists already; give the path of a new data set$"):
            made.export_dataset(store, tmp_path / name)

    def make_folder(done: int, total: int) -> None:
        (tmp_path / "set").mkdir(exist_ok=True)

    with pytest.raises(dr.StoreExists, match="set exists already"):
        made.export_dataset(store, tmp_path / "set", progress=make_folder)
    assert list((tmp_path / "set").iterdir()) == list(tmp_path.glob(".*")) == []


def test_some_episodes_are_exported_in_order_and_open_ones_are_counted(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "vectors")
    with dr.open(tmp_path / "store", "a") as store, store.writer() as writer:
        writer.append(np.zeros(3), 1, 1.0, False)
        store.refresh()
        exported = npz.export_dataset(store, tmp_path / "set", where=lambda episode: len(episode) in (1, 4, 7))
    assert (exported.episodes, exported.steps, exported.open_episodes) == (3, 12, 1)
    npz.import_dataset(tmp_path / "set", tmp_path / "back")
    every = content(tmp_path / "store")
    assert content(tmp_path / "back") == [every[1], every[4], every[7]]


def test_notes_of_an_import_are_named_where_they_have_no_place_and_kept_where_they_have(tmp_path: Path) -> None:
    import_into(tmp_path / "a", noted_source())
    would = InMemory(LACKING).export_dataset(tmp_path / "a", tmp_path / "x", dry_run=True)
    assert {name for name, _ in would.not_held} >= {"notes", "metadata"}
    assert npz.export_dataset(tmp_path / "a", tmp_path / "y").not_held == []
    npz.import_dataset(tmp_path / "y", tmp_path / "b")
    with dr.open(tmp_path / "b") as store:
        _, of_episodes = import_notes(store)
        texts = [of_episodes.get(int(episode.ids[0])) for episode in store.episodes]
    assert texts == [{"text": "episode 0"}, None, {"text": "episode 2"}, None, {"text": "episode 4"}]


# --- side folders of earlier releases --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["set/diskreplay", "set.diskreplay"])
def test_an_import_names_the_values_of_a_side_folder_and_reads_none(tmp_path: Path, where: str) -> None:
    (tmp_path / "set").mkdir()
    source = replace(noted_source(), place=tmp_path / "set")
    write_side_folder(tmp_path / where, source.schema)
    said = f"^{tmp_path / where} is from an export by an earlier .*: the store lacks final_obs, obs, priority of the"
    with pytest.warns(UserWarning, match=said):
        assert import_into(tmp_path / "a", source).episodes == 5
    assert import_into(tmp_path / "a", source).resumed == 5  # complete already: nothing is said
    shutil.rmtree(tmp_path / where)
    other = {"format": "lerobot", "source": "x", "metadata": {}}
    write_side_folder(tmp_path / where, SCHEMAS["images"], metadata=other, not_held=[])
    with pytest.warns(UserWarning, match=": the store lacks metadata, schema of the exported store. The format npz"):
        import_into(tmp_path / "b", source)
    shutil.rmtree(tmp_path / where)
    write_side_folder(tmp_path / where, source.schema, not_held=[])
    import_into(tmp_path / "c", source)  # nothing is lost, nothing is said
    assert content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c")


def test_a_resumed_import_warns_again_of_a_side_folder(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    source = replace(noted_source(fails_at=3), place=tmp_path / "set")
    write_side_folder(tmp_path / "set/diskreplay", source.schema)
    with pytest.warns(UserWarning, match="the store lacks final_obs"), pytest.raises(OSError, match="the disk is gone"):
        import_into(tmp_path / "a", source)
    with pytest.warns(UserWarning, match="the store lacks final_obs"):
        assert import_into(tmp_path / "a", replace(source, read=noted_source().read)).resumed == 3


def test_a_side_folder_is_warned_of_where_the_import_is_called(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors")
    npz.export_dataset(store, tmp_path / "set")
    write_side_folder(tmp_path / "set/diskreplay", SCHEMAS["vectors"])
    with pytest.warns(UserWarning, match="the store lacks final_obs") as warned:
        npz.import_dataset(tmp_path / "set", tmp_path / "back")
    assert [each.filename for each in warned] == [__file__]


def test_an_export_that_an_earlier_release_did_not_complete_is_refused(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    source = replace(noted_source(), place=tmp_path / "set")
    write_side_folder(tmp_path / "set/diskreplay", source.schema, complete=False)
    with pytest.raises(dr.FormatError, match="^the export to .*set was interrupted; delete it and .*export again$"):
        import_into(tmp_path / "a", source)
    for text in ("{", "[]", '{"version": 2}', '{"version": 1}'):
        (tmp_path / "set/diskreplay/export.json").write_text(text)
        with pytest.raises(dr.FormatError, match="set/diskreplay"):
            import_into(tmp_path / "a", source)
    assert not (tmp_path / "a").exists()
