"""`diskreplay import` and `export`: data sets of other formats in and out of a store.

`--option NAME=VALUE` are arguments of the function of a format, as its signature has them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_args, get_origin

import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.upkeep import parse_compression
from diskreplay.cli.where import Where, compile_where
from diskreplay.interop.exchange.choosing import SourceEpisode
from diskreplay.interop.exchange.exporting import Exported
from diskreplay.interop.exchange.importing import Announced, Planned
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
"""The formats by the word before the colon, a module of `diskreplay.interop`, and what follows the colon."""


def _complete(incomplete: str) -> list[str]:
    return [f"{name}:" for name in SCHEMES if name.startswith(incomplete)]


def _data_set(what: str) -> Any:
    listed = ", ".join(f"{name} ({where})" for name, where in SCHEMES.items())
    says = f"The data set, which is {what}; SCHEME is one of: {listed}."
    return typer.Argument(metavar="SCHEME:WHERE", help=says, autocompletion=_complete)


Source = Annotated[str, _data_set("read")]
Target = Annotated[str, _data_set("made")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SHARED = {"progress", "where", "dry_run"}
_LARGE = 100_000_000  # bytes of an import that are told before it begins

Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An option of the format, as its function in Python has it; may be repeated. A wrong one lists all.",
    ),
]


def _names(part: str) -> Any:
    says = f"The features that are {part}: NAME makes one the {part} itself; NAME,... or STORE_NAME=NAME,... a dict."
    return typer.Option(metavar="NAMES", help=says)


def import_store(
    source: Source,
    path: Annotated[Path, typer.Argument(metavar="STORE", help="The folder of the new store.")],
    option: Options = None,
    obs: Annotated[str | None, _names("the observation")] = None,
    action: Annotated[str | None, _names("the action")] = None,
    reward: Annotated[str | None, _names("the reward")] = None,
    extra: Annotated[str | None, _names("extra fields")] = None,
    rename: Annotated[
        str | None, typer.Option(metavar="NAME=STORE_NAME,...", help="Other names, as image=obs/top.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="NAME,...", help="Features that are left out; may be repeated.")
    ] = None,
    on_error: Annotated[
        str, typer.Option(metavar="raise|skip", help="skip leaves out episodes that cannot be read, and names them.")
    ] = "raise",
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="PATH=DTYPE,...",
            help="Dtypes in the store, as obs/image=uint8. Values that do not fit are refused, or rounded with :unsafe "
            "behind the dtype.",
        ),
    ] = None,
    compression: Annotated[
        str | None, typer.Option(metavar="zstd[:LEVEL]", help="How wide fields of the store are compressed.")
    ] = None,
    where: Where = None,
    as_json: AsJson = False,
) -> None:
    """Import a data set into a new store.

    An import that was interrupted continues at the first episode that is not in the store when the command is repeated.
    The store keeps every value, how each episode ended, and in its notes what the format says of the whole data set.
    """
    scheme, place = _parsed(source)
    import_dataset = import_module(f"diskreplay.interop.{scheme}").import_dataset
    given = {
        "obs": _parse_names("--obs", obs),
        "action": _parse_names("--action", action),
        "reward": _parse_names("--reward", reward),
        "extra": _parse_names("--extra", extra) if extra != "" else [],
        "rename": _parse_pairs("--rename", rename),
        "skip": [name for each in skip or () for name in each.split(",")],
        "on_error": on_error,
        "dtype": _parse_pairs("--dtype", dtype),
        "compression": parse_compression(compression),
        "where": None if where is None else WhereOfSource(where),
    }
    options = parse_options(scheme, import_dataset, option or ())
    with ExitStack() as bar:

        def announce(planned: Planned) -> None:
            if planned.nbytes >= _LARGE and not as_json:
                how = "" if compression is None else " before they are compressed"
                sizes = text.size(planned.nbytes), text.size(planned.free)
                console.emit(f"{text.plural(planned.steps, 'step')} take {sizes[0]}{how}; the disk has {sizes[1]}")
            progress.report = bar.enter_context(console.bar("Importing steps"))

        progress = Announced(announce)
        done = import_dataset(place, path, progress=progress, **given, **options)
    line = f"imported  {_amount(done)}  to {text.clean(path)}{_resumed(done)}{_cut(done)}"
    if done.skipped:
        line += f"; {len(done.skipped)} left out"
    if not as_json:
        _show_names("left out", done.skipped)
    skipped = [each._asdict() for each in done.skipped]
    console.tell({**asdict(done), "skipped": skipped}, [line], json=as_json)


class WhereOfSource:
    """A condition on the episodes of a data set, which is compiled when the schema is known."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self._condition: Callable[[Any], bool] | None = None

    def __call__(self, episode: SourceEpisode) -> bool:
        """Tell whether an episode meets it; SchemaError where it names what a data set does not have."""
        if self._condition is None:
            self._condition = cast(Callable[[Any], bool], compile_where(self.expression, episode.schema))
        try:
            return self._condition(episode)
        except AttributeError as error:
            raise dr.SchemaError(f"--where: an episode of a data set has no {error.name}") from None


