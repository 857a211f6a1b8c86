"""The table of episodes in sealed segments: it fits the rows, costs little, and may be damaged or lie."""

import os
import shutil

import numpy as np
import pytest
import zarr
from crc32c import crc32c

import diskreplay as dr
from tests.testing.commands import bytes_of_fields, repair
from tests.testing.on_disk import flip, reseal

pytestmark = pytest.mark.usefixtures("no_patience")

SEGMENT = "segments/00000000"
COLUMNS = {"position": "int64", "steps": "int32", "end": "uint8", "time": "int64", "total_reward": "float64"}
LANES = 3
SCHEMA = dr.Schema(
    obs=dr.Field((2,), "float32"),
    action=dr.Field((), "int64"),
    reward=dr.Field((), "float64"),
    episode={"seed": dr.Field((), "int64")},
)


@pytest.fixture(autouse=True)
def _small_tables(request):
    """Segments have tables however few rows they have, but for the test of how many these are."""
    if request.node.originalname != "test_a_segment_of_few_rows_has_no_table":
        request.getfixturevalue("tables_of_few_rows")


def write(path, steps=200, seed=0, **options):
    """Write episodes of three lanes that end in every way, one of them discarded."""
    rng = np.random.default_rng(seed)
    with dr.create(path, SCHEMA, chunk_bytes=512, **options) as store, store.writer(LANES) as writer:
        for step in range(steps):
            ends = rng.random((2, LANES)) < 0.05
            writer.append(
                obs=rng.random((LANES, 2), np.float32),
                action=np.arange(LANES),
                reward=rng.normal(size=LANES) * 10.0 ** rng.integers(-9, 9, LANES),
                terminated=ends[0],
                truncated=ends[1] & ~ends[0],
                episode={"seed": np.full(LANES, step)} if step % 3 else None,
            )
            mask = rng.random(LANES) < 0.03
            if mask.any():
                writer.end_episode(mask=mask, final_obs=np.ones((LANES, 2), np.float32) if step % 2 else None)
            if step == 70:
                writer.discard_episode()


@pytest.fixture
def path(tmp_store):
    write(tmp_store)
    return tmp_store


def table(path, number=0):
    """Read the table of a segment as any reader of zarr does."""
    group = zarr.open_group(f"{path}/segments/{number:08d}/episodes", mode="r")
    assert {name: array.dtype.name for name, array in group.arrays()} == COLUMNS
    return {name: group[name][:] for name in COLUMNS}


def shown(path):
    """What a reader shows of each episode, without the sums that segments keep."""
    with dr.open(path) as store:
        return {
            int(episode.ids[0]): (
                len(episode),
                float(np.add.accumulate(episode.reward)[-1]),
                episode.times[0],
                episode.ended,
            )
            for episode in store.episodes
        }


def totals(path):
    """What a reader says of the sums: of all at once, and of each episode."""
    with dr.open(path) as store:
        ids = [int(episode.ids[0]) for episode in store.episodes]
        columns = store.to_numpy()["episodes"]["total_reward"]
        assert columns.tolist() == [episode.total_reward for episode in store.episodes]
        return dict(zip(ids, columns.tolist(), strict=True))


def check(path):
    """Check that every table says what its rows do, discarded episodes aside, and that verify agrees."""
    with dr.open(path) as store:
        assert [problem for problem in store.verify(deep=True) if problem.kind != "quarantine"] == []
    expected, found = shown(path), {}
    for folder in sorted((path / "segments").glob("0*")):
        columns = table(path, int(folder.name))
        wall = zarr.open_group(folder, mode="r").attrs["clock"]["wall"]
        for position, steps, end, time, total in zip(*columns.values(), strict=True):
            ended = "terminated" if end & 1 else "cut" if end & 16 else "truncated"
            if not end & 128:
                found[int(folder.name) << 35 | int(position)] = steps, total, (time + wall) / 1e9, ended
    assert found == expected
    assert totals(path) == {first: total for first, (_, total, _, _) in expected.items()}


def reseal_segment(path, change):
    """Change the attributes of the segment, in its document and the copy of it."""
    reseal(path / SEGMENT / "zarr.json", change)
    shutil.copy(path / SEGMENT / "zarr.json", path / SEGMENT / "durable/document")


