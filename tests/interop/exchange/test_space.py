"""The space that an import takes: announced before it begins, and small while it compresses."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.interop import npz
from diskreplay.interop.exchange import importing
from tests.interop.round_trips import StopAt, content

SIDE, STEPS, COUNT = 64, 20, 60
STEP_BYTES = SIDE * SIDE + 8 + 4
SEGMENT_BYTES = 1 << 20


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """A data set of equal frames: some MB, which zstd makes small."""
    with dr.create(tmp_path / "source", dr.Schema(dr.Field((SIDE, SIDE), "uint8"), dr.Field((), "int64"))) as store:
        with store.writer() as writer:
            for number in range(COUNT):
                obs = np.full((STEPS + 1, SIDE, SIDE), number, np.uint8)
                writer.append_episode(obs, np.arange(STEPS), np.ones(STEPS), terminated=True)
        store.refresh()
        npz.export_dataset(store, tmp_path / "set")
    shutil.rmtree(tmp_path / "source")
    return tmp_path / "set"


def disk_bytes(path: Path) -> int:
    """Bytes that the files of a folder take on disk; files may vanish meanwhile."""
    found = 0
    for above, _, files in os.walk(path):
        for name in files:
            with suppress(FileNotFoundError):
                found += Path(above, name).lstat().st_blocks * 512
    return found


@contextmanager
def sampled(path: Path) -> Iterator[list[int]]:
    """Note the bytes of a folder over and over in a thread, until the block ends."""
    seen, is_over = [0], Event()

    def sample() -> None:
        while not is_over.is_set():
            seen.append(disk_bytes(path))

    thread = Thread(target=sample)
    thread.start()
    try:
        yield seen
    finally:
        is_over.set()
        thread.join()


def test_a_compressed_import_takes_its_final_size_and_two_segments_at_most(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    monkeypatch.setattr(importing, "_LEAST_SEGMENT_BYTES", SEGMENT_BYTES)
    path = tmp_path / "store"
    with sampled(path) as seen:
        npz.import_dataset(frames, path, compression="zstd", progress=lambda *_: seen.append(disk_bytes(path)))
    final, raw = disk_bytes(path), COUNT * STEPS * STEP_BYTES
    most = final + 2 * (SEGMENT_BYTES + STEPS * STEP_BYTES)
    assert max(seen) <= most < raw, "without compression it would be more"
    with dr.open(path) as store:
        segments = store.info()["segments"]
        assert len(segments) >= 4
        assert all(each["merged"] == 1 for each in segments), "each is compressed once, and never copied"
        assert store.verify(deep=True) == []
    npz.import_dataset(frames, tmp_path / "plain")
    assert content(path) == content(tmp_path / "plain")


def test_an_interrupted_import_compresses_what_it_finds(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zstandard")
    monkeypatch.setattr(importing, "_LEAST_SEGMENT_BYTES", SEGMENT_BYTES)
    path = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        npz.import_dataset(frames, path, compression="zstd", progress=StopAt(COUNT * STEPS // 2))
    assert npz.import_dataset(frames, path, compression="zstd").resumed == COUNT // 2
    with dr.open(path) as store:
        assert all(each["merged"] for each in store.info()["segments"])
        assert store.num_episodes == COUNT


def with_free(patch: pytest.MonkeyPatch, path: Path, nbytes: int) -> None:
    """Have the disk report so many free bytes."""
    usage = shutil.disk_usage(path)
    patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=nbytes))


@pytest.mark.parametrize("options", [{}, {"compression": "zstd"}], ids=["plain", "compressed"])
def test_only_the_steps_to_come_need_space(
    frames: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any
) -> None:
    path, half = tmp_path / "store", COUNT * STEPS // 2 * STEP_BYTES
    with pytest.raises(KeyboardInterrupt):
        npz.import_dataset(frames, path, progress=StopAt(COUNT * STEPS // 2), **options)
    with_free(monkeypatch, tmp_path, half - 1)
    with pytest.raises(
        dr.StorageFull, match=f"{COUNT * STEPS // 2} steps of .*set take {half} bytes, and the disk has"
    ):
        npz.import_dataset(frames, path)
    with_free(monkeypatch, tmp_path, half)
    assert npz.import_dataset(frames, path).episodes == COUNT // 2
    with_free(monkeypatch, tmp_path, 0)
    assert npz.import_dataset(frames, path).resumed == COUNT, "nothing is to come"
