import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import diskreplay as dr
from tests.cli.conftest import COMMANDS

COMMAND = [sys.executable, "-m", "diskreplay"]


def raiser(error: BaseException) -> Callable[..., None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


def is_one_line(text: str) -> bool:
    return text.startswith("diskreplay: ") and text.count("\n") == 1 and text.endswith("\n")


def test_the_version_is_printed_alone(run: Callable) -> None:
    assert run("--version") == (0, f"diskreplay {dr.__version__}\n", "")


def test_without_a_command_the_commands_are_listed(run: Callable) -> None:
    done = run()
    assert done.code == 0
    assert done.err == ""
    listed = re.findall(r"^│ (\w+) ", done.out[done.out.index("Commands") :], re.MULTILINE)
    assert sorted(set(listed) ^ set(COMMANDS)) == [], "`COMMANDS` of tests/cli/conftest.py lacks these, or has too many"
    assert tuple(listed) == COMMANDS
    assert "Exit codes: 0 success, 1 problems found, 2 bad arguments or unusable store." in done.out


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(run: Callable, command: str, flag: str) -> None:
    done = run(command, flag)
    assert (done.code, done.err) == (0, "")
    assert f"Usage: diskreplay {command}" in done.out
    assert "[default: None]" not in done.out


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_options(shell: str) -> None:
    typed = "diskreplay episodes --w"
    variables = {
        "bash": {"_DISKREPLAY_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": "2"},
        "zsh": {"_DISKREPLAY_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed},
        "fish": {
            "_DISKREPLAY_COMPLETE": "complete_fish",
            "_TYPER_COMPLETE_ARGS": typed,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        },
    }[shell]
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=600, env=os.environ | variables, check=False)
    assert "--where" in done.stdout
    assert "--json" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["inspect"], "Missing argument 'PATH'"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["inspect", "a", "--nonsense"], "No such option: --nonsense"),
        (["episodes", "a", "--limit", "-7"], "'--limit': -7 is less than 0"),
        (["episodes", "a", "--limit", "many"], "'--limit': 'many' is not a whole number"),
        (["episodes", "a", "--min-total-reward", "high"], "'high' is not a number"),
        (["watch", "a", "--interval", "nan"], "nan is not 86400.0 or less"),
        (["frames", "a", "0", "--out", "x.gif", "--fps", "nan"], "nan is not 240.0 or less"),
        (["frames", "a", "0", "--out", "x.gif", "--scale", "33"], "33 is not 32 or less"),
        (["episodes", "a", "--ended", "somehow"], "'somehow' is not one of"),
        (["episodes", "a", "--json", "--csv"], "--json and --csv exclude each other"),
        (["plot", "a", "dreams"], "Invalid value for 'WHAT': 'dreams' is not one of"),
        (["plot", "a", "total_reward", "--out", "x.jpeg"], "--out must end in .png or .svg, not x.jpeg"),
        (["frames", "a", "0"], "Missing option '--out'"),
        (["frames", "a", "0", "--out", "x.avi"], "--out must end in .png, .gif or .mp4, not x.avi"),
        (["evict", "a"], "Missing option '--where'"),
        (["copy", "a"], "Missing argument 'TO'"),
        (["merge", "a", "b"], "merge needs at least two stores"),
        (["doctor", "nowhere"], "'nowhere' does not exist; name a folder"),
        (["--json"], "needs --version; for a command, put it after the command"),
        (["--json", "inspect", "a"], "needs --version; for a command, put it after the command"),
        (["show", "a"], "Missing argument 'EPISODE'"),
        (["show", "a", "1.5"], "Invalid value for 'EPISODE': '1.5' is not a whole number"),
        (["show", "a", "0", "--nonsense"], "unexpected extra argument"),
        (["show", "a", "0", "--steps", "few"], "--steps must be A:B or one number, such as 0:10 or -1, not 'few'"),
        (["episodes", "a", "--min-length", "4", "--max-length", "3"], "--min-length 4 is more than --max-length 3"),
    ],
)
def test_a_wrong_argument_takes_one_line_and_exit_code_2(run: Callable, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert is_one_line(done.err)
    assert message in done.err
    assert "--help)" in done.err
    assert "Input should" not in done.err  # words of a library
    assert "Value error" not in done.err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (dr.FormatError("damaged\n  in two lines"), "damaged in two lines"),
        (dr.FormatError("\x1b[2Jname"), r"\x1b[2Jname"),
        (PermissionError(13, "Permission denied", "/x"), "[Errno 13] Permission denied: '/x'"),
        (KeyError("k"), "unexpected KeyError: 'k' (set DISKREPLAY_TRACEBACK=1 to see where)"),
        (MemoryError(), "unexpected MemoryError: MemoryError (set DISKREPLAY_TRACEBACK=1 to see where)"),
    ],
)
def test_an_error_takes_one_line_and_exit_code_2(
    run: Callable, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    monkeypatch.setattr(dr, "open", raiser(error))
    assert run("inspect", "somewhere") == (2, "", f"diskreplay: {message}\n")


def test_a_traceback_can_be_asked_for(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dr, "open", raiser(KeyError("k")))
    monkeypatch.setenv("DISKREPLAY_TRACEBACK", "1")
    with pytest.raises(KeyError, match="^'k'$"):
        run("inspect", "somewhere")


def test_ctrl_c_ends_quietly(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dr, "open", raiser(KeyboardInterrupt()))
    assert run("inspect", "somewhere") == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_a_reader_that_went_away_is_no_error(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=600, check=False
        )
    finally:
        os.close(write_end)
    assert done.stderr == ""
    assert done.returncode in (1, 141)  # typer prints the help itself, and says 1


def test_names_that_the_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [*COMMAND, "inspect", str(tmp_path / "größe")],
        capture_output=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert done.returncode == 2
    assert b"gr\\xf6\\xdfe" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_bars_go_to_a_terminal_and_results_do_not(tmp_store: Path, run_in_terminal: Callable) -> None:
    schema = dr.Schema(obs=dr.Field((), "float32"), action=dr.Field((), "int64"))
    dr.create(tmp_store, schema).close()
    done, shown = run_in_terminal("inspect", tmp_store, "--json")
    assert done.returncode == 0
    assert b"Reading rewards" in shown
    assert done.stdout.startswith(b"{")
    assert b"\x1b" not in done.stdout
