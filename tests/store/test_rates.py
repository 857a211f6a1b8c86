from diskreplay.store.processes import Rate


def test_a_rate_is_over_the_looks_of_its_window() -> None:
    rate = Rate(10.0)
    assert rate.add(0.0, 100) is None
    assert rate.add(2.0, 110) == 5.0
    assert rate.add(10.0, 150) == 5.0
    assert rate.add(20.0, 150) == 0.0  # since 10.0: what was before has left the window


def test_a_window_shorter_than_the_interval_is_the_look_before() -> None:
    rate = Rate(1.0)
    rate.add(0.0, 0)
    rate.add(60.0, 60)
    assert rate.add(120.0, 180) == 2.0


def test_two_looks_at_one_moment_have_no_rate() -> None:
    rate = Rate(1.0)
    rate.add(5.0, 0)
    assert rate.add(5.0, 7) is None
