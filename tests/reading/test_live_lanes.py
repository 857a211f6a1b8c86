"""Readers of lanes that grow, where much comes between two refreshes or the kernel is replaced meanwhile."""

import threading

import pytest

import diskreplay as dr
from tests.reading.inner import while_compiling
from tests.testing.support import append_numbered, serial_schema, visible_serials


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("capacity", [None, 500])
@pytest.mark.parametrize("length", [1, 50, 10_000])
def test_a_reader_takes_in_any_number_of_rows_that_came_since(tmp_store, compiled, capacity, length):
    with (
        dr.create(tmp_store, serial_schema(), segment_steps=100_000, capacity=capacity) as store,
        dr.open(tmp_store) as reader,
        store.writer() as writer,
    ):
        if compiled:
            reader.follow_compiled()
        append_numbered(writer, range(10))
        reader.refresh()  # all of the chunk is known from here on
        for first in range(10, 9_010, length):
            append_numbered(writer, range(first, min(first + length, 9_010)))
        reader.refresh()
        assert sorted(visible_serials(reader)) == list(range(9_010))[-(capacity or 9_010) :]
        assert len(reader) == (capacity or 9_010)


def test_a_store_that_gets_a_limit_while_its_kernel_is_compiled_is_read_on(tmp_store, monkeypatch):
    with (
        dr.create(tmp_store, serial_schema()) as store,
        dr.open(tmp_store) as reader,
        store.writer() as writer,
    ):
        append_numbered(writer, range(80))
        reader.refresh()

        def limit_once():
            if store.capacity is None:
                store.resize(capacity=50)
                thread = threading.Thread(target=reader.refresh)
                thread.start()
                thread.join()

        while_compiling(reader, limit_once)
        append_numbered(writer, range(80, 100))
        reader.refresh()
        assert visible_serials(reader) == list(range(50, 100))
