"""The inner names that tests step in at or patch; other modules of these folders know none.

A point is a holder and a name: `monkeypatch.setattr(*POINT, instead)` steps in, `real(POINT)` is what is there.
"""

from typing import Any

from diskreplay.integrity.backup import backup
from diskreplay.integrity.backup.copying import SegmentVanished as SegmentVanished
from diskreplay.integrity.repair import dead_writers, remedies, repair
from diskreplay.retention import policy, retention
from diskreplay.retention.policy import RetentionPolicy
from diskreplay.retention.retention import Retention
from diskreplay.segments import sealing, segment
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.layout import FORMAT_VERSION as FORMAT_VERSION
from diskreplay.segments.documents.limiters import StepCounter
from diskreplay.segments.files import commit, locks, machine
from diskreplay.segments.files.commit import StoreCounters
from diskreplay.segments.files.machine import BootTime
from diskreplay.segments.segment_writer import SegmentWriter
from diskreplay.store import info
from diskreplay.writing import sealer
from diskreplay.writing.append_cursor import AppendCursor
from diskreplay.writing.merging import background

Point = tuple[Any, str]

# Appending.
APPEND_ROW: Point = (AppendCursor, "append")
WRITE_ROWS: Point = (SegmentWriter, "write")
PUBLISH_ROWS: Point = (SegmentWriter, "publish")
SET_COUNTER: Point = (StoreCounters, "set")
SYNC_COUNTERS: Point = (commit, "sync_file")
taking_locks = locks._taking

# Sealing.
SEAL_SEGMENTS: Point = (sealer, "seal_segments")
SUBMIT_SEGMENT: Point = (sealer.Sealer, "submit")
CHECK_WRITTEN: Point = (sealing, "check_written")
FINISH_CHUNK: Point = (sealing, "_finish_chunk")
FORGET_CLAIMS: Point = (sealing, "forget_claims")
IS_WHOLE_COPY: Point = (segment, "is_whole_copy")

# Merging in the background.
BEGIN_MERGING: Point = (background, "_begin")

# Evicting.
EVICTION_LOCK: Point = (retention, "held_lock")
EVICTION_READ: Point = (retention, "read_segment")

# Backups, repairs and descriptions.
COPY_SEALED: Point = (backup, "copy_sealed")
COPY_LIVE: Point = (backup, "copy_live")
COMPLETE_BACKUP: Point = (backup._Backup, "_complete")
READ_LIVE: Point = (backup, "read_live")
BACKUP_LOCK: Point = (backup, "held_lock")
BACKUP_SYNC: Point = (backup, "sync_file_system")
BACKUP_MOMENTS = backup._MOMENTS
REPAIR_VERIFY: Point = (repair, "verify")
REPAIR_LOCK: Point = (remedies, "held_lock")
LOOKS_AT_DEAD: dict[str, Point] = {name: (dead_writers, name) for name in ("is_never_written", "fate_of")}
BEGIN_COUNT: Point = (StepCounter, "_begin")
SUM_LANE: Point = (info, "_sum_lane")


def real(point: Point) -> Any:
    """Return what is at a point."""
    holder, name = point
    return getattr(holder, name)


def gather_in_threads(patch: Any) -> None:
    """Prefetch batches of any size in threads."""
    from diskreplay.sampling import prefetcher  # loads torch, which processes that write do without

    patch.setattr(prefetcher, "LEAST_FOR_A_THREAD", 0)


def keep_members(monkeypatch: Any) -> None:
    """Leave what is put into packs where it is, as a process that dies just after a pack has its place does."""
    monkeypatch.setattr(Retention, "_remove_merged", lambda self, pace=None: None)
    monkeypatch.setattr(RetentionPolicy, "_merged_leftovers", lambda self, most: self._merged.clear() or [])


def merge_soon(patch: Any) -> None:
    """Have what is written merged at once, and seal all segments together: who merges looks once, and finds enough."""
    patch.setattr(background, "_FIRST_S", 0.01)
    patch.setattr(background, "_BETWEEN_S", 0.01)
    seal_together(patch)


def seal_together(patch: Any) -> None:
    """Seal the segments of episodes only when somebody waits for it."""
    patch.setattr(sealer, "_FULL_BATCH", 1000)
    patch.setattr(sealer, "_BATCH_WAIT_S", 60.0)


def ask_again_soon(patch: Any) -> None:
    """Ask a process that merges and does not end to end again at once."""
    patch.setattr(background, "_ASK_AGAIN_S", 0.01)


def pretend(monkeypatch: Any) -> None:
    """Write as a machine and a boot that are none: what is not sealed has to prove its rows wherever it is read."""
    line = lambda paths: "0" * 31 + "1" if "/etc/machine-id" in paths else "a boot of long ago"  # noqa: E731
    monkeypatch.setattr(machine, "_first_line", line)


def share_chunks(patch: Any) -> None:
    """Have two threads finish the chunks of a segment however few bytes they are."""
    patch.setattr(sealing, "_SHARED_BYTES", 0)


def table_all(monkeypatch: Any) -> None:
    """Give segments of any size a table of their episodes."""
    monkeypatch.setattr(layout, "LEAST_TABLE_ROWS", 0)


class Clock:
    """Clocks that stand still until a test moves them: `now` for all, `wall` alone, another boot, a time service."""

    now, wall, boot, machine, is_kept = 0.0, 1_000_000.0, "this boot", "this machine", False

    def __init__(self, patch: Any) -> None:
        for module in (sealing, policy):
            patch.setattr(module, "time", self)
            patch.setattr(module, "boot_time", self.boot_time)
        patch.setattr(policy, "is_clock_synchronized", lambda: self.is_kept)

    def time(self) -> float:
        return self.now + self.wall

    def boot_time(self) -> BootTime:
        return BootTime(self.machine, self.boot, self.now)
