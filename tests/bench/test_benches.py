"""Every bench runs at a size that says nothing, and its page says how it was made."""

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import diskreplay as dr
from tools.bench import __main__ as command, data, harness, limits

ROOT = Path(__file__).parents[2]
WITH_TORCHRL = {
    "append": "TorchRL TensorDictReplayBuffer",
    "uniform": "TorchRL TensorDictReplayBuffer",
    "pixels": "TorchRL ReplayBuffer, uniform",
    "sequences": "TorchRL SliceSampler",
}
MANY_SECONDS = (
    *("before", "busy", "cold", "compile", "compressed", "durability", "grown", "many_segments", "packs"),
    *("memory", "online", "open", "retention", "sb3", "sharded", "uniform", "write_path"),
)
ONLY_BESIDE_OTHERS = ("append", "uniform", "cold")  # their targets: beside peers, or fio


def module_of(name):
    return importlib.import_module(f"tools.bench.{command.BENCHES[name]}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.slow] if name in MANY_SECONDS else []),
                *([pytest.mark.leaks("Ray keeps the file of its log")] if name == "sharded" else []),
            ],
        )
        for name in command.BENCHES
    ],
)
def test_a_bench_runs_and_says_how_its_page_was_made(name, tmp_path):
    if name == "compressed":
        pytest.importorskip("ale_py")
    if name == "before" and not (ROOT / ".git").exists():
        pytest.skip("this is no checkout of a repository")
    if name == "sharded":
        pytest.importorskip("ray", reason="needs the extra ray")
    report = command.run_bench(name, tiny=True, rounds=1, folder=tmp_path, peers=False)
    page = report.markdown(f"tools/bench/run {name}", tmp_path)

    assert f"Made by `tools/bench/run {name}` on 20" in page
    assert f"diskreplay {dr.__version__}" in page
    assert f"{os.cpu_count()} cores" in page
    assert platform.node() not in page
    assert str(ROOT) not in page
    assert str(tmp_path) not in page
    assert report.caveats
    for table in report.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}
    if name not in (*ONLY_BESIDE_OTHERS, "device"):
        assert report.targets


RUN_WITH_PEERS = """
import sys
from pathlib import Path
from tools.bench.__main__ import run_bench
report = run_bench(sys.argv[1], tiny=True, rounds=2, folder=Path(sys.argv[2]))
print(report.markdown("", Path(sys.argv[2])))
"""


@pytest.mark.slow(turns=4)
@pytest.mark.parametrize("name", WITH_TORCHRL)
def test_a_bench_runs_beside_its_peer(name, tmp_path):
    if importlib.util.find_spec("torchrl") is None:
        pytest.skip("the bench extra is not installed")
    # In a process of its own: the peer keeps mappings and warns of what is no business of ours.
    arguments = [sys.executable, "-c", RUN_WITH_PEERS, name, str(tmp_path)]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"| {WITH_TORCHRL[name]} |" in done.stdout
    assert re.search(r"\| at least [\d.]+ times \|", done.stdout)


FAKE_FIO = """#!/bin/sh
echo "warning: something else"
echo "3;fio-3.36;reads;0;0;4096;2048;512;8"
"""


@pytest.mark.parametrize("fio", ["none", "fake", "real"])
def test_cold_reads_are_compared_with_those_of_fio_where_it_is_installed(fio, tmp_path, monkeypatch):
    if fio == "real" and shutil.which("fio") is None:
        pytest.skip("fio is not installed")
    if fio != "real":
        # The only folder in which programs are found. Python is named by its path.
        programs = tmp_path / "bin"
        programs.mkdir()
        monkeypatch.setenv("PATH", str(programs))
    if fio == "fake":
        (programs / "fio").write_text(FAKE_FIO)
        (programs / "fio").chmod(0o755)
    cold = module_of("cold")
    if fio == "fake":
        monkeypatch.setattr(cold, "_reads_directly", lambda folder: True)
    answers = iter([{"seconds": [0.5] * cold.TINY.batches, "read": 0}] * 100)
    monkeypatch.setattr(cold, "measure", lambda *_: next(answers))
    report = command.run_bench("cold", tiny=True, rounds=2, folder=tmp_path, peers=False)
    if fio == "real" and not cold._reads_directly(tmp_path):
        pytest.skip(f"{tmp_path} is on a file system without direct reads, which fio needs")
    rows = [row for table in report.tables for row in table.rows if row[0] == "direct, depth 32"]
    assert len(rows) == len(report.targets) == (fio != "none")
    if fio == "fake":
        assert rows == [["direct, depth 32", "500"]]  # 256 reads, 512 a second
        assert report.targets[0].measured == 1.0


def test_the_page_of_each_bench_is_kept_under_its_name():
    kept = {path.stem for path in harness.RESULTS.glob("*.md")}
    assert kept <= set(command.BENCHES)
    for name in kept:
        assert f"`tools/bench/run {name}" in (harness.RESULTS / f"{name}.md").read_text()


def test_full_sizes_are_those_that_the_targets_speak_of():
    assert module_of("uniform").FULL.steps == module_of("open").FULL.steps == 10**6
    assert [case[:2] for case in module_of("memory").FULL.cases[:2]] == [("Prioritized", n * 10**5) for n in (10, 11)]
    assert module_of("uniform").FULL.batch_size == module_of("pixels").FULL.batch_size == 256
    assert module_of("prioritized").FULL.beside[:3] == (10**6, 504, 256)
    assert module_of("prioritized").FULL.grown[::2] == (10**5, 10**7)
    assert module_of("pixels").FULL.steps == module_of("sequences").FULL.steps == 200_000
    assert module_of("sequences").FULL[4:7] == (64, 80, 40)
    assert module_of("open").FULL.steps // module_of("open").FULL.episode_steps == 20_000
    assert module_of("episode_layout").FULL.groups == 10_000


