"""What runs for minutes by design: `tools/nightly` all of it, `tools/test --all` a part, and `tools/test` less."""

import os
from collections import defaultdict
from collections.abc import Iterable
from hashlib import sha256

NIGHTLY = os.environ.get("DISKREPLAY_NIGHTLY") == "1"
PARTS = 8  # of the cases of a test; each number that follows another selects the next part


def whole_or_part(whole: int, part: int) -> int:
    """Return how much a test does: `whole` every night, `part` with each change."""
    return whole if NIGHTLY else part


def part_of_cases(cases: Iterable[str], number: int) -> set[str]:
    """Return a part of the cases of each test, at least one; consecutive numbers return all in turn.

    Cases are shuffled, or a parameter with as many values as there are parts would have the same one in a whole part.

    Parameters
    ----------
    cases
        Node ids of pytest, such as ``"tests/test_a.py::test_b[case]"``.
    number
        Any integer; the same one returns the same cases.
    """
    tests = defaultdict(list)
    for case in cases:
        tests[case.partition("[")[0]].append(case)
    chosen = set[str]()
    for of_test in tests.values():
        of_test.sort(key=lambda case: sha256(case.encode()).digest())
        parts = min(PARTS, len(of_test))
        chosen.update(of_test[number % parts :: parts])
    return chosen
