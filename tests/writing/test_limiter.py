"""Rate limiters: Reverb's rule against a plain account of it, over one process and over two."""

import multiprocessing
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

import diskreplay as dr
from tests.testing.limited import Counted, LimiterCounts, count_anew

SCHEMA = dr.Schema(obs=dr.Field((2,), "float32"), action=dr.Field((), "int64"))
NOW = 0.0  # a timeout: one look
ROUNDING = 1e-8


def append(writer: Any, steps: int = 1, terminated: bool = False) -> None:
    for _ in range(steps):
        writer.append(np.zeros(2), 0, 1.0, terminated, next_obs=np.zeros(2))


@given(st.floats(0.1, 10), st.integers(1, 20), st.floats(0, 100), st.integers(1, 8), st.integers(0, 2**32 - 1))
def test_the_rule_is_reverbs(spi: float, min_size: int, buffer: float, batch: int, seed: int) -> None:
    limiter = dr.RateLimiter(spi, min_size, buffer, timeout=1)
    lowest, highest = spi * min_size - buffer, spi * min_size + buffer
    rng, inserts, samples = np.random.default_rng(seed), 0, 0
    for draws in (rng.random(200) < 0.5).tolist():
        held = min(inserts, 50)
        if draws:
            room = inserts * spi - samples - batch - lowest
            allowed = limiter.may_draw(Counted(inserts, held), samples, batch)
            assert allowed == (held >= min_size and room >= 0) or abs(room) < ROUNDING
            samples += batch * allowed
        else:
            room = highest - ((inserts + 1) * spi - samples)
            allowed = limiter.may_insert(Counted(inserts, held), samples)
            assert allowed == (held < min_size or room >= 0) or abs(room) < ROUNDING
            inserts += allowed


@given(st.floats(0.1, 10), st.integers(1, 20), st.integers(1, 300), st.floats(0, 50))
@example(0.6, 1, 1, 0.0)
def test_with_the_least_error_buffer_one_side_can_always_go_on(
    spi: float, min_size: int, batch: int, more: float
) -> None:
    limiter = dr.RateLimiter(spi, min_size, (batch + spi) / 2 + more)
    limiter.check_batch(batch)
    inserts = samples = 0
    for _ in range(400):
        if limiter.may_draw(Counted(inserts, inserts), samples, batch):
            samples += batch
        else:
            assert limiter.may_insert(Counted(inserts, inserts), samples)
            inserts += 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples_per_insert": 0}, "samples_per_insert must be a positive number, not 0"),
        ({"error_buffer": -1}, "error_buffer must be a non-negative number, not -1"),
        ({"error_buffer": float("inf")}, "error_buffer must be a non-negative number, not inf"),
        ({"min_size": 0}, "min_size must be an int of at least 1, not 0"),
        ({"timeout": True}, "timeout must be a non-negative number, not True"),
        ({"name": "../up"}, "name must be letters, digits, _, - and . that begin with a letter or digit, not '../up'"),
        (
            {"error_buffer": 1},
            "error_buffer is 1: with batches of 1 steps and samples_per_insert 4 both sides could wait for each other; "
            "it must be at least 2.5",
        ),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        dr.RateLimiter(**{"samples_per_insert": 4, "min_size": 10, "error_buffer": 40, **arguments})


@pytest.mark.slow
@pytest.mark.parametrize("segment_steps", [None, 8, "episode"])
def test_the_steps_of_a_store_are_counted_as_they_come_and_go(tmp_store: Path, segment_steps: Any) -> None:
    rng = np.random.default_rng(0)
    with dr.create(tmp_store, SCHEMA, capacity=60, segment_steps=segment_steps) as store:
        counter, total = LimiterCounts(tmp_store), 0
        vector, writer = store.writer(3), store.writer()
        for _ in range(50):
            mask = rng.random(3) < 0.7
            zeros = np.zeros((3, 2), "f4")
            vector.append(zeros, np.zeros(3, int), np.zeros(3), rng.random(3) < 0.2, np.zeros(3, bool), zeros, mask)
            append(writer, 2, bool(rng.random() < 0.1))
            total += 2 + int(mask.sum())
            found = counter.read()
            assert found.ever == total
            assert found.held <= total
        vector.close()
        writer.close()
        late = count_anew(tmp_store)
        assert counter.read() == late
        assert late.ever == total
        assert 60 <= late.held <= total
        # Segments that are as long as all that was written have some of the newest steps.
        assert late.held < total or segment_steps is None


