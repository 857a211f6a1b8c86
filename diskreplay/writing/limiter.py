"""Rate limiters: how many steps are drawn for each that is inserted, kept between bounds across processes."""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any

from diskreplay.errors import RateLimited, ReadOnlyError
from diskreplay.segments.documents.limiters import SLOTS, Inserted, StepCounter, is_name, open_slots, slots_lock
from diskreplay.segments.documents.root import Root
from diskreplay.segments.files.locks import Lock, try_lock

# Between two looks at the counts: short at first, for the other side may be in the middle of its step.
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.0002, 0.01, 1.5


@dataclass(frozen=True)
class RateLimiter:
    """Keeps samplers and writers of a store in step: each waits while it is too far ahead of the other.

    With ``offset = samples_per_insert * min_size``, in steps, as Reverb (Cassirer et al. 2021) has it:

    - n steps may be drawn when the store holds `min_size`, and then
      ``inserted * samples_per_insert - drawn - n >= offset - error_buffer``;
    - a step may be inserted while the store holds fewer than `min_size`, or when
      ``(inserted + 1) * samples_per_insert - drawn <= offset + error_buffer``.

    Steps that are appended in one call, of a vector's lanes or of an episode, go in together as soon as the first of
    them may. Inserted are all steps ever committed, by writers without the limiter too; drawn are those of samplers
    with a limiter of this name. Give the same numbers everywhere.

    Immutable; may be given to any number of writers and samplers, in any processes on this machine.

    Parameters
    ----------
    samples_per_insert : float
        Steps drawn for each one inserted, on average.
    min_size : int
        Steps that the store holds before any is drawn.
    error_buffer : float
        How far, in steps drawn, either side may be ahead: at least half of a batch and `samples_per_insert` together.
    name : str
        Limiters of one name in one store count together.
    timeout : float or None
        Seconds after which a call that has to wait raises RateLimited; None waits forever.

    Raises
    ------
    ValueError
        An argument is invalid, or with them and no timeout both sides could wait for each other forever.
    """

    samples_per_insert: float
    min_size: int
    error_buffer: float
    _: KW_ONLY
    name: str = "default"
    timeout: float | None = None

    def __post_init__(self) -> None:
        _check_number("samples_per_insert", self.samples_per_insert, positive=True)
        _check_number("error_buffer", self.error_buffer)
        if isinstance(self.min_size, bool) or not isinstance(self.min_size, Integral) or self.min_size < 1:
            raise ValueError(f"min_size must be an int of at least 1, not {self.min_size!r}")
        if not is_name(self.name):
            raise ValueError(
                f"name must be letters, digits, _, - and . that begin with a letter or digit, not {self.name!r}"
            )
        if self.timeout is not None:
            _check_number("timeout", self.timeout)
        self.check_batch(1)

    @property
    def offset(self) -> float:
        """The difference of ``inserted * samples_per_insert`` and drawn that the limiter keeps to."""
        return self.samples_per_insert * self.min_size

    def check_batch(self, steps: int) -> None:
        """Refuse a batch with which both sides could wait for each other, where they would wait forever.

        Raises
        ------
        ValueError
            `timeout` is None and `error_buffer` is less than half of the batch's steps and `samples_per_insert`
            together.
        """
        if self.timeout is None and not self.fits(steps):
            raise ValueError(
                f"error_buffer is {self.error_buffer:g}: with batches of {steps} steps and samples_per_insert "
                f"{self.samples_per_insert:g} both sides could wait for each other; it must be at least "
                f"{self._least_buffer(steps):g}"
            )

    def fits(self, steps: int) -> bool:
        """Tell whether a batch of so many steps may be drawn sooner or later, as long as writers go on."""
        return self.error_buffer >= self._least_buffer(steps)

    def _least_buffer(self, steps: int) -> float:
        # The bounds are 2 * error_buffer apart. Inserting stops less than one insert below the upper one, and there a
        # batch must fit above the lower one.
        return (steps + self.samples_per_insert) / 2

    def may_insert(self, inserted: Inserted, drawn: int) -> bool:
        """Tell whether a step may be inserted."""
        if inserted.held < self.min_size:
            return True
        lead = (inserted.ever + 1) * self.samples_per_insert - drawn
        return lead <= self.offset + self.error_buffer + _rounding(lead, drawn)

    def may_draw(self, inserted: Inserted, drawn: int, steps: int) -> bool:
        """Tell whether so many steps may be drawn."""
        if inserted.held < self.min_size:
            return False
        lead = inserted.ever * self.samples_per_insert - drawn - steps
        return lead >= self.offset - self.error_buffer - _rounding(lead, drawn)

    def attach(self, store: Any) -> "AttachedLimiter":
        """Return the limiter of a store, open with mode "a"; one for each writer and each sampler.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        StorageFull
            There is no room for the limiter's counts.
        """
        if store.mode != "a":
            raise ReadOnlyError(
                f'a limiter counts in the store, and {store.path} was opened with mode "r"; use mode "a"'
            )
        return AttachedLimiter(self, store._root)


