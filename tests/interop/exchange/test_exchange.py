"""What all formats share: imports that go on, exports that appear whole, refusals, and the names of what is lost."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import dreamer, npz, torchrl_memmap
from tests.interop.round_trips import (
    EPISODES,
    PLAIN,
    SCHEMAS,
    SCHEMES,
    StopAt,
    adapter,
    content,
    make_store,
    notes_of_episodes,
    write_side_folder,
)


def make_set(path: Path, episodes: int = 5) -> Path:
    """Make a data set of which every second episode has notes, and episode n has 1 + n % 4 steps."""
    ends = [(1 + n % 4, "terminated", True) for n in range(episodes)]
    store = make_store(path.with_name(f"{path.name}-store"), "vectors", ends)
    with dr.open(store, "a") as opened:
        opened.write_note("import", {"author": "nobody"})
        first = {str(opened.episodes[n].ids[0]): {"text": f"episode {n}"} for n in range(0, episodes, 2)}
        opened.write_note("import-00000000", first)
    npz.export_dataset(store, path)
    shutil.rmtree(store)
    return path


@contextmanager
def lacks_episode(data_set: Path, number: int) -> Iterator[None]:
    """Have an episode of a data set missing during the block, in which an import fails there."""
    file = data_set / f"episode-{number:08d}.npz"
    file.rename(file.with_suffix(".away"))
    with pytest.raises(dr.FormatError, match=f"{file.name} cannot be read: "):
        yield
    file.with_suffix(".away").rename(file)


# --- import ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fails_at", [0, 1, 3, 131])
def test_an_import_goes_on_after_the_episodes_that_are_there(tmp_path: Path, fails_at: int) -> None:
    count = 138  # notes of 128 episodes are a document
    data_set = make_set(tmp_path / "set", count)
    with lacks_episode(data_set, fails_at):
        npz.import_dataset(data_set, tmp_path / "a")
    resumed = npz.import_dataset(data_set, tmp_path / "a")
    assert (resumed.episodes, resumed.resumed) == (count - fails_at, fails_at)
    npz.import_dataset(data_set, tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")
    with dr.open(tmp_path / "a") as store:
        note, of_episodes = store.read_note("import"), notes_of_episodes(store)
        texts = [of_episodes.get(int(episode.ids[0])) for episode in store.episodes]
        assert store.verify(deep=True) == []
    assert (note["complete"], note["metadata"]) == (True, {"author": "nobody"})
    assert texts == [None if n % 2 else {"text": f"episode {n}"} for n in range(count)]


def test_an_import_has_no_part_of_an_episode_wherever_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an episode of which some steps have priorities."""
    path, data_set, obs = tmp_path / "store", tmp_path / "set", np.zeros(3, np.float32)
    with dr.create(path, SCHEMAS["vectors"]) as store, store.writer() as writer:
        for t in range(6):
            writer.append(obs, t, 0.0, terminated=t == 5, priority=None if t % 2 else t)
        store.refresh()
        npz.export_dataset(store, data_set)
    calls = 0

    def interrupted(method: Any) -> Any:
        def call(*args: Any, **given: Any) -> Any:
            nonlocal calls
            calls += 1
            method(*args, **given)
            if calls == 1:
                raise KeyboardInterrupt

        return call

    for name in ("append", "append_episode"):
        monkeypatch.setattr(dr.Writer, name, interrupted(getattr(dr.Writer, name)))
    with pytest.raises(KeyboardInterrupt):
        npz.import_dataset(data_set, tmp_path / "copy")
    npz.import_dataset(data_set, tmp_path / "copy")
    assert content(tmp_path / "copy") == content(path)


