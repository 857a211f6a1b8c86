"""Buffers of RLlib in a store: the items and networks of its own buffers, and what outlives a process."""

import errno
import pickle
import warnings

import numpy as np
import pytest

import diskreplay as dr

pytest.importorskip("ray", reason="needs ray[rllib]")
pytest.importorskip("tree", reason="needs ray[rllib]")
pytest.importorskip("ormsgpack", reason="needs ray[rllib]")

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.replay_buffers import EpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer

from diskreplay.interop.rllib import DiskEpisodeReplayBuffer, DiskPrioritizedEpisodeReplayBuffer

pytestmark = pytest.mark.slow

KINDS = {
    "uniform": (DiskEpisodeReplayBuffer, EpisodeReplayBuffer),
    "prioritized": (DiskPrioritizedEpisodeReplayBuffer, PrioritizedEpisodeReplayBuffer),
}
# As DQN samples.
ITEMS = {"num_items": 24, "batch_length_T": 0, "lookback": 0, "gamma": 0.9, "beta": 0.4, "sample_episodes": True}


@pytest.fixture
def made(tmp_path):
    """Make buffers with a generator of their own, which are closed behind the test."""
    buffers = []

    def make(kind, capacity=200, **kwargs):
        buffers.append(kind(capacity, **{"path": tmp_path / "store", **kwargs}))
        buffers[-1].rng = np.random.default_rng(0)
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


def pair(made, kind, capacity=200, **kwargs):
    """Return a buffer in a store, and RLlib's own."""
    ours, theirs = made(KINDS[kind][0], capacity, **kwargs), KINDS[kind][1](capacity)
    theirs.rng = np.random.default_rng(0)
    return ours, theirs


OBSERVATIONS = {
    "box": lambda rng: rng.normal(size=3).astype(np.float32),
    "image": lambda rng: rng.integers(0, 255, (4, 5, 2), np.uint8),
    "discrete": lambda rng: rng.integers(7),
    "dict": lambda rng: {"place": rng.normal(size=2), "room": rng.integers(5)},
    "tuple": lambda rng: (rng.normal(size=2), {"room": rng.integers(5)}),
}


class Stream:
    """Chunks of episodes, as an env runner with several environments gives them."""

    def __init__(self, obs="box", envs=3, seed=0, end=0.12, numpy=True, outputs=True):
        self.rng, self.end, self.numpy, self.outputs = np.random.default_rng(seed), end, numpy, outputs
        self.some = OBSERVATIONS[obs]
        self.names = iter(f"episode-{seed}-{i}" for i in range(10**6))
        self.running = [self.begun() for _ in range(envs)]

    def begun(self):
        episode = SingleAgentEpisode(id_=next(self.names))
        episode.add_env_reset(self.some(self.rng), {"lives": 9})
        return episode

    def step(self, episode):
        ended, timeout = self.rng.random() < self.end, self.rng.random() < 0.5
        outputs = {"action_logp": np.float32(self.rng.normal()), "state_out": {"h": self.rng.normal(size=2)}}
        episode.add_env_step(
            self.some(self.rng),
            self.rng.integers(4),
            float(self.rng.normal()),
            {"lives": int(self.rng.integers(5))},
            terminated=ended and not timeout,
            truncated=ended and timeout,
            extra_model_outputs=outputs if self.outputs else None,
        )

    def chunks(self, steps):
        """Return so many steps of every environment."""
        found = []
        for i in range(len(self.running)):
            for _ in range(steps):
                self.step(self.running[i])
                if self.running[i].is_done:
                    found.append(self.running[i])
                    self.running[i] = self.begun()
            if len(self.running[i]):
                found.append(self.running[i])
                self.running[i] = self.running[i].cut(len_lookback_buffer=1)
        return [each.to_numpy() for each in found] if self.numpy else found


def leaves(tree):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves(tree[key])]
    if isinstance(tree, list | tuple):
        return [leaf for part in tree for leaf in leaves(part)]
    return [np.asarray(tree)]


def assert_same_tree(one, other):
    one, other = leaves(one), leaves(other)
    assert len(one) == len(other) > 0
    for x, y in zip(one, other, strict=True):
        assert x.shape == y.shape
        assert np.array_equal(x, y)


