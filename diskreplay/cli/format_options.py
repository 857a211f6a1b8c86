"""`--option NAME=VALUE`: what a format's function takes beside what all of them do, as its signature says."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

import typer

import diskreplay as dr

__all__ = ["Options", "named_options", "parse_options"]

_SHARED = {"progress", "where", "dry_run"}

Options = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An option of the format, as its function in Python has it; may be repeated. A wrong one lists all.",
    ),
]


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
    for text in given:
        name, equals, value = text.partition("=")
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
            raise typer.BadParameter(f"the option is {name}={kinds[name].words}, not {text!r}") from None
    return found


@contextmanager
def named_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Raise BadParameter where a format refuses the value of an option that is given."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, dr.ReplayError) or not any(name in str(error) for name in options):
            raise
        raise typer.BadParameter(str(error)) from None


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