def test_an_import_is_not_resumed_while_another_call_appends(tmp_path: Path) -> None:
    data_set, refused = make_set(tmp_path / "set"), []

    def progress(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(
                dr.StoreLocked, match="is being written, perhaps by another call of this import"
            ) as error:
                npz.import_dataset(data_set, tmp_path / "a")
            refused.append(error)

    assert npz.import_dataset(data_set, tmp_path / "a", progress=progress).episodes == 5
    with dr.open(tmp_path / "a") as store:
        assert store.num_episodes == 5


def test_an_import_into_a_store_of_other_data_is_refused(tmp_path: Path) -> None:
    data_set, other = make_set(tmp_path / "set"), make_set(tmp_path / "other")
    with lacks_episode(data_set, 3):
        npz.import_dataset(data_set, tmp_path / "a")
    shutil.rmtree(data_set)
    for given in (other, make_set(data_set, 6)):
        with pytest.raises(dr.StoreExists, match=r"imported from other data \(format npz, source .*set, .*\); give"):
            npz.import_dataset(given, tmp_path / "a")
    make_store(tmp_path / "b", "vectors")
    with pytest.raises(dr.StoreExists, match="has steps that no import has written; give the path of a new store$"):
        npz.import_dataset(data_set, tmp_path / "b")
    with pytest.raises(dr.StoreExists, match="another schema"):
        npz.import_dataset(data_set, make_store(tmp_path / "c", "images", []))


@pytest.mark.parametrize("link", [False, True])
def test_an_export_into_the_store_and_an_import_from_it_are_refused(tmp_path: Path, link: bool) -> None:
    store = make_store(tmp_path / "store", "vectors")
    npz.export_dataset(store, tmp_path / "set")
    with dr.open(store) as opened:
        dr.create(tmp_path / "empty", opened.schema).close()
    shutil.copytree(tmp_path / "set", tmp_path / "empty/below/set")
    if link:
        (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    above = tmp_path / "link" if link else tmp_path
    for name in ("set", "below/set", "../store/set"):
        with pytest.raises(dr.StoreExists, match=f"^{above / 'store' / name} is inside the store {store}; give a path"):
            npz.export_dataset(store, above / "store" / name)
    with pytest.raises(dr.StoreExists, match=f"empty/below/set is inside the store {tmp_path}/empty; give a path outs"):
        npz.import_dataset(above / "empty/below/set", tmp_path / "empty")
    assert not (store / "set").exists()
    assert not (store / "below").exists()
    with dr.open(tmp_path / "empty") as opened:
        assert not len(opened)
        assert not opened.note_names()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_export_of_no_episode_is_refused_before_anything_is_written(
    tmp_path: Path, kept_store: Callable[..., Path], scheme: str
) -> None:
    export_dataset = adapter(scheme).export_dataset
    empty, store = kept_store("vectors", []), kept_store("vectors")
    for dry_run in (False, True):
        with pytest.raises(
            dr.NotEnoughData, match=f"^{empty} has no ended episode, and 0 open; an export needs one that"
        ):
            export_dataset(empty, tmp_path / "set", dry_run=dry_run)
        with pytest.raises(
            dr.NotEnoughData, match=f"^{store} has no ended episode that where accepts, and 0 open; an "
        ):
            export_dataset(store, tmp_path / "set", where=lambda _: False, dry_run=dry_run)
    assert list(tmp_path.iterdir()) == []


def test_a_path_with_a_nul_byte_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", "vectors")
    with pytest.raises(dr.FormatError, match=r"a\\x00b' has a NUL byte, which no path may have; give another path$"):
        npz.export_dataset(store, tmp_path / "a\0b")
    npz.export_dataset(store, tmp_path / "set")
    with pytest.raises(dr.FormatError, match=r"a\\x00b' has a NUL byte, which no path may have; give another path$"):
        npz.import_dataset(tmp_path / "set", tmp_path / "a\0b")


def test_an_import_is_not_resumed_where_episodes_were_evicted_meanwhile(tmp_path: Path) -> None:
    data_set = make_set(tmp_path / "set")
    with lacks_episode(data_set, 3):
        npz.import_dataset(data_set, tmp_path / "a")
    with dr.open(tmp_path / "a", "a") as store:
        assert store.evict(lambda episode: len(episode) == 2) == 2
    with pytest.raises(dr.StoreExists, match="has lost or hidden steps of its interrupted import, which cannot"):
        npz.import_dataset(data_set, tmp_path / "a")


def test_an_import_is_not_resumed_where_a_capacity_hides_episodes(tmp_path: Path) -> None:
    """They would shift the numbers of those that are there, and some would be imported twice."""
    data_set = make_set(tmp_path / "set")
    dr.create(tmp_path / "a", SCHEMAS["vectors"], capacity=5).close()
    with lacks_episode(data_set, 4):
        npz.import_dataset(data_set, tmp_path / "a")
    with pytest.raises(dr.StoreExists, match="has lost or hidden steps of its interrupted import, which cannot"):
        npz.import_dataset(data_set, tmp_path / "a")


def test_an_import_is_not_resumed_where_the_data_have_changed(tmp_path: Path) -> None:
    data_set = make_set(tmp_path / "set")
    with lacks_episode(data_set, 3):
        npz.import_dataset(data_set, tmp_path / "a")
    (data_set / "episode-00000001.npz").rename(data_set / "episode-00000000.npz")
    with pytest.raises(
        dr.StoreExists, match="^episode 0 has 1 steps in .* and 2 in the data set, so the import cannot be"
    ):
        npz.import_dataset(data_set, tmp_path / "a")


def infinite(name: str, path: Path, *episodes: int) -> None:
    """Make the first number of an array of some episodes infinite."""
    for number in episodes:
        file = path / f"episode-{number:08d}.npz"
        with np.load(file) as arrays:
            rows = dict(arrays)
        rows.setdefault(name, np.ones(len(rows["reward"])))[0] = np.inf
        np.savez(file, **rows)


@pytest.mark.parametrize("name", ["priority", "reward"])
def test_episodes_that_the_store_refuses_are_named_and_can_be_skipped(tmp_path: Path, name: str) -> None:
    data_set = make_set(tmp_path / "set", 8)
    npz.import_dataset(data_set, tmp_path / "whole")
    infinite(name, data_set, 1, 5)
    with dr.open(tmp_path / "whole") as store:
        for target in ("a", "b"):
            dr.create(tmp_path / target, store.schema, validate="finite").close()
    with pytest.raises(dr.SchemaError, match=rf"^episode 1 of {data_set}: {name}(\[0\] is inf|: inf is not finite)"):
        npz.import_dataset(data_set, tmp_path / "a")
    with pytest.raises(KeyboardInterrupt):  # both a refused episode and accepted ones come before and after this step
        npz.import_dataset(data_set, tmp_path / "b", on_error="skip", progress=StopAt(9))
    done = npz.import_dataset(data_set, tmp_path / "b", on_error="skip")
    assert 0 < done.resumed < 6
    assert (done.resumed + done.episodes, [what for what, _ in done.skipped]) == (6, ["episode 1", "episode 5"])
    again = npz.import_dataset(data_set, tmp_path / "b", on_error="skip")
    assert (again.resumed, again.skipped) == (6, done.skipped)
    expected = content(tmp_path / "whole")
    assert content(tmp_path / "b") == [expected[number] for number in (0, 2, 3, 4, 6, 7)]


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("episodes", "of_torchrl", "of_dreamer"),
    [
        (PLAIN, [], []),
        ([(3, "cut", True)], ["cut"], ["ends"]),
        ([(3, "both", True)], [], ["ends"]),
        ([(3, "truncated", False)], ["no_final_obs"], ["no_final_obs"]),
    ],
)
def test_only_what_some_episode_has_is_named(
    tmp_path: Path, episodes: list[Any], of_torchrl: list[str], of_dreamer: list[str]
) -> None:
    store = make_store(tmp_path / "store", "vectors", episodes)
    for module, lost, options in ((torchrl_memmap, of_torchrl, {"capacity": 40}), (dreamer, of_dreamer, {})):
        would = module.export_dataset(store, tmp_path / "set", dry_run=True, **options)
        assert [name for name, _ in would.not_held if name != "schema"] == lost
        assert all(reason for _, reason in would.not_held)


@pytest.mark.parametrize(
    ("module", "case", "expected"),
    [
        (npz, "nested", []),
        (dreamer, "vectors", ["priority"]),
        # The first of these episodes has no fields.
        (dreamer, "nested", ["goal", "goal", "priority", "seed", "seed", "task", "task"]),
    ],
)
def test_episodes_are_read_for_lacking_names_until_these_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, case: str, expected: list[str]
) -> None:
    store, read, read_field = make_store(tmp_path / "store", case, priorities=True), [], dr.Episode.__getitem__

    def noted(episode: dr.Episode, name: str) -> Any:
        read.append(name)
        return read_field(episode, name)

    monkeypatch.setattr(dr.Episode, "__getitem__", noted)
    module.export_dataset(store, tmp_path / "set", where=lambda episode: len(episode) > 3, dry_run=True)
    assert sorted(read) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_interrupted_export_leaves_nothing_in_any_format(
    tmp_path: Path, kept_store: Callable[..., Path], scheme: str
) -> None:
    module, target = adapter(scheme), tmp_path / "above/set.zip"
    store = kept_store("vectors", EPISODES * 2)
    with pytest.raises(KeyboardInterrupt):
        module.export_dataset(store, target, progress=StopAt(60))
    assert list((tmp_path / "above").iterdir()) == []
    with pytest.raises((dr.FormatError, dr.StoreNotFound)):
        module.import_dataset(target, tmp_path / "back")
    done = module.export_dataset(store, target)
    assert list((tmp_path / "above").iterdir()) == [target]
    assert module.import_dataset(target, tmp_path / "back").steps == done.steps == 80


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
    store = make_store(tmp_path / "store", "vectors")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    for name in ("file", "link", "store"):
        with pytest.raises(dr.StoreExists, match=f"{name} exists already; give the path of a new data set$"):
            npz.export_dataset(store, tmp_path / name)

    def make_folder(done: int, total: int) -> None:
        (tmp_path / "set").mkdir(exist_ok=True)

    with pytest.raises(dr.StoreExists, match="set exists already"):
        npz.export_dataset(store, tmp_path / "set", progress=make_folder)
    assert list((tmp_path / "set").iterdir()) == list(tmp_path.glob(".*")) == []


