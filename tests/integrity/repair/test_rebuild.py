"""Damage costs the episodes whose rows are in a damaged block, and nothing else: ids and bytes of all others stay."""

import os
import shutil
from typing import NamedTuple

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.commands import repair, verify
from tests.testing.on_disk import flip, words
from tests.tiers import whole_or_part

pytestmark = pytest.mark.usefixtures("no_patience", "tables_of_few_rows")

# How many bytes lie between two that are damaged. 1 damages each of them in turn: of the tiny store in half an hour,
# of the others in hours.
STRIDE = int(os.environ.get("DISKREPLAY_DAMAGE_STRIDE", 0))
FAST, SLOW = whole_or_part(20, 8), whole_or_part(400, 24)  # bytes that are damaged of each store by default


class Kind(NamedTuple):
    """A store to be damaged: lanes, side of its frames, rows a segment, and bytes of its chunks."""

    lanes: int | None
    side: int
    segment_steps: int
    chunk_bytes: int
    steps: int


KINDS = {
    "tiny": Kind(None, 2, 14, 64, 10),
    "one lane": Kind(None, 3, 14, 64, 40),
    "three lanes": Kind(3, 3, 30, 256, 25),
    "frames": Kind(None, 90, 60, 1 << 19, 150),
    "many rows": Kind(None, 1, 2000, 1 << 16, 3900),
}


class Written(NamedTuple):
    """An episode as it was written: values of its steps, its last observation, how it ended, its seed."""

    obs: list[np.ndarray]
    final: np.ndarray | None
    serials: list[int]
    ended: tuple[bool, bool, bool]
    seed: int | None


class Shown(NamedTuple):
    """An episode as a store shows it, in bytes."""

    obs: bytes
    action: bytes
    reward: bytes
    serial: bytes
    ended: tuple[bool, bool, bool]
    seed: int | None


# --- what is written, in plain lists ---------------------------------------------------------------------------------


def schema(kind):
    return dr.Schema(
        obs=dr.Field((kind.side, kind.side), "uint8"),
        action=dr.Field((), "int64"),
        extra={"serial": dr.Field((), "int64")},
        episode={"seed": dr.Field((), "int64")},
    )


def frame(kind, serial):
    return np.random.default_rng(serial).integers(0, 256, (kind.side, kind.side), np.uint8)


def row_bytes(kind):
    return {"obs": kind.side**2, "action": 8, "reward": 4, "done": 1, "extra/serial": 8, "episode/seed": 8, "time": 8}


def write_one(store, kind):
    """Write episodes of one lane that end in every way; return them."""
    written, serial, number = [], 0, 0
    rng = np.random.default_rng(0)
    with store.writer() as writer:
        while serial < kind.steps:
            count = int(rng.integers(1, 40 if kind.steps > 1000 else 9))
            serials = list(range(serial, serial + count))
            obs = [frame(kind, s) for s in serials]
            following = frame(kind, serial + count + 10**6)
            way, seed = number % 6, number if number % 2 else None
            values = None if seed is None else {"seed": seed}
            with_next = way in (0, 2, 4)
            for i, s in enumerate(serials):
                last = i == count - 1
                next_obs = (following if last else obs[i + 1]) if with_next else None
                writer.append(
                    obs[i], s, float(s), last and way in (0, 1), last and way in (2, 3), next_obs=next_obs, serial=s,
                    episode=values if last and way < 4 else None, priority=float(s) if s % 3 else None,
                )  # fmt: skip
            if way >= 4:
                writer.end_episode(episode=values)
            ended = (way in (0, 1), way > 1, way > 3)
            written.append(Written(obs, following if with_next else None, serials, ended, seed))
            serial, number = serial + count, number + 1
    return written


def write_lanes(store, kind):
    """Write episodes of several lanes, each of its own length, ended with and without a last observation."""
    lanes = kind.lanes
    written, current, age = [], [([], []) for _ in range(lanes)], np.zeros(lanes, int)
    lengths = [3 + lane for lane in range(lanes)]
    with store.writer(num_envs=lanes) as writer:
        for t in range(kind.steps):
            serials = t * lanes + np.arange(lanes)
            obs = np.array([frame(kind, s) for s in serials])
            following = np.array([frame(kind, s + lanes) for s in serials])
            age += 1
            ended = np.array([age[lane] == lengths[lane] for lane in range(lanes)])
            terminated = ended & (np.arange(lanes) % 2 == 0)
            writer.append(
                obs, serials, serials.astype(np.float32), terminated, ended & ~terminated, next_obs=following,
                serial=serials, priority=np.where(serials % 3 > 0, serials, np.nan),
            )  # fmt: skip
            for lane in range(lanes):
                current[lane][0].append(obs[lane])
                current[lane][1].append(int(serials[lane]))
                if ended[lane]:
                    how = (bool(terminated[lane]), not terminated[lane], False)
                    written.append(Written(*current[lane][:1], following[lane], current[lane][1], how, None))
                    current[lane] = ([], [])
            age[ended] = 0
    for lane in range(lanes):
        if current[lane][1]:
            final = frame(kind, current[lane][1][-1] + lanes)
            written.append(Written(current[lane][0], final, current[lane][1], (False, True, True), None))
    return written


