"""Children that are forked while another thread of their parent is in the middle of something."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import diskreplay as dr
from tests.crash.injection import in_child
from tests.testing.support import append_numbered, serial_schema


def test_a_child_lists_episodes_though_a_thread_of_its_parent_was_listing_them(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(5))
        with dr.open(tmp_store) as reader:
            snapshot = type(reader.snapshot)
            hidden_steps = snapshot.hidden_steps

            def slowly(*arguments: Any) -> Any:
                begun.set()
                assert goes_on.wait(60)
                return hidden_steps(*arguments)

            def child(tell: Any) -> None:
                signal.alarm(30)  # rather than wait for ever
                goes_on.set()
                tell(len(reader.episodes))

            monkeypatch.setattr(snapshot, "hidden_steps", slowly)
            listing = threading.Thread(target=lambda: len(reader.episodes))
            listing.start()
            assert begun.wait(60)
            try:
                assert in_child(child).told == [1]
            finally:
                goes_on.set()
                listing.join()
