"""`diskreplay import` and `export`."""

import inspect
import json
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from rich.progress import Progress

import diskreplay as dr
from diskreplay.cli import console
from diskreplay.interop import dreamer
from diskreplay.interop.step_values import map_leaves
from tests.cli.conftest import small_episode, write_small
from tests.interop.exchange.test_options import pixels as write_pixels
from tests.interop.round_trips import PLAIN, SCHEMES, content, make_store


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
    assert again == f"imported  0 episodes of 0 steps  to {tmp_path / 'b'}; 8 episodes imported by an earlier call\n"


def test_a_part_of_a_store_and_a_dry_run(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "vectors")
    arguments = ("export", store, f"npz:{tmp_path / 'set'}", "--where", "length > 5")
    assert run(*arguments, "--dry-run").out == "would be exported  3 episodes of 25 steps\n"
    assert not (tmp_path / "set").exists()
    done = json.loads(run(*arguments, "--json").out)
    assert (done["episodes"], done["steps"], done["not_held"], done["dry_run"]) == (3, 25, [], False)
    imported = json.loads(run("import", f"npz:{tmp_path / 'set'}", tmp_path / "b", "--json").out)
    assert imported == {
        "path": str(tmp_path / "b"),
        "episodes": 3,
        "steps": 25,
        "resumed": 0,
        "cut": 0,
        "skipped": [],
        "not_kept": [],
    }


