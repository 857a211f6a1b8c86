"""What runs for minutes by design: `tools/nightly` all of it, `tools/test --all` a part, and `tools/test` less."""

import os
from collections import defaultdict
from collections.abc import Mapping
from hashlib import sha256

import pytest

NIGHTLY = os.environ.get("DISKREPLAY_NIGHTLY") == "1"
PARTS = 16  # of the cases of a test; each number that follows another selects the next part
SHARES = 8  # the cases of a test that tries many points, by `each_share`

each_share = pytest.mark.parametrize("share", range(SHARES))
"""Makes cases of a slow test, each of which tries every eighth point, ``points[share::SHARES]``."""


def whole_or_part(whole: int, part: int) -> int:
    """Return how much a test does: `whole` every night, `part` with each change."""
    return whole if NIGHTLY else part


def part_of_cases(cases: Mapping[str, int], number: int) -> set[str]:
    """Return a part of the cases of each test; consecutive numbers return all in turn.

    A part has a case of each test, or of a test with many turns none. Cases are shuffled, or a parameter with as many
    values as there are parts would have the same one in a whole part.

    Parameters
    ----------
    cases
        Node ids of pytest, such as ``"tests/test_a.py::test_b[case]"``, each with the turns of its test: a test of one
        case is in one of so many consecutive parts.
    number
        Any integer; the same one returns the same cases.
    """
    tests = defaultdict(list)
    for case in cases:
        tests[case.partition("[")[0]].append(case)
    chosen = set[str]()
    for test, of_test in tests.items():
        of_test.sort(key=lambda case: sha256(case.encode()).digest())
        parts = min(PARTS, len(of_test) * cases[of_test[0]])
        first = sha256(test.encode()).digest()[0]  # else all tests of one case would be in the same parts
        chosen.update(of_test[(number + first) % parts :: parts])
    return chosen
