"""Parts of the checker by their own interfaces: the checksums of holes, and the rules of flags."""

import random

import google_crc32c
import numpy as np
import pytest

from diskreplay.integrity.verify.check_sums import checksum
from diskreplay.integrity.verify.files import after_zeros
from diskreplay.integrity.verify.row_flags import START, first_wrong, is_row, may_follow
from diskreplay.segments.segment_reader import LaneSlice, parse_episodes


@pytest.mark.parametrize("runs", [[], [5], [0, 1 << 20], [3, 7 << 20, 4096, 1], [100_000, 1 << 33]])
def test_holes_have_the_checksum_of_zeros(tmp_path, runs):
    """Data and holes by turns, the last run being a hole or data."""
    crc, at = 0, 0
    with open(tmp_path / "file", "w+b") as file:
        for turn, count in enumerate(runs):
            if turn % 2 == 0:
                data = random.Random(turn).randbytes(count)
                file.seek(at)
                file.write(data)
                crc = google_crc32c.extend(crc, data)
            elif count < 1 << 30:
                crc = google_crc32c.extend(crc, bytes(count))
            else:
                crc = after_zeros(crc, count)  # compared with real zeros by the shorter runs
            at += count
            file.truncate(at)
        file.flush()
        assert checksum(file.fileno()) == crc


@pytest.mark.slow
def test_flags_that_verify_accepts_are_episodes_to_the_reader_and_few_others_are():
    """Every sequence of three rows: what verify lets pass, the reader must be able to read."""
    rows = [flags for flags in range(128) if is_row(flags)]
    alone = LaneSlice(*(np.array([n]) for n in (0, 1, 0, 0, 3)), np.array([True]))
    accepted = 0
    for first in rows:
        if not may_follow(START, first):
            continue
        for second in rows:
            if not may_follow(first, second):
                continue
            for third in rows:
                flags = np.array([first, second, third], np.uint8)
                if may_follow(second, third):
                    parse_episodes(flags, alone)
                    accepted += 1
    assert accepted > 500


@pytest.mark.parametrize("lanes", [1, 5])
def test_the_table_finds_the_first_wrong_row_that_counts(lanes):
    flags = np.zeros((lanes, 6), np.uint8)
    flags[:, 0] = 4
    flags[-1, 3:5] = 128, 128
    before = np.full(lanes, START, np.uint8)

    assert first_wrong(flags, before, np.full(lanes, 6)) == (lanes - 1, 3)
    assert first_wrong(flags, before, np.full(lanes, 3)) is None
    assert first_wrong(flags[:, 1:], before, np.full(lanes, 1)) == (0, 0)