def test_notes_of_an_import_are_named_where_they_have_no_place_and_kept_where_they_have(tmp_path: Path) -> None:
    npz.import_dataset(make_set(tmp_path / "set"), tmp_path / "a")
    would = dreamer.export_dataset(tmp_path / "a", tmp_path / "x", dry_run=True)
    assert {name for name, _ in would.not_held} >= {"notes", "metadata"}
    assert npz.export_dataset(tmp_path / "a", tmp_path / "y").not_held == []
    npz.import_dataset(tmp_path / "y", tmp_path / "b")
    with dr.open(tmp_path / "b") as store:
        of_episodes = notes_of_episodes(store)
        texts = [of_episodes.get(int(episode.ids[0])) for episode in store.episodes]
    assert texts == [{"text": "episode 0"}, None, {"text": "episode 2"}, None, {"text": "episode 4"}]


# --- side folders of earlier releases --------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["set/diskreplay", "set.diskreplay"])
def test_an_import_names_the_values_of_a_side_folder_and_reads_none(tmp_path: Path, where: str) -> None:
    data_set, schema = make_set(tmp_path / "set"), SCHEMAS["vectors"]
    write_side_folder(tmp_path / where, schema)
    said = f"^{tmp_path / where} is from an export by an earlier .*: the store lacks final_obs, obs, priority of the"
    with pytest.warns(UserWarning, match=said) as warned:
        assert npz.import_dataset(data_set, tmp_path / "a").episodes == 5
    assert [each.filename for each in warned] == [__file__]
    assert npz.import_dataset(data_set, tmp_path / "a").resumed == 5  # complete already: nothing is said
    shutil.rmtree(tmp_path / where)
    other = {"format": "lerobot", "source": "x", "metadata": {}}
    write_side_folder(tmp_path / where, SCHEMAS["images"], metadata=other, not_held=[])
    with pytest.warns(UserWarning, match=": the store lacks metadata, schema of the exported store. The format npz"):
        npz.import_dataset(data_set, tmp_path / "b")
    shutil.rmtree(tmp_path / where)
    write_side_folder(tmp_path / where, schema, not_held=[])
    npz.import_dataset(data_set, tmp_path / "c")  # nothing is lost, nothing is said
    assert content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c")