def shown(path):
    """Read every episode that a store shows, by its ids."""
    with dr.open(path) as store:
        found = {}
        for episode in store.episodes:
            seed = episode["seed"]
            found[tuple(episode.ids.tolist())] = Shown(
                episode.obs.tobytes(),
                episode.action.tobytes(),
                episode.reward.tobytes(),
                episode["serial"].tobytes(),
                (episode.terminated, episode.truncated, episode.cut),
                None if seed is None else int(seed),
            )
        assert len(store) == sum(map(len, found))
        return found


def expected_of(written):
    """Return what a store shows of an episode that was written."""
    frames = [*written.obs, *([] if written.final is None else [written.final])]
    return Shown(
        np.array(frames).tobytes(),
        np.array(written.serials, np.int64).tobytes(),
        np.array(written.serials, np.float32).tobytes(),
        np.array(written.serials, np.int64).tobytes(),
        written.ended,
        written.seed,
    )


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    """A whole store, and what it shows: exactly what was written."""
    kind = KINDS[request.param]
    path = tmp_path_factory.mktemp("whole") / "store"
    with dr.create(path, schema(kind), chunk_bytes=kind.chunk_bytes, segment_steps=kind.segment_steps) as store:
        written = write_one(store, kind) if kind.lanes is None else write_lanes(store, kind)
    before = shown(path)
    assert sorted(map(repr, before.values())) == sorted(repr(expected_of(episode)) for episode in written)
    assert {problem.kind for problem in verify(path, deep=True)} <= {"quarantine"}
    return kind, path, before


# --- which episodes a byte may cost ----------------------------------------------------------------------------------


def rows_of_episodes(path, before):
    """Return segment, lane, and rows of each episode: from its first step to that of the next one in its lane."""
    starts: dict[tuple[int, int], list[int]] = {}
    found: dict[tuple, tuple[int, int, int, int]] = {}
    rows = {int(f.parent.parent.name): np.fromfile(f, "<i8") for f in path.glob("segments/0*/committed/c.0")}
    for ids in before:
        number, position = ids[0] >> 35, ids[0] & ((1 << 35) - 1)
        row, lane = divmod(position, len(rows[number]))
        starts.setdefault((number, lane), []).append(row)
        found[ids] = number, lane, row, 0
    for ids, (number, lane, row, _) in found.items():
        later = [start for start in starts[number, lane] if start > row]
        found[ids] = number, lane, row, min(later, default=int(rows[number][lane]))
    return found


def values_of(path, number, rows):
    """Return lane and place of the values of a segment's episodes: the k-th with flag 64 of a lane has the k-th row."""
    flags = {}
    for file in (path / f"segments/{number:08d}/done").glob("c.*"):
        flags[int(file.name.split(".")[2])] = np.fromfile(file, np.uint8)
    lanes = len(np.fromfile(path / f"segments/{number:08d}/committed/c.0", "<i8"))
    done = np.concatenate([flags[chunk].reshape(lanes, -1) for chunk in sorted(flags)], axis=1)
    found = {}
    for ids, (segment, lane, first, stop) in rows.items():
        if segment == number and (done[lane, first:stop] & 64).any():
            found[ids] = lane, np.count_nonzero(done[lane, :first] & 64)
    return found


def hit_by(kind, path, where, at, rows):
    """Return the ids of the episodes that have a row in the block of a byte."""
    parts = where.parts
    leaf = "/".join(parts[2:-1])
    if parts[0] != "segments" or leaf not in row_bytes(kind) or not parts[-1].startswith("c."):
        return set()
    size, number = row_bytes(kind)[leaf], int(parts[1])
    together = 1
    while together * 2 <= 512 and together * 2 * size <= 65536:
        together *= 2
    lanes = kind.lanes or 1
    per_chunk = (path / where).stat().st_size // size // lanes
    block = at // (together * size)
    inside = range(block * together, min((block + 1) * together, lanes * per_chunk))
    chunk = int(parts[-1].split(".")[2])
    damaged = {divmod(linear, per_chunk) for linear in inside}
    damaged = {(lane, chunk * per_chunk + row) for lane, row in damaged}
    if leaf.startswith("episode/"):
        return {ids for ids, place in values_of(path, number, rows).items() if place in damaged}
    return {
        ids
        for ids, (segment, lane, first, stop) in rows.items()
        if segment == number and any((lane, row) in damaged for row in range(first, stop))
    }


