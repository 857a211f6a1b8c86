"""The store: create it, open it, look at it, write to it."""

import dataclasses
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
from numpy.typing import NDArray

from diskreplay import markup
from diskreplay.arguments import checked_limits, compression_level
from diskreplay.errors import Closed, MissingExtra, ReadOnlyError
from diskreplay.folders import shown_paths
from diskreplay.kernels.table import chosen, compile_all
from diskreplay.reading.episodes import Episode, EpisodeList
from diskreplay.reading.follower import Follower
from diskreplay.reading.known_segments import warn_of_quarantine
from diskreplay.reading.snapshot import Snapshot
from diskreplay.retention.retention import Retention
from diskreplay.schema.schema import Schema
from diskreplay.segments.damage.quarantine import Quarantined, read_quarantine
from diskreplay.segments.documents import layout
from diskreplay.segments.documents.root import read_root
from diskreplay.segments.documents.state_files import (
    delete_state,
    note_names,
    read_note,
    read_state,
    write_note,
    write_state,
)
from diskreplay.segments.files.durable import warn_of
from diskreplay.store import tables
from diskreplay.store.eviction import evict, hidden_before
from diskreplay.store.info import episode_table, store_info
from diskreplay.workers import told_of_forks
from diskreplay.writing.casting import checks_of
from diskreplay.writing.episode_writer import EpisodeWriter
from diskreplay.writing.lifetime import seal_dropped
from diskreplay.writing.limiter import RateLimiter
from diskreplay.writing.marker import Durability, Marker, check_durability
from diskreplay.writing.merging.background import BackgroundCompaction
from diskreplay.writing.sealer import Sealer
from diskreplay.writing.vector_writer import STEP_KERNEL, VectorWriter
from diskreplay.writing.writer import Writer

if TYPE_CHECKING:
    import pandas
    import ray.data
    import xarray

    from diskreplay.integrity.backup.copying import Backup
    from diskreplay.integrity.repair.remedies import Action
    from diskreplay.integrity.verify.verify import Problem

PathLike = str | os.PathLike[str]


_alive = told_of_forks(lambda store: store._reset_after_fork())