def assert_same_items(ours, theirs, outputs=("weights", "n_step")):
    """Sampled episodes are the same."""
    assert len(ours) == len(theirs) > 0
    for x, y in zip(ours, theirs, strict=True):
        assert type(x) is type(y) is SingleAgentEpisode
        assert (len(x), x.t_started, x.t, x.is_terminated, x.is_truncated) == (
            *(len(y), y.t_started, y.t),
            *(y.is_terminated, y.is_truncated),
        )
        for name in ("observations", "actions", "rewards"):
            a, b = getattr(x, name), getattr(y, name)
            assert a.lookback == b.lookback
            assert_same_tree(a.data, b.data)
        assert set(outputs) <= x.extra_model_outputs.keys() == y.extra_model_outputs.keys()
        for name in y.extra_model_outputs:
            assert_same_tree(x.extra_model_outputs[name].data, y.extra_model_outputs[name].data)
        x.validate()


@pytest.mark.parametrize("kind", KINDS)
def test_no_step_is_in_the_store_twice_if_an_add_found_the_disk_full_and_is_repeated(made, kind, monkeypatch):
    ours, theirs = pair(made, kind)
    stream, append, room = Stream(end=0.3), dr.Writer.append, 0

    def append_if_room(*args, **kwargs):
        nonlocal room
        if not room:
            raise dr.StorageFull(errno.ENOSPC, "no room")
        room -= 1
        append(*args, **kwargs)

    monkeypatch.setattr(dr.Writer, "append", append_if_room)
    steps, refusals = 0, 0
    for more in (1, 4, 5, 9, 40):
        chunks = stream.chunks(7)
        while True:
            try:
                ours.add(chunks)
                break
            except dr.StorageFull:
                refusals += 1
                assert len(ours) == len(theirs)
                room += more
        theirs.add(chunks)
        steps += sum(map(len, chunks))
        assert len(ours) == len(theirs)
        ours.store.refresh()
        assert len(ours.store) == steps
    assert refusals > 25
    assert_same_items(ours.sample(n_step=1, **ITEMS), theirs.sample(n_step=1, **ITEMS))
    for seed in (1, 2):  # the first episodes are given up, and others have their names
        episodes = Stream(seed=seed, end=0.0).chunks(3)
        for i in range(3):
            episodes[i].id_ = f"again {i}"
        room = 5 if seed == 1 else 9
        with pytest.raises(dr.StorageFull) if seed == 1 else pytest.warns(UserWarning, match="the episode was cut"):
            ours.add(episodes)
    theirs.add(episodes)
    assert_same_items(ours.sample(n_step=1, **ITEMS), theirs.sample(n_step=1, **ITEMS))


