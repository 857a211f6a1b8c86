"""The tables of `find_windows` and `gather`: windows, and the record of a gather plan. It needs no numba."""

import numpy as np

from diskreplay.ids import Ints

# Rows of a table of windows, one column an id.
SLOT, LANE, ROW = 0, 1, 2
FLOOR = 3  # the oldest row that a stack may show: the episode's first, or as many rows back as the stack has
AFTER = 4  # the row k steps later; `find_windows` has the address of the window's first flag there meanwhile
OBS_STOP = 5  # AFTER + 1 where that row has an observation, 0 where it has none
STEP_STOP = 6  # AFTER + 1 where that row is a step of the episode, 0 where it is none
K = 7  # the steps of the window
FRAMES_STOP = 8  # the row behind the last observation: AFTER + 1 where that row has one, else AFTER
OWN, OWN_STOP = 9, 10  # what a reader writes there; `find_windows` has the end of the lane in OWN_STOP meanwhile
# Written by the kernels: the folder whose chunks hold the rows, which line of each is the lane's, and how many rows of
# the line come before the first of the lane.
FOLDER, LINE, BEFORE = 11, 12, 13
WINDOW_ROWS = 14

# Columns of the record. Whether windows are to be found, how, where they are, and memory for the sources of all items.
FINDS, N, STACK, WHOLE, WINDOWS, ITEMS, SOURCES = range(7)
LIMITS = 7  # the address of the most steps that each of these windows may have, or 0
# How many lines there are, how many of them are copied, and the line behind the summands: that of the discounts, if
# there is one. Then gamma, whether wide rows go past the caches, and the line that could not be copied, or -1.
LINES, COPIED, SUMMED, GAMMA, STREAMED, FAILED = range(8, 14)
# Which array of the batch gets what is not copied from a leaf; -1 is none.
COMPUTED = ("reward", "discount", "terminated", "truncated", "index", "n_steps", "weight")
REWARD, DISCOUNT, TERMINATED, TRUNCATED, INDEX, N_STEPS, WEIGHT = range(14, 21)
# The table of the flags, as those of leaves below.
FLAGS = 21
# Columns of a line. A table: addresses of the arrays by folder and their length, of the chunks' addresses; bytes of a
# row.
FIRST_CHUNK, CHUNKS, SHIFT, FOLDERS, BASES, BASES_SIZE, ROW_BYTES = range(7)
HEAD = FLAGS + 7
BEGIN, STOP, OFFSET, LENGTH, TARGET = range(7, 12)
# Of a summand: its kind of number and its weight in the sum, the bits of a float64. That of discounts is gamma.
KIND, FACTOR = 10, 11
COLUMNS = 12

KINDS = "fiu"
"""Kinds of numbers that can be summed: floats of 2, 4 or 8 bytes, and integers of up to 8."""

LARGE_BATCH = 8 << 20
"""Bytes of a batch from which on its wide rows are streamed: a loss by half of that, a clear gain at twice."""


def table_line(first_chunk: Ints, chunks: Ints, shift: Ints, bases: Ints, row_bytes: int) -> Ints:
    """Return the table of a leaf as a record has it; the caller keeps the arrays alive."""
    addresses = [array.ctypes.data for array in (first_chunk, chunks, shift)]
    folders = min(len(first_chunk), len(chunks), len(shift))
    return np.array([*addresses, folders, bases.ctypes.data, len(bases), row_bytes], np.int64)
