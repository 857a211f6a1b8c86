"""Rate limiters, which bound the ratio of drawn to inserted steps, across processes."""

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

# The time between checks of the counts grows from _SHORTEST_S to _LONGEST_S seconds, by the factor _GROWTH after each
# check.
_SHORTEST_S, _LONGEST_S, _GROWTH = 0.0002, 0.01, 1.5


@dataclass(frozen=True)
class RateLimiter:
    """Keeps samplers and writers of a store in step: each side waits while it is too far ahead of the other.

    The rule is Reverb's (Cassirer et al. 2021), counted in steps, with ``offset = samples_per_insert * min_size``:

    - n steps may be drawn when the store holds at least `min_size` steps, and
      ``inserted * samples_per_insert - drawn - n >= offset - error_buffer``;
    - a step may be inserted while the store holds fewer than `min_size` steps, or when
      ``(inserted + 1) * samples_per_insert - drawn <= offset + error_buffer``.

    If one call appends several steps (one of each lane, or an episode), all are inserted as soon as the rule allows the
    first step. All steps ever committed count as inserted, also steps of writers without a limiter. Only steps drawn by
    samplers with a limiter of this name count as drawn. All limiters of one name must have the same arguments.

    Immutable; any number of writers and samplers, in any processes on this machine, may use it.

    Parameters
    ----------
    samples_per_insert : float
        The average number of steps drawn for each step inserted.
    min_size : int
        The number of steps that the store must hold before any step is drawn.
    error_buffer : float
        The largest difference between ``inserted * samples_per_insert - drawn`` and ``offset``. If `timeout` is None,
        it must be at least ``(samples_per_insert + n) / 2`` for batches of n steps.
    name : str
        The name of the counts in the store: limiters of the same name share the counts.
    timeout : float or None
        Seconds after which a waiting call raises RateLimited; with None, calls wait forever.

    Raises
    ------
    ValueError
        An argument is invalid, or `timeout` is None and writers and samplers could wait for each other forever.

    Examples
    --------
    >>> limiter = dr.RateLimiter(samples_per_insert=8.0, min_size=100, error_buffer=1000.0)
    >>> store = dr.open("cartpole.replay", mode="a")  # a limiter counts in the store
    >>> sampler = dr.Sampler(store, dr.Transitions(), batch_size=32, limiter=limiter)
    >>> sampler.sample().batch_size
    32
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
        """The middle of the bounds of ``inserted * samples_per_insert - drawn``."""
        return self.samples_per_insert * self.min_size

    def check_batch(self, steps: int) -> None:
        """Refuse a batch that could make writers and samplers wait for each other forever.

        Raises
        ------
        ValueError
            `timeout` is None, and `error_buffer` is less than half of the sum of the batch's steps and
            `samples_per_insert`.
        """
        if self.timeout is None and not self.fits(steps):
            raise ValueError(
                f"error_buffer is {self.error_buffer:g}: with batches of {steps} steps and samples_per_insert "
                f"{self.samples_per_insert:g} both sides could wait for each other; it must be at least "
                f"{self._least_buffer(steps):g}"
            )

    def fits(self, steps: int) -> bool:
        """Return whether `error_buffer` is large enough for batches of ``steps`` steps: see `check_batch`."""
        return self.error_buffer >= self._least_buffer(steps)

    def _least_buffer(self, steps: int) -> float:
        # The two bounds of x = inserted * samples_per_insert - drawn are 2 * error_buffer apart. Writers wait if x is
        # less than samples_per_insert below the upper bound. A sampler waits if x is less than `steps` above the lower
        # bound. Writers and samplers can wait at once if these two ranges of x overlap.
        return (steps + self.samples_per_insert) / 2

    def may_insert(self, inserted: Inserted, drawn: int) -> bool:
        """Return whether another step may be inserted, given the numbers of steps ``inserted`` and ``drawn`` so far."""
        if inserted.held < self.min_size:
            return True
        lead = (inserted.ever + 1) * self.samples_per_insert - drawn
        return lead <= self.offset + self.error_buffer + _rounding(lead, drawn)

    def may_draw(self, inserted: Inserted, drawn: int, steps: int) -> bool:
        """Return whether ``steps`` more steps may be drawn, given the numbers ``inserted`` and ``drawn`` so far."""
        if inserted.held < self.min_size:
            return False
        lead = inserted.ever * self.samples_per_insert - drawn - steps
        return lead >= self.offset - self.error_buffer - _rounding(lead, drawn)

    def attach(self, store: Any) -> "AttachedLimiter":
        """Return an `AttachedLimiter` for one writer or sampler of ``store``; the mode of the store must be "a".

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        StorageFull
            The disk has no room for the limiter's counts.
        """
        if store.mode != "a":
            raise ReadOnlyError(
                f'a limiter writes its counts to the store, but {store.path} was opened with mode "r"; use mode "a"'
            )
        return AttachedLimiter(self, store._root)


def _rounding(lead: float, drawn: int) -> float:
    """Return an upper bound of the rounding error of ``lead``, a weighted number of inserted steps minus ``drawn``.

    Without this tolerance, writers and samplers could wait for each other forever if `error_buffer` is as small as
    allowed.
    """
    return 1e-12 * (1.0 + abs(lead) + drawn)


class AttachedLimiter:
    """The rate limiter of one writer or one sampler, connected to the counts in the store.

    The rule holds exactly for any number of processes: a process holds the limiter's lock while it reads and changes
    the counts. The store has 64 counts of drawn steps, and each process changes the count that its process id selects.
    If a process dies, its lock is released, and the steps that it has counted stay counted.

    Concurrency: one thread at a time, as for the writer or sampler itself. A forked child may use the limiter.
    """

    def __init__(self, limiter: RateLimiter, root: Root) -> None:
        self.limiter = limiter
        self._root = root
        self._lock_path = slots_lock(root, limiter.name)
        with root.still_there():
            self._slots = open_slots(root, limiter.name)
            self._steps = StepCounter(root)

    def counts(self) -> tuple[Inserted, int]:
        """Return the numbers of steps ever inserted and still held, and the number of drawn steps."""
        inserted = self._steps.read()
        capacity = self._root.limits.capacity
        held = inserted.held if capacity is None else min(inserted.held, capacity)
        return Inserted(inserted.ever, held), int(self._slots.copy().sum())

    @contextmanager
    def inserting(self, check: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Return a context manager that waits until a step may be inserted, and locks the limiter for the `with` block.

        The `with` block has to commit the step. During the wait, ``check`` is called repeatedly, and may end the wait
        by raising an error. Raises RateLimited after the limiter's `timeout`.
        """
        lock = self._wait(self.limiter.may_insert, "insert a step", check)
        try:
            yield
        finally:
            lock.release()

    def draw(self, steps: int) -> None:
        """Wait until ``steps`` steps may be drawn, and count them as drawn.

        Raises RateLimited after the limiter's `timeout`. Raises ValueError if writers and samplers could wait for each
        other forever. Raises StorageFull if the file system copies on write and has no room for the changed count. If
        the call raises, the counts are unchanged.
        """
        self.limiter.check_batch(steps)
        lock = self._wait(lambda inserted, drawn: self.limiter.may_draw(inserted, drawn, steps), f"draw {steps} steps")
        try:
            self._slots[os.getpid() % SLOTS] += steps
        finally:
            lock.release()

    def _wait(
        self, may: Callable[[Inserted, int], bool], action: str, check: Callable[[], None] = lambda: None
    ) -> Lock:
        """Wait until ``may(*self.counts())`` is true, and return the acquired lock of the limiter.

        For ``check`` see `inserting`. Raises StoreNotFound if the store was deleted or replaced since it was opened.
        """
        try:
            return self._wait_for(may, action, check)
        except Exception as error:
            self._root.explain(error)
            raise

    def _wait_for(self, may: Callable[[Inserted, int], bool], action: str, check: Callable[[], None]) -> Lock:
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
                raise self._limited(action)
            time.sleep(min(pause, until - now))
            pause = min(pause * _GROWTH, _LONGEST_S)

    def _limited(self, action: str) -> RateLimited:
        limiter, (inserted, drawn) = self.limiter, self.counts()
        spi = limiter.samples_per_insert
        return RateLimited(
            f"limiter {limiter.name!r}: waited {limiter.timeout:g} s to {action}. {inserted.ever} steps were inserted "
            f"and {drawn} drawn; the store holds {inserted.held}, and drawing begins at {limiter.min_size}; "
            f"inserted * {spi:g} - drawn is {inserted.ever * spi - drawn:g}, and is kept within {limiter.offset:g} +- "
            f"{limiter.error_buffer:g}. See that the other side runs, or choose a larger error_buffer or timeout"
        )


def _check_number(name: str, value: Any, *, positive: bool = False) -> None:
    good = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not good or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} must be a {'positive' if positive else 'non-negative'} number, not {value!r}")
