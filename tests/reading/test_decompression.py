"""Rows of compressed fields: the memory for what was decompressed, threads, and the disk's blocks."""

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tests.reading.inner import (
    DISK_BLOCK_BYTES,
    MOST_DECOMPRESSED,
    blocks_asked,
    decompressed_bytes,
    disk_is_warm,
    limit,
    new_arenas,
    packed_field,
)
from tests.tiers import whole_or_part
from tests.writing.merging.test_compression import SCHEMA, attributes, make_pack

pytest.importorskip("zstandard")


def limit_memory(monkeypatch: pytest.MonkeyPatch, piece: int, block: int, most: int, least: int) -> None:
    """Have less memory for what is decompressed: bytes of a piece and a block, and of all that is kept."""
    limit(
        monkeypatch,
        piece_bytes=piece,
        block_bytes=block,
        decompressed_bytes=most,
        least_decompressed_bytes=least,
    )


def test_no_more_is_kept_decompressed_than_the_budget_and_what_a_batch_needs(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack(tmp_store, 60)
    inner = 32 * 16 * 17  # bytes of an inner chunk
    batch = 2 * 8 * 2 * inner  # obs and next_obs of eight steps, each in two of them at most
    block = 8 << 10  # about the size of an inner chunk
    with dr.open(tmp_store) as store, dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0) as sampler:
        want = [sampler.sample().numpy() for _ in range(30)]
        assert 0 < decompressed_bytes() <= MOST_DECOMPRESSED
    del store, sampler
    gc.collect()
    assert decompressed_bytes() == 0  # nobody reads a store
    limit_memory(monkeypatch, piece=2 * inner, block=4 * block, most=8 * block, least=8 * block)
    with dr.open(tmp_store) as store, dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0) as sampler:
        for expected in want:
            found = sampler.sample().numpy()
            assert all(np.array_equal(found[name], value) for name, value in expected.items())
            del found
            assert 0 < decompressed_bytes() <= 8 * block + 2 * batch


