"""The soak runs, and its account would show a step that is lost."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import diskreplay as dr
from tests.testing.coded import coded_step, make_codes, split_codes
from tests.testing.support import REPOSITORY
from tests.tiers import whole_or_part
from tools.soaks.__main__ import page
from tools.soaks.account import Plan, Soak
from tools.soaks.jobs import growth, write


@pytest.mark.slow(turns=4)
@pytest.mark.timeout(900)
def test_a_short_soak_ends_in_an_exact_account(tmp_path):
    kills = whole_or_part(12, 4)
    arguments = f"--kills {kills} --writers 3 --samplers 1 --kill-every 0.05 --check-every 4"
    arguments += " --move-every 0.2 --stop-every 0.2 --stop-s 0.5 --capacity 2000"
    done = subprocess.run(
        [sys.executable, "-m", "tools.soaks", *arguments.split(), "--folder", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| processes killed by SIGKILL | {kills} |" in done.stdout
    assert "| 0 |\n" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def idle(tmp_path):
    soak = Soak(Plan(seconds=0, writers=0, samplers=0, others=0), tmp_path)
    soak.run()
    return soak


def test_a_run_of_nothing_has_nothing_to_tell(idle, tmp_path):
    assert idle.account.problems == []
    assert "steps committed | 0 |" in page(idle.account, "tools/soak", tmp_path)


def test_a_step_that_was_committed_and_is_not_there_is_told(idle):
    idle._ends[0, 0] = 3
    idle._settle()
    assert idle.account.problems == [
        "3 steps were committed, and 0 inserted",
        "0 of 3 steps are visible",
    ]


@pytest.mark.parametrize(("noted", "told"), [([], 1), ([[0, 0, 3, 6]], 0), ([[0, 0, 3, 5]], 1)])
def test_a_step_that_is_missing_between_others_is_told_if_nobody_chose_it(idle, noted, told):
    with dr.open(idle._path, "a") as store:
        for first in range(0, 9, 3):  # sealed, so that they may be evicted
            with store.writer() as writer:
                for count in range(first, first + 3):
                    writer.append(**coded_step(make_codes(0, 0, count)), terminated=count == first + 2)
        store.refresh()
        assert store.evict(lambda episode: split_codes(episode.action[0, 0])[2] == 3) == 3
    np.array(noted, np.int64).tofile(idle._place.folder / "evicted-1")
    idle._kinds[0], idle._ends[0, 0] = write, 9
    idle._check()
    assert len(idle.account.problems) == told


@pytest.mark.parametrize(("late", "wrong"), [(1000, []), (2000, ["write-0: mappings grew from 1,000 to 2,000"])])
def test_a_process_that_grows_is_told(tmp_path, late, wrong):
    held = [[5000, 20, 1000]] * 30 + [[5000, 20, late]] * 10
    (tmp_path / "write-0.samples").write_text("\n".join(map(json.dumps, held)))
    rows, told = growth(tmp_path)
    assert told == wrong
    assert ["write-0", "mappings", "1,000", f"{late:,}"] in rows


@pytest.mark.parametrize(("others", "told"), [(40, 0), (5, 1)])
def test_only_a_full_store_may_show_nothing_of_a_dead_writer(tmp_path, others, told):
    soak = Soak(Plan(seconds=0, writers=0, samplers=0, others=0, capacity=20), tmp_path)
    soak.run()
    for number, steps in ((4, 0), (6, others)):
        with dr.open(tmp_path / "store", "a") as store, store.writer() as writer:
            for count in range(steps):
                writer.append(**coded_step(make_codes(number, 0, count)), terminated=False)
    soak._board.counts[4, 0] = 10
    soak._note_end(SimpleNamespace(number=4, since=0))
    assert len(soak.account.problems) == told
