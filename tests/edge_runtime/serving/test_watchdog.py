"""The watchdog: a step that lasts too long hangs, a process that stood still does not."""

from __future__ import annotations

from edge_runtime.executor import HANG_FACTOR, MAX_WATCH_GAP_S, MIN_HANG_S, WATCH_INTERVAL_S, Activity, Watchdog


def looks(dog: Watchdog, doing: Activity | None, seconds: float, start: float = 0.0) -> str | None:
    """What it says after so many seconds of regular looks."""
    said = None
    for number in range(round(seconds / WATCH_INTERVAL_S) + 1):
        said = said or dog.check(doing, start + number * WATCH_INTERVAL_S)
    return said


def test_watchdog_reports_a_step_ten_times_too_long():
    short, long = Activity.expecting("query a", 0.01), Activity.expecting("query b", 2.0)
    assert short.timeout_s == MIN_HANG_S and long.timeout_s == 2.0 * HANG_FACTOR
    assert looks(Watchdog(), short, MIN_HANG_S - 1) is None and looks(Watchdog(), long, 19.0) is None
    assert (looks(Watchdog(), short, MIN_HANG_S + 1) or "").startswith("query a has not ended for 6")
    assert (looks(Watchdog(), long, 21.0) or "").startswith("query b has not ended for 20")


def test_watchdog_ignores_many_short_steps():
    dog = Watchdog()
    for second in range(100):
        assert looks(dog, Activity.expecting("query a", 0.01), 0.8, second) is None
    assert looks(dog, None, 100.0, 100.0) is None


def test_watchdog_ignores_a_suspended_process():
    dog, doing = Watchdog(), Activity.expecting("query a", 0.01)
    assert looks(dog, doing, 1.0) is None
    assert looks(dog, doing, MIN_HANG_S - 2.0 - MAX_WATCH_GAP_S, 3600.0) is None
    assert looks(dog, doing, MIN_HANG_S, 3606.0) is not None
