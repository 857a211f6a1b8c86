"""`diskreplay import` and `export`: convert data sets of other formats into a store, and back.

`--option NAME=VALUE` passes a keyword argument to the Python function of a format.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin

import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.upkeep import parse_compression
from diskreplay.cli.where import SOURCE_PROPERTIES, Where, compile_where
from diskreplay.interop.exchange.choosing import SourceEpisode
from diskreplay.interop.exchange.exporting import RENAMED, Exported
from diskreplay.interop.exchange.importing import Planned
from diskreplay.interop.exchange.progress import Announced
from diskreplay.segments.documents.root import check_local

SCHEMES: Mapping[str, str] = {
    "minari": "a name in the local folder of Minari, or a path",
    "npz": "a folder of NumPy files",
    "parquet": "a folder of Parquet files",
    "zarr_episodes": "zarr of diffusion_policy, a folder or .zip file",
    "sb3_pickle": "a pickled replay buffer of Stable-Baselines3",
    "torchrl_memmap": "a folder of memory-mapped tensors of TorchRL",
    "rlds": "a folder of TFDS with episodes of RLDS, as TFRecord files",
    "dreamer": "a replay folder of Dreamer",
    "lerobot": "a folder of LeRobot",
    "d4rl": "an HDF5 file of D4RL",
    "robomimic": "an HDF5 file of demonstrations of robosuite, robomimic or Isaac Lab",
}
"""The formats of data sets, for an argument SCHEME:WHERE: {SCHEME: description of WHERE}.

Each SCHEME is the name of a module of `diskreplay.interop`.
"""


def _complete(incomplete: str) -> list[str]:
    return [f"{name}:" for name in SCHEMES if name.startswith(incomplete)]


def _data_set(verb: str) -> Any:
    listed = ", ".join(f"{name} ({where})" for name, where in SCHEMES.items())
    says = f"The data set to {verb}. SCHEME is one of: {listed}."
    return typer.Argument(metavar="SCHEME:WHERE", help=says, autocompletion=_complete)


Source = Annotated[str, _data_set("read")]
Target = Annotated[str, _data_set("write")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_LARGE = 100_000_000  # bytes; a larger import prints its size before it begins


def _names(part: str) -> Any:
    says = f"The names that become {part}: one NAME, or NAME,... or NEW_NAME=NAME,... for a dict."
    return typer.Option(metavar="NAMES", help=says)


# NAME is a name in the data set for an import, and a path in the store for an export.
Obs = Annotated[str | None, _names("observation")]
Action = Annotated[str | None, _names("action")]
Reward = Annotated[str | None, _names("reward")]
Extra = Annotated[str | None, _names("extra fields")]
Rename = Annotated[str | None, typer.Option(metavar="NAME=NEW_NAME,...", help="New names, such as image=obs/top.")]
Skip = Annotated[list[str] | None, typer.Option(metavar="NAME,...", help="Names to leave out; may be repeated.")]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="PATH=DTYPE,...",
        help="Dtypes by paths in the store, such as obs/image=uint8. Values that do not fit are an error, or rounded "
        "if :unsafe follows the dtype.",
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An argument of the format's function in Python; may be repeated. An unknown NAME lists all names.",
    ),
]


def import_store(
    source: Source,
    path: Annotated[Path, typer.Argument(metavar="STORE", help="The folder of the new store.")],
    option: Options = None,
    obs: Obs = None,
    action: Action = None,
    reward: Reward = None,
    extra: Extra = None,
    rename: Rename = None,
    skip: Skip = None,
    on_error: Annotated[
        str, typer.Option(metavar="raise|skip", help="skip: leave out unreadable episodes, and list them.")
    ] = "raise",
    dtype: Dtype = None,
    compression: Annotated[
        str | None, typer.Option(metavar="zstd[:LEVEL]", help="Compression of large fields, such as images.")
    ] = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Import a data set into a new store.

    Repeat the command to continue an interrupted import at the first missing episode. The store keeps every value and
    how each episode ended. The store's notes keep the metadata of the data set.
    """
    scheme, place = _parsed(source)
    import_dataset = import_module(f"diskreplay.interop.{scheme}").import_dataset
    given = {
        **_shared(obs, action, reward, extra, rename, skip, dtype),
        "on_error": on_error,
        "compression": parse_compression(compression),
        "where": None if where is None else WhereOfSource(where),
    }
    options = parse_options(scheme, import_dataset, option or ())

    def announce(planned: Planned) -> None:
        if planned.nbytes >= _LARGE and not as_json:
            how = "" if compression is None else " before they are compressed"
            sizes = text.size(planned.nbytes), text.size(planned.free)
            console.emit(f"{text.plural(planned.steps, 'step')} take {sizes[0]}{how}; the disk has {sizes[1]}")

    if_interrupted = f"interrupted; the same command continues the import into {text.clean(path)}"
    with _watched("Opening the data set", "Importing", announce, if_interrupted) as progress:
        done = import_dataset(place, path, progress=progress, **given, **options)
    if not as_json:
        _show_names("left out", done.skipped)
    skipped = [each._asdict() for each in done.skipped]
    parts = [f"imported  {_amount(done)}  to {text.clean(path)}"]
    if done.resumed:
        parts.append(f"{text.plural(done.resumed, 'episode')} imported by an earlier call")
    if done.cut:
        parts.append(
            f"{text.plural(done.cut, 'episode')} cut where next_obs differs from the observation of the next row"
        )
    if skipped:
        parts.append(f"{len(skipped)} left out")
    line = "; ".join([*parts, *_listed("not kept", done.not_kept)])
    console.tell({**asdict(done), "skipped": skipped}, [line], json=as_json)


