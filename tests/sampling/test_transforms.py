"""What a sampler does to its batches: functions and ready ones, in threads, over saved states, and when they fail."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diskreplay as dr
from tests.sampling.test_sampler_states import bits, compare, through_torch

pytestmark = pytest.mark.usefixtures("threads_make_all")

SCHEMA = dr.Schema(
    obs={"image": dr.Field((16, 16), "uint8"), "state": dr.Field((3,), "float32")},
    action=(dr.Field((), "int64"), dr.Field((2,), "float32")),
)
CAPACITY = 150


class Collector:
    """A writer of two lanes, which leaves episodes open."""

    def __init__(self, store: dr.Store) -> None:
        self.rng = np.random.default_rng(0)
        self.writer = store.writer(num_envs=2)
        self.obs = self.observe()

    def observe(self) -> dict[str, np.ndarray]:
        images = self.rng.integers(0, 256, (2, 16, 16), np.uint8)
        return {"image": images, "state": self.rng.normal(9, 3, (2, 3)).astype(np.float32)}

    def grow(self, steps: int) -> None:
        for _ in range(steps):
            following, action = self.observe(), (self.rng.integers(0, 9, 2), np.zeros((2, 2), np.float32))
            done = self.rng.random(2) < 0.1
            self.writer.append(self.obs, action, self.rng.random(2), done, None, next_obs=following)
            fresh = self.observe()
            self.obs = {
                name: np.where(done.reshape(2, *[1] * (new.ndim - 1)), fresh[name], new)
                for name, new in following.items()
            }


@pytest.fixture
def store(tmp_store: Path) -> Iterator[dr.Store]:
    with dr.create(tmp_store, SCHEMA, capacity=CAPACITY, segment_steps=40) as store:
        yield store


@pytest.fixture
def collector(store: dr.Store) -> Iterator[Collector]:
    collector = Collector(store)
    collector.grow(40)
    store.refresh()
    yield collector
    collector.writer.close()


def doubled(batch: dr.Batch) -> dict[str, Any]:
    """Change a field, add one, and leave the others."""
    return {"reward": batch.reward * 2, "sum": batch.obs["state"].sum(-1)}


def without_next(batch: dr.Batch) -> dr.Batch:
    return dr.Batch({name: batch[name] for name in batch if name != "next_obs"}, batch.kind)


@pytest.mark.parametrize("ahead", [0, 3])
def test_functions_change_add_and_remove_fields_in_order(store: dr.Store, collector: Collector, ahead: int) -> None:
    def after(batch: dr.Batch) -> dict[str, Any]:
        return {"reward": batch.reward + 1, "sum": batch["sum"].double()}

    transform = (doubled, without_next, after)
    with dr.Sampler(store, dr.Transitions(), batch_size=16, seed=0, prefetch=ahead, transform=transform) as sampler:
        for _ in range(5):
            batch = sampler.sample()
            stored = sampler.gather(batch.index)
            assert list(batch) == [*(name for name in stored if name != "next_obs"), "sum"]
            assert torch.equal(batch.reward, stored.reward * 2 + 1)
            assert batch["sum"].dtype is torch.float64
            assert torch.equal(batch["sum"].float(), stored.obs["state"].sum(-1))
            assert type(batch) is dr.Batch
            assert batch.kind == ("transitions",)
            assert torch.equal(batch.action[1], stored.action[1])
        assert sampler.stats()["seconds_transforming"] > 0


def test_a_module_of_torch_is_one_transform(store: dr.Store, collector: Collector) -> None:
    class Twice(torch.nn.Module):
        def forward(self, batch: dr.Batch) -> dict[str, Any]:
            return {"reward": batch.reward * 2}

    transform = torch.nn.Sequential(Twice())
    with dr.Sampler(store, dr.Transitions(), batch_size=16, seed=0, transform=transform) as sampler:
        batch = sampler.sample()
        assert torch.equal(batch.reward, sampler.gather(batch.index).reward * 2)


@pytest.mark.parametrize("ahead", [0, 3])
def test_weights_are_multiplied_in_last(store: dr.Store, collector: Collector, ahead: int) -> None:
    seen = []

    def halved(batch: dr.Batch) -> dict[str, Any]:
        seen.append(batch.weight.clone())
        return {"weight": batch.weight / 2}

    def weights(transform: Any) -> list[np.ndarray]:
        found = []
        arguments: Any = {"batch_size": 16, "seed": 1, "prefetch": ahead, "transform": transform}
        with dr.Sampler(store, dr.Transitions(), dr.Prioritized(), **arguments) as sampler:
            for number in range(8):
                batch = sampler.sample()
                found.append(batch.weight.numpy().copy())
                sampler.update_priorities(batch.index, np.random.default_rng(number).standard_normal(16))
        return found

    plain, transformed = weights(None), weights(halved)
    assert len({weight for batch in plain for weight in batch.tolist()}) > 20
    for one, other in zip(plain, transformed, strict=True):
        np.testing.assert_array_equal(one / 2, other)
    assert all(torch.equal(ones, torch.ones(16)) for ones in seen)
    np.testing.assert_array_equal(plain, weights(lambda batch: batch))


READY: dict[str, Callable[[], Any]] = {
    "normalize": lambda: dr.Normalize(reward=True),
    "shift": lambda: dr.RandomShift(2),
    "all": lambda: [doubled, dr.Normalize(["state", "image"], True), dr.RandomShift(2), dr.ToFloat()],
}
VIEWS: dict[str, Callable[[], Any]] = {
    "transitions": lambda: dr.Transitions(n_step=2, frame_stack={"image": 3}),
    "sequences": lambda: dr.Sequences(length=5, overlap=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READY)
@pytest.mark.parametrize("view", VIEWS)
def test_threads_make_what_the_caller_would_have_made(
    store: dr.Store, collector: Collector, name: str, view: str
) -> None:
    def made(**kwargs: Any) -> dr.Sampler:
        return dr.Sampler(store, VIEWS[view](), batch_size=8, seed=5, transform=READY[name](), **kwargs)

    with made() as plain, made(prefetch=3) as ahead:
        compare([plain, ahead], 12)


def test_statistics_are_those_of_the_draw(store: dr.Store, collector: Collector) -> None:
    transform = dr.Normalize()
    plain = dr.Sampler(store, dr.Transitions(), batch_size=8, seed=5)
    with plain, dr.Sampler(store, dr.Transitions(), batch_size=8, seed=5, prefetch=2, transform=transform) as sampler:
        drawn: list[tuple[np.ndarray, np.ndarray]] = []
        for number in range(12):
            # A call draws the batch that is delivered two calls later, and the first call three.
            batch = sampler.sample()
            moments = transform.moments["obs/state"]
            drawn += [(moments.mean, moments.var)] * (3 if number == 0 else 1)
            mean, var = drawn[number]
            raw = plain.gather(batch.index).obs["state"].double()
            expected = (raw - torch.from_numpy(mean)) / torch.from_numpy(np.sqrt(var + 1e-8))
            assert torch.equal(batch.obs["state"], expected.clamp(-10, 10).float())
            if number < 9:
                collector.grow(2)
        assert len({mean.tobytes() for mean, _ in drawn}) > 8


FAST = ("transitions", "all", 3)


@pytest.mark.parametrize(
    ("view", "name", "ahead"),
    [
        pytest.param(*case, marks=[] if case == FAST else pytest.mark.slow)
        for case in itertools.product(VIEWS, READY, (0, 3))
    ],
)
def test_a_saved_sampler_goes_on_with_the_same_bits(
    store: dr.Store, collector: Collector, name: str, view: str, ahead: int
) -> None:
    def made(on: dr.Store, seed: int) -> dr.Sampler:
        return dr.Sampler(on, VIEWS[view](), batch_size=8, seed=seed, prefetch=ahead, transform=READY[name]())

    with dr.open(store.path) as second, dr.open(store.path) as third, made(store, 1) as one:
        # The store grows until the batches drawn ahead are of three snapshots; then no id of theirs is lost.
        for number in range(12):
            one.sample()
            if number < 11:
                collector.grow(2)
        one.save("run")
        state = through_torch(one.state_dict())
        with made(second, 2) as other, made(third, 3) as another:
            other.load("run")
            another.load_state_dict(state)
            compare([one, other, another], 6)
            compare([one, other, another], 6, lambda _: collector.grow(1))
    assert store.verify(deep=True) == []


def test_a_state_of_other_transforms_is_refused_and_changes_nothing(store: dr.Store, collector: Collector) -> None:
    def made(transform: Any) -> dr.Sampler:
        return dr.Sampler(store, dr.Transitions(), batch_size=8, seed=1, transform=transform)

    with made(dr.Normalize()) as normal, made(None) as plain, made([dr.Normalize(reward=True), dr.ToFloat()]) as both:
        for sampler in (normal, plain, both):
            sampler.sample()
        message = r"^this is the state of a sampler with the transforms \['Normalize'\] that keep a state, and this "
        with pytest.raises(ValueError, match=message + "one has none: use the same transforms$"):
            plain.load_state_dict(normal.state_dict())
        with pytest.raises(
            ValueError, match=r"with the transforms none .* and this one has \['Normalize'\]: use the same transforms"
        ):
            normal.load_state_dict(plain.state_dict())
        before = bits(both.gather(both.ids()[:8])), repr(both.state_dict())
        with pytest.raises(ValueError, match=r"^this is not a state of Normalize: these are moments of \{'obs/s"):
            both.load_state_dict(normal.state_dict())
        broken = both.state_dict()
        broken["planner"] = {**broken["planner"], "kind": "other"}
        broken["transforms"][0]["state"]["frozen"] = True
        with pytest.raises(ValueError, match="^this is the state of Uniform over"):
            both.load_state_dict(broken)
        assert (bits(both.gather(both.ids()[:8])), repr(both.state_dict())) == before
        # A transform without a state does not matter.
        with made([dr.RandomShift(2), dr.Normalize()]) as other:
            other.load_state_dict(normal.state_dict())


class Failing:
    """A transform that fails in chosen calls."""

    def __init__(self, error: BaseException, *calls: int) -> None:
        self.error, self.calls, self.number = error, calls, 0

    def __call__(self, batch: dr.Batch) -> dr.Batch:
        self.number += 1
        if self.number in self.calls:
            raise self.error
        return batch


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_batch_whose_transform_fails_is_dropped(store: dr.Store, collector: Collector, ahead: int) -> None:
    def made(transform: Any) -> dr.Sampler:
        return dr.Sampler(store, dr.Transitions(), batch_size=8, seed=1, prefetch=ahead, transform=transform)

    with made(None) as plain:
        batches = [plain.sample() for _ in range(8)]
        expected, refused = [bits(batch) for batch in batches], [batches[i].index.tolist() for i in (2, 3)]

    def refuse(batch: dr.Batch) -> dr.Batch:
        # By what is in it: threads make batches in any order.
        if batch.index.tolist() in refused:
            raise RuntimeError("no")
        return batch

    with made(refuse) as sampler:
        found = []
        for number in range(8):
            if number in (2, 3):
                with pytest.raises(RuntimeError, match="^no$"):
                    sampler.sample()
            else:
                found.append(bits(sampler.sample()))
        assert found == expected[:2] + expected[4:]


def test_a_batch_whose_transform_is_interrupted_comes_again(store: dr.Store, collector: Collector) -> None:
    def made(transform: Any) -> dr.Sampler:
        return dr.Sampler(store, dr.Transitions(), dr.Sweep(), batch_size=8, seed=1, transform=transform)

    with made(dr.RandomShift(2)) as plain, made([dr.RandomShift(2), Failing(KeyboardInterrupt(), 2, 3)]) as sampler:
        expected = [bits(batch) for batch in plain]
        found = []
        while True:
            with suppress(KeyboardInterrupt):
                try:
                    found.append(bits(sampler.sample()))
                except StopIteration:
                    break
        assert len(expected) > 5
        assert found == expected


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (3, "transform must be a function of a batch, or several in a list, not 3"),
        ([dr.ToFloat(), "x"], "transform must be a function of a batch, or several in a list, not 'x'"),
        (dr.ToFloat, "transform must be a function of a batch, or several in a list, not <class .*"),
    ],
)
def test_what_is_no_transform_is_refused(store: dr.Store, transform: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        dr.Sampler(store, dr.Transitions(), transform=transform)


def test_a_function_must_return_a_batch_or_fields(store: dr.Store, collector: Collector) -> None:
    message = "^the transform <function .* returned NoneType: it must return a batch, or a dict of the fields"
    with (
        dr.Sampler(store, dr.Transitions(), seed=0, transform=lambda batch: None) as sampler,
        pytest.raises(ValueError, match=message),
    ):
        sampler.sample()


def test_a_view_that_a_transform_means_nothing_to_is_refused_and_changes_nothing(
    store: dr.Store, collector: Collector
) -> None:
    with dr.Sampler(store, dr.Transitions(), seed=0, transform=dr.Normalize(reward=True)) as sampler:
        sampler.sample()
        with pytest.raises(ValueError, match="does not apply to Rollouts"):
            sampler.view = dr.Rollouts(4, value_fn=lambda obs: obs["state"][:, 0])
        assert str(sampler.view) == str(dr.Transitions())
        sampler.sample()
        sampler.view = dr.Sequences(length=3, overlap=0)
        assert sampler.sample().obs["state"].abs().max() <= 10


def test_a_mixed_sampler_has_the_transforms_of_its_parts(store: dr.Store, collector: Collector) -> None:
    to_float = dr.ToFloat()  # one for both: it keeps no state
    first = dr.Sampler(store, dr.Transitions(), seed=0, transform=[to_float, dr.Normalize()], prefetch=2)
    second = dr.Sampler(store, dr.Transitions(), seed=1, transform=to_float)
    with first, second:
        mixed = dr.MixedSampler([(first, 0.5), (second, 0.5)], batch_size=20, seed=0)
        batch = mixed.sample()
        stored = mixed.gather(batch.index)
        assert torch.equal(batch.obs["image"], stored.obs["image"] * (1 / 255))
        assert torch.equal(batch.obs["state"][10:], stored.obs["state"][10:])
        assert batch.obs["state"][:10].mean().abs() < 2 < stored.obs["state"][:10].mean()
        assert torch.equal(batch.action[0], stored.action[0])
