"""What samplers and rate limiters leave on disk: saved states, and counts of steps drawn."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from diskreplay.errors import FormatError, StoreNotFound
from diskreplay.segments.documents.limiters import Inserted, limiter_names, steps_drawn
from diskreplay.segments.documents.root import Root
from diskreplay.segments.documents.state_files import Saved, read_plain, state_names
from diskreplay.store.activity.rates import Rate
from diskreplay.writing.limiter import RateLimiter


@dataclass(frozen=True)
class SavedSampler:
    """What is known of a sampler by the state that it saved last.

    Counts are those of that moment; `batches_per_second` is between the two latest saves that were seen, None before.
    """

    name: str
    seconds_since_save: float
    batches: int | None
    steps: int | None
    batches_per_second: float | None
    view: str | None
    distribution: str | None


class SavedSamplers:
    """The states that samplers save under `samplers/`, read again where they were replaced. Not thread-safe."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._rates: dict[str, Rate] = {}
        self._known: dict[str, tuple[Saved, float | None]] = {}

    def read(self, now: float) -> list[SavedSampler]:
        """Return what is saved, by name; a state that is damaged or goes meanwhile is left out."""
        names = state_names(self._root)
        self._known = {name: known for name, known in self._known.items() if name in names}
        found = []
        for name in names:
            with suppress(FormatError, StoreNotFound, OSError):
                found.append(self._describe(name, now))
        return found

    def _describe(self, name: str, now: float) -> SavedSampler:
        saved = read_plain(self._root, name)
        before, rate = self._known.get(name, (None, None))
        batches = _count(saved.plain, "batches")
        if before is None or before.time != saved.time:
            rate = self._rates.setdefault(name, Rate(0.0)).add(saved.time, batches or 0)
            self._known[name] = saved, rate
        planner = saved.plain.get("planner") if isinstance(saved.plain, Mapping) else None
        told = planner if isinstance(planner, Mapping) else {}
        return SavedSampler(
            name,
            max(0.0, now - saved.time),
            batches,
            _count(saved.plain, "steps"),
            rate if rate is None or rate >= 0 else None,  # less: another sampler saved under the name
            *(str(told[key]) if key in told else None for key in ("view", "distribution")),
        )


def _count(tree: Any, name: str) -> int | None:
    value = tree.get(name) if isinstance(tree, Mapping) else None
    return value if isinstance(value, int) else None


@dataclass(frozen=True)
class LimiterCounts:
    """What a rate limiter has counted.

    Its numbers are not on disk: where the caller gave them, `samples_until_held` and `inserts_until_held` are how many
    steps can be drawn, or inserted, before that side has to wait, and `held` names who waits now. None elsewhere.
    """

    name: str
    inserted: int
    drawn: int
    samples_per_insert: float | None
    drawn_per_second: float | None
    samples_until_held: int | None
    inserts_until_held: int | None
    held: str | None


class Limiters:
    """The counts of the rate limiters of a store. Not thread-safe.

    Parameters
    ----------
    root : Root
        The store.
    known : iterable of RateLimiter
        Limiters with the numbers that its writers and samplers were given.
    window_s : float
        Over how many seconds rates are taken.
    """

    def __init__(self, root: Root, known: Iterable[RateLimiter], window_s: float) -> None:
        self._root, self._window_s = root, window_s
        self._known = {limiter.name: limiter for limiter in known}
        self._rates: dict[str, Rate] = {}

    def read(self, now: float, inserted: Inserted) -> list[LimiterCounts]:
        """Return the counts of each limiter, by name."""
        found = []
        for name in limiter_names(self._root):
            with suppress(FormatError, OSError):
                drawn = steps_drawn(self._root, name)
                rate = self._rates.setdefault(name, Rate(self._window_s)).add(now, drawn)
                ratio = drawn / inserted.ever if inserted.ever else None
                bounds = _bounds(self._known.get(name), inserted, drawn)
                found.append(LimiterCounts(name, inserted.ever, drawn, ratio, rate, *bounds))
        return found


def _bounds(limiter: RateLimiter | None, inserted: Inserted, drawn: int) -> tuple[int | None, int | None, str | None]:
    """Return how many steps may be drawn, and inserted, until that side has to wait, and who has to now."""
    if limiter is None:
        return None, None, None
    lead = inserted.ever * limiter.samples_per_insert - drawn
    samples = max(0, int(lead - (limiter.offset - limiter.error_buffer)))
    inserts = max(0, int((limiter.offset + limiter.error_buffer - lead) / limiter.samples_per_insert))
    may_draw, may_insert = limiter.may_draw(inserted, drawn, 1), limiter.may_insert(inserted, drawn)
    if inserted.held < limiter.min_size:
        samples, inserts = 0, max(inserts, limiter.min_size - inserted.held)
    held = [side for side, may in (("samplers", may_draw), ("writers", may_insert)) if not may]
    return samples, inserts, " and ".join(held) or None
