"""The options of imports and exports, and the choice of a store's leaf for each feature of a data set.

A feature is a named array of a data set. A leaf is a field of a store's nested schema, and has a path, such as
``"obs/image"``. Without options, each feature becomes the leaf at the feature's default path.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

import numpy as np
from numpy.typing import NDArray

from diskreplay import Field, FormatError, Schema, SchemaError
from diskreplay.interop.exchange.episode_data import (
    ACTION,
    EXTRA,
    FIELDS,
    OBS,
    REWARD,
    EpisodeData,
    is_obs,
    is_part,
)
from diskreplay.interop.exchange.field_trees import schema_of_leaves
from diskreplay.interop.exchange.progress import Announced, Progress

Names = str | Sequence[str] | Mapping[str, str]
"""Features of a data set: a name, a list of names, or ``{name in the store: name in the data set}``."""

OnError = Literal["raise", "skip"]
_PARTS = OBS, ACTION, REWARD, EXTRA, FIELDS
_UNSAFE = ":unsafe"
_SHOWN = 40  # a message lists at most this number of features
_HINTS = {OBS: ("obs", "state", "image", "rgb", "cam"), ACTION: ("act",), REWARD: ("rew",)}  # in names of features
_ROLE = re.compile(r"^(obs|observations?|actions?|next|extra)[./]")


class SharedOptions(TypedDict, total=False):
    """The options of imports and of exports; `Options` and `ExportOptions` describe them."""

    obs: Names | None
    action: Names | None
    reward: Names | None
    extra: Names | None
    rename: Mapping[str, str] | None
    skip: str | Sequence[str]
    dtype: Mapping[str, Any] | None
    progress: Progress | None


class Options(SharedOptions, total=False):
    """The options that every ``import_dataset`` takes.

    Attributes
    ----------
    obs, action, reward, extra : str, list of str, or dict of str to str
        The features that become this part of a step. If the option is one name, the part is this feature. If the option
        is a list, or a dict ``{name in the store: name in the data set}``, the part is a dict of features. A slash in a
        name makes nested dicts. The name of a folder of features stands for all features in the folder. If the option
        of a part is given, the part has only the features in the option. Other features whose default path is in this
        part become extra fields. If ``extra`` is given, only the features in ``extra`` become extra fields. Other
        features that would become extra fields are left out.
    rename : dict of str to str
        ``{name in the data set: name in the store}``. A new name that begins with the name of a part, such as
        "obs/top", is the feature's path in the store. Any other new name renames the feature within its part.
    skip : str or list of str
        The features, or folders of features, that are left out.
    on_error : {"raise", "skip"}
        "skip" leaves out episodes that cannot be read or that the store refuses, and lists them in `Imported.skipped`.
    compression : "zstd" or ("zstd", level)
        The compression of the store.
    dtype : dict of str to str
        ``{path in the store: dtype}``, such as ``{"obs/image": "uint8"}``. A value that the dtype cannot hold raises
        SchemaError. If the dtype ends with ":unsafe", the value is rounded instead.
    where : callable
        A function that receives a `SourceEpisode`, and returns whether to import the episode.
    progress : callable
        Called as ``progress(done, total)``, with numbers of steps.
    """

    on_error: OnError
    compression: str | tuple[str, int] | None
    where: "Callable[[SourceEpisode], bool] | None"


@dataclass(frozen=True)
class Choice:
    obs: Names | None = None
    action: Names | None = None
    reward: Names | None = None
    extra: Names | None = None
    rename: Mapping[str, str] | None = None
    skip: str | Sequence[str] = ()
    on_error: OnError = "raise"
    compression: str | tuple[str, int] | None = None
    dtype: Mapping[str, Any] | None = None
    where: Callable[[Any], bool] | None = None
    progress: Progress | Announced | None = None

    def __post_init__(self) -> None:
        check_option("on_error", self.on_error, ("raise", "skip"))
        for name in ("obs", "action", "reward", "extra", "skip"):
            given = getattr(self, name)
            is_many = given is None or isinstance(given, Collection)
            if not is_many or not all(isinstance(each, str) and each for each in self.named(name)):
                raise SchemaError(f"{name} must be names of features, not {given!r:.80}")
        for name in ("rename", "dtype"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise SchemaError(f"{name} must be a dict, not {given!r:.80}")
        if wrong := [to for to in (self.rename or {}).values() if not isinstance(to, str) or not to]:
            raise SchemaError(f"rename must give each feature a name in the store, not {wrong[0]!r:.80}")
        if self.where is not None and not callable(self.where):
            example = "such as lambda episode: episode.total_reward > 20"
            raise SchemaError(f"where must be a function of an episode, {example}, not {self.where!r:.80}")

    def named(self, option: str) -> list[str]:
        given: Any = getattr(self, option)
        if given is None or isinstance(given, str):
            return [] if given is None else [given]
        return list(given.values() if isinstance(given, Mapping) else given)

    def skips(self, name: str) -> bool:
        return any(is_in(name, skipped) for skipped in self.named("skip"))

    def to_json(self) -> dict[str, Any]:
        """Return, as JSON, the options that determine the imported data."""
        found: dict[str, Any] = {}
        for name, given in vars(self).items():
            if name in ("compression", "progress") or given in (None, (), [], "raise"):
                continue
            if name == "where":
                found[name] = str(getattr(given, "expression", True))
            elif isinstance(given, Mapping):
                found[name] = {str(key): str(value) for key, value in given.items()}
            else:
                found[name] = given if isinstance(given, str) else sorted(given) if name == "skip" else list(given)
        return found


def is_in(name: str, folder: str) -> bool:
    return name == folder or name.startswith((f"{folder}/", f"{folder}."))


def check_option(name: str, value: object, choices: Collection[object]) -> None:
    known = list(choices)
    if value not in known:
        raise SchemaError(f"{name} must be {', '.join(map(str, known[:-1]))} or {known[-1]}, not {value!r}")


@dataclass(frozen=True)
class SourceEpisode:
    """An episode of a data set, as an import passes it to the function ``where``.

    The class has those attributes of `Episode` that do not depend on a store.

    Attributes
    ----------
    number : int
        The episode's number in the data set, counted from 0.
    schema : Schema
        The schema of the store.
    """

    number: int
    schema: Schema
    _data: EpisodeData

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._data)

    length = property(__len__)
    terminated = property(lambda self: self._data.terminated)
    truncated = property(lambda self: not self._data.terminated)
    cut = property(lambda self: self._data.cut)
    hidden_steps = property(lambda self: self._data.hidden_steps)

    @property
    def total_reward(self) -> float:
        """The sum of the rewards."""
        return float(np.sum(self._data.steps[REWARD], dtype=np.float64))

    @property
    def ended(self) -> str:
        """How the episode ended: "terminated", "truncated" or "cut"."""
        return "terminated" if self.terminated else "cut" if self.cut else "truncated"

    def __getitem__(self, name: str) -> Any:
        """Return the values of "obs", "action", "reward", an extra field or an episode field.

        Values of steps are ``(T, ...)``. "obs" has one row more if the episode has a final observation. The result is
        None if the episode has no value of the field. KeyError is raised if the schema does not have the field.
        """
        if name in (OBS, ACTION, REWARD):
            return self._data.tree(self.schema, name)
        for part in (EXTRA, FIELDS):
            if name in getattr(self.schema, part):
                values = self._data.steps if part == EXTRA else self._data.fields
                below = {path: rows for path, rows in values.items() if is_part(path, f"{part}/{name}")}
                return self.schema.unflatten(part, below)[name] if below else None
        raise KeyError(name)


@dataclass(frozen=True)
class Layout:
    """Which leaf of the store each feature of a data set becomes.

    Attributes
    ----------
    paths : dict of str to str
        The path in the store of each kept feature. The keys are the features' default paths.
    unsafe : set of str
        The paths of leaves whose values may be rounded, as the caller asked.
    """

    schema: Schema
    paths: Mapping[str, str]
    not_kept: Sequence[str]
    unsafe: Collection[str] = field(default=(), repr=False)

    def apply(self, what: str, episode: EpisodeData) -> EpisodeData:
        count = len(episode)
        steps = {new: episode.steps[old] for old, new in self.paths.items() if old in episode.steps}
        given = {new: episode.fields[old] for old, new in self.paths.items() if old in episode.fields}
        is_final = all(len(rows) > count for path, rows in steps.items() if is_obs(path))
        made = {
            path: self._cast(what, path, rows if is_final and is_obs(path) else rows[:count])
            for path, rows in steps.items()
        }
        rewards = made.get(REWARD)
        made[REWARD] = np.zeros(count, self.schema.reward.dtype) if rewards is None else rewards.reshape(count)
        fields = {path: self._cast(what, path, value) for path, value in given.items()}
        for path in self.schema.leaves:
            name = path.split("/")[1] if is_part(path, FIELDS) and path not in fields else ""
            if name and any(is_part(other, f"{FIELDS}/{name}") for other in fields):
                raise FormatError(f"{what} has no {path}, but has other values of the episode field {name!r}")
        return replace(episode, steps=made, fields=fields)

    def _cast(self, what: str, path: str, values: Any) -> NDArray[Any]:
        rows: NDArray[Any] = np.asarray(values)
        wanted = self.schema.leaves[path].dtype
        if rows.dtype == wanted:
            return rows
        with np.errstate(invalid="ignore", over="ignore"):
            made: NDArray[Any] = rows.astype(wanted)
            # Casting back is not enough to find a wrong cast: -1 becomes 255 in a uint8, and -1 again in an int8.
            same = (made.astype(rows.dtype) == rows) & (made == rows)
        if rows.dtype.kind == "f" and wanted.kind == "f":
            same |= np.isnan(rows)
        if same.all():
            return made
        if path in self.unsafe:
            return _rounded(rows, made)
        raise SchemaError(
            f"{what} has {rows[~same].flat[0]!s} in {path}, which {wanted} cannot hold; choose another dtype, "
            f"or {wanted}{_UNSAFE} to round"
        )


def _rounded(rows: NDArray[Any], cast: NDArray[Any]) -> NDArray[Any]:
    """Return ``rows`` rounded to the nearest values of the dtype of ``cast``; a NaN becomes 0 in an integer dtype.

    ``cast`` is the result of ``rows.astype``.
    """
    if cast.dtype.kind not in "iu":
        return cast
    # float64 rounds the largest int64 to 2**63, and the largest uint64 to 2**64. The comparisons below are still exact,
    # since no float64 is between such a bound and its rounded value.
    whole = np.asarray(np.rint(rows.astype(np.float64)) if rows.dtype.kind == "f" else rows)
    bounds = np.iinfo(cast.dtype)
    with np.errstate(invalid="ignore"):
        found: NDArray[Any] = np.asarray(whole.astype(cast.dtype))
    for outside, value in ((whole >= bounds.max, bounds.max), (whole <= bounds.min, bounds.min), (whole != whole, 0)):
        found[outside] = value
    return found


def lay_out(
    place: str,
    leaves: Mapping[str, Field],
    names: Mapping[str, str],
    schema: Schema | None,
    choice: Choice,
    left_out: Collection[str] = (),
) -> Layout:
    """Return the layout that results from the options of an import or an export.

    The keys of ``leaves`` and ``names`` are the features' default paths. ``schema`` is the schema without options, or
    None if the reader has none. If the options leave out no leaf, and change no path and no dtype, the layout has
    ``schema`` itself, which may have tuples. Paths cannot express tuples. ``left_out`` has the features that the reader
    has already left out.
    """
    chooser = _Chooser(place, leaves, names, choice, left_out)
    paths, not_kept = chooser.paths()
    dtypes, unsafe = _dtypes(place, choice.dtype or {}, {*paths.values(), REWARD})
    made = {REWARD: Field((), dtypes.get(REWARD, "float32"))}  # if no feature is the reward, all rewards are zero
    for old, new in paths.items():
        kind = leaves[old]
        shape = () if new == REWARD and kind.shape == (1,) else kind.shape
        same = new not in dtypes and shape == kind.shape
        try:
            made[new] = kind if same else Field(shape, dtypes.get(new, kind.dtype))
        except SchemaError as error:
            raise SchemaError(f"{place}: {new}: {error}") from None
    for part, role in {OBS: "observation", ACTION: "action"}.items():
        if not any(is_part(path, part) for path in made):
            raise SchemaError(f"{place}: no feature is the {role}; {chooser.advice()}")
    if schema is None or any(old != new for old, new in paths.items()) or made != dict(schema.leaves):
        try:
            found = schema_of_leaves(made)
        except SchemaError as error:
            raise SchemaError(f"{place}: {error}; skip= leaves a feature out, rename= gives it another name") from None
        schema = _with_tuples(found, schema, made)
    return Layout(schema, paths, not_kept, unsafe)


def _with_tuples(found: Schema, given: Schema | None, made: Mapping[str, Field]) -> Schema:
    """Return ``found`` with those parts of ``given``, such as "obs", that have the same leaves in both schemas.

    Unlike ``found``, ``given`` may have tuples.
    """
    if given is None:
        return found

    def tree(part: str) -> Any:
        same = {path: kind for path, kind in given.leaves.items() if is_part(path, part)}
        return getattr(given if same == {p: kind for p, kind in made.items() if is_part(p, part)} else found, part)

    return Schema(*map(tree, _PARTS))


def _dtypes(place: str, given: Mapping[str, Any], paths: Collection[str]) -> tuple[dict[str, Any], set[str]]:
    found, unsafe = dict[str, Any](), set[str]()
    for path, dtype in given.items():
        if path not in paths:
            raise SchemaError(f"{place}: dtype names {path!r}, but the store's leaves are {', '.join(sorted(paths))}")
        if isinstance(dtype, str) and dtype.endswith(_UNSAFE):
            unsafe.add(path)
            dtype = dtype.removesuffix(_UNSAFE)
        found[path] = dtype
    return found, unsafe


class _Chooser:
    def __init__(
        self,
        place: str,
        leaves: Mapping[str, Field],
        names: Mapping[str, str],
        choice: Choice,
        left_out: Collection[str],
    ) -> None:
        self._place, self._leaves, self._choice, self._left_out = place, leaves, choice, left_out
        self._names = dict[str, str]()
        for path, name in names.items():
            # A feature of steps and an episode field may have the same name. Then the options call the later one by its
            # path.
            if path in leaves:
                self._names[path if name in self._names else name] = path

    def paths(self) -> tuple[dict[str, str], list[str]]:
        """Return each kept feature's path in the store, by its default path, and the names of the other features."""
        skipped = {
            name
            for each in self._choice.named("skip")
            if not any(is_in(left, each) for left in self._left_out)
            for name, _ in self._find(each, "skip")
        }
        target = dict[str, str]()
        given = vars(self._choice)
        for part in (OBS, ACTION, REWARD, EXTRA):
            for name, path in self._wanted(part, given[part]):
                if name in skipped:
                    raise SchemaError(f"{self._place}: {name!r} is in both {part} and skip")
                if name in target:
                    raise SchemaError(f"{self._place}: {name!r} is taken twice, as {target[name]} and {path}")
                target[name] = path
        not_kept = sorted({*skipped, *self._left_out})
        decided = {*skipped, *target}
        for name, path in self._names.items():
            if name in decided:
                continue
            part = path.split("/")[0]
            if given.get(part) is None and not (part == REWARD and REWARD in target.values()):
                target[name] = path
            elif given[EXTRA] is None:
                target[name] = f"{EXTRA}/{self._short(name)}"
            else:
                not_kept.append(name)
        for name, path in (self._choice.rename or {}).items():
            if name not in target:
                self._find(name, "rename")
                raise SchemaError(f"{self._place}: {name!r} in rename is not a kept feature")
            target[name] = path if path.split("/")[0] in _PARTS else f"{target[name].split('/')[0]}/{path}"
        self._check(target)
        return {self._names[name]: path for name, path in target.items()}, not_kept

    def _wanted(self, part: str, given: Names | None) -> Iterator[tuple[str, str]]:
        if given is None:
            return
        if isinstance(given, str):
            for name, below in self._find(given, part):
                yield name, f"{part}/{below or self._short(name)}" if below or part == EXTRA else part
        elif isinstance(given, Mapping):
            for to, each in given.items():
                for name, below in self._find(each, part):
                    yield name, "/".join(filter(None, (part, str(to), below)))
        else:
            for each in given:
                for name, below in self._find(each, part):
                    yield name, f"{part}/{below or self._short(name)}"

    def _find(self, wanted: str, option: str) -> list[tuple[str, str]]:
        """Return the name of each feature in the folder ``wanted``, and the feature's path inside the folder.

        If ``wanted`` is itself a feature, return this feature with an empty path.
        """
        if wanted in self._names:
            return [(wanted, "")]
        for slash in "/.":
            if found := [name for name in self._names if name.startswith(f"{wanted}{slash}")]:
                return [(name, name[len(wanted) + 1 :].replace(slash, "/")) for name in found]
        raise SchemaError(f"{self._place}: {wanted!r} in {option} is not a feature; {self.advice()}")

    def _short(self, name: str) -> str:
        """Return a feature's default path without its first part: "image" for "obs/image".

        If the path has only one part, the result is the feature's name without a prefix such as "obs/".
        """
        _, _, below = self._names[name].partition("/")
        return below or _ROLE.sub("", name)

    def _check(self, target: Mapping[str, str]) -> None:
        by_path = dict[str, str]()
        for name, path in target.items():
            if path in by_path:
                raise SchemaError(f"{self._place}: {by_path[path]!r} and {name!r} would both be {path}; rename one")
            is_of_episodes = self._names[name].startswith(f"{FIELDS}/")
            if is_of_episodes != path.startswith(f"{FIELDS}/"):
                kind = "an episode has one value of" if is_of_episodes else "each step has a value of"
                raise SchemaError(f"{self._place}: {kind} {name!r}, so it cannot be {path}")
            by_path[path] = name

    def advice(self) -> str:
        steps = {name: path for name, path in self._names.items() if not path.startswith(f"{FIELDS}/")}
        listed = [f"{name} {self._leaves[path].dtype}{list(self._leaves[path].shape)}" for name, path in steps.items()]
        if len(listed) > _SHOWN:
            listed[_SHOWN:] = [f"{len(listed) - _SHOWN} more"]
        like = {
            part: [name for name in steps if any(hint in name.lower() for hint in hints)]
            for part, hints in _HINTS.items()
        }
        action = min(like[ACTION], key=len, default=None)
        call = {OBS: [name for name in like[OBS] or steps if name != action], ACTION: [action or "..."]}
        rewards = [name for name in like[REWARD] if name != action]
        if rewards and REWARD not in self._leaves:  # without this option, all rewards would be zero
            call[REWARD] = [min(rewards, key=len)]
        words = ", ".join(f"{part}={names[0] if len(names) == 1 else names!r}" for part, names in call.items())
        line = " ".join(f"--{part} {','.join(names)}" for part, names in call.items())
        return f"its features are {', '.join(listed)}. Name them, for example {words} (on the command line {line})"
