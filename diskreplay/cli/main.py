"""The `diskreplay` command: collects the commands, and turns errors into one line and an exit code.

Exit codes: 0 success, 1 problems found, 2 invalid arguments or an unusable store, 130 interrupted. After a signal, the
exit code of the demo is 128 plus the number of the signal.
"""

import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

import diskreplay as dr
from diskreplay.cli import console, text
from diskreplay.cli.copy import copy, merge
from diskreplay.cli.demo import demo
from diskreplay.cli.doctor import doctor, known_libraries, versions_of_this_process
from diskreplay.cli.exchange import export_store, import_store
from diskreplay.cli.look.diff import diff
from diskreplay.cli.look.du import du
from diskreplay.cli.look.episodes import episodes
from diskreplay.cli.look.frames import frames
from diskreplay.cli.look.inspect import inspect
from diskreplay.cli.look.plot import plot
from diskreplay.cli.look.show import show
from diskreplay.cli.look.watch import watch
from diskreplay.cli.repair import repair, verify
from diskreplay.cli.report.command import report
from diskreplay.cli.upkeep import backup, compact, evict

UNUSABLE, INTERRUPTED = 2, 130

app = typer.Typer(
    name="diskreplay",
    help="Inspect, repair, copy and convert experience replay stores on disk.",
    epilog="Exit codes: 0 success, 1 problems found, 2 bad arguments or unusable store.",
    rich_markup_mode="markdown",  # this mode joins the lines of a paragraph; "rich" would keep the line breaks
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: Sequence[Callable[..., None]] = (
    demo,
    doctor,
    inspect,
    episodes,
    show,
    plot,
    frames,
    watch,
    report,
    du,
    diff,
    verify,
    repair,
    evict,
    compact,
    backup,
    copy,
    merge,
    import_store,
    export_store,
)
for _command in COMMANDS:
    # as an argument, -1 is an episode, not an option
    _settings = {"ignore_unknown_options": _command in (show, frames)}
    app.command(_command.__name__.removesuffix("_store"), context_settings=_settings)(_command)


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --version: versions of all libraries, as JSON.")] = False,
) -> None:
    if json and not version:
        raise typer.BadParameter("needs --version; for a command, put it after the command", param_hint="'--json'")
    if version:
        console.emit(
            text.to_json(versions_of_this_process(known_libraries())) if json else f"diskreplay {dr.__version__}"
        )
        raise typer.Exit
    if context.invoked_subcommand is None:
        console.emit(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack characters of a path
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        return _run(arguments)


def _show_warning(message: Warning | str, *where: object, **more: object) -> None:
    """Print a warning without the file and the line of the code that issued it."""
    console.complain(f"warning: {text.clean(' '.join(str(message).split()))}")


def _run(arguments: Sequence[str] | None) -> int:
    try:
        return int(app(arguments, prog_name="diskreplay", standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except SystemExit as stop:  # typer raises this after a broken pipe, and a signal handler after a signal
        return stop.code if isinstance(stop.code, int) else console.PROBLEMS
    except (dr.ReplayError, OSError) as error:
        console.complain(text.one_line(error))
        return UNUSABLE
    except Exception as error:
        if os.environ.get("DISKREPLAY_TRACEBACK"):
            raise
        console.complain(_unexpected(error))
        return UNUSABLE


def _unfit(found: Mapping[str, Any], message: str) -> str:
    """Return the reason why pydantic refused an argument. If the type of the error is unknown, return ``message``.

    ``found`` is an entry of the list of errors in pydantic's exception.
    """
    value, context = found["input"], found.get("ctx", {})
    match found["type"]:
        case "int_parsing" | "int_from_float":
            return f"{value!r} is not a whole number"
        case "float_parsing":
            return f"{value!r} is not a number"
        case "greater_than_equal":
            return f"{value} is less than {context['ge']}"
        case "less_than_equal":
            return f"{value} is not {context['le']} or less"
        case "value_error":
            return str(context["error"])
    return message


def _unexpected(error: Exception) -> str:
    # Only errors of arguments have this method. In some versions of typer, their class is not public.
    if hasattr(error, "format_message"):
        command = getattr(getattr(error, "ctx", None), "command_path", "diskreplay")
        message = error.format_message()
        # Newer releases of typer check values with pydantic. Its message has neither the value nor the bound.
        if error.__cause__ is not None and hasattr(error.__cause__, "errors"):
            (found, *_) = error.__cause__.errors()
            where, _, reason = message.partition(": ")
            message = f"{where}: {_unfit(found, reason)}"
        return f"{text.clean(' '.join(message.split()))} (see {command} --help)"
    where = "set DISKREPLAY_TRACEBACK=1 to see where"
    return f"unexpected {type(error).__name__}: {text.one_line(error)} ({where})"
