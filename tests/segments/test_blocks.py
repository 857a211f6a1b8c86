"""The checksums of blocks: where blocks begin, that nothing of a hole is read, and what many say together."""

import json
import os
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay.integrity.verify.check_sums import block_length
from diskreplay.integrity.verify.files import joined
from diskreplay.segments.blocks import block_bytes, combine, read_sums, with_zeros
from tests.testing.support import serial_schema

SCHEMA = serial_schema(obs={"image": dr.Field((84, 84), "uint8"), "state": dr.Field((3,), "float32")})


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [
        (1, 512),
        (4, 2048),
        (12, 512 * 12),
        (127, 512 * 127),
        (129, 256 * 129),
        (7056, 8 * 7056),
        (65536, 65536),
        (65537, 65536),
        (1 << 20, 65536),
    ],
)
def test_a_block_is_as_many_rows_as_fit_a_power_of_two_up_to_512(row_bytes, expected):
    assert block_bytes(row_bytes) == block_length(row_bytes) == expected


@given(st.integers(1, 1 << 21))
def test_writer_and_verify_agree_where_blocks_begin(row_bytes):
    assert block_bytes(row_bytes) == block_length(row_bytes)


@given(st.lists(st.binary(max_size=40), max_size=40), st.integers(1, 40))
def test_blocks_together_have_the_checksum_of_the_whole(parts, block):
    data = b"".join(parts)
    pieces = [data[at : at + block] for at in range(0, len(data), block)]
    sums = np.array([google_crc32c.value(piece) for piece in pieces], np.uint32)
    assert combine(sums, len(data), block) == google_crc32c.value(data)
    if pieces:
        assert joined(sums, block, len(pieces[-1])) == google_crc32c.value(data)


BEHIND, BETWEEN = ((0, 200_000),), ((4096, 3), (65_530, 200_000), (8_000_000, 5_000_000))


@pytest.mark.parametrize("data_at", [(), BEHIND, BETWEEN, (*BETWEEN, (39_999_999, 2))], ids=["", "1", "3", "4"])
@pytest.mark.parametrize("block", [512, 6144, 56448, 65536])
def test_sums_of_a_file_with_holes_are_those_of_its_bytes(tmp_path, block, data_at):
    path = tmp_path / "chunk"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        os.truncate(path, 40_000_001)
        for at, count in data_at:
            file.seek(at)
            file.write(rng.bytes(count))
    data = path.read_bytes()
    fd = os.open(path, os.O_RDONLY)
    try:
        sums, crc = read_sums(fd, len(data), block)
    finally:
        os.close(fd)
    expected = [google_crc32c.value(data[at : at + block]) for at in range(0, len(data), block)]
    assert sums.tolist() == expected
    assert crc == combine(sums, len(data), block) == google_crc32c.value(data)


@given(st.binary(max_size=40), st.integers(0, 5000))
def test_zeros_behind_a_string_change_its_checksum_as_crc32c_says(data, count):
    assert with_zeros(google_crc32c.value(data), count) == google_crc32c.value(data + bytes(count))


def test_what_lies_in_a_hole_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "chunk"
    path.write_bytes(b"x")
    os.truncate(path, 1 << 30)
    read = []
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: read.append((at, len(buffers[0]))) or real(fd, buffers, at)
    )
    fd = os.open(path, os.O_RDONLY)
    try:
        sums, _ = read_sums(fd, 1 << 30, 65536)
    finally:
        os.close(fd)
    assert read == [(0, 65536)]
    assert len(set(sums.tolist())) == 2


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [None, 3])
@pytest.mark.parametrize("segment_steps", [None, 100, "episode"])
def test_a_sealed_segment_has_the_checksum_of_every_block(tmp_store, lanes, segment_steps):
    with (
        dr.create(tmp_store, SCHEMA, chunk_bytes=1 << 18, segment_steps=segment_steps) as store,
        store.writer(num_envs=lanes) as writer,
    ):
        lead = () if lanes is None else (lanes,)
        for t in range(150):
            obs = {"image": np.full((*lead, 84, 84), t, np.uint8), "state": np.full((*lead, 3), t, np.float32)}
            ones = np.ones(lead, np.int64)
            args = (obs, t * ones, ones.astype(np.float32), ones * t % 7 == 6)
            if lanes is None:
                args = (obs, t, 1.0, t % 7 == 6)
            writer.append(*args, serial=t * ones if lanes else t)
    for segment in sorted((Path(tmp_store) / "segments").glob("0*")):
        checksums = json.loads((segment / "zarr.json").read_bytes())["attributes"]["checksums"]
        expected = []
        arrays = {"action": 8, "done": 1, "extra/serial": 8, "obs/image": 7056, "obs/state": 12, "reward": 4, "time": 8}
        for leaf in sorted(arrays):
            chunks = sorted((segment / leaf).glob("c.*"), key=lambda path: int(path.name.split(".")[2]))
            length = 56448 if leaf == "obs/image" else 512 * arrays[leaf]
            for chunk in chunks:
                data = chunk.read_bytes()
                blocks = [data[at : at + length] for at in range(0, len(data), length)]
                expected += [google_crc32c.value(x) ^ google_crc32c.value(bytes(len(x))) for x in blocks]
        assert np.fromfile(segment / "durable/blocks", "<u4").tolist() == expected
        assert checksums["durable/blocks"] == google_crc32c.value((segment / "durable/blocks").read_bytes())