def test_inserting_and_drawing_wait_for_each_other_and_say_so(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store, store.writer() as writer:
        limiter = dr.RateLimiter(2.0, 10, 6.0, timeout=NOW)
        inserting, drawing = limiter.attach(store), limiter.attach(store)
        message = (
            "limiter 'default': waited 0 s to draw 4 steps. 0 steps were inserted and 0 drawn; the store holds 0, and "
            "drawing begins at 10; inserted * 2 - drawn is 0, and is kept within 20 +- 6. See that the other side "
            "runs, or choose a larger error_buffer or timeout"
        )
        with pytest.raises(dr.RateLimited, match=f"^{re.escape(message)}$"):
            drawing.draw(4)
        for _ in range(13):
            with inserting.inserting():
                append(writer)
        refused = pytest.raises(dr.RateLimited, match="^limiter 'default': waited 0 s to insert a step. 13 steps were")
        with refused, inserting.inserting():
            append(writer)
        for _ in range(3):
            drawing.draw(4)
        with pytest.raises(dr.RateLimited, match="waited 0 s to draw 4 steps. 13 steps were inserted and 12 drawn"):
            drawing.draw(4)
        assert drawing.counts() == inserting.counts() == (Counted(13, 13), 12)
        # Another name counts for itself; an attachment made later sees what was drawn before.
        assert dr.RateLimiter(2.0, 10, 6.0, name="other").attach(store).counts()[1] == 0
        assert limiter.attach(store).counts()[1] == 12


def test_the_lock_is_free_after_a_step_that_failed(tmp_store: Path) -> None:
    with dr.create(tmp_store, SCHEMA) as store:
        attached = dr.RateLimiter(1.0, 10, 10.0, timeout=NOW).attach(store)
        with pytest.raises(KeyError), attached.inserting():
            raise KeyError
        with attached.inserting(), pytest.raises(dr.RateLimited):
            dr.RateLimiter(1.0, 10, 10.0, timeout=NOW).attach(store).draw(1)


def test_only_a_store_that_may_be_written_has_limiters(tmp_store: Path) -> None:
    dr.create(tmp_store, SCHEMA).close()
    with (
        dr.open(tmp_store) as store,
        pytest.raises(dr.ReadOnlyError, match='^a limiter writes its counts to the store, but .* "r"'),
    ):
        dr.RateLimiter(1.0, 10, 10.0).attach(store)
    assert list((tmp_store / "limiters").iterdir()) == [tmp_store / "limiters" / "zarr.json"]


@pytest.mark.filterwarnings("error")
def test_zarr_reads_the_slots(tmp_store: Path) -> None:
    import zarr

    with dr.create(tmp_store, SCHEMA) as store:
        attached = dr.RateLimiter(1.0, 1, 100.0).attach(store)
        with store.writer() as writer:
            append(writer, 5)
            attached.draw(3)
        group = zarr.open_group(tmp_store, mode="r")
        slots = group["limiters/default"]
        assert (slots.shape, slots.dtype, slots[:].sum()) == ((64,), np.int64, 3)


def collect(path: str, limiter: dr.RateLimiter, steps: int) -> None:
    """Append steps under the limiter, in a process of its own."""
    with dr.open(path, "a") as store, store.writer() as writer:
        attached = limiter.attach(store)
        for t in range(steps):
            with attached.inserting():
                append(writer, 1, t % 7 == 6)


@pytest.mark.slow
def test_the_rule_holds_across_processes(tmp_store: Path) -> None:
    limiter = dr.RateLimiter(3.0, 20, 12.0, timeout=60.0)
    with dr.create(tmp_store, SCHEMA, segment_steps=30) as store:
        context = multiprocessing.get_context("spawn")
        jobs = [context.Process(target=collect, args=(str(tmp_store), limiter, 60)) for _ in range(2)]
        for job in jobs:
            job.start()
        attached = limiter.attach(store)
        for drawn in range(0, 300, 5):
            attached.draw(5)
            inserted, total = attached.counts()
            assert total == drawn + 5
            # Exact, and not by a step a process: whoever inserts looks and appends under one lock.
            assert 60 - 12 <= inserted.ever * 3 - total <= 60 + 12
        for job in jobs:
            job.join(60)
            assert job.exitcode == 0
            job.close()
        assert attached.counts()[0].ever == 120
