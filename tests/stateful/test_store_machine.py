"""Any sequence of calls leaves the store as the model in plain lists says: episodes, transitions, ids."""

import math
import pickle
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import diskreplay as dr
from diskreplay.testing import ModelStore, check_account, check_store
from diskreplay.testing.nested import flat, pick
from diskreplay.testing.scripts import EpisodePlan, random_priorities, random_rewards, random_values, script
from diskreplay.testing.strategies import schemas
from tests.inner import compressed_rows_of
from tests.testing.support import check_views, quiet, scratch
from tests.tiers import whole_or_part

MOST_WRITERS = 4
masks = st.none() | st.integers(0, 2**16 - 1)


class StoreMachine(RuleBasedStateMachine):
    """A store beside its model; `writers` are the pairs of both that are open."""

    def __init__(self):
        super().__init__()
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(scratch()))
        self.model, self.writers, self.serial, self.ids = ModelStore(), [], 0, {}

    @initialize(
        schema=schemas(),
        chunk_bytes=st.sampled_from((256, 1024, 4096)),
        segment_steps=st.none() | st.integers(1, 24) | st.just("episode"),
        kilobytes=st.none() | st.none() | st.integers(1, 200),
        compression=st.sampled_from((None, "zstd")),
        seed=st.integers(0, 1000),
    )
    def create(self, schema, chunk_bytes, segment_steps, kilobytes, compression, seed):
        self.schema, self.rolls, self.rng = schema, segment_steps is not None, np.random.default_rng(seed)
        path = self.folder / "store"
        self.compresses = compression is not None
        self.most_bytes = None if kilobytes is None or not self.rolls else kilobytes << 10
        self.store = dr.create(
            path,
            schema,
            chunk_bytes=chunk_bytes,
            segment_steps=segment_steps,
            capacity_bytes=self.most_bytes,
            compaction="manual",
            compression=compression,
        )
        self.reader = dr.open(path)

    def rows(self, *leading):
        trees = {"obs": self.schema.obs, "next_obs": self.schema.obs, "action": self.schema.action}
        drawn = {name: random_values(tree, self.rng, leading) for name, tree in trees.items()}
        extra = random_values(self.schema.extra, self.rng, leading)
        count = leading[0] if leading else 1
        extra["serial"] = np.arange(self.serial, self.serial + count).reshape(leading)
        self.serial += count
        reward = random_rewards(self.schema.reward, self.rng, count)
        return drawn, (reward if leading else reward[0]), extra

    def pick(self, index, vector):
        pairs = [pair for pair in self.writers if (pair[0].num_envs is not None) == vector]
        return pairs[index % len(pairs)]

    def has(self, vector):
        return any((pair[0].num_envs is not None) == vector for pair in self.writers)

    def continued(self, model, drawn):
        """Let the obs continue what next_obs said last, lane by lane."""
        leaves = flat(drawn["obs"], "obs")
        for lane in model.lanes:
            if lane.open is not None and lane.open.final is not None:
                for leaf, x in lane.open.final.items():
                    leaves[leaf][() if model.num_envs is None else lane.lane] = x
        drawn["obs"] = self.schema.unflatten("obs", leaves)

    @precondition(lambda self: len(self.writers) < MOST_WRITERS)
    @rule(num_envs=st.none() | st.integers(1, 5) | st.just(16))
    def open_writer(self, num_envs):
        self.writers.append((self.model.writer(num_envs), quiet(self.store.writer(num_envs))))

    @precondition(lambda self: self.has(vector=False))
    @rule(
        index=st.integers(0, 3),
        end=st.sampled_from((None, None, None, "terminated", "truncated", "both")),
        given=st.booleans(),
        continues=st.sampled_from((True, True, True, False)),
        values=st.booleans(),
        priority=st.none() | st.none() | st.integers(-9, 9),
    )
    def append(self, index, end, given, continues, values, priority):
        pair = self.pick(index, vector=False)
        drawn, reward, extra = self.rows()
        if continues:
            self.continued(pair[0], drawn)
        kwargs = {"next_obs": drawn["next_obs"] if given else None, "priority": priority, **extra}
        if values and end:
            kwargs["episode"] = random_values(self.schema.episode, self.rng)
        flags = end in ("terminated", "both"), end in ("truncated", "both")
        for writer in pair:
            writer.append(drawn["obs"], drawn["action"], reward, *flags, **kwargs)

    @precondition(lambda self: self.has(vector=True))
    @rule(
        index=st.integers(0, 3),
        ending=st.booleans(),
        mask=masks,
        given=st.booleans(),
        continues=st.sampled_from((True, True, True, False)),
        repeat=st.integers(1, 6),
        prioritized=st.booleans(),
    )
    def append_vector(self, index, ending, mask, given, continues, repeat, prioritized):
        pair = self.pick(index, vector=True)
        width = pair[0].num_envs
        for _ in range(repeat):
            drawn, reward, extra = self.rows(width)
            if continues:
                self.continued(pair[0], drawn)
            bits = (self.rng.random((2, width)) < 0.2) & ending
            kwargs = {"next_obs": drawn["next_obs"] if given else None, **extra}
            if mask is not None:
                kwargs["mask"] = (mask >> np.arange(width)) & 1 == 1
            if bits.any():
                kwargs["episode"] = random_values(self.schema.episode, self.rng, (width,))
            if prioritized:
                kwargs["priority"] = random_priorities(self.rng, width)
                kwargs["priority"][self.rng.random(width) < 0.3] = np.nan
            for writer in pair:
                writer.append(drawn["obs"], drawn["action"], reward, bits[0], bits[1], **kwargs)

    @precondition(lambda self: bool(self.writers))
    @rule(
        index=st.integers(0, 3),
        lane=st.integers(0, 15),
        plan=st.builds(
            EpisodePlan,
            st.integers(1, 40),
            st.sampled_from(("terminated", "truncated", "both", "cut")),
            final=st.booleans(),
            values=st.booleans(),
        ),
        prioritized=st.booleans(),
    )
    def append_episode(self, index, lane, plan, prioritized):
        pair = self.writers[index % len(self.writers)]
        filled = script(self.schema, plan, self.rng, self.serial)
        self.serial += plan.steps
        terminated, truncated = filled.flags(plan.steps - 1)
        obs = filled.obs if plan.final else pick(filled.obs, slice(plan.steps))
        lanes = () if pair[0].num_envs is None else (lane % pair[0].num_envs,)
        priority = random_priorities(self.rng, plan.steps) if prioritized else None
        for writer in pair:
            writer.append_episode(
                *lanes,
                obs,
                filled.action,
                filled.reward,
                terminated=terminated,
                truncated=truncated,
                episode=filled.values or None,
                priority=priority,
                **filled.extra,
            )

    @precondition(lambda self: bool(self.writers))
    @rule(index=st.integers(0, 3), mask=masks, values=st.booleans(), given=st.booleans())
    def end_episode(self, index, mask, values, given):
        pair = self.writers[index % len(self.writers)]
        width = pair[0].num_envs
        if self.rolls and width is not None and (values or given):
            # A lane that others left behind in a full segment was cut there, and what is said of its episode now is too
            # late, as the writer warns. The model learns of such cuts when the two are compared.
            self.refresh_and_compare()
        leading = () if width is None else (width,)
        kwargs = {"episode": random_values(self.schema.episode, self.rng, leading) if values else None}
        if width is not None:
            kwargs["mask"] = None if mask is None else (mask >> np.arange(width)) & 1 == 1
        if given:
            drawn = {"obs": random_values(self.schema.obs, self.rng, leading)}
            self.continued(pair[0], drawn)
            kwargs["final_obs"] = drawn["obs"]
        for writer in pair:
            writer.end_episode(**kwargs)

    @precondition(lambda self: bool(self.writers))
    @rule(index=st.integers(0, 3), mask=masks)
    def discard_episode(self, index, mask):
        pair = self.writers[index % len(self.writers)]
        width = pair[0].num_envs
        masked = {} if width is None or mask is None else {"mask": (mask >> np.arange(width)) & 1 == 1}
        for writer in pair:
            writer.discard_episode(**masked)
        left = {int(step.extra["serial"]) for episode in self.model.episodes for step in episode.steps}
        self.ids = {serial: number for serial, number in self.ids.items() if serial in left}

    @precondition(lambda self: bool(self.writers))
    @rule(index=st.integers(0, 3))
    def flush(self, index):
        for writer in self.writers[index % len(self.writers)]:
            writer.flush()

    @precondition(lambda self: bool(self.writers))
    @rule(index=st.integers(0, 3))
    def close_writer(self, index):
        for writer in self.writers.pop(index % len(self.writers)):
            writer.close()

    @rule()
    def reopen_reader(self):
        self.reader.close()
        self.reader = pickle.loads(pickle.dumps(dr.open(self.folder / "store")))

    @precondition(lambda self: not self.writers)
    @rule()
    def reopen_store(self):
        self.store.close()
        self.store = dr.open(self.folder / "store", mode="a")

    @rule(share=st.sampled_from((2, 3, 5)), rest=st.integers(0, 4))
    def evict(self, share, rest):
        """Evict by hand; what the store asks about is sealed, and so has ended."""
        self.refresh_and_compare()
        growing = {info["number"] for info in self.store.info()["segments"] if info["state"] != "sealed"}
        expected = {int(e["serial"][-1]) for e in self.reader.episodes if e.segment not in growing}
        asked = []

        def where(episode):
            asked.append(int(episode["serial"][-1]))
            return asked[-1] % share == rest

        evicted = self.store.evict(where)
        assert sorted(asked) == sorted(expected)
        chosen = {serial for serial in asked if serial % share == rest}
        for episode in self.model.episodes:
            if int(episode.steps[-1].extra["serial"]) in chosen and not episode.ended:
                episode.derived = episode.final is None
                episode.end(cut=True)
        assert evicted == self.model.evict(lambda episode: int(episode.steps[-1].extra["serial"]) in chosen)
        left = {int(step.extra["serial"]) for episode in self.model.episodes for step in episode.steps}
        self.ids = {serial: number for serial, number in self.ids.items() if serial in left}
        self.refresh_and_compare()

    @rule()
    def compact(self):
        """Merge sealed segments; a snapshot from before reads on, and so does a reader that followed none of it.

        A limit of bytes may have deleted segments that this reader would still show.
        """

        def values():
            with ExitStack() as stack:
                if self.most_bytes is not None:
                    stack.enter_context(suppress(dr.SegmentGone))
                return [(int(e.ids[0]), e["serial"].tolist(), e.times.tolist()) for e in self.reader.episodes]

        before, shown = self.reader.snapshot, values()
        done = self.store.compact()
        assert done["segments"] != 1 or self.compresses
        assert (done["segments"] > 0) == (done["bytes_after"] > 0)
        assert self.reader.snapshot is before
        assert values() in ([shown] if self.most_bytes is None else [shown, None])

    @rule()
    def refresh_and_compare(self):
        self.store._sealer.drain()  # what leaves then shall not leave while it is compared
        if self.most_bytes is not None:
            self.check_bytes()
        before = len(self.reader)
        arrived = self.reader.refresh()
        if self.most_bytes is not None:
            self.follow_capacity()
        assert arrived >= len(self.reader) - before
        ids = check_store(self.reader, self.model, length_cuts=self.rolls)
        check_account(self.reader, self.model.inserted)
        assert self.ids.items() <= ids.items(), "an id changed"
        self.ids = ids

    def check_bytes(self):
        """Check that the sealed segments fit, and that all do at the moment at which the capacity is kept."""
        used, unsealed = self.used_bytes()
        assert used <= self.most_bytes + unsealed, "what is written may have grown since then, and nothing else"
        self.store._retention.enforce()
        used, unsealed = self.used_bytes()
        assert used <= max(self.most_bytes, unsealed)

    def used_bytes(self):
        """Return the bytes of all segments, and of those that are not sealed."""
        segments = self.store.info()["segments"]
        unsealed = sum(info["bytes"] for info in segments if info["state"] != "sealed")
        return sum(info["bytes"] for info in segments), unsealed

    def follow_capacity(self):
        """Let the model lose what left with its segment: in each lane the oldest steps.

        Steps of other segments that are as old as these are hidden.
        """
        hidden, times = {}, {True: [], False: []}
        for episode in self.reader.episodes:
            for step, (serial, time) in enumerate(zip(episode["serial"], episode.times, strict=True)):
                hidden[int(serial)] = is_hidden = step < episode.hidden_steps
                times[is_hidden].append(time)
        assert max(times[True], default=0) <= min(times[False], default=math.inf), (
            "a step is hidden before an older one"
        )
        for lane in self.model.lanes():
            followed, there = [], []
            for episode in lane.episodes:
                followed.append(episode)
                if episode.evicted or episode.discarded:
                    continue
                found = [int(step.extra["serial"]) in hidden for step in episode.steps]
                there += found
                if any(found) and not all(found):
                    rest = episode.split(found.index(True))
                    episode.evicted, episode = True, rest
                    followed.append(rest)
                # Of an episode that is not there, all steps count as hidden.
                episode.hidden = sum(hidden.get(int(step.extra["serial"]), True) for step in episode.steps)
            lane.episodes = followed
            assert there == sorted(there), "a step left before an older one of its lane"
        self.ids = {serial: number for serial, number in self.ids.items() if serial in hidden}

    @rule(
        n_step=st.none() | st.integers(1, 20),
        gamma=st.sampled_from((0.0, 0.9, 1.0)),
        frame_stack=st.integers(1, 5),
    )
    def sample_and_compare(self, n_step, gamma, frame_stack):
        self.refresh_and_compare()
        check_views(self.reader, self.model, self.ids, [(n_step, gamma, frame_stack)])

    @invariant()
    def a_snapshot_stands_still(self):
        if hasattr(self, "reader"):
            assert len(self.reader) == sum(len(each) - each.hidden_steps for each in self.reader.episodes)

    def teardown(self):
        try:
            if hasattr(self, "store"):
                for pair in self.writers:
                    for writer in pair:
                        writer.close()
                self.sample_and_compare(3, 0.9, 2)
                with dr.open(self.folder / "store") as fresh:
                    assert check_store(fresh, self.model) == self.ids
        finally:
            for store in (getattr(self, name, None) for name in ("store", "reader")):
                if store is not None:
                    store.close()
            self.stack.close()


@pytest.fixture(autouse=True)
def _compress_all():
    """Compress fields of a few bytes, too: no others are drawn."""
    with compressed_rows_of(16):
        yield


StoreMachine.TestCase.settings = settings(
    max_examples=whole_or_part(120, 5),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestStoreMachine = pytest.mark.slow(pytest.mark.timeout(900)(StoreMachine.TestCase))
