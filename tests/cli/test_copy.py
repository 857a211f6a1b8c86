import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diskreplay as dr
from tests.cli.conftest import EPISODES, SCHEMA, small_episode, write_small

SEEN = tuple[Any, ...]


def began(episode: dr.Episode) -> float:
    return float(episode.times[0])


def content(store: dr.Store) -> list[SEEN]:
    """All that a copy keeps, oldest first, bytes for bytes."""
    found = []
    for episode in sorted(store.episodes, key=began):
        rows = {path: episode.rows(path) for path in store.schema.step_leaves}
        values = [(path, array.dtype, array.shape, array.tobytes()) for path, array in rows.items()]
        fields = [(name, np.asarray(episode[name]).tobytes()) for name in store.schema.episode]
        found.append((episode.terminated, episode.truncated, episode.cut, values, fields))
    return found


def read(path: Path) -> list[SEEN]:
    with dr.open(path) as store:
        return content(store)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_copy_has_every_value_of_every_episode(run: Callable, small: Path) -> None:
    to = small.with_name("copy")
    assert run("copy", small, to) == (0, f"copied  6 episodes of 80 steps  to {to}\n", "")
    assert read(to) == read(small)
    assert len(read(to)) == 6
    with dr.open(to) as copied, dr.open(small) as store:
        assert (copied.schema, copied.capacity) == (store.schema, 1000)
        assert copied.uuid != store.uuid
    assert run("verify", to, "--deep").code == 0


