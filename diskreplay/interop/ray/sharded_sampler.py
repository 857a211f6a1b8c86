"""The sampler over many shards: batches from all shards, and one set of priorities for all trainers."""

import re
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

import diskreplay as dr
from diskreplay.device_tensors import fetched
from diskreplay.interop.ray.draw_rounds import Drawn, DrawRounds, Round
from diskreplay.interop.ray.messages import TOLD, Target, Update, put_together
from diskreplay.interop.ray.shard_group import Lost, ShardGroup
from diskreplay.interop.ray.shard_link import ShardLink
from diskreplay.interop.ray.supported import check_together

_START_S = 120.0  # Before its first answer, a shard must import torch, open the store and load kernels.
_PATIENCE_S = 60.0  # Ray restarts an actor within seconds, but the restart of a machine takes about a minute.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


class ShardedSampler(IterableDataset[dr.Batch]):
    """Draws batches from the stores of many nodes, as `Sampler` draws from one store.

    A batch is divided among the shards by one multinomial draw with their masses. The mass of a shard is the number of
    its ids. With `Prioritized`, the mass is the sum of the priorities of these ids. Each shard reports the probability
    of each item at the draw, so importance weights are exact even if the masses are old. The index of a batch is (B, 2)
    int64: the number of the shard and the id.

    All trainers with the same `name`, such as ranks of DDP or several learners, share one set of priorities. The shards
    keep these priorities. Each trainer draws from all ids, independently of the other trainers.

    The store on this process' node is read directly, without the shard's actor. With `Prioritized`, the actor still
    draws the ids.

    A shard that does not answer within `deadline_s` is left out, and training continues with the other shards. When the
    shard answers again, its ids are drawn again. A restarted shard loads its saved priorities. `stats()["missing"]` has
    the numbers of the missing shards.

    Any thread may call any method; calls run one after the other.

    Parameters
    ----------
    store : ShardedStore
        The shards. The sampler does not close this object.
    view : View
        `Transitions` or `Sequences`. Rollouts and episodes are refused.
    distribution : Uniform or Prioritized or None
        None: `Uniform()`. Other distributions raise ValueError.
    batch_size : int
        Number of items in a batch.
    device : torch.device or str or None
        Device of batches; None: CPU.
    prefetch : int
        Number of batches that one message requests from each shard. The message is sent while earlier batches are
        delivered, so a batch is drawn `prefetch` to 2 · prefetch - 1 batches before its delivery. 0: each batch is
        drawn when it is requested.
    seed : int or None
        The seed of all draws. The draws of a single trainer depend only on the seed, the calls and the answers of the
        shards.
    fields, where
        As for `Sampler`. The field "age" counts the newer steps of the item's shard. `where` runs in the shards.
    name : str
        Name under which trainers share priorities: letters, digits, dots, dashes and underscores.
    direct : bool
        Whether to read a store on this node directly, without the shard's actor.
    deadline_s : float
        The number of seconds that a shard may take to answer.
    update_age_s : float
        The time in seconds after which updates of priorities are sent even if no batch is requested.

    Raises
    ------
    ValueError
        An argument is invalid or not supported with shards, the schemas of the stores differ, or a sampler of this name
        has another view, distribution or fields.
    StoreNotFound
        A shard has no store at its path.

    Notes
    -----
    A trainer divides batches in proportion to the masses in the shards' last answers, and requests a mass again when
    the answer is older than 0.1 s. Each shard reports the probability p of an item among its own ids at the draw. The
    probability of the item among all ids is p · m / M. When the batch was divided, m was the mass of the shard, and M
    the sum of all masses. Importance weights are computed from p · m / M. They are exact even if the masses are old.
    With `Uniform`, all weights are 1. A shard with new ids gets a larger part of the batches only after its next
    answer.

    New ids begin with the largest priority of their shard. Updates are sent with the next request for a batch, or after
    `update_age_s` without a request. A call of `sample` that waits for a shard delays updates by up to `deadline_s`
    more. `stats()["oldest_update_s"]` is the longest time that an update has waited. `update_priorities` returns the
    number of ids that were skipped in earlier calls.
    """

    def __init__(
        self,
        store: ShardGroup,
        view: Any,
        distribution: Any = None,
        *,
        batch_size: int = 256,
        device: torch.device | str | None = None,
        prefetch: int = 0,
        seed: int | None = None,
        fields: Sequence[str] | None = None,
        where: Callable[[dr.Episode], bool] | None = None,
        name: str = "default",
        direct: bool = True,
        deadline_s: float = 0.5,
        update_age_s: float = 0.05,
    ) -> None:
        if not isinstance(store, ShardGroup):
            raise ValueError(f"store must be a ShardedStore, not {store!r}")
        distribution = dr.Uniform() if distribution is None else distribution
        check_together(view, distribution)
        self._batch_size, prefetch = _count("batch_size", batch_size, 1), _count("prefetch", prefetch, 0)
        for argument, value in (("deadline_s", deadline_s), ("update_age_s", update_age_s)):
            if not value > 0:
                raise ValueError(f"{argument} must be a number of seconds above 0, not {value!r}")
        if not _NAME.fullmatch(name):
            raise ValueError(f"name must be 1 to 80 letters, digits, dots, dashes and underscores, not {name!r}")
        self._per_round, self._most_rounds = max(1, prefetch), 2 if prefetch else 1
        self._told = tuple(one for one in fields or () if one in TOLD)
        fields = None if fields is None else tuple(one for one in fields if one not in TOLD)
        self._device = torch.device("cpu" if device is None else device)
        self._lock = threading.RLock()
        self._closed, self._was_weighted = False, distribution.weighted
        self._batches, self._started = 0, 0.0
        self._queue: deque[Round] = deque()
        self._skipped = 0
        self._update_age_s, self._end = update_age_s, threading.Event()
        self._flusher: threading.Thread | None = None
        target = Target(view, distribution, fields, where)
        own, *seeds = np.random.SeedSequence(seed).spawn(1 + store.num_shards)
        run = secrets.token_hex(8)
        self._store = store
        self._links = [
            ShardLink(store, shard, name, run, int(seeds[shard].generate_state(1)[0]), direct)
            for shard in range(store.num_shards)
        ]
        self._rounds = DrawRounds(self._links, store.calls, target, own, deadline_s, _PATIENCE_S)
        try:
            _join(self._links, target)
        except BaseException:
            self.close()
            raise

    @property
    def _target(self) -> Target:
        return self._rounds.target

    def __repr__(self) -> str:
        return f"{self._target.distribution} over {self._target.view} in {len(self._links)} shards"

    @property
    def view(self) -> Any:
        """The view.

        Setting the view changes the sampler of this name in each shard, so all trainers with this name must set the
        same view.
        """
        return self._target.view

    @view.setter
    def view(self, view: Any) -> None:
        self._set_target(self._target._replace(view=view))

    @property
    def distribution(self) -> Any:
        """The distribution. Like `view`, this attribute may be set. The priorities are kept."""
        return self._target.distribution

    @distribution.setter
    def distribution(self, distribution: Any) -> None:
        self._set_target(self._target._replace(distribution=distribution))

    def _set_target(self, target: Target) -> None:
        check_together(target.view, target.distribution)
        with self._lock:
            self._check_open()
            self._drop_queue()
            self._rounds.target = target
            self._was_weighted = self._was_weighted or target.distribution.weighted
            for link in self._links:
                link.set_target(target)

    def _drop_queue(self) -> None:
        while self._queue:
            self._rounds.drop(self._queue.popleft())

    def sample(self, batch_size: int | None = None, beta: float | None = None) -> dr.Batch:
        """Draw and gather one batch; for the arguments see `Sampler.sample`.

        Raises
        ------
        NotEnoughData
            No shard that answers has a sampleable step.
        ReplayError
            No shard has answered for a minute.
        """
        size = self._batch_size if batch_size is None else _count("batch_size", batch_size, 1)
        if beta is not None and not self._target.distribution.weighted:
            raise ValueError(f"beta means nothing to {self.distribution}, whose weights are all 1: leave it out")
        with self._lock:
            self._check_open()
            self._started = self._started or perf_counter()
            self._rounds.poll()
            if size != self._batch_size:
                drawn = self._rounds.next(self._rounds.begin([size]))
            else:
                drawn = self._next()
            batch = self._to_batch(drawn, beta)
            self._batches += 1
            return batch

    def _next(self) -> Drawn:
        while len(self._queue) < self._most_rounds:
            try:
                self._queue.append(self._rounds.begin([self._batch_size] * self._per_round))
            except dr.NotEnoughData:
                if not self._queue:
                    raise
                break
        found = self._queue[0]
        try:
            drawn = self._rounds.next(found)
        except BaseException:
            self._queue.popleft()  # the other batches of the round are dropped, too
            raise
        if found.next == len(found.counts):
            self._queue.popleft()
        return drawn

    def _to_batch(self, drawn: Drawn, beta: float | None) -> dr.Batch:
        exponent = self._target.distribution.beta if beta is None and self._target.distribution.weighted else beta
        beta = exponent(self._batches) if callable(exponent) else exponent
        batch = self._rounds.to_batch(drawn, beta, self._told, pinned=self._device.type == "cuda")
        return batch if self._device.type == "cpu" else batch.to(self._device, non_blocking=True)

    def gather(self, ids: Any) -> dr.Batch:
        """Gather a batch of the items with these ids, in the order of the ids. All weights are 1.

        Parameters
        ----------
        ids : array_like of int or Tensor
            (n, 2): the number of the shard and the id of each item, such as the index of a batch.

        Raises
        ------
        InvalidIndex
            A shard or an id does not exist, an id was evicted, or an id cannot be sampled with this view.
        ReplayError
            A shard does not answer.
        """
        index = self._index(ids)
        if not len(index):
            raise dr.InvalidIndex("no id is given: there is nothing to gather")
        with self._lock:
            self._check_open()
            shards, inverse = np.unique(index[:, 0], return_inverse=True)
            found = [self._links[one].gather(index[index[:, 0] == one, 1]) for one in shards.tolist()]
        fields = put_together(found[0][0], [leaves for _, leaves in found], False)
        order = np.argsort(np.argsort(inverse, kind="stable"))
        size = len(index)
        together = dr.Batch({**fields, "index": np.arange(size), "weight": np.ones(size, np.float32)})
        batch = together.select(order).replaced({"index": torch.from_numpy(index)})
        return dr.Batch(dict(batch), ("sharded", *self._target.view.kind)).to(self._device)

    def _index(self, index: Any) -> NDArray[np.int64]:
        given = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
        if given.ndim != 2 or given.shape[1] != 2 or (given.size and given.dtype.kind not in "iu"):
            raise dr.InvalidIndex(
                f"an index over shards is integers (batch, 2), shard and id, not {given.dtype}{list(given.shape)}"
            )
        found = given.astype(np.int64)
        unknown = found[(found[:, 0] < 0) | (found[:, 0] >= len(self._links)), 0]
        if len(unknown):
            raise dr.InvalidIndex(f"there is no shard {unknown[0]}: the store has {len(self._links)}")
        return found

    def update_priorities(self, index: Any, td_error: Any, kind: tuple[Any, ...] | None = None) -> int:
        """Set the priorities of items from their temporal-difference errors, in the shards; see `Sampler`.

        The errors are sent with the next request for a batch, or after `update_age_s`. If this call raises an error,
        nothing is sent.

        Returns
        -------
        int
            The number of skipped ids that became known since the last call. An id is skipped if it was evicted after
            the draw, if the view does not have it, or if its shard is missing.
        """
        ids, errors = fetched(index, td_error)
        ids, errors = self._index(ids), _errors(errors)
        if len(errors) != len(ids):
            raise ValueError(f"td_error must have one row for each of {len(ids)} ids, not shape {list(errors.shape)}")
        if not np.isfinite(errors).all():
            raise ValueError("td_error must be finite: nothing was updated")
        if kind is None and isinstance(index, torch.Tensor):
            kind = index.__dict__.get("kind")
        own = None if kind is None else kind[1:]
        with self._lock:
            self._check_open()
            if not self._was_weighted:
                raise ValueError(f"{self._target.distribution} has no priorities to update: draw with Prioritized(...)")
            for shard in np.unique(ids[:, 0]).tolist():
                mine = ids[:, 0] == shard
                self._links[shard].update(Update(np.ascontiguousarray(ids[mine, 1]), errors[mine], own))
            if self._flusher is None:
                self._flusher = threading.Thread(target=self._flush, name="diskreplay-updates", daemon=True)
                self._flusher.start()
            before, self._skipped = self._skipped, sum(link.skipped + link.updates_lost for link in self._links)
            return self._skipped - before

    def _flush(self) -> None:
        while not self._end.wait(self._update_age_s / 2):
            with self._lock:
                self._send_updates(self._update_age_s / 2)

    @property
    def sampleable(self) -> int:
        """The number of drawable ids in the shards that answer. Each use of this attribute calls every shard."""
        with self._lock:
            self._check_open()
            self._rounds.refresh()
            return sum(link.population for link in self._links)

    def ids(self) -> NDArray[np.int64]:
        """Return all drawable ids of the shards that answer, (n, 2): the number of the shard and the id.

        The ids are in the order of the shards. Within a shard, the oldest id is first.
        """
        with self._lock:
            self._check_open()
            found = [np.zeros((0, 2), np.int64)]
            for link in self._links:
                if link.lost is None:
                    ids = link.with_sampler(lambda sampler: sampler.ids())
                    found.append(np.stack([np.full(len(ids), link.shard), ids], axis=1))
            return np.concatenate(found)

    def save(self, name: str) -> None:
        """Save the state of each shard in its store, and the trainer's state in all stores; see `Sampler.save`."""
        with self._lock:
            self._check_open()
            self._send_updates()
            note = self._own_state()
            for link in self._links:
                link.with_sampler(lambda sampler: sampler.save(name))
                link.with_store(lambda store: store.write_note(f"ray-trainer-{name}", note))

    def load(self, name: str) -> None:
        """Resume from a saved state; see `Sampler.load`. If a shard refuses its state, nothing changes."""
        with self._lock:
            self._check_open()
            notes = [link.with_store(lambda store: store.read_note(f"ray-trainer-{name}")) for link in self._links]
            if None in notes:
                raise dr.StoreNotFound(f"{self._links[notes.index(None)].place[0]} has no sampler state named {name!r}")
            self._load([lambda sampler: sampler.load(name)] * len(self._links), notes[0])

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the trainer and of each shard, for `torch.save`; see `Sampler.state_dict`.

        Batches that were drawn ahead are not in the state, and are drawn again after the state is loaded.
        """
        with self._lock:
            self._check_open()
            self._send_updates()
            return {**self._own_state(), "shards": self._states()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state; see `Sampler.load_state_dict`.

        Raises
        ------
        ValueError
            `state` is not from a `ShardedSampler`, has a different number of shards, or a shard refuses it. Then
            nothing changes.
        ReplayError
            A shard does not answer. Then the other shards do not change.
        """
        if not isinstance(state, Mapping) or not {"rng", "batches", "shards"} <= state.keys():
            raise ValueError(f"this is not a state of a sharded sampler, but {type(state).__name__}")
        if len(state["shards"]) != len(self._links):
            raise ValueError(
                f"this is the state of {len(state['shards'])} shards, and this sampler has {len(self._links)}"
            )
        with self._lock:
            self._check_open()
            self._load([partial(_load_state, state=own) for own in state["shards"]], state)

    def _load(self, loads: Sequence[Callable[[dr.Sampler], None]], own: Mapping[str, Any]) -> None:
        """Load the states of all shards and the trainer. After a failure or an interrupt, all states are as before."""
        rng = np.random.PCG64()
        try:
            rng.state, batches = own["rng"], int(own["batches"])
        except (TypeError, ValueError, KeyError) as error:
            raise ValueError(f"this is not a state of a sharded sampler: {error}") from None
        self._send_updates()
        before = self._rounds.rng, self._batches, self._queue
        states, begun = self._states(), []
        try:
            for link, load, state in zip(self._links, loads, states, strict=True):
                begun.append((link, state))
                link.with_sampler(load)
            for round_ahead in self._queue:
                self._rounds.drop(round_ahead)
            self._rounds.refresh()  # the next batch needs the masses of the loaded priorities
            self._rounds.rng, self._batches, self._queue = np.random.Generator(rng), batches, deque()
        except BaseException:
            self._rounds.rng, self._batches, self._queue = before
            for link, state in begun:
                with suppress(dr.ReplayError):  # restore other shards even if this shard is lost
                    link.with_sampler(partial(_load_state, state=state))
            self._rounds.refresh()
            raise

    def _send_updates(self, waiting_s: float = 0.0) -> None:
        """Send the updates that have waited longer than `waiting_s`.

        A shard applies these updates before it answers a later call.
        """
        for link in self._links:
            if link.lost is None and link.update_age() > waiting_s:
                link.send_updates()

    def _states(self) -> list[Any]:
        return [link.with_sampler(lambda sampler: sampler.state_dict()) for link in self._links]

    def _own_state(self) -> dict[str, Any]:
        return {"rng": self._rounds.rng.bit_generator.state, "batches": self._batches}

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dr.Batch:
        return self.sample()

    def stats(self) -> dict[str, Any]:
        """Return counts and rates of the sampler, and the missing shards.

        - `batches`: the number of delivered batches. `batches_per_second`: the rate since the first request.
        - `seconds_waiting`: the time that this trainer waited for shards.
        - `bytes`, `messages`: the numbers of bytes and messages between shards and this trainer.
        - `redrawn`: the number of items that were drawn from other shards because a shard did not answer.
        - `updates_sent`: the number of ids whose priorities were sent. `updates_lost`: the number of ids whose
          priorities were lost because a shard did not answer. `updates_skipped`: the number of ids that shards skipped.
          `oldest_update_s`: the longest time that an update waited before it was sent.
        - `population`: the number of drawable ids in the shards that answer. `priority_sum`: the sum of the priorities
          of these ids; NaN with `Uniform`.
        - `missing`: the numbers of the shards that do not answer.
        - `shards`: path, address, mass and population of each shard. A missing shard also has the reason, and the
          seconds since it was lost.
        """
        with self._lock:
            links, elapsed = self._links, perf_counter() - self._started
            return {
                "batches": self._batches,
                "batches_per_second": self._batches / elapsed if self._started else 0.0,
                "seconds_waiting": self._rounds.seconds_waiting,
                "bytes": self._rounds.nbytes,
                "messages": sum(link.messages for link in links),
                "redrawn": self._rounds.redrawn,
                "updates_sent": sum(link.updates_sent for link in links),
                "updates_lost": sum(link.updates_lost for link in links),
                "updates_skipped": sum(link.skipped for link in links),
                "oldest_update_s": max(link.oldest_update_s for link in links),
                "population": sum(link.population for link in links),
                "priority_sum": sum(link.mass for link in links) if self._target.distribution.weighted else np.nan,
                "missing": [link.shard for link in links if link.lost is not None],
                "shards": [link.stats() for link in links],
            }

    def close(self) -> None:
        """Send the waiting updates, and close the stores that this process reads directly. The shards stay alive."""
        self._end.set()
        if self._flusher is not None:
            self._flusher.join()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.clear()
                for link in self._links:
                    link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError(
            "a sampler cannot be sent to another process: make one there, of the same ShardedStore and name"
        )

    def _check_open(self) -> None:
        if self._closed:
            raise dr.Closed("this sampler is closed; make another")


