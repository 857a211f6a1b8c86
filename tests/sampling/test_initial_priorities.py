"""Initial priorities: what is drawn is what plain loops say, however the store grew and the sampler came to it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import diskreplay as dr
from diskreplay.testing import ModelStore
from diskreplay.testing.reference import window, window_starts
from diskreplay.testing.scripts import EpisodePlan, WriterPlan, play
from tests.testing.support import append_numbered, quiet, serial_schema

EPS = 1e-3


def distribution(**kwargs: Any) -> Any:
    return dr.Prioritized(**{"alpha": 0.7, "eps": EPS, **kwargs})


def sampler_of(store: Any, view: Any = None, drawing: Any = None, **kwargs: Any) -> dr.Sampler:
    """Make a sampler whose batches tell the probability of each id."""
    kwargs = {"batch_size": 8, "seed": 0, "fields": ("...", "probability"), **kwargs}
    return dr.Sampler(store, view or dr.Transitions(), drawing or distribution(), **kwargs)


def chances(sampler: dr.Sampler) -> dict[int, float]:
    """The probability of each id that can be drawn, as the next draw has it."""
    ids = sampler.ids()
    return dict(zip(ids.tolist(), sampler.gather(ids).probability.tolist(), strict=True))


def check_chances(sampler: Any, raw: dict[int, float], alpha: float = 0.7) -> int:
    """Compare P(i) with raw ** alpha over the sum of these; returns how many were compared."""
    found, total = chances(sampler), sum(priority**alpha for priority in raw.values())
    assert found.keys() == raw.keys()
    for i, chance in found.items():
        assert chance == pytest.approx(raw[i] ** alpha / total, rel=1e-12), i
    return len(found)


def serial_ids(store: Any) -> dict[int, int]:
    store.refresh()
    return {serial: i for e in store.episodes for serial, i in zip(e["serial"].tolist(), e.ids.tolist(), strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [False, True])
def test_new_steps_begin_with_their_priority_and_others_with_the_largest_given(tmp_store: Path, mixed: bool) -> None:
    """Step by step as in a loop over one collector's steps, with updates, evictions and other samplers that go on."""
    rng, compared = np.random.default_rng(0), 0
    schema = serial_schema()

    def made() -> dr.Sampler:
        drawing = dr.Mixture([(distribution(), 1.0)]) if mixed else distribution()
        return sampler_of(store, drawing=drawing, batch_size=16)

    with dr.create(tmp_store, schema, capacity=120, segment_steps=30, chunk_bytes=256) as store, store.writer() as one:
        sampler = made()
        ids: dict[int, int] = {}
        raw: dict[int, float] = {}  # by number
        given: set[int] = set()
        entered, serial = set(), 0
        for at in range(60):
            new = []
            for _ in range(int(rng.integers(1, 12))):
                priority = None if serial < 7 or rng.random() < 0.4 else float(rng.normal(0, 3) * 0.9**at)
                append_numbered(one, [serial], "terminated" if rng.random() < 0.1 else "open", priority=priority)
                new.append((serial, priority))
                serial += 1
            ids |= serial_ids(store)
            there = range(max(0, serial - 120), serial)
            for number, priority in new:
                if priority is None:
                    raw[number] = max((raw[other] for other in given.intersection(there)), default=1.0)
                    entered.add(raw[number])
                else:
                    raw[number] = abs(priority) + EPS
                    given.add(number)
            compared += check_chances(sampler, {ids[number]: raw[number] for number in there})
            batch = sampler.sample()
            errors = rng.normal(0, 2, 16) * 0.9**at
            sampler.update_priorities(batch.index, errors)
            number_of = {i: number for number, i in ids.items()}
            for i, error in zip(batch.index.tolist(), errors.tolist(), strict=True):
                raw[number_of[i]] = abs(error) + EPS
                given.add(number_of[i])
            if rng.random() < 0.2:
                state = sampler.state_dict()
                sampler.close()
                sampler = made()
                sampler.load_state_dict(state)
        assert compared > 4000
        assert min(entered) < 0.3 < 3 < max(entered)
        assert len(entered) > 20


