"""Data sets of NumPy files: a folder with one ``.npz`` file for each episode, with all data of a store.

``dataset.json`` has the schema, as `docs/format.md` describes it, and the numbers of episodes and steps. A file
``episode-NNNNNNNN.npz`` has the arrays of one episode. Arrays have the names of paths of the schema, such as ``obs``,
``obs/image``, ``action``, ``reward``, ``extra/log_prob`` and ``episode/seed``. With a final observation, arrays of
observations have one row more than other arrays. The scalars ``terminated`` and ``truncated`` are both false if the
episode was cut. The array ``priority`` exists if steps were appended with priorities. If the episode has notes, the
array ``notes`` has the bytes of their JSON text in UTF-8.

An export marks hidden steps in the array ``hidden``. An import does not read this array.

NumPy files of other programs are imported, too: one file with the rows of all episodes, or a folder with a file for
each episode. In files of other programs, ``obs`` or ``observations``, ``actions``, ``rewards``, ``next_obs`` and
``dones`` have their usual meaning. Arrays with one value for each episode are episode fields, and other arrays are
extra fields.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from diskreplay import FormatError, SchemaError, Store, StoreNotFound
from diskreplay.bounded_json import parse_json
from diskreplay.interop.exchange.choosing import Options, check_option, is_in, lay_out
from diskreplay.interop.exchange.description import DescribedSource, describe, is_described
from diskreplay.interop.exchange.episode_data import (
    ACTION,
    EXTRA,
    FIELDS,
    HIDDEN,
    OBS,
    PRIORITY,
    REWARD,
    Arrays,
    EpisodeData,
    is_obs,
    is_part,
)
from diskreplay.interop.exchange.exporting import Exported, ExportOptions, Format, Plan, export_from
from diskreplay.interop.exchange.field_trees import leaves_of
from diskreplay.interop.exchange.foreign import NUMBERS, read_npz
from diskreplay.interop.exchange.importing import Given, Imported, Skipped, Source, import_into
from diskreplay.interop.step_values import as_flags

__all__ = ["export_dataset", "import_dataset"]

NAME = "npz"
_T = TypeVar("_T")
Ended = Literal["terminated", "truncated", "cut"]
Rows = dict[str, NDArray[Any]]
Ends = tuple[NDArray[np.bool_] | None, NDArray[np.bool_] | None]
_OWN = re.compile(r"episode-\d{8,}\.npz")
_TERMINATED, _TRUNCATED, _NOTES = "terminated", "truncated", "notes"


def import_dataset(
    source: str | PathLike[str],
    path: str | PathLike[str],
    *,
    starts: str | None = None,
    indices: str | None = None,
    ended: Ended = "truncated",
    terminated: str | None = None,
    truncated: str | None = None,
    **options: Unpack[Options],
) -> Imported:
    """Import NumPy files into a new store, or resume an interrupted import.

    Parameters
    ----------
    source : path
        A folder that `export_dataset` wrote, or files of other programs: one ``.npz`` file with the rows of all
        episodes, or a folder with an ``.npz`` file for each episode. Episodes are in the order of the files' names.
        Arrays with usual names, such as "obs", "actions" or "act", "rewards" or "rew", "next_obs", "dones",
        "terminated" and "truncated", have their usual meaning. Arrays with one row for each episode are episode fields,
        and other arrays are extra fields. For all other names, see the options.
    starts : str, optional
        In a file of all episodes, the name of the array that is true in the first row of each episode. The default is
        "episode_starts".
    indices : str, optional
        In a file of all episodes, the name of the array with one row number for each episode. This is the episode's
        first row, or the row after the last row.
    ended : {"truncated", "terminated", "cut"}
        How episodes ended. This applies if no array, such as "dones" or "terminals", tells it.
    terminated, truncated : str, optional
        The names of two arrays of flags. The array ``terminated`` is true at the last step of a terminated episode, and
        the array ``truncated`` at the last step of a truncated episode. The default is the first usual name that the
        data set has.
    path : path
        The path of the store. Nothing may exist at this path, except an interrupted import of this folder.
    **options
        The features to import, with their leaves and dtypes: see `Options`.

    Raises
    ------
    StoreNotFound
        There is no such data set.
    FormatError
        The data set cannot be read.
    SchemaError
        An option names an array that does not exist, or does not apply to this data set.
    StoreExists
        Something else is at ``path``.
    """
    check_option("ended", ended, get_args(Ended))
    told = _Told(starts, indices, ended, terminated, truncated)
    return import_into(path, source, partial(_open, told), options)


def export_dataset(
    store_or_path: Store | str | PathLike[str],
    path: str | PathLike[str],
    **options: Unpack[ExportOptions],
) -> Exported:
    """Export the ended episodes of a store to a folder of NumPy files.

    Parameters
    ----------
    store_or_path : Store or path
        The store to export, or its path.
    path : path
        The path of the new folder. Nothing may exist at this path.
    **options
        Leaves, names, dtypes and episodes of the data set: see `ExportOptions`.

    Raises
    ------
    StoreExists
        Something is at ``path``.
    """
    made = Format({}, _write, marks_hidden=True)
    return export_from(store_or_path, path, lambda *_: made, options)


class _DataSet(DescribedSource):
    format = NAME

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        names = {*wanted, _TERMINATED, _TRUNCATED, PRIORITY, _NOTES}
        for number in range(first, self.episodes):
            yield _episode(read_npz(self.place / _file(number), names.__contains__))


def _episode(values: dict[str, NDArray[Any]]) -> EpisodeData:
    terminated, truncated = bool(values.pop(_TERMINATED)), bool(values.pop(_TRUNCATED))
    priority, notes = values.pop(PRIORITY, None), values.pop(_NOTES, None)
    return EpisodeData(
        {path: rows for path, rows in values.items() if not is_part(path, FIELDS)},
        terminated,
        truncated,
        {path: value for path, value in values.items() if is_part(path, FIELDS)},
        priority,
        None if notes is None else parse_json(notes.tobytes()),
    )


def _write(plan: Plan, episodes: Iterable[EpisodeData]) -> None:
    plan.path.mkdir()
    for number, episode in enumerate(episodes):
        values = {**episode.steps, **episode.fields}
        values |= {_TERMINATED: episode.terminated, _TRUNCATED: episode.truncated, HIDDEN: episode.hidden}
        if episode.priority is not None:
            values[PRIORITY] = episode.priority
        if episode.notes is not None:
            values[_NOTES] = np.frombuffer(json.dumps(episode.notes).encode(), np.uint8)
        np.savez(plan.path / _file(number), **values)
    describe(plan, NAME)


def _file(number: int) -> str:
    return f"episode-{number:08d}.npz"


# --- other NumPy files ------------------------------------------------------------------------------------------------

_ROLES = {
    **dict.fromkeys(("obs", "observation", "observations", "state", "states"), OBS),
    **dict.fromkeys(("action", "actions", "act", "acts"), ACTION),
    **dict.fromkeys(("reward", "rewards", "rew", "rews"), REWARD),
}
_AFTER = "next_obs", "obs_next", "next_observation", "next_observations", "next_state", "next_states"
_ENDS = "terminated", "terminals", "terminal", "dones", "done"
_LIMITS = "truncated", "timeouts", "truncations"
_STARTS = "episode_starts"


def _has_foreign_files(folder: Path) -> bool:
    """Tell whether a folder has NumPy files of other programs. Even an incomplete export is not such a folder."""
    files = sorted(folder.glob("*.npz")) if folder.is_dir() else []
    return bool(files) and not is_described(folder) and not any(_OWN.fullmatch(file.name) for file in files)


def _raise_not_found(folder: Path) -> NoReturn:
    if not folder.is_dir():
        raise StoreNotFound(f"there is no file or folder {folder}")
    inner = next((file for above in ("*", "*/*") for file in folder.glob(f"{above}/*.npz")), None)
    hint = f"; there are some in {inner.parent.relative_to(folder)}" if inner else ""
    kind = "the description of an export, dataset.json" if any(folder.glob("*.npz")) else "NumPy files (.npz)"
    raise StoreNotFound(f"{folder} lacks {kind}{hint}")


class _Told(NamedTuple):
    """The options of an import that describe the arrays; see `import_dataset`."""

    starts: str | None
    indices: str | None
    ended: Ended
    terminated: str | None
    truncated: str | None

    def ends(self) -> tuple[str, ...]:
        return _ENDS if self.terminated is None else (self.terminated,)

    def limits(self) -> tuple[str, ...]:
        return _LIMITS if self.truncated is None else (self.truncated,)


def _open(told: _Told, given: Given) -> Source:
    folder = given.place
    if folder.is_dir() and (told.starts is not None or told.indices is not None):
        raise SchemaError(
            f"starts and indices are for one file with the rows of all episodes, and {folder} is a folder"
        )
    if folder.is_file():
        return _OneFile(given, told)
    if _has_foreign_files(folder):
        return _Files(given, told)
    if told.terminated is not None or told.truncated is not None:
        raise SchemaError(f"terminated and truncated are for files of other programs, and {folder} has none")
    if not is_described(folder):
        _raise_not_found(folder)
    return _DataSet(given)


class _Arrays(Source):
    """The arrays in files of other programs, with the meaning of each array."""

    format = NAME

    def __init__(self, given: Given, told: _Told) -> None:
        super().__init__(given)
        self._told = told
        self._known = (*_AFTER, *told.ends(), *told.limits(), _STARTS)
        self._columns = dict[str, str]()  # the name of each array of steps by path, such as {"obs": "observations"}
        self._after: str | None = None

    def _load(self, file: Path) -> Rows:
        """Return a file's arrays without those in the option ``skip``. Flags and next observations are always read."""
        self.left_out = []

        def is_read(name: str) -> bool:
            if self.choice.skips(name):
                self.left_out.append(name)
                return name in self._known
            return True

        return read_npz(file, is_read)

    def _action_in(self, arrays: Arrays) -> str:
        """Return the name of the first array of actions. The length of this array is the number of steps."""
        wanted = self.choice.named(ACTION) or [name for name, role in _ROLES.items() if role == ACTION]
        found = [name for name, rows in arrays.items() if any(is_in(name, each) for each in wanted) and rows.ndim]
        if not found:
            names = {_ROLES.get(name, f"{EXTRA}/{name}"): name for name, rows in arrays.items() if rows.ndim}
            leaves = leaves_of({path: arrays[name] for path, name in names.items()}, self.place)
            # `lay_out` raises SchemaError if an option has a name that the file lacks. The message has the names in the
            # file.
            lay_out(str(self.place), leaves, names, None, self.choice)
            raise FormatError(f"{self.place} has no actions; it has {', '.join(arrays)}")
        return found[0]

    def _sort(self, arrays: Arrays, count: int, episodes: int) -> dict[str, NDArray[Any]]:
        """Add the arrays of steps to ``_columns``, and return the arrays of episode fields, by path.

        ``arrays`` have ``count`` steps of ``episodes`` episodes.
        """
        fields: dict[str, NDArray[Any]] = {}
        steps = list[str]()
        for name, rows in arrays.items():
            if self.choice.skips(name):
                continue
            if name in _AFTER:
                self._after = name
            if name in self._known:
                continue
            if rows.ndim and len(rows) in (count, count + (episodes == 1)):
                steps.append(name)
            elif rows.dtype.kind in NUMBERS and (len(rows) if rows.ndim else 1) == episodes:
                fields[f"{FIELDS}/{name}"] = rows.reshape(episodes, *rows.shape[1:])
            else:
                self.not_kept.append(name)
        obs = [name for name in steps if _ROLES.get(name.split("/")[0]) == OBS]
        for name in steps:
            role, below = _ROLES.get(name.split("/")[0], EXTRA), name.partition("/")[2] or name
            is_below = role == EXTRA or "/" in name or (role == OBS and len(obs) > 1)
            self._columns[f"{role}/{name if role == EXTRA else below}" if is_below else role] = name
        return fields

    def _flag(self, arrays: Arrays, names: Iterable[str], count: int) -> NDArray[np.bool_] | None:
        """Return a flag for each step, from the first array of ``names`` that exists; None if no such array exists."""
        found = next((name for name in names if name in arrays), None)
        if found is None:
            return None
        flags = as_flags(np.atleast_1d(arrays[found]), f"{self.place}: {found}", FormatError).reshape(-1)
        if len(flags) not in (1, count):
            raise FormatError(f"{self.place}: {found} has {len(flags)} rows and the actions have {count}")
        return flags if len(flags) == count else np.arange(count) == (count - 1 if flags[0] else -1)

    def _check_named(self, arrays: Arrays, *names: str | None) -> None:
        for name in (self._told.terminated, self._told.truncated, *names):
            if name is not None and name not in arrays:
                raise SchemaError(f"{self.place} has no array {name!r}; it has {', '.join(arrays)}")

    def _flags(self, arrays: Arrays, count: int) -> Ends:
        """Return two masks of steps: steps that terminated or were done, and steps that a limit truncated."""
        return self._flag(arrays, self._told.ends(), count), self._flag(arrays, self._told.limits(), count)

    def _episode(
        self,
        names: Mapping[str, str],
        arrays: Arrays,
        flags: Ends,
        part: slice,
        count: int,
        fields: Mapping[str, Any],
    ) -> EpisodeData:
        """Return the episode in the rows ``part`` of ``arrays``. ``count`` is the number of steps in ``arrays``."""
        last, steps = part.stop - 1, dict[str, NDArray[Any]]()
        for path, name in names.items():
            if name not in arrays:
                raise FormatError(f"{self.place} has no {name}, which the first episode has")
            rows = arrays[name]
            is_whole = is_obs(path) and len(rows) == count + 1 and part == slice(0, count)
            steps[path] = rows if is_whole else rows[part]
        obs = [path for path in steps if is_obs(path)]
        after = None if self._after is None else arrays.get(self._after)
        if after is not None and len(obs) == 1 and len(steps[obs[0]]) == part.stop - part.start:
            steps[obs[0]] = np.concatenate([steps[obs[0]], after[last : part.stop].astype(steps[obs[0]].dtype)])
        ends, limits = flags
        if ends is None and limits is None:
            return EpisodeData(steps, self._told.ended == _TERMINATED, self._told.ended == _TRUNCATED, fields)
        truncated = limits is not None and bool(limits[last])
        return EpisodeData(steps, ends is not None and bool(ends[last]) and not truncated, truncated, fields)

    def _describe(self, lengths: Sequence[int], first: Arrays, fields: Arrays) -> None:
        rows = {path: first[name] for path, name in self._columns.items()}
        self.leaves = leaves_of({**rows, **fields}, self.place, "; leave out an array by skip= (--skip NAME)")
        self.names = self._columns | {path: path.removeprefix(f"{FIELDS}/") for path in fields}
        self.episodes, self.steps = len(lengths), sum(lengths)


