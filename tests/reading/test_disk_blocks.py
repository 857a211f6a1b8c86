"""For which blocks of a compressed file the disk is asked."""

import mmap
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.reading import decompression
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.packs import all_packs, open_shard
from tests.writing.merging.test_compression import SCHEMA

pytest.importorskip("zstandard")


@pytest.mark.parametrize("block", [decompression._BLOCK_BYTES, mmap.PAGESIZE])
def test_the_disk_is_asked_for_blocks_of_a_file_and_for_nothing_behind_it(tmp_store: Path, block: int) -> None:
    page = mmap.PAGESIZE
    with dr.create(tmp_store, SCHEMA, compression="zstd", compaction="manual") as store:
        with store.writer() as writer:
            obs = np.random.default_rng(0).integers(0, 256, (2001, 16, 17), np.uint8)
            writer.append_episode(obs, np.zeros((2000, 255), np.uint8), np.ones(2000), terminated=True)
        store.compact()
    (info,) = [info for info, _ in all_packs(read_root(tmp_store), 0)]
    shard = open_shard(info, "obs")
    there = np.flatnonzero(shard.sizes)
    numbers = there[[0, len(there) // 2, len(there) // 2 + 1, -1]]
    starts, sizes = decompression._blocks(shard, numbers, block)
    ends = starts + sizes
    for number in numbers:
        begin = shard.mapping.address + shard.offsets[number]
        assert ((starts <= begin) & (begin + shard.sizes[number] <= ends)).sum() == 1
    assert ((starts - shard.mapping.address) % block == 0).all()
    assert (starts[1:] > ends[:-1]).all()
    assert ends[-1] - shard.mapping.address <= -(-shard.mapping.nbytes // page) * page
    assert sizes.sum() <= shard.sizes[numbers].sum() + len(numbers) * 2 * block
    assert sizes.sum() < shard.mapping.nbytes