def test_what_a_batch_needs_does_not_leave_for_what_else_it_needs(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack(tmp_store, 100)
    inner = 32 * 16 * 17  # bytes of an inner chunk, of which there are 35
    limit_memory(monkeypatch, piece=4 * inner, block=8 * inner, most=32 * inner, least=32 * inner)
    new_arenas(monkeypatch)
    limit(monkeypatch, attempts=2)  # to open chunks, and to see that they are there
    with dr.open(tmp_store) as store, dr.Sampler(store, dr.Transitions(), batch_size=8, seed=0) as sampler:
        for _ in range(500):
            sampler.sample()
    assert decompressed_bytes() <= 40 * inner


def test_inner_chunks_that_are_decompressed_one_by_one_share_a_piece(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack(tmp_store, 100)
    block = 1 << 17
    limit_memory(monkeypatch, piece=8 * 32 * 16 * 17, block=block, most=1 << 30, least=1 << 30)
    new_arenas(monkeypatch)
    with dr.open(tmp_store) as store:
        for number, episode in enumerate(store.episodes):
            assert np.array_equal(episode.obs[:, 0, 0], np.arange(10 * number, 10 * number + 11).astype(np.uint8))
        assert decompressed_bytes() == 5 * block  # for 35 inner chunks
    del store, episode
    gc.collect()
    assert decompressed_bytes() == 0


def test_who_keeps_rows_keeps_nothing_else_that_was_decompressed(tmp_store: Path) -> None:
    make_pack(tmp_store, 60)
    with dr.open(tmp_store) as store:
        kept = [episode.obs for episode in store.episodes]
        assert max(obs.max() for obs in kept) == 255
        assert decompressed_bytes() > 0
    del store
    gc.collect()
    assert decompressed_bytes() == 0
    assert [int(obs[0, 0, 0]) for obs in kept[:3]] == [0, 10, 20]


@pytest.mark.parametrize(("most", "fits"), [(1 << 30, True), (150_000, False)])
def test_more_is_kept_with_each_batch_once_nothing_comes_from_disk_if_half_of_the_field_fits(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, most: int, fits: bool
) -> None:
    make_pack(tmp_store, 200)
    # A block is for one inner chunk.
    limit_memory(monkeypatch, piece=1, block=1 << 14, most=most, least=1 << 15)
    with dr.open(tmp_store) as store, dr.Sampler(store, dr.Transitions(), batch_size=1, seed=0) as sampler:
        disk_is_warm(monkeypatch, False)
        for _ in range(100):
            sampler.sample()
        assert decompressed_bytes() <= 1 << 16  # twice what a batch needs
        disk_is_warm(monkeypatch, True)
        for _ in range(200):
            sampler.sample()
        assert (decompressed_bytes() > 30 << 14) == fits
        assert fits or decompressed_bytes() <= 1 << 16


@pytest.mark.parametrize(("more", "block"), [(0, DISK_BLOCK_BYTES), (1, mmap.PAGESIZE)])
def test_what_lies_around_is_read_of_fields_that_fit_in_memory_as_they_are_on_disk(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, more: int, block: int
) -> None:
    make_pack(tmp_store, 60)
    nbytes = attributes(tmp_store)["compressed"]["obs"]["nbytes"]
    limit(monkeypatch, fitting_bytes=nbytes - more)
    asked = blocks_asked(monkeypatch)
    with dr.open(tmp_store) as store:
        store.to_numpy()
    assert set(asked) == {block}


@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_damaged_is_told_whichever_thread_finds_it(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    make_pack(tmp_store, 60)
    limit(monkeypatch, piece_bytes=1, threads=threads, least_for_threads=1)
    with dr.open(tmp_store) as store:
        path, offsets, sizes = packed_field(tmp_store, "obs")
        before = path.read_bytes()
        for at in offsets[np.flatnonzero(sizes)[::7]].tolist():
            # Another kind of file, or another number of bytes than the index of a shard has: zstd's frame header.
            for place, byte in ((at, before[at] ^ 255), (at + 5, before[at + 5] ^ 1)):
                path.write_bytes(before[:place] + bytes([byte]) + before[place + 1 :])
                with (
                    dr.open(tmp_store) as damaged,
                    pytest.raises(dr.FormatError, match=r"damaged \(.*diskreplay repair"),
                ):
                    damaged.to_numpy()
            path.write_bytes(before)
        assert len(store.to_numpy()["obs"]) == len(store)


FRAMES = np.random.default_rng(0).integers(0, 256, (66, 16, 17), np.uint8)  # zstd keeps them as they are
# Of what a pack holds: all but raw rows, whose checksums are of whole blocks, for `verify`.
CHECKED = (
    *("zarr.json", "obs/zarr.json", "obs/c.0.0.0.0", "members/c.0.0", "runs/c.0.0", "committed/c.0"),
    *("durable/blocks", "durable/document", "durable/indexes", "durable/tables"),
)


def right_steps(path: Path) -> int:
    """Return how many steps a sampler shows of those frames, after checking each; of damage it only raises."""
    shown = 0
    with dr.open(path) as store, dr.Sampler(store, dr.Transitions(), dr.Sweep(1), batch_size=7, seed=0) as sampler:
        while True:
            try:
                batch = sampler.sample()
            except (StopIteration, dr.NotEnoughData):
                return shown
            except dr.FormatError as error:
                if "diskreplay repair" not in str(error):
                    raise
                continue
            rows = batch.index.numpy()  # of segment 0, which has one lane
            np.testing.assert_array_equal(batch.obs.numpy(), FRAMES[rows])
            np.testing.assert_array_equal(batch.next_obs.numpy(), FRAMES[rows + 1])
            shown += len(rows)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:segment . of .* is damaged")
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("name", CHECKED)
def test_a_sampler_shows_no_row_with_a_flipped_bit(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch, name: str, threads: int
) -> None:
    limit(monkeypatch, threads=threads, least_for_threads=1, piece_bytes=1, inner_chunk_bytes=1 << 10)
    with dr.create(tmp_store, SCHEMA, compression="zstd", compaction="manual") as store:
        with store.writer() as writer:
            for first in range(0, 66, 11):
                writer.append_episode(
                    FRAMES[first : first + 11], np.zeros((10, 255), np.uint8), np.ones(10), terminated=True
                )
        store.compact()
    assert right_steps(tmp_store) == 60
    (pack,) = tmp_store.glob("segments/*/")
    whole, path, shown = (pack / name).read_bytes(), pack / name, list[int]()
    path.chmod(0o644)
    for at in range(0, len(whole), max(1, len(whole) // whole_or_part(400, 10))):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        shown.append(right_steps(tmp_store))
    path.write_bytes(whole)
    if name == "obs/c.0.0.0.0":
        assert 0 < max(shown) < 60  # only batches with a damaged row are lost