class _OneFile(_Arrays):
    def __init__(self, given: Given, told: _Told) -> None:
        super().__init__(given, told)
        self._arrays = self._load(self.place)
        self._rows = len(self._arrays[self._action_in(self._arrays)])
        self._ends = self._flags(self._arrays, self._rows)
        self._bounds = self._find_bounds(told.starts, told.indices)
        named = {name: rows for name, rows in self._arrays.items() if name not in (told.starts, told.indices)}
        self._fields = self._sort(named, self._rows, len(self._bounds))
        self._describe([part.stop - part.start for part in self._bounds], self._arrays, self._fields)

    def _find_bounds(self, starts: str | None, indices: str | None) -> list[slice]:
        self._check_named(self._arrays, starts, indices)
        count, name = self._rows, starts or (_STARTS if indices is None and _STARTS in self._arrays else None)
        if indices is not None:
            given = self._arrays[indices]
            if given.ndim != 1 or given.dtype.kind not in "iu" or not len(given) or (np.diff(given) <= 0).any():
                raise FormatError(f"{self.place}: {indices} does not have increasing numbers of rows")
            firsts = given if given[0] == 0 else np.concatenate([[0], given[:-1]])
            if given[0] != 0 and given[-1] != count:
                raise FormatError(f"{self.place}: {indices} ends with {given[-1]}, and the actions have {count} rows")
        elif name is not None:
            firsts = np.flatnonzero(np.asarray(self._flag(self._arrays, [name], count)))
            if not len(firsts) or firsts[0] != 0:
                raise FormatError(f"{self.place}: {name} is not true in the first row")
        else:
            ends = [flags for flags in self._ends if flags is not None]
            if not ends:
                raise SchemaError(
                    f"{self.place} does not say where its episodes begin: name the array that does by starts= or "
                    f"indices= (--option starts=NAME); it has {', '.join(self._arrays)}"
                )
            firsts = np.concatenate([[0], np.flatnonzero(np.logical_or.reduce(ends)) + 1])
        bounds = [*firsts[firsts < count].tolist(), count]
        if bounds != sorted(set(bounds)):
            raise FormatError(f"{self.place} has an episode without steps")
        return list(map(slice, bounds[:-1], bounds[1:]))

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        for number, part in enumerate(self._bounds[first:], first):
            fields = {path: rows[number] for path, rows in self._fields.items()}
            yield self._episode(self._columns, self._arrays, self._ends, part, self._rows, fields)