def test_initial_priorities_are_copied(run: Callable, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with dr.create(tmp_path / "a", SCHEMA) as store, store.writer(num_envs=1) as writer:
        for e, (steps, how, _, has_final) in [*enumerate(EPISODES)] * 3:
            episode = small_episode(e)
            flat = dict(SCHEMA.flatten("obs", episode["obs"]))
            obs = [SCHEMA.unflatten("obs", {path: x[t : t + 1] for path, x in flat.items()}) for t in range(steps + 1)]
            for t in range(steps):
                last = t == steps - 1
                writer.append(
                    obs[t],
                    *(episode[name][t : t + 1] for name in ("action", "reward")),
                    *([last and how == name] for name in ("terminated", "truncated")),
                    next_obs=obs[t + 1] if not last or has_final else None,
                    priority=rng.choice([0.0, 1.5, np.nan, 1e-300], 1),
                    log_prob=episode["log_prob"][t : t + 1],
                )
            if how == "cut":
                writer.end_episode()
    assert run("copy", tmp_path / "a", tmp_path / "b").out.startswith("copied  18 episodes of 240 steps")
    assert read(tmp_path / "b") == read(tmp_path / "a")
    with dr.open(tmp_path / "a") as store, dr.open(tmp_path / "b") as copied:
        priorities = [np.concatenate([episode["priority"] for episode in each.episodes]) for each in (store, copied)]
    assert np.isnan(priorities[0]).sum() > 10
    np.testing.assert_array_equal(*priorities)
    assert run("diff", tmp_path / "a", tmp_path / "b").code == 0


def test_a_copy_of_some(run: Callable, small: Path) -> None:
    to = small.with_name("copy")
    done = run("copy", small, to, "--where", "seed is not None and length < 10")
    assert done == (0, f"copied  3 episodes of 10 steps  to {to}\n", "")
    every = read(small)
    assert read(to) == [every[0], every[3], every[4]]


def test_settings_of_the_store_go_along(run: Callable, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "capacity": 500,
        "capacity_bytes": 10**9,
        "max_age_s": 1e6,
        "chunk_bytes": 1 << 17,
        "segment_steps": "episode",
        "validate": "finite",
        "compaction": "manual",
    }
    write_small(tmp_path / "a", compression=("zstd", 3), **options)
    assert run("copy", tmp_path / "a", tmp_path / "b").code == 0
    kept = [json.loads((tmp_path / name / "zarr.json").read_text())["attributes"] for name in "ab"]
    assert {name: kept[0][name] for name in options} == options
    changed = {name for name in kept[0] if kept[0][name] != kept[1][name]}
    assert changed <= {"uuid", "created", "diskreplay_crc32c"}
    assert read(tmp_path / "a") == read(tmp_path / "b")


def test_lanes_are_copied_in_the_order_in_which_their_episodes_began(run: Callable, tmp_path: Path) -> None:
    schema = dr.Schema(dr.Field((3,), "float64"), dr.Field((), "int8"))
    rng = np.random.default_rng(3)
    with dr.create(tmp_path / "a", schema) as store, store.writer(num_envs=4) as writer:
        for _ in range(200):
            obs, ends = rng.normal(size=(4, 3)), rng.random((2, 4)) < 0.1
            obs[rng.random((4, 3)) < 0.1] = np.nan
            writer.append(obs, rng.integers(0, 9, 4), rng.normal(size=4), ends[0], ends[1])
        store.refresh()
        open_ones = sum(episode.ended == "open" for episode in store.episodes)
        ended = [
            seen for seen, e in zip(content(store), sorted(store.episodes, key=began), strict=True) if e.ended != "open"
        ]
        done = run("copy", tmp_path / "a", tmp_path / "b")
        left = f"; {open_ones} open episode{'s' * (open_ones > 1)} left out\n"
        assert open_ones > 0
        assert done.out.endswith(left)
    assert len(ended) > 50
    assert read(tmp_path / "b") == ended


def test_a_dry_run_makes_nothing(run: Callable, small: Path) -> None:
    done = run("copy", small, small.with_name("copy"), "--where", "cut", "--dry-run")
    assert done == (0, "would be copied  2 episodes of 6 steps\n", "")
    assert names(small.parent) == ["store"]


def test_what_exists_is_not_replaced(run: Callable, small: Path) -> None:
    to = small.with_name("copy")
    to.mkdir()
    done = run("copy", small, to)
    assert done == (2, "", f"diskreplay: {to} exists already; give the path of a new store\n")
    assert names(to) == []


def test_a_copy_that_fails_leaves_nothing(run: Callable, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = dr.Writer.append_episode

    def fail(writer: dr.Writer, *args: Any, **kwargs: Any) -> None:
        if len(kwargs["reward"]) == 4:
            raise dr.StorageFull("no room")
        append(writer, *args, **kwargs)

    monkeypatch.setattr(dr.Writer, "append_episode", fail)
    assert run("copy", small, small.with_name("copy")) == (2, "", "diskreplay: no room\n")
    assert names(small.parent) == ["store"]


def test_what_leaves_a_store_meanwhile_is_told(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small(tmp_path / "a", segment_steps="episode")
    append = dr.Writer.append_episode

    def evict_others(writer: dr.Writer, *args: Any, **kwargs: Any) -> None:
        append(writer, *args, **kwargs)
        with dr.open(tmp_path / "a", "a") as store:
            store.evict(lambda episode: len(episode) in (4, 5))

    monkeypatch.setattr(dr.Writer, "append_episode", evict_others)
    done = run("copy", tmp_path / "a", tmp_path / "b")
    line = f"copied  4 episodes of 71 steps  to {tmp_path / 'b'}; 2 episodes evicted meanwhile\n"
    assert done == (0, line, "")
    with dr.open(tmp_path / "b") as store:
        assert [len(episode) for episode in store.episodes] == [3, 60, 2, 6]


def test_a_merge_has_the_episodes_of_all_stores_by_time_and_no_limits(run: Callable, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths[:2]:
        dr.create(path, SCHEMA, capacity=100).close()
    for e in range(len(EPISODES)):
        with dr.open(paths[e % 2], "a") as store, store.writer() as writer:
            writer.append_episode(**small_episode(e))
    assert run("merge", *paths) == (0, f"copied  6 episodes of 80 steps  to {paths[2]}\n", "")
    write_small(tmp_path / "whole")
    assert read(paths[2]) == read(tmp_path / "whole")
    with dr.open(paths[2]) as store:
        assert store.capacity is None


def test_stores_of_different_schemas_are_not_merged(run: Callable, small: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    dr.create(other, dr.Schema(dr.Field((), "int64"), dr.Field((), "int64"))).close()
    done = run("merge", small, other, tmp_path / "merged")
    assert (done.code, done.out) == (2, "")
    assert (
        f"{other} has a different schema from {small}; `diskreplay diff {small} {other}` shows the difference"
        in done.err
    )
    assert not (tmp_path / "merged").exists()
