"""Which machine this is, and since when it runs."""

import pytest

from diskreplay.segments.files import machine


@pytest.fixture
def identities():
    """The functions that tell which machine and boot this is, as if they had never been asked."""
    yield
    for function in (machine.boot_id, machine.machine_id):
        function.cache_clear()


@pytest.mark.parametrize("text", ["", "uninitialized", "localhost"])
def test_a_machine_or_boot_that_is_not_known_is_like_no_other(identities, monkeypatch, text):
    monkeypatch.setattr(machine, "_first_line", lambda paths: "" if "boot_id" in next(iter(paths)) else text)
    seen = set()
    for _ in range(3):
        for function in (machine.boot_id, machine.machine_id):
            function.cache_clear()
            seen.add(function())
            assert function() in seen  # for one process it is one
    assert len(seen) == 6
    assert all(name.startswith("unknown-") for name in seen)


def test_whether_a_time_service_keeps_the_clock_is_asked_of_the_kernel():
    assert machine.is_clock_synchronized() in (True, False)