def _parse_names(option: str, given: str | None) -> Any:
    if given is None or ("," not in given and "=" not in given):
        return given
    return _parse_pairs(option, given) if "=" in given else given.split(",")


def _parse_pairs(option: str, given: str | None) -> dict[str, str] | None:
    if given is None:
        return None
    pairs = [item.partition("=") for item in given.split(",")]
    if wrong := ["".join(pair) for pair in pairs if not all(pair)]:
        raise typer.BadParameter(f"{option} is NAME=NAME,..., and {wrong[0]!r} is no pair")
    found = {name: value for name, _, value in pairs}
    if len(found) < len(pairs):
        raise typer.BadParameter(f"{option} has a name twice: {given}")
    return found


def export_store(
    path: console.StorePath,
    target: Target,
    where: Where = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, only tell what would be.")] = False,
    option: Options = None,
    video: Annotated[
        bool, typer.Option("--video", help="As --option video=true: encode images as video, which loses detail.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export the ended episodes of a store, or those that meet an expression, to a new data set.

    Values that the format cannot hold are named before the export begins, and are not in the data set; the scheme npz
    holds everything. An export that is interrupted leaves nothing. Open episodes are left out.
    """
    scheme, to = _parsed(target)
    check_local(to)
    export_dataset = import_module(f"diskreplay.interop.{scheme}").export_dataset
    given = [*(option or ()), *(["video=true"] if video else [])]
    options = parse_options(scheme, export_dataset, given)
    with dr.open(path) as store, ExitStack() as bar:
        condition = None if where is None else compile_where(where, store.schema)
        bar.enter_context(console.bar("Choosing episodes"))

        def announce(planned: Exported) -> None:
            bar.close()  # no bar is drawn over the tables
            if not as_json:
                _show_names("the format cannot hold", planned.not_held)
                _show_names("not exact", planned.lossy)
            if not dry_run:
                progress.report = bar.enter_context(console.bar("Exporting steps"))

        progress = Announced(announce)
        done = export_dataset(store, to, where=condition, progress=progress, dry_run=dry_run, **options)
    if as_json:
        named = {name: [each._asdict() for each in vars(done)[name]] for name in ("not_held", "lossy")}
        console.emit(text.to_json({**asdict(done), **named, "dry_run": dry_run}))
        return
    line = f"would be exported  {_amount(done)}" if dry_run else f"exported  {_amount(done)}  to {text.clean(to)}"
    if done.open_episodes:
        line += f"; {text.plural(done.open_episodes, 'open episode')} left out"
    console.emit(line)


def _show_names(title: str, named: Sequence[tuple[str, str]]) -> None:
    if not named:
        return
    columns = {"name": lambda each: text.clean(each[0]), "reason": lambda each: text.clean(each[1])}
    console.show(console.TextTable(title, columns, named))


def _parsed(given: str) -> tuple[str, str]:
    """Return the scheme and what follows the colon."""
    name, colon, where = given.partition(":")
    known = f"the schemes are {', '.join(SCHEMES)}"
    if not colon or not where:
        raise typer.BadParameter(f"{given!r} is not SCHEME:WHERE; {known}")
    if name not in SCHEMES:
        raise typer.BadParameter(f"unknown scheme {name!r}; {known}")
    return name, where


def _amount(done: Any) -> str:
    return f"{text.plural(done.episodes, 'episode')} of {text.plural(done.steps, 'step')}"


def _cut(done: Any) -> str:
    return f"; {text.plural(done.cut, 'episode')} cut where the next row has another observation" if done.cut else ""


def _resumed(done: Any) -> str:
    return f"; {text.plural(done.resumed, 'episode')} by an earlier call" if done.resumed else ""


# --- options of formats -----------------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """The values of an option in words, and their reader, which raises ValueError or KeyError for any other text."""

    words: str
    read: Callable[[str], Any]


def parse_options(scheme: str, function: Callable[..., Any], given: Sequence[str]) -> dict[str, Any]:
    """Return the arguments that options name.

    Raises
    ------
    typer.BadParameter
        The function has no such option, or it does not take the value.
    """
    kinds = {
        name: _kind(parameter.annotation)
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in _SHARED
    }
    found: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
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
    if get_origin(annotation) is Mapping:
        return _Kind("KEY:NAME,...", lambda text: dict(item.split(":", 1) for item in text.split(",")))
    if get_origin(annotation) is Sequence:
        return _Kind("NAME,...", lambda text: text.split(","))
    return {int: _Kind("INTEGER", int), float: _Kind("NUMBER", float), str: _Kind("TEXT", str)}[annotation]
