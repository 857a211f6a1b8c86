"""`diskreplay import` and `export`."""

import json
from collections.abc import Callable
from pathlib import Path

from diskreplay.cli.exchange import SCHEMES
from tests.interop.round_trips import content, make_store


def test_a_store_goes_out_and_comes_back(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "nested")
    there = tmp_path / "set"
    assert run("export", store, f"npz:{there}") == (0, f"exported  8 episodes of 40 steps  to {there}\n", "")
    assert run("import", f"npz:{there}", tmp_path / "b") == (
        0,
        f"imported  8 episodes of 40 steps  to {tmp_path / 'b'}\n",
        "",
    )
    assert content(tmp_path / "b") == content(store)
    again = run("import", f"npz:{there}", tmp_path / "b").out
    assert again == f"imported  0 episodes of 0 steps  to {tmp_path / 'b'}; 8 episodes by an earlier call\n"


def test_a_part_of_a_store_and_a_dry_run(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "vectors")
    arguments = ("export", store, f"npz:{tmp_path / 'set'}", "--where", "length > 5")
    assert run(*arguments, "--dry-run").out == "would be exported  3 episodes of 25 steps\n"
    assert not (tmp_path / "set").exists()
    done = json.loads(run(*arguments, "--json").out)
    assert (done["episodes"], done["steps"], done["not_held"], done["dry_run"]) == (3, 25, [], False)
    imported = json.loads(run("import", f"npz:{tmp_path / 'set'}", tmp_path / "b", "--json").out)
    assert imported == {"path": str(tmp_path / "b"), "episodes": 3, "steps": 25, "resumed": 0}


def test_wrong_arguments_are_one_line(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "vectors")
    known = f"the schemes are {', '.join(SCHEMES)}"
    for given, said in (
        ("somewhere", f"'somewhere' is not SCHEME:WHERE; {known}"),
        ("npz:", f"'npz:' is not SCHEME:WHERE; {known}"),
        ("tape:x", f"unknown scheme 'tape'; {known}"),
    ):
        assert run("export", store, given) == (
            2,
            "",
            f"diskreplay: Invalid value: {said} (see diskreplay export --help)\n",
        )
        assert run("import", given, tmp_path / "b").err.startswith(f"diskreplay: Invalid value: {said}")
    assert "npz has no option --video" in run("export", store, f"npz:{tmp_path / 'x'}", "--video").err
    assert "it has no dataset.json" in run("import", f"npz:{tmp_path / 'x'}", tmp_path / "b").err
    assert (
        "is no store" in run("export", tmp_path / "x", "npz:y").err or run("export", tmp_path / "x", "npz:y").code == 2
    )
    assert not (tmp_path / "b").exists()


def test_help_lists_the_schemes(run: Callable) -> None:
    for command in ("import", "export"):
        shown = " ".join(run(command, "--help").out.split())
        assert all(name in shown for name in SCHEMES)
