"""Damage in copies whose files have write permission: readers show the whole rows, and the next writer keeps them."""

import random
import shutil
from pathlib import Path

import pytest

import diskreplay as dr
from tests.testing.commands import repair
from tests.testing.support import append_numbered, digest, serial_schema
from tests.tiers import whole_or_part

CHUNKED = ("obs", "action", "reward", "serial", "done", "time", "priority")
HOW = ("flip", "missing", "short", "long")


def make(path: Path, rng: random.Random) -> None:
    """Make a sealed segment of some 2,000 steps in episodes of 1 to 60, with marks or without."""
    durability = rng.choice(["none", 3600.0])
    with dr.create(path, serial_schema(), chunk_bytes=1024) as store:
        kwargs = {"priority": 2.0} if rng.random() < 0.5 else {}
        with store.writer(durability=durability) as writer:
            first = 0
            while first < 2000:
                stop = first + rng.randint(1, 60)
                append_numbered(writer, range(first, stop), rng.choice(["terminated", "truncated"]), **kwargs)
                first = stop
                if rng.random() < 0.05:
                    writer.flush()
        if rng.random() < 0.5:
            store.refresh()
            gone = {episode.ids[0] for episode in rng.sample(list(store.episodes), 3)}
            store.evict(lambda episode: episode.ids[0] in gone)


def damage(copy: Path, leaf: str, how: str, rng: random.Random) -> bool:
    """Damage one of the chunk files of an array; False where it has none."""
    files = sorted(copy.glob(f"segments/*/{leaf}/c.*"))
    if not files:
        return False
    file = rng.choice(files)
    data = bytearray(file.read_bytes())
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.unlink()
    if how != "missing":
        file.write_bytes({"short": data[: len(data) // 2], "long": bytes(data) + b"x"}.get(how, data))
    return True


def steps_of(path: Path) -> dict[int, str]:
    with dr.open(path) as store:
        found = {}
        for e in store.episodes:
            fields = (e["serial"], e.obs[: len(e)], e.action, e.reward)
            rows = zip(*(values.tolist() for values in fields), strict=True)
            found |= dict(zip(e.ids.tolist(), map(repr, rows), strict=True))
        assert len(found) == len(store)
        (segment,) = store.info()["segments"]
        assert segment["steps"] == len(store)
        return found


@pytest.mark.slow
@pytest.mark.parametrize("leaf", CHUNKED)
def test_no_damage_of_a_copy_shows_a_row_that_was_not_written(tmp_store, tmp_path, leaf):
    """Readers change nothing. A dry run of repair tells the actions of repair, and the next writer does the same."""
    for seed in range(whole_or_part(8, 1)):
        rng = random.Random(f"{leaf} {seed}")
        shutil.rmtree(tmp_store, ignore_errors=True)
        make(tmp_store, rng)
        wanted = steps_of(tmp_store)
        for how in rng.sample(HOW, whole_or_part(4, 2)):
            copy, repaired = tmp_path / "copy", tmp_path / "repaired"
            shutil.copytree(tmp_store, copy, copy_function=shutil.copyfile)
            if damage(copy, leaf, how, rng):
                shutil.copytree(copy, repaired, copy_function=shutil.copyfile)
                most = 700 if how == "flip" else 1200  # a block, or a chunk, and the episodes at either end
                after, shown = check(copy, repaired, wanted)
                assert len(after) >= len(wanted) - most
                if how == "flip" and leaf not in ("done", "time"):
                    assert shown == after
                shutil.rmtree(repaired)
            shutil.rmtree(copy)


def check(copy: Path, repaired: Path, wanted: dict[int, str]) -> tuple[dict[int, str], dict[int, str]]:
    """Check that readers leave a copy as it is, and that mode "a" and repair keep the same rows.

    Returns the steps that are shown after that, and before.
    """
    before = digest(copy)
    shown = steps_of(copy)
    assert digest(copy) == before
    assert shown.items() <= wanted.items()
    planned, done = repair(copy, dry_run=True).actions, repair(repaired).actions
    assert [(a.what, a.where, a.steps) for a in planned] == [(a.what, a.where, a.steps) for a in done]
    dr.open(copy, "a").close()
    after = steps_of(copy)
    assert shown.items() <= after.items() <= wanted.items()
    assert after == steps_of(repaired)
    return after, shown
