"""Values of episodes: the arrays of episode fields have a row for each episode that has values, and no others."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.testing import packed
from tests.testing.commands import bytes_of_fields, repair
from tests.testing.on_disk import POSITION_BITS, flip, reseal

pytestmark = pytest.mark.usefixtures("no_patience")
LANES = 5
Values = dict[int, tuple[Any, ...] | None]


def schema() -> dr.Schema:
    """Steps with numbers, and episodes with a number, a wide field and a nested one."""
    return dr.Schema(
        obs=dr.Field((2,), "float32"),
        action=dr.Field((), "int64"),
        episode={
            "seed": dr.Field((), "int64"),
            "goal": dr.Field((70, 70), "uint8"),
            "task": {"x": dr.Field((3,), "float32")},
        },
    )


def values_of(seed: int) -> dict[str, Any]:
    """Return values of an episode that all tell its seed."""
    return {"seed": seed, "goal": np.full((70, 70), seed % 251, np.uint8), "task": {"x": np.full(3, seed, np.float32)}}


def write_lone(writer: Any, rng: np.random.Generator, episodes: int, first: int) -> None:
    """Write episodes of one lane, ended in each way there is; about half of them have values."""
    for seed in range(first, first + episodes):
        count, way, given = int(rng.integers(1, 9)), int(rng.integers(5)), rng.random() < 0.6
        values = values_of(seed) if given else None
        if way == 4:
            obs = np.zeros((count + 1, 2))
            writer.append_episode(obs, np.full(count, seed), np.zeros(count), terminated=True, episode=values)
            continue
        for t in range(count):
            last = t == count - 1
            writer.append(
                np.zeros(2), seed, 0.0, last and way == 0, last and way == 1,
                next_obs=np.zeros(2) if way % 2 else None, episode=values if last and way < 2 else None,
            )  # fmt: skip
        if way >= 2:
            writer.end_episode(episode=values)


def write_lanes(writer: Any, rng: np.random.Generator, steps: int, first: int) -> None:
    """Write steps of several lanes, whose episodes often end together; every second step gives values."""
    for t in range(steps):
        ends = rng.random(LANES) < (0.7 if t % 5 == 0 else 0.1)
        seeds = first + LANES * t + np.arange(LANES)
        values = None
        if t % 2 and ends.any():
            goal = np.broadcast_to((seeds % 251).astype(np.uint8)[:, None, None], (LANES, 70, 70))
            values = {"seed": seeds, "goal": goal, "task": {"x": np.repeat(seeds[:, None], 3, 1).astype(np.float32)}}
        writer.append(np.zeros((LANES, 2)), seeds, np.zeros(LANES), ends, next_obs=np.zeros((LANES, 2)), episode=values)


def read_all(path: Path) -> Values:
    """Return the seed of each ended episode that has values, by the id of its first step: one by one, and together."""
    with dr.open(path) as store:
        found: Values = {}
        for episode in store.episodes:
            seed = episode["seed"]
            found[int(episode.ids[0])] = None if seed is None else int(seed)  # type: ignore[assignment]
            if seed is not None:
                assert (episode["goal"] == seed % 251).all()
                assert (episode["task"]["x"] == seed).all()
        firsts = sorted(found)
        seeds, given = store.snapshot.episode_values("episode/seed", np.array(firsts, np.int64))
        told = [int(seed) if has else None for seed, has in zip(seeds, given, strict=True)]
        assert told == [found[first] for first in firsts]
        fields = ["index", "episode/seed", "episode/goal", "episode_known"]
        sampler = dr.Sampler(store, dr.Transitions(), fields=fields)
        known = {step: int(episode.ids[0]) for episode in store.episodes for step in episode.ids.tolist()}
        if found:
            batch = sampler.gather(sampler.ids())
            seeds = [found[known[step]] for step in batch.index.tolist()]
            numbers = np.array([seed or 0 for seed in seeds])
            assert batch["episode_known"].tolist() == [seed is not None for seed in seeds]
            np.testing.assert_array_equal(batch["episode"]["seed"], numbers)
            assert (batch["episode"]["goal"].numpy() == (numbers % 251)[:, None, None]).all()
        assert {problem.kind for problem in store.verify(deep=True)} <= {"quarantine", "unproven"}
    return found


def make(path: Path, **kwargs: Any) -> dr.Store:
    """Make a store with many segments of one lane, and of several."""
    store = dr.create(path, schema(), **{"chunk_bytes": 1 << 14, "segment_steps": 60, "compaction": "manual", **kwargs})
    rng = np.random.default_rng(0)
    with store.writer() as writer:
        write_lone(writer, rng, 40, 1)
    with store.writer(num_envs=LANES) as writer:
        write_lanes(writer, rng, 60, 1000)
    return store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Values]:
    """Such a store, and its values."""
    path = tmp_path_factory.mktemp("made") / "store"
    make(path).close()
    found = read_all(path)
    assert sum(seed is not None for seed in found.values()) > 40
    return path, found


@pytest.fixture
def store(made: tuple[Path, Values], tmp_path: Path) -> tuple[Path, Values]:
    """A copy of it, to be changed."""
    shutil.copytree(made[0], tmp_path / "store")
    return tmp_path / "store", made[1]


def test_values_are_right_while_they_are_written_and_where_many_lanes_end_together(tmp_path: Path) -> None:
    path, rng = tmp_path / "store", np.random.default_rng(1)
    with dr.create(path, schema(), chunk_bytes=1 << 14) as store, store.writer(num_envs=LANES) as writer:
        for part in range(4):
            write_lanes(writer, rng, 40, 200 * part)
            store.refresh()
            for episode in store.episodes:
                if episode["seed"] is not None:
                    assert episode["seed"] == episode.action[-1]
                    assert (episode["goal"] == episode.action[-1] % 251).all()
            writer.flush()
    found = read_all(path)
    assert sum(seed is not None for seed in found.values()) > 50


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_values_stay_what_they_are_in_packs_of_packs(
    made: tuple[Path, Values], tmp_path: Path, compression: Any
) -> None:
    path = tmp_path / "store"
    make(path, compression=compression).close()
    expected = read_all(path)
    with dr.open(path, "a") as store, dr.open(path) as reader:
        before = list(reader.episodes)
        merged = store.compact()
        assert merged["segments"] > 5
        for episode in before:  # of a snapshot from before
            seed = episode["seed"]
            assert (None if seed is None else int(seed)) == expected[int(episode.ids[0])]
        gone = {int(e.ids[0]) for e in store.episodes if e["seed"] is not None and e["seed"] % 3 == 0}
        store.evict(lambda episode: int(episode.ids[0]) in gone)
        with store.writer() as writer:
            write_lone(writer, np.random.default_rng(5), 30, 5000)
        store.compact()
    left = read_all(path)
    assert {first: left[first] for first in expected.keys() - gone} == {
        first: seed for first, seed in expected.items() if first not in gone
    }
    assert len(left) == len(expected) - len(gone) + 30


@pytest.mark.slow(turns=2)
def test_backups_copies_and_tools_that_copy_have_the_values(store: tuple[Path, Values], tmp_path: Path) -> None:
    path, expected = store
    with dr.open(path, "a") as source:
        writer = source.writer()
        write_lone(writer, np.random.default_rng(3), 10, 7000)
        source.refresh()
        source.backup(tmp_path / "backup")
        shutil.copytree(path, tmp_path / "tool")
        writer.close()
    seeds = sorted(seed for seed in read_all(path).values() if seed is not None)
    assert len(seeds) > len([seed for seed in expected.values() if seed is not None])
    for copy in ("backup", "tool"):
        with dr.open(tmp_path / copy, "a"):
            pass
    assert sorted(seed for seed in read_all(tmp_path / "backup").values() if seed is not None) == seeds
    proven = [seed for seed in read_all(tmp_path / "tool").values() if seed is not None]
    assert set(proven) <= set(seeds)
    subprocess.run([sys.executable, "-m", "diskreplay", "copy", path, tmp_path / "copy"], check=True)
    assert sorted(seed for seed in read_all(tmp_path / "copy").values() if seed is not None) == seeds


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))])
def test_a_rebuilt_segment_shows_the_right_values(
    store: tuple[Path, Values], compacted: bool, seed: int, tmp_path: Path
) -> None:
    """Flags are damaged in several places, too; episodes are evicted before, and segments merged after a repair."""
    (path, expected), rng = store, np.random.default_rng(seed)
    with dr.open(path, "a") as opened:
        evicted = {int(e.ids[0]) for e in opened.episodes if rng.random() < 0.1}
        opened.evict(lambda episode: int(episode.ids[0]) in evicted)
        if compacted:
            opened.compact()
    for _ in range(2):
        chunks = [
            file.relative_to(path)
            for file in sorted(path.glob("segments/*/*/**/c.0.*"))
            if file.parts[-2] in ("done", "seed", "goal", "x", "action")
        ]
        for name in rng.choice(len(chunks), min(4, len(chunks)), replace=False):
            size = (path / chunks[name]).stat().st_size
            for at in rng.integers(0, size, 1 + int(rng.integers(2))).tolist():
                flip(path / chunks[name], at)
        repair(path)
        found = read_all(path)
        assert found.items() <= expected.items()
        assert not evicted & found.keys()
    if not compacted:
        with dr.open(path, "a") as opened:
            opened.compact()
        assert read_all(path) == found


def test_damaged_flags_in_two_places_of_a_lane_cost_the_values_between(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with dr.create(path, schema()) as made, made.writer() as writer:
        for seed in range(1, 801):  # three rows each, values in every second
            for t in range(3):
                values = values_of(seed) if t == 2 and seed % 2 else None
                writer.append(np.zeros(2), seed, 0.0, t == 2, episode=values)
    expected = read_all(path)
    assert len(expected) == 800
    for at in (600, 1800):  # in the second and the fourth block
        flip(path / "segments/00000000/done/c.0.0", at)
    repair(path)
    found = read_all(path)
    assert found.items() <= expected.items()
    rows = sorted(first % (1 << POSITION_BITS) for first in found)
    assert max(row for row in rows if row < 1024) < 512 + 3
    between = [found[row] for row in rows if 1030 <= row < 1530]
    assert between
    assert set(between) == {None}
    assert {found[row] is None for row in rows if row >= 2048} == {True, False}


def test_a_killed_writer_leaves_the_values_that_it_published(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with dr.create(path, schema()) as made:
        writer = made.writer()
        write_lone(writer, np.random.default_rng(3), 30, 1)
        writer.append(np.zeros(2), 1, 0.0, False)
        made.refresh()
        expected = {int(e.ids[0]): e["seed"] for e in made.episodes if e.ended != "open"}
        for segment in writer._episode_writer.rotation.open:  # as it is when the process is gone
            segment.lock.release()
        writer._episode_writer.rotation.abandon(seal=False)
        with dr.open(path, "a"):
            pass
    found = read_all(path)
    assert {first: found[first] for first in expected} == expected


@pytest.mark.parametrize(
    "values", [[-1], [1 << 40], [7], [], [1, 1], "1", [True], None], ids=lambda value: json.dumps(value)
)
def test_a_document_with_values_that_cannot_be_is_refused(tmp_path: Path, values: Any) -> None:
    path = tmp_path / "store"
    with dr.create(path, schema()) as made, made.writer() as writer:
        for t in range(6):
            writer.append(np.zeros(2), t, 0.0, t == 5, episode=values_of(3) if t == 5 else None)
    with_document(path / "segments/00000000/zarr.json", values=values)
    with pytest.warns(dr.DamagedSegmentWarning, match="unusable attributes|more values of episodes than rows"):
        opened = dr.open(path)
    with opened:
        assert len(opened) == 0
        assert opened.verify() != []


def with_document(file: Path, **changes: Any) -> None:
    """Change attributes of a segment, under a checksum that fits."""
    for name in (file, file.parent / "durable/document"):
        name.chmod(0o644)
        reseal(name, lambda attributes: attributes.update(changes))


@pytest.mark.parametrize("column", [3, 4])
@pytest.mark.parametrize("value", [-1, 1 << 62, 1])
def test_a_pack_with_values_that_cannot_be_is_refused(store: tuple[Path, Values], column: int, value: int) -> None:
    path, _ = store
    with dr.open(path, "a") as opened:
        opened.compact()
    number = max(int(name.name) for name in (path / "segments").iterdir() if (name / "runs").exists())
    members, runs = packed.tables(path, number)
    runs[0, column] += value
    packed.change_tables(path, number, members, runs)
    with pytest.warns(dr.DamagedSegmentWarning, match="hold impossible values"):
        opened = dr.open(path)
    with opened:
        assert len(opened) == 0
        assert {p.where for p in opened.verify()} == {f"segments/{number:08}/runs/c.0.0"}


def test_a_store_of_before_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "store"
    dr.create(path, schema()).close()
    for requires in (["discards"], []):
        reseal(path / "zarr.json", lambda attributes, requires=requires: attributes.update(requires=requires))
        with pytest.raises(dr.FormatError, match="was written before the format was released"):
            dr.open(path)
    reseal(path / "zarr.json", lambda attributes: attributes.update(requires=["episode-tables", "later"]))
    with pytest.raises(dr.FormatError, match="needs \\['later'\\], which this release does not know"):
        dr.open(path)


# --- the cost ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "dtype"), [((84, 84), "uint8"), ((84, 84, 3), "uint8"), ((64, 64, 3), "uint8"), ((512,), "float32")]
)
def test_a_field_of_goal_images_costs_what_it_holds(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    field = dr.Field(shape, dtype)
    made = dr.create(
        tmp_path / "store",
        dr.Schema(obs=dr.Field((4,), "float32"), action=dr.Field((), "int64"), episode={"goal": field}),
    )
    with made, made.writer() as writer:
        goal = np.ones(shape, dtype)
        for _ in range(1000):
            for t in range(3):
                writer.append(np.zeros(4), 0, 1.0, t == 2, episode={"goal": goal} if t == 2 else None)
    assert bytes_of_fields(tmp_path / "store")["episode/goal"] <= 1.05 * 1000 * field.row_bytes


def test_two_numbers_an_episode_cost_little_more_than_their_bytes(tmp_path: Path) -> None:
    fields = {"seed": dr.Field((), "int64"), "score": dr.Field((), "float32")}
    made = dr.create(
        tmp_path / "store",
        dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"), episode=fields),
    )
    count = 5000
    with made, made.writer() as writer:
        for seed in range(count):
            writer.append(0.0, 0, 1.0, True, episode={"seed": seed, "score": 0.5})
    found = bytes_of_fields(tmp_path / "store")
    assert found["episode/seed"] + found["episode/score"] < 19 * count