class _Files(_Arrays):
    def __init__(self, given: Given, told: _Told) -> None:
        super().__init__(given, told)
        files = sorted(self.place.glob("*.npz"))
        loaded = ((file, self._or_skip(self._load, file)) for file in files)
        file, first = next((each for each in loaded if each[1] is not None), (self.place, None))
        if first is None:
            raise FormatError(f"{self.place} has no file that can be read: {self.skipped[0].why}")
        self._check_named(first)
        self._check_one_episode(file, first)
        self._action = self._action_in(first)
        self._fields = self._sort(first, len(first[self._action]), 1)
        self.skipped.clear()  # the next lines read all files again, and find the same unreadable files
        lengths = [self._or_skip(self._length, file) for file in files]
        self.numbers = [number for number, length in enumerate(lengths) if length is not None]
        self.files = [files[number].name for number in self.numbers]
        self._lengths = [length for length in lengths if length is not None]
        self._describe(self._lengths, first, self._fields)

    def _or_skip(self, read: Callable[[Path], _T], file: Path) -> _T | None:
        """Return ``read(file)``; None if this call fails and ``on_error`` is "skip".

        A file that fails is added to ``skipped``.
        """
        try:
            return read(file)
        except (FormatError, SchemaError) as error:
            if self.choice.on_error == "raise":
                advice = "skip= (--skip NAME) omits an array, and on_error='skip' (--on-error skip) omits such files"
                raise type(error)(f"{error}; {advice}") from error
            self.skipped.append(Skipped(file.name, str(error)))
            return None

    def _length(self, file: Path) -> int:
        """Return the number of steps in a file: the length of the array of actions.

        If possible, read only this array.
        """
        arrays = read_npz(file, self._action.__eq__) or read_npz(file)
        return len(arrays[self._action_in(arrays)])

    def _check_one_episode(self, file: Path, arrays: Arrays) -> None:
        """Raise FormatError if flags show that a file has several episodes: they would be imported as one."""
        for name in (*self._told.ends(), *self._told.limits(), _STARTS):
            flags = as_flags(np.ravel(arrays.get(name, False)), f"{file}: {name}", FormatError)
            # Some environments repeat the flag at the end of an episode. So an episode begins only at a false flag
            # after a true flag.
            inside = flags[1:] if name == _STARTS else flags[:-1] & ~flags[1:]
            if inside.any():
                raise FormatError(
                    f"{file} has several episodes: {name} says so in row {int(inside.argmax()) + (name == _STARTS)}. "
                    "A folder must have one episode in each file. Import each file by its own path and merge the stores"
                )

    def read(self, first: int, wanted: Collection[str]) -> Iterator[EpisodeData]:
        names = {path: path.removeprefix(f"{FIELDS}/") for path in self._fields if path in wanted}
        kept = {path: name for path, name in self._columns.items() if path in wanted}
        for name, count in zip(self.files[first:], self._lengths[first:], strict=True):
            file = self.place / name
            arrays = read_npz(file, {*kept.values(), *names.values(), *self._known}.__contains__)
            self._check_one_episode(file, arrays)
            fields = {path: arrays[each].reshape(self._fields[path].shape[1:]) for path, each in names.items()}
            yield self._episode(kept, arrays, self._flags(arrays, count), slice(0, count), count, fields)
