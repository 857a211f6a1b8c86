"""Windows that run across episodes equal the reference: ids, and every field of every step, also as lanes grow."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import diskreplay as dr
from diskreplay import Sequences
from diskreplay.testing.model import ModelEpisode
from diskreplay.testing.reference import crossing_starts, crossing_window
from tests.parity.test_sequences import compare, let_some_continue, stacks, start_only
from tests.testing.on_disk import POSITION_BITS
from tests.views.fakes import Snapshot, check_every_id, followed, gathered
from tests.views.strategies import snapshots

seeds = st.integers(0, 2**32 - 1)
FLAGS = ("terminated", "truncated", "is_first", "mask", "loss_mask")
EVERYTHING = ("obs", "next_obs", "action", "reward", *FLAGS, "bonus", "hidden")


@st.composite
def views(draw: st.DrawFn) -> Sequences:
    length = draw(st.integers(1, 12))
    stride, burn_in = draw(st.integers(1, 14)), draw(st.integers(0, length - 1))
    pad = draw(st.sampled_from((True, "drop")))
    return Sequences(length, None, burn_in, pad, draw(stacks), draw(start_only), stride, cross_episodes=True)


def lanes_of(snapshot: Snapshot) -> Iterator[list[tuple[int, int, ModelEpisode]]]:
    """Go through the lanes: first id, distance of ids, and the model of each episode."""
    for lane in range(int(snapshot.lanes.max(initial=0))):
        found = []
        for step_id, (of, t) in sorted(snapshot.model.items()):
            width = int(snapshot.lanes[(step_id >> POSITION_BITS) - snapshot.origin])
            if t == 0 and step_id % (1 << POSITION_BITS) % width == lane:
                found.append((step_id, width, of))
        yield found


def hides_oldest_first(snapshot: Snapshot) -> bool:
    """Tell whether what is hidden of each lane are its oldest steps, in the segments before it too."""
    for lane in lanes_of(snapshot):
        kept = [of.hidden < len(of.steps) for *_, of in lane]
        partly = [of.hidden > 0 for *_, of in lane]
        if any(kept[:i].count(True) and partly[i] for i in range(len(lane))):
            return False
    return True


consistent = snapshots().filter(hides_oldest_first)


def windows_of(view: Sequences, snapshot: Snapshot) -> dict[int, tuple[list[Any], tuple[int, int]]]:
    """Ask the reference for all windows: the id of each, the episodes of its lane, and where in these it starts."""
    found = {}
    for lane in lanes_of(snapshot):
        for i, t in crossing_starts([of for *_, of in lane], view.length, view.stride):
            found[lane[i][0] + t * lane[i][1]] = lane, (i, t)
    return found


def expected(view: Sequences, lane: list[Any], start: tuple[int, int], continuing: set[int]) -> dict[str, Any]:
    """Ask the reference, leaf by leaf where their stacks differ."""
    depths = {leaf: view.frame_stack for leaf in ("image", "state")}
    if not isinstance(view.frame_stack, int):
        depths = {leaf: view.frame_stack.get(leaf, 1) for leaf in depths}
    places = {i for i, (first, *_) in enumerate(lane) if first in continuing}
    found: dict[str, Any] = {}
    for leaf, depth in depths.items():
        how = view.length, view.burn_in, depth, tuple(view.start_only), places
        whole = crossing_window([of for *_, of in lane], start, *how)
        found = {**whole, **found}
        found |= {name: whole[name] for name in (f"obs/{leaf}", f"next_obs/{leaf}")}
    return found


@pytest.mark.slow
@given(consistent, views())
def test_the_ids_offered_are_the_windows_of_the_reference(snapshot: Snapshot, view: Sequences) -> None:
    assert Counter(followed(view, snapshot)) == Counter(windows_of(view, snapshot).keys())


@pytest.mark.slow
@given(consistent, views(), seeds)
def test_every_field_of_every_window_equals_the_reference(snapshot: Snapshot, view: Sequences, seed: int) -> None:
    continuing = let_some_continue(snapshot, seed)
    windows = windows_of(view, snapshot)
    ids = sorted(windows)
    batch = gathered(view, snapshot, ids, EVERYTHING)
    assert batch["index"].tolist() == ids
    for item, step_id in enumerate(ids):
        compare(batch, item, expected(view, *windows[step_id], continuing))
    assert "next_obs/image" not in gathered(view, snapshot, ids)


@pytest.mark.slow
@given(consistent, views())
def test_every_id_at_which_no_window_starts_is_an_invalid_index(snapshot: Snapshot, view: Sequences) -> None:
    check_every_id(view, snapshot, windows_of(view, snapshot))


def test_other_arguments_that_do_not_go_with_it_are_refused() -> None:
    for arguments in ({"pad": False}, {"align": "end"}):
        with pytest.raises(
            ValueError, match="^windows with cross_episodes do not end with an episode: do not give pad=False or"
        ):
            Sequences(8, 4, cross_episodes=True, **arguments)
    kinds = {Sequences(8, 4, cross_episodes=c).kind for c in (True, False)}
    assert len(kinds) == 2


# On real stores that grow, and lose steps and episodes.

LANES = 3
STORED = dr.Schema(
    obs=dr.Field((2,), "float32"), action=dr.Field((), "int64"),
    extra={"name": dr.Field((), "int64"), "serial": dr.Field((), "int64")},
)  # fmt: skip


class Grown:
    """A vector writer and a single one, which come back as new writers; each numbers the steps of its lanes."""

    def __init__(self, store: Any, seed: int) -> None:
        self.store, self.rng = store, np.random.default_rng(seed)
        self.writers: list[Any] = [None, None]
        self.named = 0  # lanes so far, of all writers
        self.serial: dict[int, int] = {}
        self.resets: set[tuple[int, int]] = set()  # lanes and numbers of steps behind an end

    def grow(self, steps: int) -> None:
        for _ in range(steps):
            for which, lanes in enumerate((LANES, 1)):
                if self.writers[which] is None:
                    writer = self.store.writer(num_envs=lanes if lanes > 1 else None)
                    self.writers[which] = writer, list(range(self.named, self.named + lanes))
                    self.serial |= dict.fromkeys(self.writers[which][1], 0)
                    self.resets |= {(name, 0) for name in self.writers[which][1]}
                    self.named += lanes
                writer, names = self.writers[which]
                self.append(writer, names)
                if self.rng.random() < 0.01:
                    writer.close()
                    self.writers[which] = None

    def append(self, writer: Any, names: list[int]) -> None:
        serial = np.array([self.serial[name] for name in names])
        ends, cut = self.rng.random((2, len(names))) < 0.15, self.rng.random(len(names)) < 0.05
        obs = np.stack([np.array(names), serial], axis=1).astype(np.float32)
        row: dict[str, Any] = {
            "obs": obs, "action": serial, "reward": serial * 0.5, "terminated": ends[0], "truncated": ends[1],
            "next_obs": None if self.rng.random() < 0.3 else obs + [0, 1], "name": np.array(names), "serial": serial,
        }  # fmt: skip
        if len(names) == 1:
            did = np.ones(1, bool)
            writer.append(**{name: None if x is None else x[0] for name, x in row.items()})
            if cut[0]:
                writer.end_episode(None if self.rng.random() < 0.5 else obs[0] + [0, 1])
        else:
            did = self.rng.random(LANES) < 0.9
            writer.append(**row, mask=did)
            cut &= did
            writer.end_episode(None if self.rng.random() < 0.5 else obs + [0, 1], mask=cut)
        for at in np.flatnonzero(did):
            name = names[at]
            self.serial[name] += 1
            if ends[:, at].any() or cut[at]:
                self.resets.add((name, self.serial[name]))

    def admits(self, of: Any) -> bool:
        """Let some episodes in, by the number of their first step."""
        return int(of["serial"][0]) % 5 != 3

    def windows(self, view: Sequences, filtered: bool) -> dict[int, list[tuple[Any, int]]]:
        """List the steps of all windows by their ids: the episode and the number of each step in it.

        They run across what was evicted, and not across what `where` leaves out.
        """
        lanes: dict[int, list[Any]] = {}
        for of in self.store.episodes:
            lanes.setdefault(int(of["name"][0]), []).append(of)
        found = {}
        hidden = {int(of.ids[0]): of.hidden_steps for of in self.store.episodes}
        for episodes in lanes.values():
            episodes.sort(key=lambda of: int(of["serial"][0]))
            steps: list[tuple[Any, int]] = []
            for of in episodes:
                if filtered and not self.admits(of):
                    steps = []
                    continue
                is_open = not (of.terminated or of.truncated)
                usable = len(of.obs) - 1 if is_open else len(of)
                for t in range(usable):
                    steps.append((of, t))
                    window = steps[-view.length :]
                    first, at = window[0]
                    if len(window) == view.length and at % view.stride == 0 and at >= hidden[int(first.ids[0])]:
                        found[int(first.ids[at])] = window
        return found


def check_batch(batch: Any, windows: dict[int, list[tuple[Any, int]]], burn_in: int, resets: set[Any]) -> None:
    for item, step_id in enumerate(batch["index"].tolist()):
        window, exact = windows[step_id], False
        for j, (of, t) in enumerate(window):
            last = t == len(of) - 1
            for name in ("obs", "action", "reward", "name", "serial"):
                want = of[name][t] if name in ("name", "serial") else getattr(of, name)[t]
                np.testing.assert_array_equal(batch[name][item, j], want)
            following = of.obs[t + 1] if t + 1 < len(of.obs) else np.zeros(2)
            np.testing.assert_array_equal(batch["next_obs"][item, j], following)
            assert batch["terminated"][item, j] == (last and of.terminated)
            assert batch["truncated"][item, j] == (last and of.truncated)
            is_first = (int(of["name"][t]), int(of["serial"][t])) in resets
            exact |= is_first
            assert batch["is_first"][item, j] == is_first
            assert batch["loss_mask"][item, j] == (exact or j >= burn_in)
            assert batch["mask"][item, j]


@pytest.mark.slow(turns=2)
@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("capacity", [None, 300])
@pytest.mark.parametrize("segment_steps", [None, 30, "episode"])
def test_windows_of_a_store_that_grows_and_loses_steps_equal_the_reference(
    tmp_store: Path, filtered: bool, capacity: int | None, segment_steps: Any
) -> None:
    rng = np.random.default_rng(filtered + 2 * (capacity is None))
    length = int(rng.integers(2, 9))
    burn_in = int(rng.integers(0, length))
    view = Sequences(length, burn_in=burn_in, stride=int(rng.integers(1, 4)), cross_episodes=True)
    fields = ("obs", "next_obs", "action", "reward", *FLAGS, "name", "serial")
    listed = compared = 0
    with dr.create(tmp_store, STORED, capacity=capacity, segment_steps=segment_steps, chunk_bytes=4096) as store:
        grown = Grown(store, seed=length)
        how: dict[str, Any] = {"fields": fields, "where": grown.admits if filtered else None}
        followers = [dr.Sampler(store, view, d, batch_size=16, seed=0, **how) for d in (dr.Uniform(), dr.Prioritized())]
        for number in range(25):
            grown.grow(int(rng.integers(1, 12)))
            if number % 6 == 5:
                store.evict(lambda of: rng.random() < 0.1)
            store.refresh()
            windows = grown.windows(view, filtered)
            listed += len(windows)
            with dr.Sampler(store, view, **how) as fresh:
                for sampler in (*followers, fresh):
                    assert sorted(sampler.ids().tolist()) == sorted(windows)
            if windows:
                some = rng.permutation(sorted(windows))[:16]
                batches = [followers[0].gather(some), *(sampler.sample() for sampler in followers)]
                for batch in batches:
                    check_batch(batch.numpy(), windows, burn_in, grown.resets)
                    compared += len(batch.index)
                followers[1].update_priorities(batches[2].index, rng.random(16))
        for sampler in followers:
            sampler.close()
        for writer in grown.writers:
            if writer:
                writer[0].close()
    assert listed > 300
    assert compared > 300