def nbytes_of(file):
    """Return how many bytes of a file say anything: room for evictions by hand is reserved, and nobody reads it."""
    if file.parts[-2:] == ("evictions", "c.0.0"):
        return 16 * words(file.parents[1])["evictions"]
    return file.stat().st_size


def bytes_of(path):
    """Return every byte of a store: the file, and its place in it. Locks are empty, and holes have none."""
    found = []
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        found += [(file.relative_to(path), at) for at in range(nbytes_of(file))]
    return found


def problems(path):
    """Return what is wrong, but for the count of what was set aside."""
    return [problem for problem in verify(path, deep=True) if not problem.where.startswith("counters/quarantine")]


def check_damage(whole, copy, where, at):
    """Damage one byte of a copy, repair it, and compare what it shows with what was written."""
    kind, path, before = whole
    shutil.copytree(path, copy)
    try:
        flip(copy / where, at, 1 + at % 255)
        rows = rows_of_episodes(path, before)
        hit = hit_by(kind, path, where, at, rows)
        assert problems(copy), (where, at)
        foreseen = repair(copy, dry_run=True)
        done = repair(copy)
        assert done.left == [], (where, at)
        assert done.steps_lost == sum(map(len, hit)) == foreseen.steps_lost, (where, at)
        assert [action.what for action in done.actions] == [action.what for action in foreseen.actions]
        assert shown(copy) == {ids: episode for ids, episode in before.items() if ids not in hit}, (where, at)
        assert problems(copy) == [], (where, at)
        assert repair(copy).actions == []
        with dr.open(copy) as store:
            info = store.info()
            whole_segments = {action.what for action in done.actions} != {"quarantined"}
            assert info["steps_lost"] == done.steps_lost * whole_segments
            assert info["steps"] == len(store)
    finally:
        shutil.rmtree(copy)


def sample(path, count):
    """Return bytes of a store: of each file some, and in all about so many, the same ones each time."""
    rng = np.random.default_rng(count)
    files = sorted(file for file in path.rglob("*") if file.is_file() and nbytes_of(file))
    chosen = rng.permutation(len(files))[:count].tolist()
    chosen += rng.integers(0, len(files), max(0, count - len(chosen))).tolist()
    return [(files[i].relative_to(path), int(rng.integers(nbytes_of(files[i])))) for i in chosen]


@pytest.mark.parametrize("byte", [0, 7], ids=["a little other", "negative"])
def test_damaged_priorities_cost_no_step_and_the_rest_of_them_stay(tmp_store, byte):
    with dr.create(tmp_store, schema(KINDS["tiny"]), chunk_bytes=1 << 16) as store, store.writer() as writer:
        for s in range(1200):
            writer.append(np.zeros((2, 2), np.uint8), s, 0.0, s % 10 == 9, serial=s, priority=s + 1.0)
    before = shown(tmp_store)
    chunk = tmp_store / "segments/00000000/priority/c.0.0"
    flip(chunk, 600 * 8 + byte)  # of the rows 512 to 1023
    found = {problem.where for problem in verify(tmp_store, deep=True)}
    assert found - {"segments/00000000/priority"} == {"segments/00000000/priority/c.0.0"}
    done = repair(tmp_store)
    assert (done.steps_lost, done.left, [action.what for action in done.actions]) == (0, [], ["rebuilt"])
    assert "no step is lost" in done.actions[0].detail
    assert problems(tmp_store) == []
    assert shown(tmp_store) == before
    with dr.open(tmp_store) as store:
        found = np.concatenate([episode["priority"] for episode in store.episodes])
        rows = np.concatenate([episode.ids for episode in store.episodes])
    damaged = (rows >= 512) & (rows < 1024)
    np.testing.assert_array_equal(found, np.where(damaged, np.nan, np.arange(1200) + 1.0))


@pytest.mark.slow(turns=2)
def test_a_damaged_byte_costs_the_episodes_in_its_block_and_nothing_else(whole, tmp_path):
    for where, at in sample(whole[1], FAST):
        check_damage(whole, tmp_path / "copy", where, at)


@pytest.mark.slow(turns=2)
@pytest.mark.timeout(24 * 3600)
def test_any_damaged_byte_costs_the_episodes_in_its_block_and_nothing_else(whole, tmp_path):
    chosen = bytes_of(whole[1])[::STRIDE] if STRIDE else sample(whole[1], SLOW)
    for where, at in chosen:
        check_damage(whole, tmp_path / "copy", where, at)
