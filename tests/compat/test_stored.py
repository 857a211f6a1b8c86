"""A store of each format version is kept, and every later release reads all of it as the one that made it did."""

import json
import re
import struct
import warnings
from itertools import pairwise

import google_crc32c
import numpy as np
import pytest
import zarr

import diskreplay as dr
from tests.compat.decoder import decode
from tests.compat.make_store import (
    FOLDER,
    LIMITER,
    STATE,
    STORES,
    append,
    observation,
    read,
    read_batches,
    read_episode,
    unpack,
)
from tests.compat.test_zarr_python import read_with_zarr
from tests.testing.on_disk import END_MARKER, OBSERVATION_ONLY, POSITION_BITS, segment_of, words
from tests.testing.support import serial_schema


@pytest.fixture(params=sorted(STORES.iterdir()), ids=lambda kept: kept.name)
def kept(request):
    """What is kept of one format version: the store, and what the release that made it read of it."""
    return request.param


@pytest.fixture
def expected(kept):
    return json.loads((kept / "expected.json").read_text())


@pytest.fixture(params=[True, False], ids=["with its modes", "as a tool copies that keeps no modes"])
def path(tmp_path, request, kept):
    """The store, in a folder of the test's own; of what was sealed no file may be written, or every file."""
    path = unpack(tmp_path, modes=request.param, kept=kept)
    chunk = path / "segments/00000000/obs/speed/c.0.0.0"
    assert bool(chunk.stat().st_mode & 0o200) is not request.param
    return path


def as_json(value):
    return json.loads(json.dumps(value))


def test_a_store_of_this_format_version_is_kept():
    assert (FOLDER / "store.tar.gz").exists(), "python -m tests.compat.make_store makes it"


def test_a_stored_store_shows_what_it_did(path, expected):
    del expected["batches"]
    assert as_json(read(path)) == expected
    for episode in expected["episodes"]:
        if episode["ids"][0] >> POSITION_BITS != 1:  # that one has several lanes
            serials = np.array(episode["action"]) / 3
            np.testing.assert_array_equal(serials / 8, episode["reward"])
            np.testing.assert_array_equal(serials / 4, np.array(episode["obs"]["speed"])[: len(serials), 0])
            assert len(np.unique(np.diff(serials))) <= 1


def test_it_has_all_that_the_format_knows(path):
    segments = [segment_of(path, number) for number in range(4)]
    said = [json.loads((segment / "zarr.json").read_text())["attributes"] for segment in segments]
    assert [attributes["sealed"] for attributes in said] == [True, True, True, False]
    assert [len(attributes["lanes"]) for attributes in said] == [1, 3, 1, 1]
    assert said[2]["lost"] == [[0, 78]]
    assert [(segment / "durable/blocks").exists() for segment in segments] == [True, True, True, False]
    assert (segments[0] / "durable/marks").stat().st_size == 2 * 32
    assert (segments[3] / "durable/marks").stat().st_size == 32
    assert len(list((segments[0] / "reward").glob("c.*"))) > 1
    assert (path / "evictions/document").read_bytes() == (path / "zarr.json").read_bytes()
    assert words(path)["evictions"] == 1
    assert (path / "counters/quarantine/segments/00000002.record.json").exists()
    assert zarr.open_group(path, mode="r")[f"limiters/{LIMITER}"][:].sum() == 5 * 8
    assert (path / "samplers" / STATE / "zarr.json").exists()


def test_a_saved_state_goes_on_with_the_same_batches(path, expected):
    assert as_json(read_batches(path)) == expected["batches"]


def test_a_stored_store_is_written_on(path, expected):
    """What a dead writer left is sealed, nothing else changes, and no number of a segment is used again."""
    reserved = words(path)["reserved"]
    *others, opened = expected["episodes"]
    with dr.open(path, "a") as store, store.writer() as writer:
        append(writer, 9000, 5, "terminated", seed=90)
    with dr.open(path, "a") as store:
        *before, cut, new = map(as_json, map(read_episode, store.episodes))
        assert before == others
        assert cut == opened | {"ended": [False, True, True]}
        assert new["ids"][0] >> POSITION_BITS == reserved
        assert [[problem.kind, problem.where] for problem in store.verify(deep=True)] == expected["problems"]
        assert [action.what for action in store.repair(salvage=True)] == ["salvaged"]
    with dr.open(path) as store:
        assert store.episodes[-2].action.tolist() == [3 * serial for serial in range(7200, 7207)]