def test_a_resumed_import_warns_again_of_a_side_folder(tmp_path: Path) -> None:
    data_set = make_set(tmp_path / "set")
    write_side_folder(tmp_path / "set/diskreplay", SCHEMAS["vectors"])
    with pytest.warns(UserWarning, match="the store lacks final_obs"), lacks_episode(data_set, 3):
        npz.import_dataset(data_set, tmp_path / "a")
    with pytest.warns(UserWarning, match="the store lacks final_obs"):
        assert npz.import_dataset(data_set, tmp_path / "a").resumed == 3


def test_an_export_that_an_earlier_release_did_not_complete_is_refused(tmp_path: Path) -> None:
    data_set = make_set(tmp_path / "set")
    write_side_folder(tmp_path / "set/diskreplay", SCHEMAS["vectors"], complete=False)
    with pytest.raises(dr.FormatError, match="^the export to .*set was interrupted; delete it and .*export again$"):
        npz.import_dataset(data_set, tmp_path / "a")
    for text in ("{", "[]", '{"version": 2}', '{"version": 1}'):
        (tmp_path / "set/diskreplay/export.json").write_text(text)
        with pytest.raises(dr.FormatError, match="set/diskreplay"):
            npz.import_dataset(data_set, tmp_path / "a")
    assert not (tmp_path / "a").exists()