def lie(path, name, change):
    """Change a column, and every checksum of it."""
    file = path / SEGMENT / f"episodes/{name}/c.0"
    values = np.fromfile(file, COLUMNS[name])
    change(values)
    file.write_bytes(values.tobytes())
    crc = {f"episodes/{name}/c.0": crc32c(values.tobytes())}
    reseal_segment(path, lambda attributes: attributes["checksums"].update(crc))


def repaired(path):
    """Repair a store; return how it was, what was done, and how many steps it cost."""
    with dr.open(path) as store:
        problems = store.verify(deep=True)
        before = len(store)
    done = repair(path)
    assert done.left == []
    with dr.open(path) as store:
        assert len(store) == before
    return {problem.kind for problem in problems}, [action.what for action in done.actions], done.steps_lost


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("options", [{}, {"segment_steps": 120}, {"segment_steps": "episode"}])
def test_each_sealed_segment_says_what_its_rows_do(tmp_store, seed, options):
    write(tmp_store, seed=seed, **options)
    check(tmp_store)


def test_a_discarded_episode_is_in_the_table_and_not_shown(path):
    discarded = table(path)["end"] & 128 != 0
    assert np.count_nonzero(discarded) == LANES


def test_a_segment_without_rows_behind_its_last_mark_has_an_empty_table(tmp_store):
    with dr.create(tmp_store, SCHEMA) as store, store.writer(LANES):
        pass
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []


def test_sums_are_the_same_of_pieces_of_rows(tmp_store):
    """An episode in many chunks, of rewards whose sum depends on the order of adding."""
    reward = np.random.default_rng(1).normal(size=5000) * 10.0 ** np.random.default_rng(2).integers(-12, 12, 5000)
    with dr.create(tmp_store, SCHEMA, chunk_bytes=256) as store, store.writer() as writer:
        writer.append_episode(
            obs=np.zeros((5001, 2), np.float32), action=np.zeros(5000, np.int64), reward=reward, terminated=True
        )
        store.refresh()
        live = store.episodes[0].total_reward
    (total,) = table(tmp_store)["total_reward"]
    assert live == total == np.add.accumulate(reward)[-1] == totals(tmp_store)[0]


@pytest.mark.parametrize("merges", [1, 2])
def test_a_pack_has_a_table_of_its_own_rows(tmp_store, merges):
    write(tmp_store, segment_steps=60)
    before = shown(tmp_store)
    for _ in range(merges):
        with dr.open(tmp_store, "a") as store:
            store.compact()
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []
        packs = [segment["number"] for segment in store.info()["segments"] if segment["merged"]]
    assert len(packs) == 1
    columns = table(tmp_store, packs[0])
    kept = columns["end"] & 128 == 0
    found = zip(columns["steps"][kept].tolist(), columns["total_reward"][kept].tolist(), strict=True)
    assert sorted(found) == sorted((steps, total) for steps, total, _, _ in before.values())
    assert {first: total for first, (_, total, _, _) in before.items()} == totals(tmp_store)


@pytest.mark.parametrize("rows", [(1 << 14) - 1, 1 << 14])
def test_a_segment_of_few_rows_has_no_table(tmp_store, rows):
    fields = {"obs": np.zeros((rows, 2), np.float32), "action": np.zeros(rows, np.int64), "reward": np.ones(rows)}
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        writer.append_episode(**fields, terminated=True)
    assert (tmp_store / SEGMENT / "episodes").exists() == (rows == 1 << 14)
    assert totals(tmp_store) == {0: rows}
    with dr.open(tmp_store) as store:
        assert store.verify(deep=True) == []


# --- damaged tables ---------------------------------------------------------------------------------------------------


def _link(file):
    file.rename(file.parent.parent.parent / "durable/.elsewhere")
    file.symlink_to(file.parent.parent.parent / "durable/.elsewhere")


