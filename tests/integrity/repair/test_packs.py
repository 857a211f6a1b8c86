"""Packs that are damaged: only the episodes in damaged blocks are lost, and what the tables say never is."""

import json
import os
import random
import shutil

import numpy as np
import pytest

import diskreplay as dr
from tests.testing import packed
from tests.testing.commands import Refused, repair, verify
from tests.testing.on_disk import LANE_COUNTERS, flip, set_words, words
from tests.testing.support import digest

pytestmark = pytest.mark.usefixtures("no_patience", "tables_of_few_rows")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A store of which all is in one pack, the number of that, and its episodes."""
    path = tmp_path_factory.mktemp("original") / "store"
    number = packed.write_packed(path)
    return path, number, packed.shown(path)


@pytest.fixture
def damaged(original, tmp_store):
    """A copy of it, to be damaged: the path, the folder of its pack, and the episodes."""
    path, number, episodes = original
    packed.copied(path, tmp_store)
    return tmp_store, tmp_store / f"segments/{number:08}", episodes


def account(path):
    with dr.open(path) as store:
        info = store.info()
    return (
        info["steps"]
        + info["steps_evicted"]
        + info["steps_lost"]
        + sum(entry["steps"] or 0 for entry in info["quarantine"]["entries"] if not entry["rebuilt"])
    )


def files_of(folder):
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and file.stat().st_size)


# --- any byte --------------------------------------------------------------------------------------------------------


def check_a_damaged_byte(path, folder, name, at, episodes):
    """Damage a byte, repair, and check that what is shown then was there before; return how many episodes are gone."""
    before = account(path)
    flip(folder / name, at)
    done = repair(path)
    assert done.left == [], (name, at, done)
    assert verify(path, deep=True) == [p for p in verify(path) if p.kind == "quarantine"]
    after = packed.shown(path)
    assert all(episodes[first] == values for first, values in after.items()), (name, at)
    assert account(path) == before, (name, at)
    assert (path / "segments" / folder.name).exists(), (name, at)
    return len(episodes) - len(after)


@pytest.mark.slow(turns=4)
def test_a_byte_of_any_file_of_a_pack_costs_no_more_than_its_block(original, tmp_path):
    path, number, episodes = original
    folder = path / f"segments/{number:08}"
    rng = random.Random(0)
    for i, name in enumerate(files_of(folder)):
        copy = packed.copied(path, tmp_path / str(i))
        at = rng.randrange((folder / name).stat().st_size)
        gone = check_a_damaged_byte(copy, copy / f"segments/{number:08}", name, at, episodes)
        if name.endswith("zarr.json") or name.split("/")[0] in ("members", "runs", "committed", "observed", "durable"):
            assert gone == 0, name
        shutil.rmtree(copy)


@pytest.mark.slow(turns=4)
def test_no_byte_of_a_table_costs_anything(original, tmp_path):
    path, number, episodes = original
    copy = packed.copied(path, tmp_path / "copy")
    folder = copy / f"segments/{number:08}"
    for name in ("members/c.0.0", "runs/c.0.0", "durable/tables"):
        for at in range(0, (folder / name).stat().st_size, 41):
            before = digest(folder)
            flip(folder / name, at)
            assert packed.shown(copy) == episodes  # readers have the copy
            done = repair(copy)
            assert done.left == []
            assert [(action.what, action.steps) for action in done.actions] == [("restored", 0)]
            assert digest(folder) == before


def test_no_document_of_a_pack_with_compressed_fields_costs_anything(tmp_store):
    pytest.importorskip("zstandard")
    number = packed.write_packed(tmp_store, compression="zstd")
    folder = tmp_store / f"segments/{number:08}"
    before, documents = digest(folder), sorted(folder.rglob("zarr.json"))
    for i, file in enumerate(documents):
        if i % 2:
            file.unlink()
        else:
            flip(file, 30)
    assert {action.steps for action in repair(tmp_store).actions} == {0}
    assert digest(folder) == before


def test_a_table_that_is_missing_is_made_again_from_the_copy(damaged):
    path, folder, episodes = damaged
    before = digest(folder)
    shutil.rmtree(folder / "members")
    (folder / "runs/c.0.0").unlink()
    assert packed.shown(path) == episodes
    assert repair(path).left == []
    assert digest(folder) == before


def test_two_blocks_of_a_table_and_of_its_copy_cost_the_pack_alone(damaged):
    path, folder, _ = damaged
    flip(folder / "members/c.0.0", 3)
    flip(folder / "durable/tables", 4)
    done = repair(path)
    assert done.left == []
    assert [action.what for action in done.actions] == ["quarantined"]
    assert packed.shown(path) == {}
    with dr.open(path, "a") as store, store.writer() as writer:
        packed.append(writer, 3)
    assert len(packed.shown(path)) == 1


# --- rows ------------------------------------------------------------------------------------------------------------


def lose_rows(path, folder, *, leaf="action/c.0.0", at=0):
    flip(folder / leaf, at)
    done = repair(path)
    assert done.left == []
    assert [action.what for action in done.actions] == ["rebuilt"]
    return done


def test_what_is_lost_is_described_by_ids_of_its_segments(original, tmp_store, monkeypatch):
    path, number, episodes = original
    packed.copied(path, tmp_store)
    monkeypatch.setattr("diskreplay.segments.documents.layout.BLOCK_ROWS", 8)
    flip(tmp_store / f"segments/{number:08}/action/c.0.0", 8 * 100)
    done = repair(tmp_store, dry_run=True)
    assert "steps lost, ids " in done.actions[0].detail
    first = int(done.actions[0].detail.split("ids ")[1].split(" ")[0])
    assert first in episodes or first >> 35 < number


def test_lost_rows_end_with_each_lane_and_times_are_repeated_within_it(damaged):
    path, folder, _ = damaged
    _, runs = packed.tables(path, int(folder.name))
    lose_rows(path, folder)
    lost = json.loads((folder / "zarr.json").read_bytes())["attributes"]["lost"]
    assert len(lost) >= len(runs) - 1
    stops = (runs[:, 0] + runs[:, 1]).tolist()
    assert all(not first < stop < first + rows for first, rows in lost for stop in stops)
    times = np.fromfile(folder / "time/c.0.0", "<i8")
    for first, rows in runs[:, :2].tolist():
        assert (np.diff(times[first : first + rows]) >= 0).all()


def test_episodes_evicted_by_hand_are_not_lost(damaged):
    path, folder, _ = damaged
    with dr.open(path) as store:
        evicted = store.info()["steps_evicted"]
    assert evicted
    lose_rows(path, folder)
    with dr.open(path) as store:
        info = store.info()
    assert info["steps_evicted"] == evicted
    writers = {row["writer"]: row["steps"] for row in info["writers"]}
    assert sum(writers.values()) == info["steps"]


def test_a_compressed_field_loses_the_inner_chunks_that_are_damaged(tmp_store):
    pytest.importorskip("zstandard")
    number = packed.write_packed(tmp_store, compression="zstd")
    episodes, before = packed.shown(tmp_store), account(tmp_store)
    folder = tmp_store / f"segments/{number:08}"
    flip(folder / "extra/wide/c.0.0.0", 5)
    done = repair(tmp_store)
    assert done.left == []
    assert [action.what for action in done.actions] == ["rebuilt"]
    after = packed.shown(tmp_store)
    assert len(episodes) - 7 < len(after) < len(episodes)
    assert all(episodes[first] == values for first, values in after.items())
    assert account(tmp_store) == before
    assert verify(tmp_store, deep=True) == [p for p in verify(tmp_store) if p.kind == "quarantine"]


@pytest.mark.parametrize("how", ["flip", "cut"])
def test_the_index_of_a_compressed_field_is_restored_from_its_copy(tmp_store, how):
    pytest.importorskip("zstandard")
    number = packed.write_packed(tmp_store, compression="zstd")
    episodes = packed.shown(tmp_store)
    file = tmp_store / f"segments/{number:08}/extra/wide/c.0.0.0"
    if how == "flip":
        flip(file, file.stat().st_size - 20)
    else:
        file.chmod(0o644)
        os.truncate(file, file.stat().st_size - 20)
    done = repair(tmp_store)
    assert done.left == []
    assert [(action.what, action.steps) for action in done.actions] == [("rebuilt", 0)]
    assert packed.shown(tmp_store) == episodes


# --- quarantine, and segments beside the pack ------------------------------------------------------------------------


def test_a_pack_that_is_set_aside_comes_back_as_it_was(tmp_store):
    path, number = tmp_store, packed.write_packed(tmp_store, evict=False)
    episodes, before, flags = packed.shown(path), account(path), path / f"segments/{number:08}/done/c.0.0"
    good = flags.read_bytes()
    flags.chmod(0o644)
    flags.write_bytes(bytes(len(good)))
    done = repair(path)
    assert [action.what for action in done.actions] == ["quarantined"]
    assert packed.shown(path) == {}
    assert account(path) == before
    aside = path / done.quarantine[0].where / "done/c.0.0"
    with dr.open(path, "a") as store, store.writer() as writer:
        packed.append(writer, 3)
    aside.write_bytes(good)
    aside.chmod(0o444)
    assert repair(path, restore=number).left == []
    after = packed.shown(path)
    assert {first: after[first] for first in episodes} == episodes
    assert len(after) == len(episodes) + 1
    assert account(path) == before + 3


def test_segments_that_are_still_there_serve_again_when_their_pack_is_damaged(tmp_store, monkeypatch):
    with monkeypatch.context() as patch:
        packed.keep_members(patch)
        number = packed.write_packed(tmp_store)
        episodes, before = packed.shown(tmp_store), account(tmp_store)
        flip(tmp_store / f"segments/{number:08}/action/c.0.0", 0)
        done = repair(tmp_store)
    assert [(action.what, action.steps) for action in done.actions] == [("quarantined", 0)]
    assert done.left == []
    assert packed.shown(tmp_store) == episodes
    assert account(tmp_store) == before
    with dr.open(tmp_store, "a"):
        pass
    assert packed.shown(tmp_store) == episodes  # nothing has deleted them
    flip(tmp_store / done.quarantine[0].where / "action/c.0.0", 0)
    with pytest.raises(Refused, match=r"segments/0000000. is in the store, and a part of .*, which stays as it is$"):
        repair(tmp_store, restore=number)


def test_a_mended_pack_takes_the_place_of_the_rebuilt_one(damaged):
    path, folder, episodes = damaged
    before = account(path)
    flip(folder / "action/c.0.0", 0)
    assert [action.what for action in repair(path).actions] == ["rebuilt"]
    assert set(packed.shown(path)) < set(episodes)
    flip(path / "counters/quarantine/segments" / folder.name / "action/c.0.0", 0)
    assert repair(path, restore=int(folder.name)).left == []
    assert packed.shown(path) == episodes
    assert account(path) == before
    with dr.open(path, "a"):
        pass
    assert packed.shown(path) == episodes


@pytest.mark.parametrize("is_taken", [False, True])
def test_the_counters_reach_over_the_members_of_a_pack_that_is_back(damaged, is_taken):
    path, folder, episodes = damaged
    aside, number = path / "counters/quarantine/segments" / folder.name, int(folder.name)
    for name in LANE_COUNTERS:
        flip(folder / name / "c.0")
    assert [action.what for action in repair(path).actions] == ["quarantined"]
    for name in LANE_COUNTERS:
        flip(aside / name / "c.0")
    set_words(path, first_live=number)  # what retention has made of it meanwhile
    if is_taken:
        folder.mkdir()
    repair(path, restore=number)
    assert words(path)["first_live"] == 0
    assert packed.shown(path) == episodes


def test_a_segment_whose_rows_are_in_a_pack_is_not_restored_beside_it(tmp_store):
    packed.write_segments(tmp_store, segment_steps=30)
    flip(tmp_store / "segments/00000000/action/c.0.0", 0)
    assert [action.what for action in repair(tmp_store).actions] == ["rebuilt"]
    aside = tmp_store / "counters/quarantine/segments/00000000/action/c.0.0"
    with dr.open(tmp_store, "a") as store:
        store.compact()
    flip(aside, 0)
    with pytest.raises(Refused, match="^segment 0 was merged into segments/.*/00000000 stays as it is$"):
        repair(tmp_store, restore=0)


def test_the_next_to_open_the_store_deletes_what_is_in_packs(tmp_store, monkeypatch):
    with monkeypatch.context() as patch:
        packed.keep_members(patch)
        packed.write_packed(tmp_store)
        with dr.open(tmp_store, "a") as store:
            for _ in range(3):
                with store.writer() as writer:
                    packed.append(writer, 5)
            store.compact()
    episodes, before = packed.shown(tmp_store), account(tmp_store)
    with dr.open(tmp_store, "a"):
        pass
    assert len(os.listdir(tmp_store / "segments")) == 2
    assert packed.shown(tmp_store) == episodes
    assert account(tmp_store) == before


def test_the_counters_are_recomputed_with_the_segments_in_packs(damaged):
    path, folder, episodes = damaged
    (path / "counters/c.0").write_bytes(bytes(256))
    assert repair(path).left == []
    assert words(path)["next_segment"] == int(folder.name) + 1
    assert words(path)["first_live"] == 0
    assert set(packed.shown(path)) >= set(episodes)


def test_salvage_leaves_packs_alone(damaged):
    path, _, episodes = damaged
    before = digest(path)
    assert repair(path, salvage=True).actions == []
    assert digest(path) == before
    assert packed.shown(path) == episodes


@pytest.mark.slow(turns=4)
def test_a_pack_of_millions_of_lanes_is_rebuilt(tmp_store):
    number = packed.write_packed(tmp_store, evict=False)
    folder = tmp_store / f"segments/{number:08}"
    add_empty_lanes(tmp_store, number, *packed.tables(tmp_store, number), 168_000)
    before = packed.shown(tmp_store)
    flip(folder / "extra/wide/c.0.0.0", 300 * 80)
    done = repair(tmp_store)
    assert ([action.what for action in done.actions], done.left) == (["rebuilt"], [])
    assert {problem.kind for problem in verify(tmp_store)} == {"quarantine"}
    after = packed.shown(tmp_store)
    assert 0 < len(after) < len(before)
    assert all(before[first] == values for first, values in after.items())


def add_empty_lanes(path, number, members, runs, count):
    """Add lanes without rows to each segment of a pack."""
    first, rows, lanes, first_value, values = runs.T
    ends = np.cumsum(members[:, 1])
    spare = np.zeros((len(ends), count, 5), np.int64)
    spare[:, :, 0], spare[:, :, 3] = ((first + rows)[ends - 1, None], (first_value + values)[ends - 1, None])
    spare[:, :, 2] = lanes.max() + 1 + np.arange(count)
    runs = np.insert(runs, np.repeat(ends, count), spare.reshape(-1, 5), axis=0)
    members = members + [0, count, 0, 0]
    document = json.loads((path / f"segments/{number:08}/runs/zarr.json").read_bytes())
    document["shape"] = document["chunk_grid"]["configuration"]["chunk_shape"] = list(runs.shape)
    tables = members.astype("<i8").tobytes(), runs.astype("<i8").tobytes()
    files = {"members/c.0.0": tables[0], "runs/c.0.0": tables[1], "durable/tables": b"".join(tables)}
    files["runs/zarr.json"] = json.dumps(document, separators=(",", ":")).encode()
    packed.change(path, number, files, {"packed": {"members": len(members), "runs": len(runs)}})