def _rounding(lead: float, drawn: int) -> float:
    """Return more than rounding can take from a lead: with the least error_buffer, both sides would wait for ever."""
    return 1e-12 * (1.0 + abs(lead) + drawn)


class AttachedLimiter:
    """A limiter at work for one writer or one sampler.

    The rule holds exactly, with any number of processes: whoever inserts or draws holds the limiter's lock from the
    look at the counts to their change. Steps drawn are added to one of the limiter's 64 slots, that of the process's
    number; two samplers may share one, for they add under the lock. A process that dies frees the lock and leaves its
    counts.

    Concurrency: one thread at a time, as the writer's or sampler's own. A forked child may go on using it.
    """

    def __init__(self, limiter: RateLimiter, root: Root) -> None:
        self.limiter = limiter
        self._root = root
        self._lock_path = slots_lock(root, limiter.name)
        with root.still_there():
            self._slots = open_slots(root, limiter.name)
            self._steps = StepCounter(root)

    def counts(self) -> tuple[Inserted, int]:
        """Return the steps inserted, and the steps drawn."""
        inserted = self._steps.read()
        capacity = self._root.limits.capacity
        held = inserted.held if capacity is None else min(inserted.held, capacity)
        return Inserted(inserted.ever, held), int(self._slots.copy().sum())

    @contextmanager
    def inserting(self, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Wait until a step may be inserted, and let nobody else insert or draw during the block that commits it.

        While it waits, ``check`` is called now and then; what it raises ends the wait, and nothing changed. Raises
        RateLimited where it may not within the timeout; nothing changed.
        """
        lock = self._wait(self.limiter.may_insert, "insert a step", check)
        try:
            yield
        finally:
            lock.release()

    def draw(self, steps: int) -> None:
        """Wait until so many steps may be drawn, and count them as drawn.

        Raises RateLimited where they may not within the timeout, StorageFull where the file system copies on write and
        there is no room for the count, both with nothing changed; ValueError where both sides could wait for each other
        and there is no timeout.
        """
        self.limiter.check_batch(steps)
        lock = self._wait(lambda inserted, drawn: self.limiter.may_draw(inserted, drawn, steps), f"draw {steps} steps")
        try:
            self._slots[os.getpid() % SLOTS] += steps
        finally:
            lock.release()

    def _wait(self, may: Callable[[Inserted, int], bool], what: str, check: Callable[[], None] = lambda: None) -> Lock:
        """Return the lock, held, when the counts allow it.

        Raises StoreNotFound where the store was deleted or replaced since it was opened.
        """
        try:
            return self._wait_for(may, what, check)
        except Exception as error:
            self._root.explain(error)
            raise

    def _wait_for(self, may: Callable[[Inserted, int], bool], what: str, check: Callable[[], None]) -> Lock:
        timeout = self.limiter.timeout
        until = math.inf if timeout is None else time.monotonic() + timeout
        pause = _SHORTEST_S
        while True:
            lock = try_lock(self._lock_path)
            if lock is not None:
                try:
                    if may(*self.counts()):
                        return lock
                except BaseException:
                    lock.release()
                    raise
                lock.release()
            check()
            now = time.monotonic()
            if now >= until:
                raise self._limited(what)
            time.sleep(min(pause, until - now))
            pause = min(pause * _GROWTH, _LONGEST_S)

    def _limited(self, what: str) -> RateLimited:
        limiter, (inserted, drawn) = self.limiter, self.counts()
        spi = limiter.samples_per_insert
        return RateLimited(
            f"limiter {limiter.name!r}: waited {limiter.timeout:g} s to {what}. {inserted.ever} steps were inserted "
            f"and {drawn} drawn; the store holds {inserted.held}, and drawing begins at {limiter.min_size}; "
            f"inserted * {spi:g} - drawn is {inserted.ever * spi - drawn:g}, and is kept within {limiter.offset:g} +- "
            f"{limiter.error_buffer:g}. See that the other side runs, or choose a larger error_buffer or timeout"
        )


def _check_number(name: str, value: Any, *, positive: bool = False) -> None:
    good = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be a {'positive' if positive else 'non-negative'} number, not {value!r}")