DAMAGES = {
    "flip": flip,
    "short": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "long": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file: file.write_bytes(b""),
    "missing": lambda file: file.unlink(),
    "link": _link,
    "no array": lambda file: shutil.rmtree(file.parent),
    "no table": lambda file: shutil.rmtree(file.parent.parent),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage"),
    [*((name, "flip") for name in COLUMNS), *(("total_reward", damage) for damage in DAMAGES if damage != "flip")],
)
def test_a_damaged_table_costs_nothing(path, name, damage):
    expected, before = totals(path), table(path)
    DAMAGES[damage](path / SEGMENT / f"episodes/{name}/c.0")
    assert totals(path) == expected

    kinds, done, lost = repaired(path)

    assert kinds <= {"checksum", "size", "missing", "type"}
    assert kinds
    assert {*done} <= {"restored", "quarantined"}
    assert lost == 0
    check(path)
    after = table(path)
    assert all(np.array_equal(after[column], before[column]) for column in COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_document_in_a_table_is_restored(path, name):
    file = path / SEGMENT / f"episodes/{name}/zarr.json"
    file.write_bytes(file.read_bytes().replace(b"[", b"[1", 1))
    _, done, lost = repaired(path)
    assert (done, lost) == (["restored"], 0)
    check(path)


@pytest.mark.slow
@pytest.mark.parametrize("name", COLUMNS)
def test_a_table_that_lies_with_right_checksums_is_found_and_rebuilt(path, name):
    before = table(path)

    def change(values):
        values[3] += 1

    lie(path, name, change)
    kinds, done, lost = repaired(path)
    assert (kinds, done, lost) == ({"episodes"}, ["rebuilt"], 0)
    check(path)
    after = table(path)
    assert all(np.array_equal(after[column], before[column]) for column in COLUMNS)


@pytest.mark.parametrize("damage", ["short", "missing", "no table"])
def test_a_damaged_table_whose_checksum_lies_too_is_rebuilt(path, damage):
    lie(path, "total_reward", lambda values: values.__iadd__(1))
    DAMAGES[damage](path / SEGMENT / "episodes/total_reward/c.0")
    _, done, lost = repaired(path)
    assert "rebuilt" in done
    assert lost == 0
    check(path)


def test_a_table_that_lies_is_found_without_deep_but_for_its_sums(path):
    lie(path, "steps", lambda values: values.__iadd__(1))
    with dr.open(path) as store:
        (problem,) = store.verify()
    assert (problem.kind, problem.where) == ("episodes", f"{SEGMENT}/episodes/steps/c.0")
    steps = int(table(path)["steps"][0])
    assert problem.detail == f"says {steps} of the episode at position 0, but its rows say {steps - 1}"


def test_sums_are_those_of_the_table(path):
    lie(path, "total_reward", lambda values: values.fill(7))
    assert {*totals(path).values()} == {7.0}


def test_a_line_of_an_episode_with_other_steps_is_not_used(path):
    expected = totals(path)
    lie(path, "steps", lambda values: values.__iadd__(1))
    assert totals(path) == expected


@pytest.mark.slow
@pytest.mark.parametrize("count", [0, 1, 1 << 40, 1 << 62])
def test_a_segment_that_names_another_number_of_episodes_is_read_and_rebuilt(path, count):
    expected = totals(path)
    reseal_segment(path, lambda attributes: attributes.update(episodes=count))
    assert totals(path) == expected
    kinds, done, lost = repaired(path)
    assert "episodes" in kinds
    assert "rebuilt" in done
    assert lost == 0
    check(path)


def test_a_table_of_holes_takes_no_memory(path):
    """The files end far behind their data, and a hostile document counts lines up to there."""
    expected, count = totals(path), 1 << 38
    for name, dtype in COLUMNS.items():
        os.truncate(path / SEGMENT / f"episodes/{name}/c.0", count * np.dtype(dtype).itemsize)
    reseal_segment(path, lambda attributes: attributes.update(episodes=count))
    assert totals(path) == expected


def test_lost_rows_are_not_in_the_table(path):
    before = shown(path)
    flip(path / SEGMENT / "reward/c.0.1")
    assert repair(path).steps_lost > 0
    check(path)
    assert len(shown(path)) < len(before)


def test_an_episode_with_two_values_takes_at_most_48_bytes_beside_its_rows(tmp_store):
    count, lanes = 100_000, 1000
    values = {"seed": dr.Field((), "int64"), "level": dr.Field((), "float32")}
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "uint8"), episode=values)
    zeros, action = np.zeros(lanes, np.float32), np.zeros(lanes, np.uint8)
    with dr.create(tmp_store, schema) as store, store.writer(lanes) as writer:
        for number in range(count // lanes):
            episode = {"seed": np.arange(lanes) + number, "level": zeros + number}
            writer.append(zeros, action, zeros, np.ones(lanes, bool), episode=episode)
    taken = bytes_of_fields(tmp_store)
    assert taken["episodes"] <= 30 * count
    assert sum(taken[name] for name in ("episodes", "episode/seed", "episode/level")) <= 48 * count
