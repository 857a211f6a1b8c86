"""What all formats share: imports and exports that resume, refusals, and the side folder of what a format lacks."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import npz
from diskreplay.interop.exchange.episode_data import EpisodeData, is_obs
from diskreplay.interop.exchange.exporting import Exported, Format, Plan, export_from
from diskreplay.interop.exchange.importing import EPISODES_A_NOTE, Imported, Source, import_into, import_notes
from diskreplay.interop.exchange.side_folder import find_side, side_path
from tests.interop.round_trips import CASES, EPISODES, SCHEMAS, check_round_trip, content, make_store, random_episode

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
Read = Callable[[int], Iterator[EpisodeData]]


class Lossy:
    """A format in memory that keeps what `LACKING` does not name, and fails where it is told to."""

    def __init__(self, lacking: dict[str, str], fails_at: int | None = None) -> None:
        self.lacking, self.fails_at = lacking, fails_at
        self.whole: list[EpisodeData] = []

    @contextmanager
    def open(self, plan: Plan) -> Iterator["Lossy"]:
        plan.path.mkdir(exist_ok=True)
        yield self

    @property
    def episodes(self) -> int:
        return len(self.whole)

    def add(self, episode: EpisodeData) -> None:
        if len(self.whole) == self.fails_at:
            raise OSError(errno.EIO, "the disk is gone")
        steps = {
            path: rows[: len(episode)] if "final_obs" in self.lacking else rows
            for path, rows in episode.steps.items()
            if path not in self.lacking
        }
        if "no_final_obs" in self.lacking and not episode.has_final_obs:
            steps |= {path: np.concatenate([rows, rows[-1:]]) for path, rows in steps.items() if is_obs(path)}
        fields = {path: value for path, value in episode.fields.items() if path not in self.lacking}
        ends = {"terminated": episode.terminated, "truncated": episode.truncated}
        if "ends" in self.lacking:
            ends = {"terminated": episode.terminated, "truncated": not episode.terminated}
        kept = None if "priority" in self.lacking else episode.priority
        notes = None if "notes" in self.lacking else episode.notes
        self.whole.append(EpisodeData(steps, **ends, fields=fields, priority=kept, notes=notes))

    def finish(self) -> None:
        pass

    def export_dataset(self, store: Any, path: Path, **options: Any) -> Exported:
        return export_from(store, path, lambda *_: Format("lossy", True, self.lacking, self.open), **options)

    def import_dataset(self, source: Path, path: Path, progress: Any = None) -> Imported:
        side = find_side(source)
        assert side is not None
        steps = sum(map(len, self.whole))
        read: Read = lambda first: iter(self.whole[first:])  # noqa: E731
        made = Source("lossy", str(source), side.schema, len(self.whole), steps, read, side.metadata, side)
        return import_into(path, made, progress)


def noted_source(episodes: int = 5, name: str = "made", fails_at: int | None = None) -> Source:
    """A data set of which every second episode has notes."""
    schema = SCHEMAS["vectors"]

    def read(first: int) -> Iterator[EpisodeData]:
        for number in range(first, episodes):
            if number == fails_at:
                raise OSError(errno.EIO, "the disk is gone")
            episode = random_episode(schema, np.random.default_rng(number), 1 + number % 4, "terminated", True)
            yield episode if number % 2 else replace(episode, notes={"text": f"episode {number}"})

    steps = sum(1 + number % 4 for number in range(episodes))
    return Source("made", name, schema, episodes, steps, read, {"author": "nobody"})


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


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_a_format_lacks_comes_back_from_its_side_folder(tmp_path: Path, case: str) -> None:
    store = make_store(tmp_path / "store", case, priorities=True)
    lossy = Lossy(LACKING)
    exported = check_round_trip(store, tmp_path / "set", lossy.export_dataset, lossy.import_dataset)
    expected = {"final_obs", "ends", "priority", "schema"}
    if case == "nested":
        expected |= {"obs/state/0", "extra/log_prob", "episode/seed"}
    assert {name for name, _ in exported.not_held} == expected
    assert dict(exported.not_held)["ends"] == "it has one flag"
    assert exported.side_folder == str(tmp_path / "set/diskreplay")


def test_a_final_observation_that_a_format_has_made_up_is_none_again(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "nested")
    lossy = Lossy({"no_final_obs": "it repeats the last one"})
    exported = check_round_trip(tmp_path / "store", tmp_path / "set", lossy.export_dataset, lossy.import_dataset)
    assert [name for name, _ in exported.not_held] == ["no_final_obs"]
    assert all(episode.has_final_obs for episode in lossy.whole)


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_an_export_goes_on_after_the_episodes_that_are_there(tmp_path: Path, fails_at: int) -> None:
    store = make_store(tmp_path / "store", "nested", EPISODES * 3)
    lossy = Lossy(LACKING, fails_at)
    with pytest.raises(OSError, match="gone"):
        lossy.export_dataset(store, tmp_path / "set")
    with pytest.raises(dr.FormatError, match="was interrupted; repeat it"):
        lossy.import_dataset(tmp_path / "set", tmp_path / "back")
    lossy.fails_at = None
    exported = lossy.export_dataset(store, tmp_path / "set")
    assert (exported.episodes, exported.resumed) == (3 * len(EPISODES), fails_at)
    lossy.import_dataset(tmp_path / "set", tmp_path / "back")
    assert content(tmp_path / "back") == content(store)


def test_an_interrupted_export_of_other_episodes_is_not_resumed(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors")
    lossy = Lossy(LACKING, 2)
    with pytest.raises(OSError, match="gone"):
        lossy.export_dataset(store, tmp_path / "set")
    lossy.fails_at = None
    for other, where in ((store, lambda episode: len(episode) > 1), (make_store(tmp_path / "b", "vectors"), None)):
        with pytest.raises(dr.StoreExists, match="^an export of other episodes to .*set was interrupted; delete it"):
            lossy.export_dataset(other, tmp_path / "set", where=where)
    with dr.open(store, "a") as opened, opened.writer() as writer:  # more of them is no other ones
        random_episode(opened.schema, np.random.default_rng(9), 3, "terminated", True).append_to(writer, opened.schema)
    assert lossy.export_dataset(store, tmp_path / "set").episodes == len(EPISODES) + 1


def test_an_export_never_replaces_what_is_there(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors")
    lossy = Lossy(LACKING)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(dr.StoreExists, match="file exists already; give the path of a new data set$"):
        lossy.export_dataset(store, tmp_path / "file")
    lossy.export_dataset(store, tmp_path / "set")
    with pytest.raises(dr.StoreExists, match="set was exported already; give the path of a new data set$"):
        lossy.export_dataset(store, tmp_path / "set")


def test_a_dry_run_tells_what_an_export_would_do_and_writes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "nested", priorities=True)
    lossy = Lossy(LACKING)
    would = lossy.export_dataset(store, tmp_path / "set", dry_run=True)
    assert not (tmp_path / "set").exists()
    assert would == lossy.export_dataset(store, tmp_path / "set")


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


def test_notes_of_an_import_survive_formats_with_and_without_a_place_for_them(tmp_path: Path) -> None:
    import_into(tmp_path / "a", noted_source())
    lossy = Lossy(LACKING)
    assert {name for name, _ in lossy.export_dataset(tmp_path / "a", tmp_path / "x").not_held} >= {"notes", "metadata"}
    lossy.import_dataset(tmp_path / "x", tmp_path / "b")
    assert npz.export_dataset(tmp_path / "b", tmp_path / "y").not_held == []
    npz.import_dataset(tmp_path / "y", tmp_path / "c")
    for name in "bc":
        with dr.open(tmp_path / name) as store:
            _, of_episodes = import_notes(store)
            texts = [of_episodes.get(int(episode.ids[0])) for episode in store.episodes]
        assert texts == [{"text": "episode 0"}, None, {"text": "episode 2"}, None, {"text": "episode 4"}]


def test_a_side_folder_of_another_data_set_is_refused(tmp_path: Path) -> None:
    lossy = Lossy(LACKING)
    lossy.export_dataset(make_store(tmp_path / "store", "vectors"), tmp_path / "set")
    del lossy.whole[-1]
    with pytest.raises(dr.FormatError, match="set has 7 episodes, and .*diskreplay describes 8 of them; move that"):
        lossy.import_dataset(tmp_path / "set", tmp_path / "back")
    (tmp_path / "set/diskreplay/export.json").write_text("[]")
    with pytest.raises(dr.FormatError, match="is not one that this release reads"):
        lossy.import_dataset(tmp_path / "set", tmp_path / "back")


def test_the_side_folder_is_inside_a_folder_and_beside_a_file(tmp_path: Path) -> None:
    assert side_path(tmp_path / "set", True) == tmp_path / "set/diskreplay"
    assert side_path(tmp_path / "set.h5", False) == tmp_path / "set.h5.diskreplay"
    assert find_side(tmp_path / "set") is None
