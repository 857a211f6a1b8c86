"""What `diskreplay watch` shows of a look."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from diskreplay.cli import text
from diskreplay.cli.look.watch import log_line, view
from diskreplay.store.activity import Disk, Look, RetentionActivity
from diskreplay.store.processes import LimiterCounts, SavedSampler, WriterActivity

LOOK = Look(
    path="/data/runs/a",
    time=1767225600.0,
    steps=1_234_567,
    steps_hidden=700_000,
    steps_evicted=65_421,
    steps_discarded=0,
    steps_lost=0,
    steps_in_quarantine=12,
    inserted=2_000_000,
    steps_per_second=1234.567,
    episodes=5_000,
    episodes_open=4,
    episodes_per_second=3.5,
    newest_episodes=100,
    mean_total_reward=31.25,
    writers=[
        WriterActivity(7, "dead", (12,), 1, 40, 0.0, 600.0, None),
        WriterActivity(8, "writing", (13, 14), 512, 4_000_000, 51_200.0, 0.01, 2.5),
        WriterActivity(9, "closed", (), 0, 12, 0.0, 3.0, None),
    ],
    samplers=[
        SavedSampler("learner", 90.0, 1_000, 256_000, 12.5, "Transitions(n_step=5)", "Prioritized"),
        SavedSampler("odd", 7.0, None, None, None, None, None),
    ],
    limiters=[
        LimiterCounts("default", 2_000_000, 7_500_000, 3.75, 4_000.0, 120, 0, "writers"),
        LimiterCounts("other", 2_000_000, 10, 5e-6, None, None, None, None),
    ],
    disk=Disk(12_345_678_901, 99_000_000_000, 3_600_000_000.0, 99_000.0),
    retention=RetentionActivity(2_000_000, 10**11, 86_400.0, 0.617, 620.0, 765_433, 12.5, 7_000.0),
    problems=["writer 7 died; the next process that opens the store for writing, or repair, seals segment 12"],
)
AT_FIRST = replace(
    LOOK,
    steps_per_second=None,
    episodes_per_second=None,
    newest_episodes=0,
    mean_total_reward=None,
    writers=[],
    samplers=[],
    limiters=[],
    disk=Disk(0, 10, None, None),
    retention=RetentionActivity(None, None, None, None, None, 0, None, None),
    steps_in_quarantine=0,
    problems=[],
)


def shown(look: Look, width: int, height: int | None = None) -> str:
    console = Console(width=width, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view(look, height))
    return capture.get()


def test_everything_that_a_look_tells_is_shown() -> None:
    words = " ".join(shown(LOOK, 200).split())
    for expected in (
        "/data/runs/a",
        "1,234,567, 2,000,000 inserted, 700,000 hidden, 65,421 evicted, 1,235/s",
        "5,000 ended, 4 open, 3.5/s; mean total_reward of the newest 100: 31.25",
        "12.3 GB, 99.0 GB free, +3.6 GB an hour; the disk will be full in 28 h",
        "keeps 2,000,000 steps, 100.0 GB, 24 h: 62% used, all in 10 min; 12.5/s leave, the oldest first; the oldest "
        "step is 117 min old",
        "12 steps, not included in other counts",
        "writer 7 died",
        "7 dead 12 1 0 40 10 min ago -",
        "8 writing 13, 14 512 51,200 4,000,000 0.0 s ago all but 2.5 s",
        "9 closed - 0 0 12 3.0 s ago -",
        "default 7,500,000 4,000 3.75 120 0 writers",
        "other 10 - 0 - - -",
        "learner 90 s ago 1,000 12.5 256,000 Transitions(n_step=5) by Prioritized",
        "odd 7.0 s ago - - - - by -",
    ):
        assert expected in words


def test_the_first_look_at_an_idle_store_is_short() -> None:
    words = " ".join(shown(AT_FIRST, 80).split())
    assert "1,234,567, 2,000,000 inserted, 700,000 hidden, 65,421 evicted, -" in words
    assert "on disk 0 B, 10 B free retention keeps everything" in words
    assert "writers" not in words


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_view_fits_every_terminal_and_splits_no_word(width: int) -> None:
    lines = shown(LOOK, width, 24).splitlines()
    assert max(map(len, lines)) <= width
    assert set(" ".join(lines).split()) <= set(shown(LOOK, 200).split())


def test_a_small_terminal_leaves_rows_out_and_says_how_many() -> None:
    many = replace(LOOK, writers=[replace(LOOK.writers[1], writer=i) for i in range(100)])
    assert "97 more" in shown(many, 120, 10)
    assert "70 more" in shown(many, 120, 50)
    assert "more" not in shown(many, 120)


def test_a_line_tells_the_most_important() -> None:
    got = log_line(LOOK)
    assert re.match(r"\d\d:\d\d:\d\d  steps 1,234,567  1,235/s  writing 1  episodes 5,000  total_reward 31.25", got)
    assert got.endswith("on disk 12.3 GB  free 99.0 GB  leaving 12.5/s  held writers (default)  problems 1")
    assert log_line(AT_FIRST).endswith("total_reward -  on disk 0 B  free 10 B")


def test_nothing_in_a_store_is_obeyed_by_the_terminal() -> None:
    evil = replace(
        LOOK,
        path="/x\x1b[2J",
        problems=["\x1b]0;x\a"],
        samplers=[replace(LOOK.samplers[0], view="\x1b[1m", name="a")],
    )
    assert "\x1b" not in shown(evil, 200) + log_line(evil)


def test_durations_and_rates_are_for_people() -> None:
    cases = [(None, "-"), (0.04, "0.0 s"), (9.96, "10.0 s"), (90, "90 s"), (119.9, "120 s"), (7199, "120 min")]
    cases += [(86400, "24 h"), (86400 * 365, "365 days")]
    for seconds, expected in cases:
        assert text.duration(seconds) == expected
    for rate, expected in [(None, "-"), (0.0, "0/s"), (1234.567, "1,235/s"), (0.123456, "0.1235/s")]:
        assert text.rate(rate) == expected
