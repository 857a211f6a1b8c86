"""The options of formats, as `--option NAME=VALUE` of import and export."""

import inspect
from collections.abc import Callable

import pytest
import typer

from diskreplay.cli.format_options import parse_options
from tests.cli.test_exchange import SCHEMES


def test_every_option_of_every_format_can_be_given() -> None:
    values = ("3", "true", "a:b", "cut", "final", "arrow")
    for scheme in SCHEMES:
        module = pytest.importorskip(f"diskreplay.interop.{scheme}", reason=f"needs the libraries of {scheme}")
        for function in (module.import_dataset, module.export_dataset):
            for name, parameter in inspect.signature(function).parameters.items():
                if parameter.kind is parameter.KEYWORD_ONLY and name not in ("progress", "where", "dry_run"):
                    assert any(takes(function, f"{name}={value}") for value in values), (scheme, name)


def takes(function: Callable, given: str) -> bool:
    try:
        return bool(parse_options("some", function, [given]))
    except typer.BadParameter:
        return False