def test_an_export_evaluates_its_condition_once_for_each_episode(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read, total_reward = make_store(tmp_path / "a", "vectors"), [], dr.Episode.total_reward.fget

    def noted(episode: dr.Episode) -> float:
        read.append(int(episode.ids[0]))
        return total_reward(episode)

    monkeypatch.setattr(dr.Episode, "total_reward", property(noted))
    assert run("export", store, f"npz:{tmp_path / 'set'}", "--where", "total_reward > -100").code == 0
    with dr.open(store) as opened:
        assert sorted(read) == [int(episode.ids[0]) for episode in opened.episodes]


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--json"], ["--json", "--dry-run"]])
def test_an_export_chooses_episodes_and_looks_for_what_is_lost_once(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    store, called, export_dataset = make_store(tmp_path / "a", "vectors", priorities=True), [], dreamer.export_dataset

    @wraps(export_dataset)
    def noted(*arguments: Any, dry_run: bool = False, **others: Any) -> Any:
        called.append(dry_run)
        return export_dataset(*arguments, dry_run=dry_run, **others)

    bars, add_task = [], Progress.add_task
    monkeypatch.setenv("FORCE_COLOR", "1")  # takes stderr for a terminal
    monkeypatch.setattr(
        Progress, "add_task", lambda self, title, **rest: bars.append(title) or add_task(self, title, **rest)
    )
    monkeypatch.setattr(dreamer, "export_dataset", noted)
    shown = run("export", store, f"dreamer:{tmp_path / 'set'}", *options)
    is_dry = "--dry-run" in options
    assert (shown.code, "priority" in shown.out, called) == (0, True, [is_dry])
    assert bars == ["Choosing episodes", *([] if is_dry else ["Exporting"])]
    assert (tmp_path / "set").exists() is not is_dry


def test_an_export_names_what_the_format_cannot_hold_before_it_begins(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "vectors", priorities=True)
    shown, table = run("export", store, f"dreamer:{tmp_path / 'set'}"), "the format cannot hold"
    assert shown.code == 0
    assert shown.out.splitlines()[0].strip() == table
    assert "priority" in shown.out
    assert "no_final_obs" in shown.out
    amount, lost = "8 episodes of 40 steps", "not held: priority, ends, no_final_obs, schema"
    assert shown.out.splitlines()[-1] == f"exported  {amount}  to {tmp_path / 'set'}; {lost}"
    would = run("export", store, f"dreamer:{tmp_path / 'other'}", "--dry-run").out
    assert would.splitlines() == [*shown.out.splitlines()[:-1], f"would be exported  {amount}; {lost}"]
    asked = run("export", store, f"npz:{tmp_path / 'all'}").out
    assert table not in asked
    (tmp_path / "b").mkdir()
    refused = run("export", store, f"npz:{tmp_path / 'b'}")
    assert (refused.code, refused.out) == (2, "")
    assert "b exists already; give the path of a new data set" in refused.err


def test_an_import_tells_how_many_episodes_it_cut(run: Callable, tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py", reason="needs h5py")
    obs = np.arange(10.0)
    with h5py.File(tmp_path / "set.hdf5", "w") as file:
        file["observations"], file["next_observations"] = obs, np.where(obs > 7, obs, obs + 1)
        file["actions"] = file["rewards"] = np.zeros(10)
        file["terminals"] = np.zeros(10, bool)
    code, out, error = run("import", f"d4rl:{tmp_path / 'set.hdf5'}", tmp_path / "a")
    said = "; 1 episode cut where next_obs differs from the observation of the next row\n"
    assert (code, out, error) == (0, f"imported  2 episodes of 10 steps  to {tmp_path / 'a'}{said}", "")
    with h5py.File(tmp_path / "set.hdf5", "a") as file:
        file["next_observations"][...] = obs + 1.5
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, error = run("import", f"d4rl:{tmp_path / 'set.hdf5'}", tmp_path / "b")
    assert error.startswith(f"diskreplay: warning: {tmp_path / 'set.hdf5'}: 9 of 10 steps lead to another observation")
    assert (code, error.count("\n")) == (0, 1)


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
    assert "npz has no option 'video' here; it has none" in run("export", store, f"npz:{tmp_path / 'x'}", "--video").err
    assert "there is no file or folder" in run("import", f"npz:{tmp_path / 'x'}", tmp_path / "b").err
    assert (
        "is no store" in run("export", tmp_path / "x", "npz:y").err or run("export", tmp_path / "x", "npz:y").code == 2
    )
    assert not (tmp_path / "b").exists()


def test_options_of_a_format_are_passed_on(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "nested")
    options = ("--option", "zarr_format=3", "--rename", "obs/image=img,action/move=push")
    assert run("export", store, f"zarr_episodes:{tmp_path / 'set'}", *options).code == 0
    root = zarr.open_group(tmp_path / "set", mode="r")
    assert root.metadata.zarr_format == 3
    assert {"img", "push"} <= set(root["data"].keys())
    del zarr.open_group(tmp_path / "set", mode="a").attrs["diskreplay"]
    options = ("--option", "ended=cut", "--action", "push", "--extra", "img")
    assert run("import", f"zarr_episodes:{tmp_path / 'set'}", tmp_path / "b", *options).code == 0
    with dr.open(tmp_path / "b") as back:
        assert list(back.schema.extra) == ["img"]
        assert back.episodes[0].cut


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("format=3", "zarr_episodes has no option 'format' here; it has zarr_format=2|3"),
        ("where=3", "zarr_episodes has no option 'where' here; it has zarr_format=2|3"),
        ("zarr_format=4", "the option is zarr_format=2|3, not 'zarr_format=4'"),
        ("zarr_format", "the option is zarr_format=2|3, not 'zarr_format'"),
        ("names=a:b", "the option names is --rename now"),
    ],
)
def test_a_wrong_option_is_one_line(run: Callable, tmp_path: Path, given: str, said: str) -> None:
    store = make_store(tmp_path / "a", "vectors")
    asked = run("export", store, f"zarr_episodes:{tmp_path / 'set'}", "--option", given)
    assert asked == (2, "", f"diskreplay: Invalid value: {said} (see diskreplay export --help)\n")
    assert not (tmp_path / "set").exists()


def test_what_the_format_refuses_is_one_line(run: Callable, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    store = make_store(tmp_path / "a", "vectors")
    asked = run("export", store, f"parquet:{tmp_path / 'set'}", "--option", "compression=loose")
    assert asked.err.startswith("diskreplay: compression must be snappy, ")
    assert asked.err.endswith(" or none, not 'loose'\n")
    assert run("export", store, f"parquet:{tmp_path / 'set'}", "--option", "compression=loose", "--json") == asked
    assert not (tmp_path / "set").exists()


def test_an_option_is_given_once(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "vectors")
    twice = ("--option", "zarr_format=2", "--option", "zarr_format=3")
    assert "the option zarr_format is given twice" in run("export", store, f"zarr_episodes:{tmp_path}/x", *twice).err


def test_help_lists_the_schemes(run: Callable) -> None:
    for command in ("import", "export"):
        shown = " ".join(run(command, "--help").out.split())
        assert all(name in shown for name in SCHEMES)


# --- options of formats -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_option_of_every_format_can_be_given(run: Callable, tmp_path: Path, scheme: str) -> None:
    values = ("3", "true", "a:b", "cut", "final", "arrow")
    module = pytest.importorskip(f"diskreplay.interop.{scheme}", reason=f"needs the libraries of {scheme}")
    nothing = f"{scheme}:{tmp_path / 'nothing'}"
    calls = {
        module.import_dataset: ("import", nothing, tmp_path / "new"),
        module.export_dataset: ("export", tmp_path / "nothing", nothing),
    }
    for function, call in calls.items():
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY and name not in ("progress", "where", "dry_run"):
                said = [run(*call, "--option", f"{name}={value}").err for value in values]
                assert all("nothing" in each or "Invalid value" in each for each in said)
                assert not all("Invalid value" in each for each in said), name


def test_the_options_of_a_command(run: Callable, tmp_path: Path) -> None:
    write_pixels(tmp_path / "set")
    options = ("--obs", "arm=state,eye/top=image", "--action", "actions", "--rename", "score=extra/points")
    more = ("--dtype", "obs/eye/top=uint8", "--where", "length > 4", "--compression", "zstd:3", "--json")
    done = run("import", f"zarr_episodes:{tmp_path / 'set'}", tmp_path / "store", *options, *more)
    assert done.code == 0, done.err
    assert json.loads(done.out)["episodes"] == 1
    with dr.open(tmp_path / "store") as store:
        assert store.schema.step_leaves.keys() == {"obs/arm", "obs/eye/top", "action", "reward", "extra/points"}
        assert store.schema.obs["eye"]["top"].dtype == np.uint8
    for wrong, said in [
        (("--rename", "score"), "--rename is NAME=NAME,..., but 'score' is not a pair"),
        (("--where", "segment > 1"), "--where: unknown name 'segment'; known are total_reward, length, "),
        (("--where", "lenth > 1"), "lenth"),
        (("--on-error", "ignore"), "on_error must be raise or skip, not 'ignore'"),
        (("--compression", "gzip"), "'gzip' is not zstd or zstd:LEVEL"),
    ]:
        asked = run("import", f"zarr_episodes:{tmp_path / 'set'}", tmp_path / "other", *options[:4], *wrong)
        assert asked.code != 0
        assert said in asked.err
        assert asked.err.count("\n") == 1
        assert not (tmp_path / "other").exists()


def test_the_space_of_a_large_import_is_told_before_it_begins(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pixels(tmp_path / "set")
    command = "import", f"zarr_episodes:{tmp_path / 'set'}"
    roles = "--obs", "state,image", "--action", "actions", "--reward", "score"
    monkeypatch.setattr("diskreplay.cli.exchange._LARGE", 1000)
    lines = run(*command, tmp_path / "a", *roles).out.splitlines()
    nbytes = 10 * 4 * (5 + 8 * 8 * 3 + 2 + 1)
    assert lines[0].startswith(f"10 steps take {nbytes / 1000:.1f} kB; the disk has ")
    assert lines[1].startswith("imported  2 episodes of 10 steps")
    free = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free._replace(free=nbytes - 1))
    asked = run(*command, tmp_path / "b", *roles)
    assert (asked.code, asked.err.count("\n")) == (2, 1)
    assert f"10 steps of {tmp_path / 'set'} take {nbytes} bytes, and the disk has {nbytes - 1}; compress" in asked.err
    assert not (tmp_path / "b").exists()
    assert run(*command, tmp_path / "b", *roles, "--compression", "zstd").code == 0


def test_names_are_given_once_and_no_extra_fields_by_none(run: Callable, tmp_path: Path) -> None:
    write_pixels(tmp_path / "set")
    roles = (f"zarr_episodes:{tmp_path / 'set'}", tmp_path / "b", "--action", "actions")
    twice = run("import", *roles, "--obs", "a=state,a=image")
    assert (twice.code, "--obs has a name twice: a=state,a=image" in twice.err) == (2, True)
    done = json.loads(run("import", *roles, "--obs", "state", "--extra", "", "--json").out)
    assert done["not_kept"] == ["image", "score"]


# --- progress and the report ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("is_terminal", [True, False])
def test_every_format_shows_episodes_bytes_and_the_time_that_is_left(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, is_terminal: bool
) -> None:
    pytest.importorskip(f"diskreplay.interop.{scheme}", reason=f"needs the libraries of {scheme}")
    store, there = make_store(tmp_path / "a", "vectors", PLAIN * 4), f"{scheme}:{tmp_path / 'set.bin'}"
    with dr.open(store) as opened:
        episodes, steps = opened.num_episodes, len(opened)
    monkeypatch.setattr(console, "SECONDS_A_LINE", 0.0)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")  # takes stderr for a terminal
        monkeypatch.setenv("COLUMNS", "160")
        render = console._Amounts.render
        monkeypatch.setattr(
            console._Amounts, "render", lambda self, task: shown.append(render(self, task)) or shown[-1]
        )
    for command in (("export", store, there), ("import", there, tmp_path / "b")):
        shown: list[Any] = []
        done = run(*command)
        assert done.code == 0, done.err
        lines = list(map(str, shown)) if is_terminal else done.err.splitlines()
        said = rf"{episodes} of {episodes} episodes, (\S+) k?B of (\S+) k?B, 0.0 s left$"
        (last,) = {match.groups() for line in lines if (match := re.search(said, line))}
        assert last[0] == last[1]
        assert all(line.startswith(f"diskreplay: {command[0]}ing: ") for line in lines) is not is_terminal
        assert f"{episodes} episodes of {steps} steps" in done.out


def test_an_interruption_is_one_line_that_says_how_to_go_on(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store(tmp_path / "a", "vectors")

    def interrupt(title: str) -> Any:
        return nullcontext(StopAtEpisode(3))

    whole = tmp_path / "set"
    with monkeypatch.context() as patch:
        patch.setattr(console, "transfer", interrupt)
        assert run("export", store, f"npz:{whole}") == (
            130,
            "",
            f"diskreplay: interrupted; nothing was written to {whole}\n",
        )
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert run("export", store, f"npz:{whole}").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(console, "transfer", interrupt)
        said = f"diskreplay: interrupted; the same command continues the import into {tmp_path / 'b'}\n"
        assert run("import", f"npz:{whole}", tmp_path / "b") == (130, "", said)
    assert "3 episodes imported by an earlier call" in run("import", f"npz:{whole}", tmp_path / "b").out
    assert content(tmp_path / "b") == content(store)


class StopAtEpisode:
    """A report of amounts that interrupts the command after some episodes."""

    def __init__(self, episodes: int) -> None:
        self._episodes = episodes

    def __call__(self, done: Any, total: Any) -> None:
        if done.episodes == self._episodes:
            raise KeyboardInterrupt


def test_the_last_line_of_an_export_lists_what_is_lost_rounded_and_left_out(run: Callable, tmp_path: Path) -> None:
    write_small(tmp_path / "a")
    with dr.open(tmp_path / "a", "a") as store, store.writer() as writer:
        first = {part: tree for part, tree in small_episode(1).items() if part in ("obs", "action", "reward")}
        row = {part: map_leaves(lambda rows: rows[0], tree) for part, tree in first.items()}
        writer.append(**row, terminated=False, log_prob=0.0)
        store.refresh()
        options = ("--skip", "obs/state,episode/lr", "--dtype", "extra/log_prob=int8:unsafe")
        done = run("export", tmp_path / "a", f"dreamer:{tmp_path / 'set'}", *options, "--rename", "obs/image=top")
    lost = "episode/seed, episode/goal, ends, no_final_obs, schema"
    assert done.out.splitlines()[-1].split("; ") == [
        f"exported  6 episodes of 80 steps  to {tmp_path / 'set'}",
        "1 open episode left out",
        f"not held: {lost}",
        "not exact: extra/log_prob",
        "not kept: episode/lr, obs/state/0, obs/state/1",
    ]


def test_the_last_line_of_an_import_lists_what_was_skipped_and_left_out(run: Callable, tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", "nested")
    assert run("export", store, f"npz:{tmp_path / 'set'}").code == 0
    (tmp_path / "set/episode-00000002.npz").write_bytes(b"damage")
    options = ("--skip", "extra,obs/state", "--on-error", "skip", "--where", "number != 1 and length < 12")
    done = run("import", f"npz:{tmp_path / 'set'}", tmp_path / "b", *options)
    assert done.out.splitlines()[0].strip() == "left out"
    assert done.out.splitlines()[-1].split("; ") == [
        f"imported  6 episodes of 27 steps  to {tmp_path / 'b'}",
        "1 left out",
        "not kept: extra/hidden/h, extra/log_prob, obs/state/0, obs/state/1",
    ]


def test_compression_is_an_option_of_formats_that_have_it(run: Callable, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    store = make_store(tmp_path / "a", "images")
    for name in ("zstd", "none"):
        assert run("export", store, f"parquet:{tmp_path / name}", "--compression", name).code == 0
    refused = run("export", store, f"npz:{tmp_path / 'set'}", "--compression", "zstd")
    assert (refused.code, "npz has no option 'compression' here; it has none" in refused.err) == (2, True)