class WhereOfSource:
    """A condition on the episodes of a data set.

    The expression is compiled at the first call, since the schema is not known before the first episode.
    """

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self._condition: Callable[[Any], bool] | None = None

    def __call__(self, episode: SourceEpisode) -> bool:
        """Tell whether an episode meets the condition; raise SchemaError for a name that is not in the data set."""
        if self._condition is None:
            made = compile_where(self.expression, episode.schema, SOURCE_PROPERTIES)
            self._condition = cast(Callable[[Any], bool], made)
        return self._condition(episode)


def _shared(
    obs: str | None,
    action: str | None,
    reward: str | None,
    extra: str | None,
    rename: str | None,
    skip: list[str] | None,
    dtype: str | None,
) -> dict[str, Any]:
    return {
        "obs": _parse_names("--obs", obs),
        "action": _parse_names("--action", action),
        "reward": _parse_names("--reward", reward),
        "extra": _parse_names("--extra", extra) if extra != "" else [],
        "rename": _parse_pairs("--rename", rename),
        "skip": [name for each in skip or () for name in each.split(",")],
        "dtype": _parse_pairs("--dtype", dtype),
    }


@contextmanager
def _watched(
    before: str, title: str, announce: Callable[[Any], None], if_interrupted: str, *, dry_run: bool = False
) -> Iterator[Announced]:
    """Show the progress of an import or an export. After Ctrl-C, print ``if_interrupted``.

    The `with` block passes the yielded object to the import or export as ``progress``. Before the first episode, the
    bar has the title ``before``. At the first episode, ``announce`` gets the plan of the import or export, and then a
    bar with the title ``title`` appears.
    """
    with ExitStack() as shown:
        shown.enter_context(console.bar(before))

        def begin(planned: Any) -> None:
            shown.close()  # `announce` prints tables: a bar would overwrite them
            announce(planned)
            if not dry_run:
                progress.report = shown.enter_context(console.transfer(title))

        progress = Announced(begin)
        try:
            yield progress
        except KeyboardInterrupt:
            shown.close()
            console.complain(if_interrupted)
            raise


def _parse_names(option: str, given: str | None) -> Any:
    if given is None or ("," not in given and "=" not in given):
        return given
    return _parse_pairs(option, given) if "=" in given else given.split(",")


def _parse_pairs(option: str, given: str | None) -> dict[str, str] | None:
    if given is None:
        return None
    pairs = [item.partition("=") for item in given.split(",")]
    if wrong := ["".join(pair) for pair in pairs if not all(pair)]:
        raise typer.BadParameter(f"{option} is NAME=NAME,..., but {wrong[0]!r} is not a pair")
    found = {name: value for name, _, value in pairs}
    if len(found) < len(pairs):
        raise typer.BadParameter(f"{option} has a name twice: {given}")
    return found