def _call_each(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


class Store:
    """A replay store on disk. Made by `create` and `open`.

    Concurrency: any number of processes and threads may have one store open, and write to it through writers of their
    own. What this object shows changes only by `refresh`, and by calls that refresh; any thread may make them. A forked
    child may go on using it, but not the writers made by its parent. A Store pickles as its path and mode.
    """

    @shown_paths()
    def __init__(self, path: PathLike, mode: Literal["r", "a"] = "r") -> None:
        if mode not in ("r", "a"):
            raise ValueError(f'mode is "r" or "a", not {mode!r}')
        self._root = read_root(Path(path).absolute())
        warn_of(self._root.file_system, self._root.path, self._root.uuid)
        self._mode = mode
        try:
            self._counters = self._root.counters(writable=mode == "a")
            self._writers: weakref.WeakSet[Any] = weakref.WeakSet()
            self._is_compiled = False
            self._begin_maintenance()
            if mode == "a":
                self._seal_dead()
                warn_of_quarantine(self._root)
                self._retention.reserve_entries()
        except OSError as error:
            if mode == "r" or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            raise ReadOnlyError(
                f'{self.path} cannot be written ({error.strerror}: {error.filename}); open it with mode "r", or let '
                "this user write there"
            ) from error
        self._follower: Follower | None = Follower(self._root, self._counters)
        self._is_closed, self._closer = False, 0  # the thread that closes it
        _alive.add(self)

    def _reset_after_fork(self) -> None:
        """Use nothing, in a forked child, that another thread may have been in the middle of: that is not here."""
        self._begin_maintenance()
        if self._follower is not None:
            self._follower.reset_after_fork()

    def _begin_maintenance(self) -> None:
        """Make what seals, marks, merges and evicts, if it is open to write."""
        if self._mode == "r":
            return
        self._retention = Retention(self._root, self._counters)
        self._marker = Marker(self._root)
        self._compaction = BackgroundCompaction(self._root, self._counters, self._retention.is_making_pack)
        after = [self._retention.after_sealing]
        if self._root.compacts:
            after.append(self._compaction.note_sealed)
        self._sealer = Sealer(self._root, partial(_call_each, after), self._marker)

    def _seal_dead(self) -> None:
        while dead := self._retention.dead_segments():
            for info, lock in dead:
                self._sealer.submit(info, lock, of_dead_writer=True)

    def __repr__(self) -> str:
        """Say where the store is and how much this object sees of it."""
        steps = "closed" if self._follower is None else f"steps={len(self)}"
        return f"Store({str(self.path)!r}, mode={self._mode!r}, {steps})"

    def _repr_html_(self) -> str:
        said: dict[str, object] = {"path": self.path, "mode": self._mode, "uuid": self.uuid}
        if self._follower is None:
            said["steps"] = "closed"
        else:
            said |= {"steps": f"{len(self):,}", "episodes": f"{self.num_episodes:,}"}
        said |= {name: f"{limit:,}" for name, limit in vars(self._root.limits).items() if limit is not None}
        facts = markup.facts({name: markup.text(value) for name, value in said.items()})
        title = markup.element("strong", markup.text("Store"))
        return markup.element("div", title, facts, markup.Html(self.schema._repr_html_()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as path and mode."""
        return Store, (str(self._root.path), self._mode)

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The store's folder."""
        return self._root.path

    @property
    def uuid(self) -> str:
        """The store's identity, made by `create`: copies of a store have the same."""
        return self._root.uuid

    @property
    def schema(self) -> Schema:
        """What one step and one episode hold."""
        return self._root.schema

    @property
    def capacity(self) -> int | None:
        """The most steps the store keeps; None: all."""
        return self._root.limits.capacity

    @property
    def mode(self) -> str:
        """How it was opened: "r" or "a"."""
        return self._mode

    @property
    def snapshot(self) -> Snapshot:
        """The frozen state that everything here is read from."""
        # By the attribute, as in `newest_snapshot`.
        return (self._follower or self._open_follower()).snapshot

    def __len__(self) -> int:
        """Return the number of steps in the current snapshot."""
        return len(self.snapshot)

    @property
    def episodes(self) -> EpisodeList:
        """The episodes of the current snapshot that have a visible step, oldest first, open ones included.

        Each is whole, with the steps that a capacity or an age hides: `Episode.hidden_steps` counts them.
        """
        return EpisodeList(self.snapshot)

    @property
    def num_episodes(self) -> int:
        """The number of episodes in the current snapshot, open ones included."""
        return len(self.episodes)

    def refresh(self) -> int:
        """Take a new snapshot; return how many steps became visible with it."""
        return self._open_follower().refresh()[1]

    def newest_snapshot(self) -> Snapshot:
        """Take a new snapshot and return it."""
        # By the attribute: this is asked for at every batch.
        return (self._follower or self._open_follower()).refresh()[0]

    def follow_compiled(self, also: Sequence[str] = ()) -> None:
        """Follow what is written with compiled code from now on, as samplers do; without it, with its plain twin.

        Other kernels are compiled `also`.
        """
        follower = self._open_follower()
        compile_all([follower.kernel_name, *also])
        follower.follow_with(chosen)
        self._is_compiled = True
        for writer in list(self._writers):
            self._compile_for(writer)

    def _compile_for(self, writer: object) -> None:
        """Have a writer use compiled code too, where it has so many lanes that it is of use."""
        if isinstance(writer, VectorWriter) and writer.num_envs > layout.CLOSE_LANES:
            compile_all([STEP_KERNEL])

    @shown_paths()
    def info(self, progress: Callable[[int, int], None] | None = None, *, total_reward: bool = True) -> dict[str, Any]:
        """Describe the store as it is now: what ``diskreplay inspect --json`` prints. It refreshes.

        Every step that was ever inserted is in one class, and `steps_inserted` is the sum of `steps` (the visible
        ones), `steps_hidden`, `steps_evicted`, `steps_discarded`, `steps_lost` and the `steps` of `quarantine`. The
        rows of `segments` have the same keys. Episodes whose segment has left meanwhile are not counted.

        Parameters
        ----------
        progress : callable, optional
            Called with how many bytes of rewards have been read, and of how many.
        total_reward : bool
            Whether to sum the rewards of every episode; if not, `total_reward` is None.
        """
        follower = self._open_follower()
        return store_info(self._root, follower, progress, total_reward)

    @property
    def quarantine(self) -> list[Quarantined]:
        """What repair or a recovery has set aside, by path: each with segment, steps, reason, since and where."""
        return read_quarantine(self._root.folder)

    @shown_paths()
    def repair(
        self,
        dry_run: bool = False,
        foreign: bool = False,
        salvage: bool = False,
        restore: int | None = None,
        max_lost_steps: int | None = None,
    ) -> "list[Action]":
        """Repair the store on disk, and return what was done; what this object shows changes with the next `refresh`.

        Parameters
        ----------
        dry_run : bool
            Change nothing, and return what would be done.
        foreign : bool
            Seal also segments that another machine wrote, whose writer must be dead: that cannot be seen from here.
        salvage : bool
            Take also the steps that no mark proves, as far as their flags are whole; their bytes may be torn.
        restore : int, optional
            Only bring back this segment from quarantine.
        max_lost_steps : int, optional
            Leave a segment as it is where more steps than this would have been set aside with it. None: no limit.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        StoreNotFound
            It was deleted or moved, or another store is at its path.
        ReplayError
            The segment to restore is not in quarantine, is still damaged, or has no place.
        StoreLocked
            Another process held the store's lock for a minute.
        """
        if not dry_run:
            self._check_writable("repair")
            self._root.check_still_there()
        from diskreplay.integrity.repair.repair import repair as repair_store  # a process that appends does without

        repaired = repair_store(
            self._root.home,
            dry_run=dry_run,
            foreign=foreign,
            salvage=salvage,
            restore=restore,
            max_lost_steps=max_lost_steps,
        )
        return repaired.actions

    def verify(self, deep: bool = False, progress: Callable[[int, int], None] | None = None) -> "list[Problem]":
        """Look for what is wrong with the store on disk; empty where nothing is.

        Structure, sizes, metadata against the schema, flags against counters, and with ``deep`` the checksums of every
        sealed chunk. It may be written meanwhile. See docs/durability.md.
        """
        from diskreplay.integrity.verify.verify import verify  # as above

        return verify(self._root.home, deep=deep, progress=progress)

    @shown_paths()
    def backup(
        self, path: PathLike, progress: Callable[[int, int], None] | None = None, *, link: bool = True
    ) -> "Backup":
        """Make a consistent copy of the store at a path, while others write and evict, and return what was made.

        The copy is the store as it is at one moment of this call: every lane up to a step, among them all that was
        committed before the call, with the same ids, priorities, saved states and limits. It is complete when it
        appears at its path, and as if every writer had died at that moment: open episodes are cut ones there. Writers
        wait while the store lock is held, for no longer than it takes to read counters and copy small files.

        The checksums of sealed segments are read, of the copy. What is damaged is copied as it is, and named in
        `problems` of the result. A call that is interrupted, or finds the disk full, leaves what it has copied in a
        hidden folder beside the path, ``.NAME.backup``; the same call goes on from there.

        Parameters
        ----------
        path : path
            The folder of the new store; nothing may be there.
        progress : callable, optional
            ``progress(done, total)`` is called now and then, with bytes.
        link : bool
            Whether files of sealed segments may share their blocks with the copy, or be hard links, where the file
            system can: that takes no time and no space, and damage of the disk is damage of both.

        Raises
        ------
        StoreExists
            Something is at the path, or an unfinished backup of another store beside it.
        StorageFull
            There is no room; the same call goes on when there is.
        StoreLocked
            Another process makes a backup at this path, or held the store lock for a minute.
        ReadOnlyError
            The system lets this process not take the store lock.
        ValueError
            The path is inside the store.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        self._open_follower()
        from diskreplay.integrity.backup.backup import back_up  # as above

        return back_up(self._root, path, link=link, progress=progress)

    @shown_paths()
    def compact(
        self,
        compression: str | tuple[str, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """Merge sealed segments into packs, while others write, read and evict, and return what was done.

        A pack is a segment with the rows of many: a store of many short segments opens faster, needs fewer files, and
        is sampled like one of few. Nothing that users see changes: ids, episodes, priorities and saved states stay, and
        samplers go on. Episodes that were evicted by hand leave the disk, apart from their flags and times.

        Segments that are being written, that fill half of a pack, or that are damaged are left as they are. A pack
        holds at most a sixteenth of the capacity, as it leaves as a whole. Segments whose rows are in a pack are
        deleted when it is complete and durable; until then, the disk has to have room for both.

        Parameters
        ----------
        compression : "zstd" or ("zstd", level), optional
            How fields of at least 256 bytes a step are compressed, as in `create`. None: as the store was made.
        progress : callable, optional
            ``progress(done, total)`` is called now and then, with bytes on disk.
        dry_run : bool
            Change nothing, and return what would be merged; ``bytes_after`` is 0 then.

        Returns
        -------
        dict
            ``segments`` that were merged, their ``steps``, and the bytes on disk of these, ``bytes_before`` and
            ``bytes_after``. Zeros where there was nothing to merge.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        MissingExtra
            zstandard is needed, and not installed.
        StorageFull
            There is no room for a pack; the segments stay as they are.
        StoreLocked
            Another process compacts the store, or held the store lock for a minute.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        follower = self._open_follower()
        if not dry_run:
            self._check_writable("compact")
        from diskreplay.writing.merging.compaction import Compaction  # as above

        level = self._root.compression if compression is None else compression_level(compression)
        retention = Retention(self._root, self._counters) if dry_run else self._retention
        compaction = Compaction(self._root, self._counters, retention, level)
        done = compaction.plan() if dry_run else compaction.run(progress)
        follower.refresh()
        return done._asdict()

    @shown_paths()
    def evict(self, where: Callable[[Episode], bool]) -> int:
        """Evict by hand the episodes for which a predicate is true, and return how many steps that were.

        It is asked about every episode with a visible step in a sealed segment: one that no writer appends to any more.
        An episode is whole, leaves whole, and all of its steps count, also those that a capacity hides. What it chooses
        is gone at once, here and in every process that refreshes, all of it or, where this call fails or its process
        dies, nothing. Bytes are deleted when a whole segment is evicted or hidden. Samplers keep the batches that they
        have planned; priorities of evicted steps are gone, and later updates of them are skipped.

        Parameters
        ----------
        where : callable
            ``where(episode)`` is true for what has to leave, such as ``lambda e: e["policy_version"][0] < 10``.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            ``where`` is no function.
        StorageFull
            There is no room for a list of them; nothing is evicted.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        follower = self._open_follower()
        self._check_writable("evict")
        if not callable(where):
            raise ValueError(f"where must be a function of an episode, not {where!r}")
        return evict(follower, self._retention, where)

    @shown_paths()
    def resize(
        self,
        *,
        capacity: int | EllipsisType | None = ...,
        capacity_bytes: int | EllipsisType | None = ...,
        max_age_s: float | EllipsisType | None = ...,
    ) -> None:
        """Change what the store keeps at most, for every process that has it open.

        What is more than a smaller limit allows is hidden at the next refresh, and deleted as whole segments.
        What is hidden does not come back by a larger one. Writers aim at segments of the size that they began with.

        Parameters
        ----------
        capacity, capacity_bytes, max_age_s : optional
            As for `create`, None for no limit. Those that are left out stay as they are.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            A number is out of its range, or none is given.
        StorageFull
            There is no room for the new metadata; nothing is changed.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        follower = self._open_follower()
        self._check_writable("resize")
        given = {"capacity": capacity, "capacity_bytes": capacity_bytes, "max_age_s": max_age_s}
        given = {name: value for name, value in given.items() if value is not ...}
        if not given:
            raise ValueError("resize changes capacity, capacity_bytes or max_age_s: give one of them")
        limits = checked_limits(**{**vars(self._root.limits), **given})
        self._retention.resize(limits, lambda: hidden_before(follower))
        follower.refresh()

    @shown_paths()
    def save_sampler_state(self, name: str, tree: Any) -> None:
        """Save a tree of numbers, texts and arrays under a name; what `Sampler.save` does. Raises as that does."""
        self._check_writable("save a sampler's state")
        write_state(self._root, name, tree)

    @shown_paths()
    def load_sampler_state(self, name: str) -> Any:
        """Return the tree that was saved last under a name; raises as `Sampler.load` does."""
        return read_state(self._root, name)

    @shown_paths()
    def delete_sampler_state(self, name: str) -> None:
        """Delete the state that samplers have saved under a name (`Sampler.save`).

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        StoreNotFound
            Nothing is saved under it, or the store was deleted or replaced since it was opened.
        """
        self._check_writable("delete a sampler's state")
        delete_state(self._root, name)

    @shown_paths()
    def write_note(self, name: str, value: Any) -> None:
        """Save a JSON value under a name, such as where the data come from; it replaces the one that is there.

        Notes are kept with the store and mean nothing to it. It is durable when this returns.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            The name is invalid, the value is not JSON, or has more than 64 MiB.
        StorageFull
            There is no room; the old note is untouched.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        self._check_writable("write a note")
        write_note(self._root, name, value)

    @shown_paths()
    def read_note(self, name: str) -> Any:
        """Return what `write_note` saved last under a name; None where there is nothing.

        Raises
        ------
        FormatError
            It is damaged.
        """
        return read_note(self._root, name)

    @property
    def texts(self) -> dict[str, list[str]]:
        """The texts that an import found, by the name of the field whose numbers are places in the list.

        ``store.texts["split"][store.episodes[0]["split"]]`` is a text. The numbers of LeRobot's ``task_index`` are
        places in ``texts["task"]``.
        """
        found: dict[str, list[str]] = self.read_note("texts") or {}
        return found

    @shown_paths()
    def note_names(self) -> list[str]:
        """Return the names under which notes are saved, in order."""
        return note_names(self._root)

    @shown_paths()
    def episode_table(self, progress: Callable[[int, int], None] | None = None) -> dict[str, NDArray[Any]]:
        """Return a column of each of the episodes' properties, oldest first: id, segment, lane, length, ...

        ``progress`` is called with how many bytes of rewards have been read, and of how many.
        """
        return episode_table(self.snapshot, progress)

    @shown_paths()
    def to_numpy(self) -> dict[str, Any]:
        """Return everything in the current snapshot as arrays in memory, the oldest episode first.

        Episodes are whole: N is the sum of their lengths, and not ``len(store)`` where steps are hidden.

        Returns
        -------
        dict
            Of N steps: the fields, nested as the schema is, (N, ...); `terminated` and `truncated`, (N,) bool; `id`,
            (N,) int64; `time`, (N,) float64, seconds since the epoch; `episode` and `step`, (N,) int64, the place of
            the episode in `Store.episodes`, and that of the step in it; `hidden`, (N,) bool, whether the capacity or
            the age limit hides the step from samplers, which is `is_hidden` where an extra field is called `hidden`.
            A field whose name another of these has is below its path, such as `extra/id` or `episode/length`.
            The observation that a step led to is that of the next one, or behind the last one of an episode its final
            observation. Below `episodes`, of E episodes: `id`, `length`, `hidden_steps`, `total_reward`, `ended`, (E,),
            `final_obs`, nested (E, ...), and the episode fields. The last two are masked arrays: an episode may lack
            them.

        Raises
        ------
        SegmentGone
            A segment was evicted since the snapshot: refresh, and call it again.
        """
        return tables.to_numpy(self.snapshot)

    @shown_paths()
    def to_pandas(self) -> "pandas.DataFrame":
        """Return the steps of the current snapshot as a data frame, indexed by `episode` and `step`.

        It has the columns of `to_numpy` but those of episodes. Elements of vectors of up to 64 are columns of their
        own, `obs[0]`; what is larger is a column of arrays. Nested fields are `obs.image`, and a field called `id` is
        `extra.id`. Of the episodes,
        ``pandas.DataFrame(store.episode_table())`` makes one.

        Raises
        ------
        MissingExtra
            pandas is not installed.
        SegmentGone
            As for `to_numpy`.
        """
        return tables.to_pandas(self.snapshot)

    @shown_paths()
    def to_xarray(self) -> "xarray.Dataset":
        """Return everything in the current snapshot as a data set with the dimensions `step` and `episode`.

        Further dimensions are named as in the arrays on disk, `obs_0`. Values that an episode may lack, `final_obs` and
        `episode_seed`, have a variable beside them that says which are there, `has_final_obs`. See `to_numpy`.

        Raises
        ------
        MissingExtra
            xarray is not installed.
        SegmentGone
            As for `to_numpy`.
        """
        return tables.to_xarray(self.snapshot)

    @shown_paths()
    def to_ray_dataset(
        self, *, where: Callable[[Episode], bool] | None = None, fields: Sequence[str] | None = None
    ) -> "ray.data.Dataset":
        """Return the steps of the current snapshot as a dataset of Ray Data, a row a step, which its tasks read.

        It has the columns of `to_pandas`, with `episode` and `step` among them, and arrays as tensors: ``obs`` has the
        shape of the field. Tasks read whole segments, several small ones or parts of a large one, on the machine of the
        caller, and yield blocks of up to 32 MiB; nothing is read here. Rows of an episode are in order inside a block,
        and blocks come as Ray's execution options say.

        Parameters
        ----------
        where : callable, optional
            A predicate over episodes: those whose steps are in it. Tasks ask it, so it is pickled.
        fields : sequence of str, optional
            The columns; "obs" is all below it, "obs.image" one leaf, "..." all columns. Only when it is named,
            "next_obs" is there: the observation that a step led to. A step that lacks it, the last one of an episode
            without a final observation, is left out then.

        Raises
        ------
        MissingExtra
            Ray Data is not installed.
        SchemaError
            There is no such column.
        ValueError
            `where` is no function, or `fields` a lone text.
        SegmentGone
            In a task: a segment was evicted since the snapshot.
        """
        with MissingExtra.raised_for("a dataset of Ray", "ray"):
            from diskreplay.store.ray_dataset import to_ray_dataset

        if where is not None and not callable(where):
            raise ValueError(f"where must be a function of an episode, not {where!r}")
        return to_ray_dataset(self.snapshot, self._root, where, fields)

    # --- writing -----------------------------------------------------------------------------------------------------

    @overload
    def writer(
        self, num_envs: None = None, *, durability: Durability = 5.0, limiter: RateLimiter | None = None
    ) -> Writer: ...
    @overload
    def writer(
        self, num_envs: int, *, durability: Durability = 5.0, limiter: RateLimiter | None = None
    ) -> VectorWriter: ...
    def writer(
        self, num_envs: int | None = None, *, durability: Durability = 5.0, limiter: RateLimiter | None = None
    ) -> Writer | VectorWriter:
        """Return a writer for one environment, or for ``num_envs`` of them that step together.

        Parameters
        ----------
        num_envs : int, optional
            The number of environments; None: one, whose arrays have no leading axis.
        durability : float, "episode" or "none"
            Appended steps are visible to all processes at once, and survive the death of any process. What a loss of
            power, a copy or a move to another disk can take of a writer that has not closed: a number of seconds, at
            most what was appended in the last so many, as a thread in the background makes the rest durable;
            ``"episode"``, nothing of an episode whose end was appended, as that call waits for the disk; ``"none"``,
            all that is not in a sealed segment.
        limiter : RateLimiter, optional
            Makes an append wait while the writers are too far ahead of the samplers with the same limiter.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        """
        self._check_writable("write")
        check_durability(durability)
        lanes = 1 if num_envs is None else num_envs
        if not isinstance(lanes, (int, np.integer)) or isinstance(lanes, bool) or not 1 <= lanes <= layout.MAX_LANES:
            raise ValueError(f"num_envs is from 1 to {layout.MAX_LANES}, not {num_envs!r}")
        attached = None if limiter is None else limiter.attach(self)
        episodes = EpisodeWriter(self._root, int(lanes), self._retention, self._sealer)
        kind = Writer if num_envs is None else VectorWriter
        checks = checks_of(self.schema, self._root.validate)
        writer = kind(self.schema, episodes, durability, self, attached, self._marker, checks)
        self._writers.add(writer)
        if self._is_compiled:
            self._compile_for(writer)
        return writer

    @shown_paths()
    def close(self) -> None:
        """Close the writers it made and wait until their segments are sealed. Closing twice is fine.

        One that is interrupted is completed by the next call.
        """
        if self._is_closed or self._closer == threading.get_ident():
            return  # the latter: a signal's handler, in the middle of this
        self._closer = threading.get_ident()
        try:
            self._close_now()
        finally:
            self._closer = 0

    def _close_now(self) -> None:
        if self._follower is not None:
            self._follower.close()
        self._follower = None
        background: list[Callable[[], None]] = []
        if self._mode == "a":
            self._compaction.stop_soon()
            background = [self._sealer.drain, self._compaction.stop]
        errors = self._finish([writer.close for writer in list(self._writers)])
        # Else this is a signal's handler in the middle of a call of a writer, which may hold locks: it does the rest.
        if not any(writer.closes_later for writer in self._writers):
            errors += self._finish([seal_dropped, *background])
            self._counters.close()
            # The folder stays open for those who still read from it: snapshots and their episodes.
            self._root = dataclasses.replace(self._root, home=self._root.home.closed())
            self._begin_maintenance()
            self._is_closed = True
        if errors:
            raise errors[0]

    @staticmethod
    def _finish(parts: Iterable[Callable[[], None]]) -> list[Exception]:
        """Call each, and return what they raised."""
        errors = []
        for part in parts:
            try:
                part()
            except Exception as error:
                errors.append(error)
        return errors

    def _check_writable(self, verb: str) -> None:
        self._open_follower()
        if self._mode != "a":
            raise ReadOnlyError(f'{self.path} was opened with mode "r"; open it with mode "a" to {verb}')

    def _open_follower(self) -> Follower:
        if self._follower is None:
            raise Closed(f"this store of {self._root.path} is closed; open it again")
        return self._follower

    def __enter__(self) -> Self:
        """Return the store."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the store."""
        self.close()
