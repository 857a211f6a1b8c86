import json
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from diskreplay import StoreNotFound
from diskreplay.cli import text


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (12_345_678, "12.3 MB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (999_999_999, "1.0 GB"),
        (10**15, "1.0 PB"),
        (10**22, "10,000.0 EB"),
        (None, "-"),
    ],
)
def test_bytes_are_given_in_the_largest_unit_that_fits(amount: int | None, shown: str) -> None:
    assert text.size(amount) == shown


@given(st.integers(0, 10**21))
def test_a_size_is_right_to_its_last_digit(amount: int) -> None:
    digits, unit = text.size(amount).split()
    scale = 1000 ** text.UNITS.index(unit)
    assert abs(float(digits.replace(",", "")) * scale - amount) <= 0.0501 * scale


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (475, "475"),
        (475.0, "475"),
        (0.125, "0.125"),
        (21.73456, "21.73"),
        (-1234.56, "-1,234.6"),
        (1234567.0, "1,234,567"),
        (1.5e-7, "1.500e-07"),
        (1.25e10 + 0.5, "1.250e+10"),
        (-0.0, "0"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.float32(0.5), "0.5"),
        (None, "-"),
    ],
)
def test_a_measured_number_keeps_about_four_digits(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("part", "shown"),
    [
        (0.0, "0%"),
        (0.0004, "< 0.1%"),
        (0.05, "5%"),
        (0.1234, "12.3%"),
        (0.9996, "> 99.9%"),
        (1.0, "100%"),
        (None, "-"),
    ],
)
def test_a_little_is_not_nothing_and_nearly_all_not_all(part: float | None, shown: str) -> None:
    assert text.percent(part) == shown


def test_whole_numbers_have_their_digits_grouped() -> None:
    assert text.count(1_234_567) == "1,234,567"
    assert text.count(None) == "-"
    assert text.plural(1, "episode") == "1 episode"
    assert text.plural(2000, "episode") == "2,000 episodes"


def test_a_share_of_nothing_is_nothing() -> None:
    assert text.share(1, 4) == "25%"
    assert text.share(1, 0) == text.share(1, None) == "-"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "1970-01-01 00:00:00 UTC"),
        (1767225600.75, "2026-01-01 00:00:00 UTC"),
        ("2026-01-01T01:00:00+01:00", "2026-01-01 00:00:00 UTC"),
        ("long ago\x1b", "long ago\\x1b"),
        (1e300, "1e+300"),
        (math.nan, "nan"),
        (None, "-"),
    ],
)
def test_a_moment_is_given_in_utc(value: object, shown: str) -> None:
    assert text.moment(value) == shown


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert text.clean("a\x1b[31mb\nc\x9b\u202e") == r"a\x1b[31mb\nc\x9b\u202e"
    assert text.clean("größe ✓ [red]") == "größe ✓ [red]"
    assert text.clean("lost\udcff") == r"lost\udcff"


@given(st.text(st.characters(exclude_categories=[])))
def test_cleaned_text_can_always_be_printed(anything: str) -> None:
    cleaned = text.clean(anything)
    assert cleaned.isprintable()
    cleaned.encode()


def test_an_error_takes_one_line() -> None:
    assert text.one_line(ValueError("no\n  such\tthing")) == "no such thing"
    assert text.one_line(StoreNotFound(2, "No such file", "/x")) == "[Errno 2] No such file: '/x'"
    assert text.one_line(ValueError()) == "ValueError"


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("1", "open"), ("12,345", "cut")]
    assert text.aligned((">id", "ended"), rows) == [
        "    id  ended",
        "     1  open",
        "12,345  cut",
    ]
    assert text.aligned((">id", "ended"), rows, width=13) == text.aligned((">id", "ended"), rows)
    assert text.aligned((">id", "ended"), rows, width=12) == ["id 1  ended open", "id 12,345  ended cut"]
    assert text.aligned((">id", "ended"), []) == ["id  ended"]


@pytest.mark.parametrize(
    ("bounds", "shown"),
    [
        (None, "-"),
        ({"type": "Box", "low": 0, "high": 255}, "Box(0 to 255)"),
        ({"type": "Box", "low": "-Infinity", "high": "Infinity"}, "Box(-inf to inf)"),
        ({"type": "Box", "low": [0, 1], "high": [2, 3]}, "Box([...] to [...])"),
        ({"type": "Box", "low": [[-1.5, -1.5]], "high": ["Infinity", "Infinity"]}, "Box(-1.5 to inf)"),
        ({"type": "Discrete", "n": 7, "start": 0}, "Discrete(7)"),
        ({"type": "Discrete", "n": 7, "start": -3}, "Discrete(7 from -3)"),
        ({"type": "MultiDiscrete", "nvec": [3, 4]}, "MultiDiscrete([3, 4])"),
        ({"type": "MultiDiscrete", "nvec": [3] * 40}, "MultiDiscrete(...)"),
        ({"type": "MultiBinary"}, "MultiBinary"),
        ({"type": "\x1b[2J"}, r"\x1b[2J"),
    ],
)
def test_a_space_is_described_in_a_phrase(bounds: dict | None, shown: str) -> None:
    assert text.space(bounds) == shown


def test_json_has_null_for_what_is_no_number_and_plain_values_for_numpy() -> None:
    value = {
        "nan": math.nan,
        "infinities": [math.inf, -math.inf],
        "numpy": (np.float32("nan"), np.int64(3), np.bool_(True), np.arange(2), np.float64(0.5)),
        1: None,
    }
    expected = {"nan": None, "infinities": [None, None], "numpy": [None, 3, True, [0, 1], 0.5], "1": None}
    assert json.loads(text.to_json(value)) == expected


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_is_readable_by_a_strict_parser(value: object) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    shown = text.to_json(value)
    assert shown.isascii()
    json.loads(shown, parse_constant=refuse)