def _join(links: Sequence[ShardLink], target: Target) -> None:
    for link in links:
        link.begin_join(target)
    until = monotonic() + _START_S
    for link in links:
        try:
            link.end_join(target, max(until - monotonic(), 0.0))
        except Lost as error:
            link.lost = str(error)
    joined = [link for link in links if link.joined is not None]
    if not joined:
        raise dr.ReplayError(f"no shard answers; the first shard: {links[0].lost}")
    for link in joined[1:]:
        if link.joined.schema != joined[0].joined.schema:  # type: ignore[union-attr]
            raise ValueError(f"the stores of {link.place} and {joined[0].place} have different schemas")


def _load_state(sampler: dr.Sampler, state: Mapping[str, Any]) -> None:
    sampler.load_state_dict(state)


def _errors(td_error: Any) -> NDArray[np.float64]:
    if isinstance(td_error, torch.Tensor):
        td_error = td_error.detach().cpu().double().numpy()
    errors = np.asarray(td_error, np.float64)
    if errors.ndim == 2 and errors.shape[1] == 1:
        errors = errors.reshape(-1)
    if errors.ndim not in (1, 2):
        raise ValueError(f"td_error must be (batch,), (batch, 1) or (batch, length), not shape {list(errors.shape)}")
    return errors


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be an int of at least {least}, not {value!r}")
    return int(value)
