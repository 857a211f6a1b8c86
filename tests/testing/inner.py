"""The inner names that tests patch to make a state on disk at will; most other modules of tests know none."""

from typing import Any

from diskreplay.retention.policy import RetentionPolicy
from diskreplay.retention.retention import Retention
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.layout import FORMAT_VERSION as FORMAT_VERSION
from diskreplay.segments.files import machine


def keep_members(monkeypatch: Any) -> None:
    """Leave what is put into packs where it is, as a process that dies just after a pack has its place does."""
    monkeypatch.setattr(Retention, "_remove_merged", lambda self, pace=None: None)
    monkeypatch.setattr(RetentionPolicy, "_left_by_merges", lambda self, most: self._merged.clear() or [])


def pretend(monkeypatch: Any) -> None:
    """Write as a machine and a boot that are none: what is not sealed has to prove its rows wherever it is read."""
    line = lambda paths: "0" * 31 + "1" if "/etc/machine-id" in paths else "a boot of long ago"  # noqa: E731
    monkeypatch.setattr(machine, "_first_line", line)


def table_all(monkeypatch: Any) -> None:
    """Give segments of any size a table of their episodes."""
    monkeypatch.setattr(layout, "LEAST_TABLE_ROWS", 0)
