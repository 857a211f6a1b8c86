"""The `Store` class: it opens a store on disk, reads it, maintains it and makes writers."""

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
from diskreplay.arguments import check_where, checked_limits, compression_level
from diskreplay.errors import Closed, MissingExtra, ReadOnlyError
from diskreplay.folders import shown_paths
from diskreplay.kernels.table import compile_all, get_kernel
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
from diskreplay.workers import fork_listeners
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


_alive = fork_listeners(lambda store: store._reset_after_fork())


def _call_each(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


class Store:
    """A replay store on disk. Made by `create` and `open`.

    Concurrency: any number of processes and threads may have one store open, and write to it through their own writers.
    A store object shows a snapshot. Methods that take a new snapshot, such as `refresh`, say so in their description;
    any thread may call these methods. A forked child may use the store, but not the writers that its parent made. A
    Store pickles as its path and mode.

    Examples
    --------
    >>> store = dr.open("cartpole.replay")
    >>> store.num_episodes, len(store) == sum(len(episode) for episode in store.episodes)
    (20, True)
    >>> worst = min(store.episodes, key=lambda episode: episode.total_reward)
    >>> worst.terminated
    True
    """

    @shown_paths
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
        self._is_closed, self._closer = False, 0  # `_closer` is the ident of the thread that is closing the store
        _alive.add(self)

    def _reset_after_fork(self) -> None:
        """Replace the objects that a thread of the parent process may have been using during the fork."""
        self._begin_maintenance()
        if self._follower is not None:
            self._follower.reset_after_fork()

    def _begin_maintenance(self) -> None:
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
        return Store, (str(self._root.path), self._mode)

    # --- reading -----------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The store's folder."""
        return self._root.path

    @property
    def uuid(self) -> str:
        """The identity of the store and of all its copies, made by `create`."""
        return self._root.uuid

    @property
    def schema(self) -> Schema:
        """The fields of each step and each episode."""
        return self._root.schema

    @property
    def capacity(self) -> int | None:
        """The maximum number of steps to keep; None: no limit."""
        return self._root.limits.capacity

    @property
    def mode(self) -> str:
        """The mode of the open store: "r" or "a"."""
        return self._mode

    @property
    def snapshot(self) -> Snapshot:
        """The store's state at the last refresh: every method that reads steps reads them from this snapshot."""
        # To save time, `_open_follower` is called only if the store is closed.
        return (self._follower or self._open_follower()).snapshot

    def __len__(self) -> int:
        return len(self.snapshot)

    @property
    def episodes(self) -> EpisodeList:
        """The episodes of the current snapshot with a visible step, oldest first, open ones included.

        Each episode is whole: it includes the steps that the capacity or the age limit hides. `Episode.hidden_steps`
        counts the hidden steps.
        """
        return EpisodeList(self.snapshot)

    @property
    def num_episodes(self) -> int:
        """The number of episodes in the current snapshot, open ones included."""
        return len(self.episodes)

    def refresh(self) -> int:
        """Take a new snapshot, and return the number of new visible steps."""
        return self._open_follower().refresh()[1]

    def newest_snapshot(self) -> Snapshot:
        """Take a new snapshot and return it."""
        return (self._follower or self._open_follower()).refresh()[0]

    def follow_compiled(self, also: Sequence[str] = ()) -> None:
        """Read new rows with a compiled kernel from now on, instead of plain Python; samplers call this.

        ``also`` has the names of further kernels to compile.
        """
        follower = self._open_follower()
        compile_all([follower.kernel_name, *also])
        follower.follow_with(get_kernel)
        self._is_compiled = True
        for writer in list(self._writers):
            self._compile_for(writer)

    def _compile_for(self, writer: object) -> None:
        if isinstance(writer, VectorWriter) and writer.num_envs > layout.CLOSE_LANES:
            compile_all([STEP_KERNEL])

    @shown_paths
    def info(self, progress: Callable[[int, int], None] | None = None, *, total_reward: bool = True) -> dict[str, Any]:
        """Refresh, and describe the store as ``diskreplay inspect --json`` prints it.

        Every step that was ever inserted is counted once: `steps_inserted` is the sum of `steps` (visible),
        `steps_hidden`, `steps_evicted`, `steps_discarded`, `steps_lost` and the `steps` of `quarantine`. Each entry of
        `segments` has these numbers for its segment, under the same keys. Episodes whose segment was evicted during the
        call are not counted.

        Parameters
        ----------
        progress : callable, optional
            ``progress(done, total)`` is called with numbers of bytes: of the rewards that were read so far, and of all
            rewards.
        total_reward : bool
            Whether to sum the rewards of every episode. If False, `total_reward` is None.
        """
        follower = self._open_follower()
        return store_info(self._root, follower, progress, total_reward)

    @property
    def quarantine(self) -> list[Quarantined]:
        """The data that repairs and recoveries have set aside, sorted by path."""
        return read_quarantine(self._root.folder)

    @shown_paths
    def repair(
        self,
        dry_run: bool = False,
        foreign: bool = False,
        salvage: bool = False,
        restore: int | None = None,
        max_lost_steps: int | None = None,
    ) -> "list[Action]":
        """Repair the store on disk, and return the actions that were taken.

        This object shows the result of the repair after the next `refresh`.

        Parameters
        ----------
        dry_run : bool
            Change nothing, and return the actions that would be taken.
        foreign : bool
            Also seal segments that another machine wrote. You must know that their writer is dead: this machine cannot
            check it.
        salvage : bool
            Also keep steps that no mark proves, as far as their flags are valid. These steps may have wrong bytes.
        restore : int, optional
            The number of a segment to bring back from quarantine. With this argument, nothing else is repaired.
        max_lost_steps : int, optional
            Leave a segment as it is if its repair would set aside more steps than this. None: no limit.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        StoreNotFound
            The store was deleted or moved, or another store is at its path.
        ReplayError
            The segment to restore is not in quarantine, is still damaged, or another segment is in its place.
        StoreLocked
            Another process held the store's lock for a minute.
        """
        if not dry_run:
            self._check_writable("repair")
            self._root.check_still_there()
        from diskreplay.integrity.repair.repair import repair as repair_store  # few processes need this import

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
        """Check the store on disk, and return a list of problems.

        The call checks the structure and file sizes. The call compares the metadata to the schema, and the flags to the
        counters. With ``deep``, the call also compares every sealed chunk with its checksum. Writers may append
        meanwhile. See docs/repair.md.
        """
        from diskreplay.integrity.verify.verify import verify  # few processes need this import

        return verify(self._root.home, deep=deep, progress=progress)

    @shown_paths
    def backup(
        self, path: PathLike, progress: Callable[[int, int], None] | None = None, *, link: bool = True
    ) -> "Backup":
        """Copy the store consistently to a path, and return a description of the copy; writers may append meanwhile.

        The copy is the store at one moment of this call. Each lane of the copy ends at some step, and has at least all
        steps that were committed before the call. Ids, priorities, saved states and limits are the same as in the
        store. The copy appears at its path when it is complete. Episodes that were open at that moment are cut in the
        copy. The store lock is held while counters are read and small files are copied; a writer that needs the lock
        waits.

        The checksums of sealed segments are verified in the copy. Damaged segments are copied unchanged and listed in
        `problems` of the result. If a call is interrupted or the disk is full, the copied files stay in a hidden folder
        next to the path, ``.NAME.backup``. The next call with the same path continues with these files.

        Parameters
        ----------
        path : path
            The folder of the new store; it must not exist.
        progress : callable, optional
            ``progress(done, total)`` is called now and then, with numbers of bytes.
        link : bool
            Whether sealed segments of the store and of the copy may share disk blocks or files, if the file system
            supports this. Sharing takes no time and no space, but damage of the disk then affects both the store and
            the copy.

        Raises
        ------
        StoreExists
            Something is at the path, or an unfinished backup of another store is next to it.
        StorageFull
            The disk is full. A repeated call continues where this call stopped.
        StoreLocked
            Another process makes a backup at this path, or held the store lock for a minute.
        ReadOnlyError
            The operating system does not let this process take the store lock.
        ValueError
            The path is inside the store.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        self._open_follower()
        from diskreplay.integrity.backup.backup import back_up  # few processes need this import

        return back_up(self._root, path, link=link, progress=progress)

    @shown_paths
    def compact(
        self,
        compression: str | tuple[str, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
        *,
        dry_run: bool = False,
        only_compress: bool = False,
    ) -> dict[str, int]:
        """Merge sealed segments into packs, and return the result; other processes may use the store meanwhile.

        A pack is a segment with the rows of many segments. After the merging, a store of many short segments opens
        faster, needs fewer files, and is sampled as fast as a store of few segments. Users see no change: ids,
        episodes, priorities and saved states stay, and samplers continue. Episodes that were evicted by hand are
        deleted from the disk, except for their flags and times.

        Damaged segments and segments that are still written are not merged. Segments that fill more than half of a pack
        are only merged to compress them. A pack holds at most a sixteenth of the capacity, because a pack is evicted as
        a whole. Merged segments are deleted when their pack is complete and durable. During the merge, the disk needs
        room for the segments and their pack.

        Parameters
        ----------
        compression : "zstd" or ("zstd", level), optional
            The compression of fields of at least 256 bytes per step, as in `create`. None: the compression of the
            store.
        progress : callable, optional
            ``progress(done, total)`` is called now and then, with numbers of bytes on disk.
        dry_run : bool
            Change nothing, and return the numbers of a real call; only ``bytes_after`` is 0.
        only_compress : bool
            Only compress: segments and packs that have nothing to compress stay as they are.

        Returns
        -------
        dict
            ``segments`` and ``steps``: the numbers of merged segments and of their steps. ``bytes_before`` and
            ``bytes_after``: the bytes on disk before and after the merge. All numbers are 0 if there was nothing to
            merge.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        MissingExtra
            ``compression`` needs zstandard, which is not installed.
        StorageFull
            The disk has no room for a pack; the segments stay as they are.
        StoreLocked
            Another process compacts the store, or held the store lock for a minute.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        follower = self._open_follower()
        if not dry_run:
            self._check_writable("compact")
        from diskreplay.writing.merging.compaction import Compaction  # few processes need this import

        level = self._root.compression if compression is None else compression_level(compression)
        retention = Retention(self._root, self._counters) if dry_run else self._retention
        compaction = Compaction(self._root, self._counters, retention, level, only_compress=only_compress)
        done = compaction.plan() if dry_run else compaction.run(progress)
        follower.refresh()
        return done._asdict()

    @shown_paths
    def evict(self, where: Callable[[Episode], bool]) -> int:
        """Evict the episodes for which a predicate is true, and return the number of their steps.

        The predicate is called for every episode with a visible step in a sealed segment. An episode is evicted as a
        whole, and the result counts all its steps, hidden ones included.

        The evicted episodes disappear at once, here and in every process that refreshes. If the call fails or the
        calling process dies, either all of these episodes are evicted or none. A segment is deleted when all its steps
        are evicted or hidden. If a sampler has already drawn the ids of a batch, the sampler still delivers the batch.
        The priorities of evicted steps are deleted, and later updates of these priorities are skipped.

        Parameters
        ----------
        where : callable
            ``where(episode)`` returns True to evict, such as ``lambda e: e["policy_version"][0] < 10``.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            ``where`` is not callable.
        StorageFull
            The disk has no room for the list of evictions; nothing is evicted.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        follower = self._open_follower()
        self._check_writable("evict")
        check_where(where)
        return evict(follower, self._retention, where)

    @shown_paths
    def resize(
        self,
        *,
        capacity: int | EllipsisType | None = ...,
        capacity_bytes: int | EllipsisType | None = ...,
        max_age_s: float | EllipsisType | None = ...,
    ) -> None:
        """Change the limits of the store, for every process that has it open.

        Steps that exceed a smaller limit are hidden at the next refresh. Hidden steps stay on disk until their whole
        segment is deleted. A larger limit does not bring hidden steps back. Open writers keep the segment size that
        they started with.

        Parameters
        ----------
        capacity, capacity_bytes, max_age_s : optional
            As for `create`; None: no limit. An omitted limit stays as it is.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            A number is out of range, or no limit is given.
        StorageFull
            The disk has no room for the new metadata; nothing is changed.
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

    @shown_paths
    def save_sampler_state(self, name: str, tree: Any) -> None:
        """Save nested dicts and lists of numbers, texts and arrays under a name.

        Raises the errors of `Sampler.save`.
        """
        self._check_writable("save a sampler's state")
        write_state(self._root, name, tree)

    @shown_paths
    def load_sampler_state(self, name: str) -> Any:
        """Return the value that was last saved under a name; raises the errors of `Sampler.load`."""
        return read_state(self._root, name)

    @shown_paths
    def delete_sampler_state(self, name: str) -> None:
        """Delete the state that samplers saved under a name (`Sampler.save`).

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        StoreNotFound
            Nothing is saved under the name, or the store was deleted or replaced since it was opened.
        """
        self._check_writable("delete a sampler's state")
        delete_state(self._root, name)

    @shown_paths
    def write_note(self, name: str, value: Any) -> None:
        """Save a JSON value as the note ``name``, and replace an earlier note of this name.

        A note can say, for example, where the data come from. Notes do not affect the store. The note is durable when
        the call returns.

        Raises
        ------
        ReadOnlyError
            The store was opened with mode "r".
        ValueError
            The name is invalid, or the value is not JSON or larger than 64 MiB.
        StorageFull
            The disk is full; the old note is untouched.
        StoreNotFound
            The store was deleted or replaced since it was opened.
        """
        self._check_writable("write a note")
        write_note(self._root, name, value)

    @shown_paths
    def read_note(self, name: str) -> Any:
        """Return the value that `write_note` last saved under a name; None if there is no note of this name.

        Raises
        ------
        FormatError
            The note is damaged.
        """
        return read_note(self._root, name)

    @property
    def texts(self) -> dict[str, list[str]]:
        """The texts of imported fields, as a list for each field.

        The integers of a field are indices into the field's list. For example,
        ``store.texts["split"][store.episodes[0]["split"]]`` is the split of an episode. LeRobot's ``task_index`` is an
        index into ``texts["task"]``.
        """
        found: dict[str, list[str]] = self.read_note("texts") or {}
        return found

    @shown_paths
    def note_names(self) -> list[str]:
        """Return the names of all saved notes, sorted."""
        return note_names(self._root)

    @shown_paths
    def episode_table(self, progress: Callable[[int, int], None] | None = None) -> dict[str, NDArray[Any]]:
        """Return the properties of all episodes as columns, oldest episode first: id, segment, lane, length, ...

        ``progress(done, total)`` is called with numbers of bytes: of the rewards that were read so far, and of all
        rewards.
        """
        return episode_table(self.snapshot, progress)

    @shown_paths
    def to_numpy(self) -> dict[str, Any]:
        """Return everything in the current snapshot as arrays in memory, oldest episode first.

        N is the number of steps of all episodes in `Store.episodes`. N includes the hidden steps of these episodes, so
        N may be larger than ``len(store)``.

        Returns
        -------
        dict
            The columns of N steps:

            - the fields, nested as in the schema, (N, ...);
            - `terminated` and `truncated`, (N,) bool;
            - `id`, (N,) int64;
            - `time`, (N,) float64, seconds since the epoch;
            - `episode`, (N,) int64, the index of the episode in `Store.episodes`;
            - `step`, (N,) int64, the index of the step in its episode;
            - `hidden`, (N,) bool, whether the capacity or the age limit hides the step from samplers. The column is
              called `is_hidden` if an extra field is called `hidden`.

            If a field has the same name as another column, the key of the field is its path, such as `extra/id` or
            `episode/length`. The observation that a step led to is the next step's observation, or the final
            observation after an episode's last step.

            Under `episodes`, the columns of E episodes: `id`, `length`, `hidden_steps`, `total_reward`, `ended`, (E,);
            `final_obs`, nested (E, ...); and the episode fields. `final_obs` and the episode fields are masked arrays,
            as an episode may lack a value.

        Raises
        ------
        SegmentGone
            A segment was evicted since the snapshot: refresh, and call this again.
        """
        return tables.to_numpy(self.snapshot)

    @shown_paths
    def to_pandas(self) -> "pandas.DataFrame":
        """Return the steps of the current snapshot as a data frame, indexed by `episode` and `step`.

        The data frame has the columns of `to_numpy`, without `episodes`. Each element of a vector of up to 64 elements
        has its own column, such as `obs[0]`; a larger field is a column of arrays. A nested field has a name such as
        `obs.image`, and an extra field called `id` has the name `extra.id`. ``pandas.DataFrame(store.episode_table())``
        is a data frame of the episodes.

        Raises
        ------
        MissingExtra
            pandas is not installed.
        SegmentGone
            As for `to_numpy`.
        """
        return tables.to_pandas(self.snapshot)

    @shown_paths
    def to_xarray(self) -> "xarray.Dataset":
        """Return everything in the current snapshot as a data set with the dimensions `step` and `episode`.

        Further dimensions are named as in the arrays on disk, such as `obs_0`. An episode may lack its final
        observation or the value of an episode field. For a variable such as `final_obs`, a second variable,
        `has_final_obs`, tells which episodes have the value. See `to_numpy`.

        Raises
        ------
        MissingExtra
            xarray is not installed.
        SegmentGone
            As for `to_numpy`.
        """
        return tables.to_xarray(self.snapshot)

    @shown_paths
    def to_ray_dataset(
        self, *, where: Callable[[Episode], bool] | None = None, fields: Sequence[str] | None = None
    ) -> "ray.data.Dataset":
        """Return the steps of the current snapshot as a dataset of Ray Data with one row per step.

        The dataset has the columns of `to_pandas`, including `episode` and `step`. Arrays are tensors: ``obs`` has the
        shape of the field. This call reads no steps: Ray's tasks read them later, on the caller's machine. Each task
        reads several small segments, or a part of a large segment, and yields blocks of up to 32 MiB. The rows of an
        episode are in order inside a block. Ray's execution options decide the order of blocks.

        Parameters
        ----------
        where : callable, optional
            A function of an episode: the dataset has the steps of episodes for which it returns True. The function is
            pickled, as Ray's tasks call it.
        fields : sequence of str, optional
            The columns: "obs" stands for all leaves of the observation, "obs.image" for one leaf, "..." for all
            columns. The column "next_obs" has the observation that a step led to: it is included only if it is named.
            With "next_obs", the last step of an episode without a final observation is left out.

        Raises
        ------
        MissingExtra
            Ray Data is not installed.
        SchemaError
            A named column does not exist.
        ValueError
            `where` is not callable, or `fields` is a single str.
        SegmentGone
            In a task: a segment was evicted since the snapshot.
        """
        with MissingExtra.raised_for("a dataset of Ray", "ray"):
            from diskreplay.store.ray_dataset import to_ray_dataset

        if where is not None:
            check_where(where)
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
        """Return a writer for one environment, or for ``num_envs`` environments that step together.

        Parameters
        ----------
        num_envs : int, optional
            The number of environments. None: one environment, whose arrays have no leading axis.
        durability : float, "episode" or "none"
            Which steps of an open writer can be lost in a power loss, or if the store is copied or moved to another
            disk. With every value, appended steps are visible to all processes at once, and survive the death
            of any process.

            - a number n of seconds: the steps of the last n seconds, because a background thread makes older steps
              durable;
            - ``"episode"``: steps of open episodes, because the call that ends an episode waits for the disk. If the
              disk is full, this call returns, and the next one waits, or raises StorageFull;
            - ``"none"``: all steps outside sealed segments.
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
            raise ValueError(f"num_envs must be from 1 to {layout.MAX_LANES}, not {num_envs!r}")
        attached = None if limiter is None else limiter.attach(self)
        episodes = EpisodeWriter(self._root, int(lanes), self._retention, self._sealer)
        kind = Writer if num_envs is None else VectorWriter
        checks = checks_of(self.schema, self._root.validate)
        writer = kind(self.schema, episodes, durability, self, attached, self._marker, checks)
        self._writers.add(writer)
        if self._is_compiled:
            self._compile_for(writer)
        return writer

    @shown_paths
    def close(self) -> None:
        """Close the store's writers and wait until their segments are sealed. Closing twice is allowed.

        If a call is interrupted, call `close` again to complete it.
        """
        if self._is_closed or self._closer == threading.get_ident():
            return  # the store is closed, or a signal handler has interrupted this thread inside `close`
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
        # A signal handler may call this method during a call of a writer. The writer closes at the end of this call
        # (``closes_later``), and the next `close` of the store completes the closing.
        if not any(writer.closes_later for writer in self._writers):
            errors += self._finish([seal_dropped, *background])
            self._counters.close()
            # The folder stays open, because snapshots and their episodes still read from it.
            self._root = dataclasses.replace(self._root, home=self._root.home.closed())
            self._begin_maintenance()
            self._is_closed = True
        if errors:
            raise errors[0]

    @staticmethod
    def _finish(parts: Iterable[Callable[[], None]]) -> list[Exception]:
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
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