def test_contestants_take_turns_and_the_first_round_does_not_count():
    order = []

    def contestant(name):
        def one_round():
            order.append(name)
            return np.full(2, float(len(order)))

        return harness.Contestant(name, one_round)

    seconds = harness.in_turn([contestant("a"), contestant("b")], 2)
    assert "".join(order) == "abbaab"
    assert [taken.tolist() for taken in seconds["a"]] == [[4, 4], [5, 5]]
    assert [taken.tolist() for taken in seconds["b"]] == [[3, 3], [6, 6]]


def test_a_ratio_compares_all_calls_of_one_round():
    seconds = {
        "ours": [np.array([1.0, 3.0]), np.array([1.0, 1.0])],
        "peer": [np.array([4.0, 4.0]), np.array([9.0, 1.0])],
    }
    assert harness.ratios(seconds, "ours", "peer").tolist() == [2.0, 5.0]
    assert harness.ratio_table(seconds, [("ours", "peer")]).rows == [["ours", "peer", "3.5", "2", "5", "2"]]


def test_every_call_is_timed_with_its_own_arguments():
    seen = []
    taken = harness.timed(lambda a, b: seen.append((a, b)), [(1, 2), (3, 4), (5, 6)])
    assert seen == [(1, 2), (3, 4), (5, 6)]
    assert taken.shape == (3,)
    assert (taken >= 0).all()


@pytest.mark.parametrize(("measured", "at_least", "met"), [(5, True, "yes"), (4.9, True, "**no**"), (5, False, "yes")])
def test_a_target_says_whether_it_was_met(measured, at_least, met):
    assert harness.Target("it", measured, 5, "times", at_least).row()[-1] == met


def test_the_rows_of_the_peer_are_the_transitions_that_ours_draws(tmp_path):
    """The same work on both sides: every row that the peer gets ready-made is what a sampler makes of the steps."""
    steps = 500
    data.fill(tmp_path / "store", steps, 1, 30)
    rows = data.nstep_rows(list(data.episodes(steps, 1, 30)), 5, 0.99)
    with (
        dr.open(tmp_path / "store") as store,
        dr.Sampler(store, dr.Transitions(n_step=5, gamma=0.99), seed=0) as sampler,
    ):
        batch = sampler.gather(np.concatenate([episode.ids for episode in store.episodes])).numpy()
    assert len(rows["reward"]) == steps
    for name in ("obs", "action", "next_obs"):
        np.testing.assert_array_equal(batch[name], rows[name])
    np.testing.assert_array_equal(batch["terminated"], rows["done"])
    np.testing.assert_allclose(batch["reward"], rows["reward"], rtol=1e-6, atol=1e-6)


def test_the_stacked_rows_of_the_peers_are_the_transitions_that_ours_draws(tmp_path):
    # More than 8 MiB, which are stored past the caches.
    found = list(data.frame_episodes(160, 1, 30))
    data.write(tmp_path / "store", data.FRAME_SCHEMA, found)
    parts = [data.nstep_rows_of(episode, 3, 0.99, 4) for episode in found]
    view = dr.Transitions(n_step=3, gamma=0.99, frame_stack=4)
    with dr.open(tmp_path / "store") as store, dr.Sampler(store, view, seed=0) as sampler:
        batch = sampler.gather(np.concatenate([episode.ids for episode in store.episodes])).numpy()
    for name in ("obs", "action", "next_obs"):
        np.testing.assert_array_equal(batch[name], np.concatenate([part[name] for part in parts]))


@pytest.mark.parametrize(("n", "stack"), [(3, 4), (8, 1)])
def test_the_limit_copies_the_rows_that_ours_gathers(n, stack, tmp_path):
    data.write(tmp_path / "store", data.FRAME_SCHEMA, data.frame_episodes(60, 10, 30))
    with dr.open(tmp_path / "store") as store:
        snapshot, episode = store.snapshot, store.episodes[0]
        windows = limits.windows_of(snapshot, episode.ids[2:4], n, stack)
        runs = limits.runs(snapshot, "obs", windows, [(windows.floor, windows.after)])
        copied = np.zeros(runs.nbytes, np.uint8)
        limits.copy_kernel()(*runs, copied.ctypes.data, 0)
        expected = np.concatenate([episode.obs[max(t - stack + 1, 0) : t + n + 1] for t in (2, 3)])
        np.testing.assert_array_equal(copied.reshape(expected.shape), expected)
        limits.copy_kernel()(*runs, copied.ctypes.data, 1)
        np.testing.assert_array_equal(copied.reshape(expected.shape), expected)


def test_single_steps_and_whole_episodes_are_the_same_data():
    whole = list(data.episodes(50, 3, 9))
    single = list(data.single_steps(50, 3, 9))
    assert sum(map(len, whole)) == len(single) == 50
    assert [step[1] for step in single] == np.concatenate([episode.action for episode in whole]).tolist()
    assert sum(step[3] or step[4] for step in single) == len(whole)


def test_the_command_line_refuses_rounds_that_say_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run", "append", "--rounds", "3"])
    with pytest.raises(SystemExit):
        command.main()
    assert "fewer than 7 rounds say nothing" in capsys.readouterr().err