def export_store(
    path: console.StorePath,
    target: Target,
    where: Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing; only print the result.")] = False,
    option: Options = None,
    obs: Obs = None,
    action: Action = None,
    reward: Reward = None,
    extra: Extra = None,
    rename: Rename = None,
    skip: Skip = None,
    dtype: Dtype = None,
    compression: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Short for --option compression=NAME, for parquet."),
    ] = None,
    video: Annotated[
        bool, typer.Option("--video", help="Short for --option video=true: encode images as video, with some loss.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export the ended episodes of a store, or a selection of them, to a new data set.

    The export first lists the data that the format cannot hold. These data are left out. With the scheme npz, all data
    are exported. An interrupted export leaves no files. Open episodes are left out.
    """
    scheme, to = _parsed(target)
    check_local(to)
    export_dataset = import_module(f"diskreplay.interop.{scheme}").export_dataset
    given = [*(option or ()), *(["video=true"] if video else [])]
    given += [] if compression is None else [f"compression={compression}"]
    options = _shared(obs, action, reward, extra, rename, skip, dtype) | parse_options(scheme, export_dataset, given)

    def announce(planned: Exported) -> None:
        if not as_json:
            _show_names("the format cannot hold", planned.not_held)
            _show_names("not exact", planned.lossy)

    with dr.open(path) as store:
        condition = None if where is None else compile_where(where, store.schema)
        if_interrupted = f"interrupted; nothing was written to {text.clean(to)}"
        watched = _watched("Choosing episodes", "Exporting", announce, if_interrupted, dry_run=dry_run)
        with watched as progress:
            done = export_dataset(store, to, where=condition, progress=progress, dry_run=dry_run, **options)
    named = {name: [each._asdict() for each in vars(done)[name]] for name in ("not_held", "lossy")}
    parts = [f"would be exported  {_amount(done)}" if dry_run else f"exported  {_amount(done)}  to {text.clean(to)}"]
    if done.open_episodes:
        parts.append(f"{text.plural(done.open_episodes, 'open episode')} left out")
    for title, names in {"not held": done.not_held, "not exact": done.lossy}.items():
        parts += _listed(title, [each.name for each in names])
    line = "; ".join([*parts, *_listed("not kept", done.not_kept)])
    console.tell({**asdict(done), **named, "dry_run": dry_run}, [line], json=as_json)


def _listed(title: str, names: Sequence[str]) -> list[str]:
    return [f"{title}: {', '.join(map(text.clean, names))}"] if names else []


def _show_names(title: str, named: Sequence[tuple[str, str]]) -> None:
    if not named:
        return
    columns = {"name": lambda each: text.clean(each[0]), "reason": lambda each: text.clean(each[1])}
    console.show(console.TextTable(title, columns, named))


def _parsed(given: str) -> tuple[str, str]:
    name, colon, where = given.partition(":")
    known = f"the schemes are {', '.join(SCHEMES)}"
    if not colon or not where:
        raise typer.BadParameter(f"{given!r} is not SCHEME:WHERE; {known}")
    if name not in SCHEMES:
        raise typer.BadParameter(f"unknown scheme {name!r}; {known}")
    return name, where


def _amount(done: Any) -> str:
    return f"{text.plural(done.episodes, 'episode')} of {text.plural(done.steps, 'step')}"


# --- options of formats -----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """The kind of an option: ``words`` describes the possible values, and ``read`` parses a value.

    ``read`` raises ValueError or KeyError for an invalid value.
    """

    words: str
    read: Callable[[str], Any]


def parse_options(scheme: str, function: Callable[..., Any], given: Sequence[str]) -> dict[str, Any]:
    kinds = {
        name: _kind(parameter.annotation)
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    found: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if name in RENAMED and name not in kinds:
            raise typer.BadParameter(f"the option {name} is --{RENAMED[name]} now")
        if name not in kinds:
            known = ", ".join(f"{name}={kind.words}" for name, kind in kinds.items())
            raise typer.BadParameter(f"{scheme} has no option {name!r} here; it has {known or 'none'}")
        if name in found:
            raise typer.BadParameter(f"the option {name} is given twice")
        try:
            if not equals:
                raise ValueError
            found[name] = kinds[name].read(value)
        except (ValueError, KeyError):
            raise typer.BadParameter(f"the option is {name}={kinds[name].words}, not {item!r}") from None
    return found


def _kind(annotation: Any) -> _Kind:
    members = [member for member in get_args(annotation) if member is not NoneType]
    if NoneType in get_args(annotation):
        words, read = _kind(members[0])
        return _Kind(f"{words}|none", lambda text: None if text == "none" else read(text))
    if get_origin(annotation) is Literal:
        named = {str(member): member for member in members}
        return _Kind("|".join(named), named.__getitem__)
    if annotation is bool:
        return _Kind("true|false", {"true": True, "false": False}.__getitem__)
    if get_origin(annotation) is Sequence:
        return _Kind("NAME,...", lambda text: text.split(","))
    return {int: _Kind("INTEGER", int), float: _Kind("NUMBER", float), str: _Kind("TEXT", str)}[annotation]