def test_an_initial_priority_is_to_the_bit_what_an_update_with_it_would_be(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    errors = rng.normal(0, 5, 1000) * 10.0 ** rng.integers(-12, 6, 1000)
    samplers = []
    for name, given in (("given", errors), ("updated", None)):
        with dr.create(tmp_path / name, serial_schema()) as store, store.writer() as writer:
            writer.append_episode(
                np.zeros((1001, 3)), np.zeros(1000, int), np.zeros(1000), terminated=True, priority=given,
                serial=np.arange(1000),
            )  # fmt: skip
        samplers.append(sampler_of(tmp_path / name, batch_size=64))
    assert samplers[1].update_priorities(samplers[1].ids(), errors) == 0
    for _ in range(20):
        first, second = (sampler.sample() for sampler in samplers)
        for name in ("index", "weight"):
            assert first[name].numpy().tobytes() == second[name].numpy().tobytes()
    for sampler in samplers:
        sampler.close()


@pytest.mark.slow
def test_a_million_draws_follow_the_initial_priorities(tmp_store: Path) -> None:
    """Chi-square against the closed form, over a vector, a lone writer, steps without one, and two views."""
    rng = np.random.default_rng(0)
    with dr.create(tmp_store, serial_schema()) as store:
        with store.writer() as one, store.writer(num_envs=3) as some:
            for t in range(100):
                priority = rng.random() * 0.9 if t else 1.0  # the largest is that of the first step
                append_numbered(one, [t], "terminated" if t % 9 == 8 else "open", priority=priority)
                priorities = np.where(rng.random(3) < 0.5, np.nan, rng.random(3) * 0.9)
                ends, serials = np.full(3, t % 11 == 10), 1000 + 3 * t + np.arange(3)
                obs = np.zeros((3, 3), np.float32)
                some.append(obs, serials, np.zeros(3), ends, next_obs=obs, priority=priorities, serial=serials)
        raw = {}
        for episode in store.episodes if store.refresh() else ():
            for i, priority in zip(episode.ids.tolist(), episode["priority"].tolist(), strict=True):
                raw[i] = 1.0 + EPS if np.isnan(priority) else priority + EPS
        sampler = dr.Sampler(store, dr.Transitions(), distribution(stratified=False), batch_size=10_000, seed=3)
        drawn = np.concatenate([sampler.sample().index.numpy() for _ in range(100)])
        ids, counts = np.unique(drawn, return_counts=True)
        assert ids.tolist() == sorted(raw)
        expected = np.array([raw[i] ** 0.7 for i in ids.tolist()])
        assert stats.chisquare(counts, expected / expected.sum() * counts.sum()).pvalue > 1e-3
        weights = sampler.sample(beta=0.5)
        mass = np.array([raw[i] ** 0.7 for i in weights.index.tolist()])
        np.testing.assert_allclose(weights.weight, (mass / mass.min()) ** -0.5, rtol=1e-5)


WINDOWS = {
    "sequences": dr.Sequences(length=5, overlap=2),
    "burn-in": dr.Sequences(length=6, overlap=4, burn_in=3),
    "moved back": dr.Sequences(length=4, overlap=1, pad=False),
    "episodes": dr.Episodes(),
    "the first steps of episodes": dr.Episodes(max_length=3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("num_envs", [None, 3])
@pytest.mark.parametrize("eta", [0.9, 0.0])
def test_windows_begin_with_the_mix_of_the_priorities_of_their_steps(
    tmp_store: Path, name: str, num_envs: int | None, eta: float
) -> None:
    """Over the steps that count for the loss and have one; of a window without any, the largest so far."""
    view, schema = WINDOWS[name], serial_schema()
    episodes = [EpisodePlan(1 + 3 * n % 14, ("terminated", "truncated", "cut")[n % 3], n % 4 > 0) for n in range(15)]
    lanes = tuple(tuple(episodes[lane:] + episodes[:lane]) for lane in range(num_envs or 1))
    model, compared = ModelStore(), 0
    with dr.create(tmp_store, schema, chunk_bytes=512) as store:
        for number in range(3):  # the second writer gives none
            plan = WriterPlan(num_envs, lanes, seed=number, priority="never" if number == 1 else "sometimes")
            with store.writer(num_envs) as writer:
                play(plan, schema, [quiet(writer), model.writer(num_envs)], 1000 * number)
        ids = serial_ids(store)
        sampler = sampler_of(store, view, distribution(eta=eta))
        found = chances(sampler)
        given, lacking = {}, set()
        for episode in model.episodes:
            whole = isinstance(view, dr.Episodes)
            length = (view.max_length or len(episode)) if whole else view.length
            starts = [0] if whole else window_starts(episode, view.length, view.length - view.overlap, view.pad)
            if not episode.window_end:
                continue
            for start in starts:
                burn_in = 0 if whole else view.burn_in
                mask = window(episode, start, length, burn_in)["loss_mask"]
                steps = [episode.steps[start + j].priority for j in np.flatnonzero(mask).tolist()]
                steps = [priority for priority in steps if priority is not None]
                i = ids[int(episode.steps[start].extra["serial"])]
                if steps:
                    given[i] = eta * max(steps) + (1 - eta) * sum(steps) / len(steps) + EPS
                else:
                    lacking.add(i)
        assert found.keys() == given.keys() | lacking
        assert len(given) > 20
        assert len(lacking) > 5
        one = next(iter(given))
        for i, raw in given.items():
            assert found[i] / found[one] == pytest.approx((raw / given[one]) ** 0.7, rel=1e-9)
            compared += 1
        bounds = np.array([min(given.values()), max(1.0, *given.values())])
        for i in lacking:  # the largest before it, whichever came first
            least, most = (bounds / given[one]) ** 0.7
            assert least * 0.999 < found[i] / found[one] < most * 1.001
        assert compared == len(given)


@pytest.mark.slow
def test_windows_across_episodes_begin_with_the_mix_over_all_of_their_episodes(tmp_store: Path) -> None:
    view, rng = dr.Sequences(6, stride=2, burn_in=2, overlap=4, cross_episodes=True), np.random.default_rng(0)
    given: dict[int, float | None] = {}
    with dr.create(tmp_store, serial_schema(), segment_steps=25) as store:
        with store.writer() as writer:
            for serial in range(200):
                given[serial] = None if rng.random() < 0.3 else float(rng.random())
                append_numbered(writer, [serial], "terminated" if serial % 9 == 8 else "open", priority=given[serial])
        sampler = sampler_of(store, view)
        serials = {i: serial for serial, i in serial_ids(store).items()}
        raw: dict[int, float] = {}
        for i in chances(sampler):
            first = serials[i]
            counts = [
                s for s in range(first, first + 6) if s >= first + 2 or any(r % 9 == 0 for r in range(first, s + 1))
            ]
            some = [priority for s in counts if (priority := given[s]) is not None]
            raw[i] = 0.9 * max(some) + 0.1 * np.mean(some) + EPS if some else 1.0
        assert check_chances(sampler, raw) > 90


def test_a_sampler_that_comes_later_begins_as_one_that_was_there_from_the_first_step_on(tmp_store: Path) -> None:
    rng = np.random.default_rng(1)
    with dr.create(tmp_store, serial_schema(), segment_steps=50) as store:
        early = sampler_of(store)
        with store.writer() as writer:
            for t in range(400):
                priority = float(rng.normal(0, 2)) if t > 30 and rng.random() < 0.5 else None
                append_numbered(writer, [t], "terminated" if t % 13 == 12 else "open", priority=priority)
                if t % 7 == 0:
                    early.sample()
        with dr.open(tmp_store) as again:
            late = sampler_of(again)
            assert chances(late) == chances(early)
            only = sampler_of(again, where=lambda e: int(e["serial"][0]) % 2 == 0)
            part, every = chances(only), chances(late)
            given = {i: p for e in again.episodes for i, p in zip(e.ids.tolist(), e["priority"], strict=True) if p > 0}
            both = sorted(part.keys() & given.keys())
            assert 50 < len(both) < len(given)
            share = [part[i] / every[i] for i in both]
            assert share == pytest.approx([share[0]] * len(both), rel=1e-9)


@pytest.mark.parametrize("when", ["before the counters are read", "before the rows are followed"])
def test_the_first_priority_of_a_segment_is_never_missed(
    tmp_store: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer adds the array, and publishes the step, while a sampler is in the middle of a refresh."""
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer, dr.open(tmp_store) as reader:
        append_numbered(writer, range(5), "open")
        sampler = sampler_of(reader)
        sampler.sample()

        def read(counters: Any) -> bytes:
            monkeypatch.undo()
            before: bytes = counters.raw()
            append_numbered(writer, [5], "open", priority=50.0)
            after: bytes = counters.raw()
            return before if when == "before the rows are followed" else after

        monkeypatch.setattr("diskreplay.segments.files.commit.StoreCounters.raw", read)
        sampler.sample()
        ids = serial_ids(store)
        check_chances(sampler, {i: 50.0 + EPS if number == 5 else 1.0 for number, i in ids.items()})


def test_a_segment_that_was_read_before_its_first_priority_is_read_again(
    tmp_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if another thread has looked at the counter in between, with a snapshot that does not have the segment."""
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as one, dr.open(tmp_store) as reader:
        append_numbered(one, range(3), "open")
        sampler = sampler_of(reader)
        sampler.sample()
        before = reader.snapshot
        with store.writer() as two:
            append_numbered(two, [3], "open")

            def read_early(known: Any, number: int) -> Any:
                monkeypatch.undo()
                info = known.read(number)
                append_numbered(two, [4], "open", priority=50.0)
                assert not before.has_priorities
                return info

            monkeypatch.setattr("diskreplay.reading.known_segments.KnownSegments.read", read_early)
            sampler.sample()
            ids = serial_ids(store)
            check_chances(sampler, {i: 50.0 + EPS if number == 4 else 1.0 for number, i in ids.items()})


def test_steps_that_were_evicted_meanwhile_have_none(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema(), capacity=60, segment_steps=20) as store, store.writer() as writer:
        append_numbered(writer, range(30), priority=5.0)
        with dr.open(tmp_store) as reader:
            sampler = dr.Sampler(reader, dr.Transitions(), distribution(), batch_size=4, seed=0, refresh=False)
            append_numbered(writer, range(30, 300), priority=5.0)
            writer.flush()
            store.refresh()
            assert not (tmp_store / "segments/00000000").exists()
            found = sampler._planner.target.population
            sampler._planner._refresh_population()
            assert set(sampler._planner.target.distribution.chances(found, found.take(np.arange(30)))) == {1 / 30}


def test_priorities_of_a_state_go_before_initial_ones(tmp_store: Path) -> None:
    with dr.create(tmp_store, serial_schema()) as store, store.writer() as writer:
        append_numbered(writer, range(10), priority=3.0)
        sampler = sampler_of(store)
        sampler.sample()
        sampler.update_priorities(store.episodes[0].ids[:5], np.full(5, 7.0))
        state = sampler.state_dict()
        append_numbered(writer, range(10, 15), priority=9.0)
        append_numbered(writer, range(15, 17))
        other = sampler_of(store, seed=1)
        other.load_state_dict(state)
        ids = serial_ids(store)
        raw = [7.0] * 5 + [3.0] * 5 + [9.0] * 7
        for one in (sampler, other):
            check_chances(one, {ids[number]: raw[number] + EPS for number in range(17)})
