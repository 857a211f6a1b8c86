"""The whole reader of docs/format.md yields the episodes that a store has, and no others."""

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from diskreplay.testing.scripts import play
from tests.compat.test_zarr_python import LANES, PLAN
from tests.snippets import ROOT, snippets
from tests.testing import packed
from tests.testing.support import quiet, serial_schema

pytestmark = pytest.mark.usefixtures("no_patience")
PAGE = ROOT / "docs/format.md"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Any]:
    """The page's function `episodes`, from its first two snippets."""
    (tmp_path / "page").mkdir()
    monkeypatch.chdir(tmp_path / "page")
    names: dict[str, Any] = {}
    with redirect_stdout(StringIO()):
        for snippet in snippets(PAGE)[:2]:
            exec(compile(snippet.code, str(PAGE), "exec"), names)
    read: Callable[[Path], Any] = names["episodes"]
    return read


def check_reads(read: Callable[[Path], Any], path: Path) -> int:
    """Compare with the episodes and the table of all steps; return how many episodes there are."""
    found = sorted((obs.tobytes(), action.tobytes()) for _, obs, action in read(path))
    with dr.open(path) as store:
        expected = sorted((episode.obs.tobytes(), episode.action.tobytes()) for episode in store.episodes)
        assert found == expected
        actions = np.concatenate([action for *_, action in read(path)])
        np.testing.assert_array_equal(np.sort(actions), np.sort(store.to_numpy()["action"]))
    return len(found)


def lose_rows(path: Path, number: int, name: str) -> None:
    """Damage the middle of a chunk file of a pack, and repair the store."""
    file = path / f"segments/{number:08}" / name
    data = bytearray(file.read_bytes())
    at = max(range(len(data)), key=lambda i: (data[i] != 0, i))  # evicted rows are zeros
    data[at // 2] ^= 0x55
    file.chmod(0o644)
    file.write_bytes(data)
    with dr.open(path, "a") as store:
        store.repair()
        assert store.info()["steps_lost"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("segment_steps", [None, "episode"])
def test_lanes_with_every_end_are_read(read: Callable[[Path], Any], tmp_store: Path, segment_steps: Any) -> None:
    with dr.create(tmp_store, serial_schema(), chunk_bytes=256, segment_steps=segment_steps) as store:
        for plan in (PLAN, LANES):
            with store.writer(plan.num_envs) as writer:
                play(plan, store.schema, [quiet(writer)])
        store.evict(lambda episode: len(episode) == 9)
    assert check_reads(read, tmp_store) > 20


@pytest.mark.parametrize("compression", [pytest.param(None, marks=pytest.mark.slow), "zstd"])
def test_packs_are_read_without_what_was_evicted_and_lost(
    read: Callable[[Path], Any], tmp_store: Path, compression: Any
) -> None:
    number = packed.write_packed(tmp_store, compression=compression)
    whole = check_reads(read, tmp_store)
    lose_rows(tmp_store, number, "extra/wide/c.0.0.0")
    assert 0 < check_reads(read, tmp_store) < whole


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_segments_that_a_pack_has_replaced_are_not_read_twice(
    read: Callable[[Path], Any], tmp_store: Path, monkeypatch: pytest.MonkeyPatch, compression: Any
) -> None:
    packed.write_packed(tmp_store, compression=compression)
    packed.keep_members(monkeypatch)
    with dr.open(tmp_store, "a") as store:
        with store.writer() as writer:
            for first in (300, 320, 340):
                packed.append(writer, 12, first)
        store.compact()
    assert len(packed.pack_numbers(tmp_store)) == 2  # the newer one holds the older one
    check_reads(read, tmp_store)