@pytest.mark.parametrize("numpy", [True, False])
@pytest.mark.parametrize("obs", OBSERVATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_items_are_those_of_its_own_buffer(made, kind, obs, numpy):
    ours, theirs = pair(made, kind, 80)
    stream, ends = Stream(obs, numpy=numpy, end=0.3), set()
    assert isinstance(ours, KINDS[kind][1])
    for n_step in (1, 3, (1, 4)):
        for _ in range(3):
            chunks = stream.chunks(7)
            ours.add(chunks)
            theirs.add(chunks)
        assert len(ours) == len(theirs)
        items = [buffer.sample(n_step=n_step, include_extra_model_outputs=True, **ITEMS) for buffer in (ours, theirs)]
        assert_same_items(*items, outputs=("weights", "n_step", "action_logp", "state_out"))
        ends |= {(item.is_terminated, item.is_truncated) for item in items[0]}
    assert ends == {(False, False), (True, False), (False, True)}
    assert ours.get_num_episodes_evicted() == theirs.get_num_episodes_evicted() > 0
    assert ours.get_metrics().keys() == theirs.get_metrics().keys()


def test_returns_over_several_steps_are_discounted_sums(made):
    ours = made(DiskPrioritizedEpisodeReplayBuffer)
    ours.add(Stream(envs=1, end=0).chunks(30))
    ours.store.refresh()
    (episode,) = ours.store.episodes
    for item in ours.sample(n_step=3, **ITEMS):
        rewards = episode.reward[item.t_started : item.t_started + 3]
        assert item.get_return() == pytest.approx((rewards * 0.9 ** np.arange(3)).sum())
        assert np.array_equal(item.get_observations(-1), episode.obs[item.t_started + 3])


def test_sequences_with_lookback_are_those_of_its_own_buffer(made):
    ours, theirs = pair(made, "uniform")
    chunks = Stream().chunks(40)
    ours.add(chunks)
    theirs.add(chunks)
    arguments = {**ITEMS, "n_step": 1, "batch_length_T": 8, "lookback": 1, "min_batch_length_T": 2}
    items = ours.sample(**arguments), theirs.sample(**arguments)
    assert_same_items(*items, outputs=("action_logp", "state_out"))
    assert max(map(len, items[0])) == 8
    assert any(item.observations.lookback for item in items[0])


def test_batches_of_rows_are_those_of_its_own_buffer_and_read_no_further_than_they_go(made):
    ours, theirs = pair(made, "uniform")
    chunks = Stream(end=0.08).chunks(40)
    ours.add(chunks)
    theirs.add(chunks)
    for length in (1, 5, 30):
        batches = [buffer.sample(batch_size_B=6, batch_length_T=length) for buffer in (ours, theirs)]
        assert batches[0].keys() == batches[1].keys()
        for name, values in batches[1].items():
            assert np.array_equal(batches[0][name], values), name
    with ours._reader.at_most(5):
        episode = max(ours.episodes, key=len)
        assert len(episode.observations[2:]) == 6
        assert len(episode.actions[2:]) == len(episode.rewards[2:]) == 5


def test_priorities_change_what_is_drawn_as_in_its_own_buffer(made):
    ours, theirs = pair(made, "prioritized", alpha=1.0)
    stream, rng = Stream(), np.random.default_rng(3)
    for _ in range(4):
        chunks = stream.chunks(10)
        ours.add(chunks)
        theirs.add(chunks)
        assert_same_items(*(buffer.sample(n_step=2, **ITEMS) for buffer in (ours, theirs)))
        errors = rng.random(24) * 10
        ours.update_priorities(errors)
        theirs.update_priorities(errors)
    weights = [item.extra_model_outputs["weights"].data[0] for item in ours.sample(n_step=2, **ITEMS)]
    assert len(set(weights)) > 1


def test_infos_have_what_is_stored_of_them(made):
    ours, theirs = pair(made, "uniform", info_fields=["lives"])
    chunks = Stream().chunks(30)
    ours.add(chunks)
    theirs.add(chunks)
    for x, y in zip(*(buffer.sample(n_step=2, **ITEMS) for buffer in (ours, theirs)), strict=True):
        infos = [{} if x.t_started + i == 0 else info for i, info in ((0, y.infos.data[0]), (1, y.infos.data[1]))]
        assert x.infos.data == infos
    ours.store.refresh()
    assert ours.store.episodes[0]["lives"].shape == (len(ours.store.episodes[0]),)


# --- the store -------------------------------------------------------------------------------------------------------


def test_steps_are_in_the_store_with_what_the_module_gave(made):
    ours = made(DiskEpisodeReplayBuffer)
    stream = Stream("dict")
    chunks = stream.chunks(10) + stream.chunks(10)
    ours.add(chunks)
    assert ours.store.refresh() == len(ours) == 60
    assert ours.store.schema.extra.keys() == {"action_logp", "state_out"}
    assert ours.store.schema.reward.dtype == np.float64
    assert ours.store.capacity == 400
    by_name = {}
    for chunk in chunks:
        by_name.setdefault(chunk.id_, []).append(chunk)
    returns = sorted(sum(chunk.get_return() for chunk in each) for each in by_name.values())
    assert sorted(episode.total_reward for episode in ours.store.episodes) == pytest.approx(returns)
    assert sum(episode.terminated for episode in ours.store.episodes) == sum(chunk.is_terminated for chunk in chunks)
    assert ours.store.verify(deep=True) == []


def test_a_buffer_at_the_path_of_a_store_begins_with_its_newest_episodes(made):
    ours, stream = made(DiskEpisodeReplayBuffer), Stream()
    ours.add(stream.chunks(60))
    ours.close()
    again = made(DiskEpisodeReplayBuffer, 100)
    assert 60 < len(again) <= 100
    assert len(again) == sum(map(len, again.episodes))
    newest = again.store.episodes[-len(again.episodes) :]
    for episode, stored in zip(again.episodes, newest, strict=True):
        assert np.array_equal(episode.get_observations(), stored.obs)
        assert np.array_equal(episode.get_rewards(), stored.reward)
        assert (episode.is_terminated, episode.is_truncated) == (stored.terminated, stored.truncated)
    again.add(Stream(seed=1).chunks(5))
    assert again.store.refresh() == 15
    assert len(again.sample(n_step=1, **ITEMS)) == 24


def test_a_run_that_has_died_loses_no_step(made):
    made(DiskEpisodeReplayBuffer).add(Stream().chunks(20))  # and is never closed, as when it is killed
    again, theirs = made(DiskEpisodeReplayBuffer), EpisodeReplayBuffer(200)
    theirs.add(Stream().chunks(20))
    assert len(again) == len(theirs) == 60
    returns = [sorted(sum(episode.get_rewards()) for episode in buffer.episodes) for buffer in (again, theirs)]
    assert returns[0] == pytest.approx(returns[1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_names_the_steps_and_brings_them_back(made, kind):
    ours, stream = made(KINDS[kind][0]), Stream("image", outputs=False)
    ours.add(stream.chunks(40))
    if kind == "prioritized":
        ours.sample(n_step=1, **ITEMS)
        ours.update_priorities(np.arange(24.0))
    state = pickle.dumps(ours.get_state())
    assert len(state) < 120 * 40 * 2 * 10  # of the observations alone
    ours.rng = np.random.default_rng(5)
    expected = ours.sample(n_step=2, **ITEMS)
    ours.add(stream.chunks(10))
    ours.close()
    again = made(KINDS[kind][0])
    assert len(again) == 150
    again.set_state(pickle.loads(state))
    assert len(again) == 120
    again.rng = np.random.default_rng(5)
    assert_same_items(again.sample(n_step=2, **ITEMS), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an episode that goes on elsewhere is cut
        again.add(Stream("image", seed=8, outputs=False).chunks(5))
    assert len(again) == 135


def test_a_state_of_another_store_or_of_no_store_is_refused(made, tmp_path):
    ours, other = made(DiskEpisodeReplayBuffer), made(DiskEpisodeReplayBuffer, path=tmp_path / "other")
    for buffer in (ours, other):
        buffer.add(Stream().chunks(5))
    with pytest.raises(dr.StoreNotFound, match=f"the state is of the store {other.store.uuid}, and the store at "):
        ours.set_state(other.get_state())
    theirs = EpisodeReplayBuffer(100)
    theirs.add(Stream().chunks(5))
    with pytest.raises(ValueError, match="the state holds the steps themselves"):
        ours.set_state(theirs.get_state())
    assert len(ours) == 15


def test_a_state_whose_steps_the_store_has_evicted_is_refused(made):
    ours, stream = made(DiskEpisodeReplayBuffer, 100), Stream()
    ours.add(stream.chunks(30))
    state = ours.get_state()
    for _ in range(10):
        ours.add(stream.chunks(10))
    ours.sample(n_step=1, **ITEMS)
    with pytest.raises(dr.SegmentGone, match=r"has evicted \d+ of the 9\d steps of the state: continue"):
        ours.set_state(state)


def test_a_step_that_the_store_has_evicted_is_an_error_of_its_own(made):
    ours, stream = made(DiskEpisodeReplayBuffer, 100), Stream()
    ours.add(stream.chunks(30))
    with dr.open(ours.store.path, "a") as store:
        store.resize(capacity=5)
    ours.add(stream.chunks(1))
    with pytest.raises(dr.InvalidIndex, match="is hidden by the capacity|is not in the store: it was evicted"):
        ours.sample(n_step=1, **ITEMS)


def test_a_store_that_exists_is_continued_with_what_it_names(made, tmp_path):
    schema = dr.Schema(obs=dr.Field((3,), "float32"), action=dr.Field((), "int64"), extra={"lives": dr.Field((), "i8")})
    with dr.create(tmp_path / "store", schema) as store, store.writer() as writer:
        writer.append_episode(np.zeros((9, 3)), np.arange(8), np.ones(8), terminated=True, lives=np.arange(8))
        writer.append_episode(np.zeros((5, 3)), np.arange(5), np.ones(5), terminated=True, lives=np.arange(5))
        ours = made(DiskEpisodeReplayBuffer, path=store, info_fields=["lives"])
    assert [len(episode) for episode in ours.episodes] == [8, 5]
    ours.add(Stream().chunks(5))
    assert ours.store.refresh() == 15
    assert ours.episodes[-1].extra_model_outputs == {}


def test_a_store_that_does_not_fit_the_buffer_is_refused(made, tmp_path):
    made(DiskEpisodeReplayBuffer).add(Stream().chunks(5))
    with pytest.raises(dr.StoreExists, match="keeps 400 steps, fewer than the buffer's capacity of 401: use a new"):
        made(DiskEpisodeReplayBuffer, 401)
    with pytest.raises(dr.StoreExists, match="has no fields for the infos frames, lives: use a new path"):
        made(DiskEpisodeReplayBuffer, info_fields=("lives", "frames"))
    with pytest.raises(ValueError, match="info_fields must be a sequence of names, such as .* not 'lives'"):
        made(DiskEpisodeReplayBuffer, info_fields="lives")


def test_what_does_not_fit_is_refused_before_anything_is_added(made):
    ours = made(DiskEpisodeReplayBuffer)
    stream, other = Stream(envs=1, end=0), Stream("image", seed=1)
    first, second, third = (stream.chunks(4)[0] for _ in range(3))
    with pytest.raises(dr.NotEnoughData, match="the buffer is empty"):
        ours.sample(n_step=1, **ITEMS)
    ours.add(first)
    with pytest.raises(dr.SchemaError, match="the buffer takes episodes of single agents, not MultiAgentEpisode"):
        ours.add([second, MultiAgentEpisode()])
    with pytest.raises(ValueError, match="begins at step 8, and the buffer has the episode up to step 4"):
        ours.add(third)
    with pytest.raises(ValueError, match="begins at step 4, and the buffer has the episode up to step 8"):
        ours.add([second, second])
    with pytest.raises(dr.SchemaError, match="obs"):
        ours.add([second, *other.chunks(4)])
    with pytest.raises(dr.SchemaError, match="action_logp"):
        ours.add([second, *Stream(seed=2, outputs=False).chunks(4)])
    assert ours.store.refresh() == len(ours) == 4
    ours.add([second, third])
    assert ours.store.refresh() == 8
    assert len(ours.store.episodes) == 1
    with pytest.raises(dr.SchemaError, match="the info of step 0 of the episode .* has no 'frames'"):
        made(DiskEpisodeReplayBuffer, path=ours.store.path.with_name("other"), info_fields=["frames"]).add(first)


def test_episodes_without_steps_are_taken(made):
    ours, theirs = pair(made, "uniform")
    ours.add(Stream(seed=2).begun())
    assert len(ours) == 0
    for buffer in (ours, theirs):
        stream = Stream(envs=1, end=0)
        buffer.add(stream.chunks(3))
        buffer.add(Stream(seed=1).begun())
        assert (len(buffer), buffer.get_num_episodes()) == (3, 2)
    assert_same_items(*(buffer.sample(n_step=1, **ITEMS) for buffer in (ours, theirs)))


def test_a_closed_buffer_names_itself(made):
    ours = made(DiskPrioritizedEpisodeReplayBuffer)
    ours.add(Stream().chunks(4))
    assert repr(ours) == f"DiskPrioritizedEpisodeReplayBuffer({str(ours.store.path)!r}, steps=12, capacity=200)"
    ours.close()
    for call in (lambda: ours.add([]), lambda: ours.sample(n_step=1, **ITEMS), ours.get_state):
        with pytest.raises(dr.Closed, match="this DiskPrioritizedEpisodeReplayBuffer is closed; make another"):
            call()