def test_a_stored_store_takes_initial_priorities(path):
    with dr.open(path, "a") as store, store.writer() as writer:
        for t in range(5):
            writer.append(
                observation(9000 + t), t, 0.0, t == 4, next_obs=observation(9001 + t), log_prob=0.0,
                priority=None if t < 2 else -float(t), episode={"seed": 1} if t == 4 else None,
            )  # fmt: skip
        writer.flush()
        before = {(problem.kind, problem.where) for problem in store.verify(deep=True)}
    with dr.open(path) as store:
        assert {(problem.kind, problem.where) for problem in store.verify(deep=True)} == before
        np.testing.assert_array_equal(store.episodes[-1]["priority"], [np.nan, np.nan, 2.0, 3.0, 4.0])
        assert np.isnan(np.concatenate([episode["priority"] for episode in store.episodes[:-1]])).all()
        sampler = dr.Sampler(store, dr.Transitions(), dr.Prioritized(), batch_size=4, seed=0)
        assert len(sampler.sample().index) == 4


def test_a_reader_that_knows_the_page_on_the_format_alone_finds_the_same(path):
    """Beside what `decode` knows: of what is sealed, which episodes were lost to damage, and which are evicted."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dr.open(path, "a").close()  # seals what a dead writer left: marks are what other tests are for
    arrays = read_with_zarr(path)
    with dr.open(path) as store:
        found = {episode.ids[0]: episode for episode in decode(arrays, store.schema)}
        evicted = arrays["evictions"][: words(path)["evictions"]]
        for first, steps in evicted.tolist():
            assert len(found.pop(first).ids) == steps
        for first, rows in arrays["segments/00000002"]["lost"]:
            assert len(found.pop(2 << POSITION_BITS | first).ids) == rows
        assert sorted(found) == [int(episode.ids[0]) for episode in store.episodes]
        for episode in store.episodes:
            other = found[int(episode.ids[0])]
            assert other.ids == episode.ids.tolist()
            assert (other.terminated, other.truncated, other.cut) == (
                episode.terminated,
                episode.truncated,
                episode.cut,
            )
            for name in ("image", "speed"):
                np.testing.assert_array_equal(other.values[f"obs/{name}"], episode.obs[name])
            np.testing.assert_array_equal(other.values["reward"], episode.reward)
            assert other.values.get("episode/seed") == episode["seed"]


# --- marks and blocks in plain loops, from the page on the format ----------------------------------------------------


def array_folders(segment):
    """Give the path of each array with rows, in order, the bytes of a row, rows a chunk, lanes, and how names end."""
    for path in sorted(json.loads((segment / "zarr.json").read_text())["attributes"]["chunk_rows"]):
        document = json.loads((segment / path / "zarr.json").read_text())
        lanes, rows, *shape = document["chunk_grid"]["configuration"]["chunk_shape"]
        yield path, np.dtype(document["data_type"]).itemsize * int(np.prod(shape)), rows, lanes, ".0" * len(shape)


def read_marks(segment, lanes):
    """Give rows and checksums of each mark up to the first one that does not fit itself."""
    data, size, written = (segment / "durable/marks").read_bytes(), 24 + 8 * lanes, b""
    for start in range(0, len(data) - size + 1, size):
        mark = data[start : start + size]
        written += mark[:-4]
        own_size, crc, _, *rows, of_priorities, own = struct.unpack(f"<IId{lanes}qII", mark)
        if own_size != size or own != google_crc32c.value(written):
            return
        yield rows, crc, of_priorities


def crc_of_priorities(data):
    """Give the CRC-32C of bytes whose register begins with zeros and is not inverted, a bit at a time."""
    register = 0
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register


def count_values(segment, rows):
    """Count the values of episodes in the first rows of each lane, by flag 64."""
    _, _, per_chunk, lanes, ending = next(array for array in array_folders(segment) if array[0] == "done")
    flags = [
        (segment / "done" / f"c.0.{chunk}{ending}").read_bytes()
        for chunk in range(-(-max(rows, default=0) // per_chunk))
    ]
    return [
        sum(flags[row // per_chunk][lane * per_chunk + row % per_chunk] & 64 > 0 for row in range(rows[lane]))
        for lane in range(lanes)
    ]


def new_bytes(segment, before, rows, of_priorities=False):
    """Give the bytes of the rows that a mark covers and the one before does not."""
    for path, row_bytes, per_chunk, lanes, ending in array_folders(segment):
        if (path == "priority") != of_priorities:
            continue
        begin, upto = before, rows
        if path.startswith("episode/"):
            begin, upto = (count_values(segment, some) for some in (before, rows))
        for chunk in range(-(-max(upto) // per_chunk)):
            data = (segment / path / f"c.0.{chunk}{ending}").read_bytes()
            for lane in range(lanes):
                first = min(max(begin[lane] - chunk * per_chunk, 0), per_chunk)
                stop = min(max(upto[lane] - chunk * per_chunk, 0), per_chunk)
                yield data[(lane * per_chunk + first) * row_bytes : (lane * per_chunk + stop) * row_bytes]


def check_marks(segment, marks):
    lanes = len(marks[0][0])
    for (before, *_), (upto, crc, of_priorities) in pairwise([([0] * lanes,), *marks]):
        assert google_crc32c.value(b"".join(new_bytes(segment, before, upto))) == crc
        assert crc_of_priorities(b"".join(new_bytes(segment, before, upto, of_priorities=True))) == of_priorities


def test_marks_of_initial_priorities_are_what_the_page_says(tmp_path):
    with dr.create(tmp_path / "store", serial_schema(), chunk_bytes=512) as store, store.writer(num_envs=2) as writer:
        for t in range(30):
            obs, serials = np.zeros((2, 3), np.float32), np.arange(2) + 2 * t
            priority = [t + 0.5, np.nan] if t > 8 else None
            writer.append(obs, serials, serials, [False] * 2, next_obs=obs, serial=serials, priority=priority)
            if t % 6 == 5:
                writer.flush()
        segment = tmp_path / "store/segments/00000000"
        marks = list(read_marks(segment, 2))
        check_marks(segment, marks)
        assert [rows for rows, *_ in marks] == [[n, n] for n in (6, 12, 18, 24, 30)]
        assert [of_priorities > 0 for *_, of_priorities in marks] == [False, True, True, True, True]


@pytest.mark.parametrize(("number", "rows"), [(0, [[18], [63]]), (3, [[22]])])
def test_marks_are_what_the_page_on_the_format_says(path, number, rows):
    segment = segment_of(path, number)
    marks = list(read_marks(segment, 1))
    assert [covered for covered, *_ in marks] == rows
    covered = [[0], *(rows for rows, *_ in marks)]
    check_marks(segment, marks)
    assert {of_priorities for *_, of_priorities in marks} == {0}
    if number == 3:
        with dr.open(path) as store:
            flags = zarr.open_group(path, mode="r")["segments/00000003/done"][0, : covered[-1][0]]
            steps = int(np.count_nonzero(flags & (OBSERVATION_ONLY | END_MARKER) == 0))
            assert sum(len(episode) for episode in store.episodes if episode.ids[0] >> 35 == 3) == steps


def test_blocks_are_what_the_page_on_the_format_says(path):
    for number in range(3):
        segment, sums = segment_of(path, number), b""
        checksums = json.loads((segment / "zarr.json").read_text())["attributes"]["checksums"]
        for folder, row_bytes, _, _, ending in array_folders(segment):
            names = [name for name in checksums if re.fullmatch(rf"{folder}/c\.0\.[0-9]+{re.escape(ending)}", name)]
            assert names or (folder.startswith("episode/") and number == 1)  # no episode of it has values
            for name in sorted(names, key=lambda name: int(name.split(".")[2])):
                data = (segment / name).read_bytes()
                block = min(512, 1 << (65536 // row_bytes).bit_length() - 1) * row_bytes
                for start in range(0, len(data), block):
                    part = data[start : start + block]
                    sums += struct.pack("<I", google_crc32c.value(part) ^ google_crc32c.value(bytes(len(part))))
        assert (segment / "durable/blocks").read_bytes() == sums
        assert (segment / "durable/document").read_bytes() == (segment / "zarr.json").read_bytes()
