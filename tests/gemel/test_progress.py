"""Progress of long commands: one line an event in a file, a bar on a terminal."""

import contextlib
import io
import os
import re
import threading
from pathlib import Path

import pytest

from gemel.progress import EVENT_FORMATS, ProgressDisplay, format_event, show_progress

ROOT = Path(__file__).parents[2]
STAGE_EVENTS = {"stages", "stage", "part"}
SHAPES = {
    "warning": [{"text": "day-bus: few clips"}],
    "query": [{"query": "gate", "index": 1, "count": 3}],
    "cycle": [{"query": "gate", "cycle": 1, "cycles": 3, "val": 0.9}],
    "original": [{"query": "gate", "metric": "f1", "val": 0.9, "test": 0.88, "seconds": 64.0}],
    "epoch": [
        {"queries": ["gate"], "epoch": 1, "epochs": 4, "cycle": 1, "loss": 0.3},
        {"queries": ["gate", "lane"], "epoch": 3, "epochs": 8, "loss": 0.3, "ratios": {"gate": 0.93, "lane": 0.99}},
        {"queries": ["gate"], "epoch": 3, "epochs": 8, "loss": 0.3, "ratios": {"gate": 0.93}},
    ],
    "reference": [{"query": "gate", "metric": "f1", "val": 0.81, "needed": 0.77}],
    "processes": [{"queries": [["gate", "lane"], []]}],
    "ancestry": [{"kin": kin, "similarity": {"a": 0.98}, "donor": "a"} for kin in (True, False)],
    "identical": [{"sets": 3, "saved_bytes": 9, "queries": []}],
    "aligned": [{"query": "gate", "spaces": 3, "moved": 1275, "channels": 1280}],
    "suffix": [{"query": "gate", "donor": "yard", "suffix": 3, "of": 4, "private": ["stem"], "ratio": 0.97,
                "required": 0.95, "accepted": accepted, "saved_bytes": 9} for accepted in (True, False)],
    "start": [{"ratios": {"gate": 0.4}, "hard": hard, "saved_bytes": 0} for hard in (True, False)],
    "training": [{"training": kind, "epoch": 1, "ratios": {"gate": 0.9}, "met": [], "saved_bytes": 0}
                 for kind in ("donor-frozen", "joint")],
    "restore": [{"accepted_bytes": 9, "instead_of_bytes": 3}],
    "recipe": [{"rate": 5e-4, "epochs": 4, "features": 1.0, "private": 0.1}],
    "repair": [
        {"query": "gate", "repair": "norms and head", "ratio": 0.98, "required": 0.97},
        {"query": "gate", "repair": "original", "required": 0.97},
    ],
    "widths": [{"width": "int8", "stored_bytes": {"int8": 9}, "ratios": {"gate": 0.9}, "in_the_way": ["gate"]}],
    "prefix": [{"query": "gate", "prefix": 4, "layers": 20, "ratio": 0.98}],
    "attempt": [
        {"query": "gate", "prefix": 4, "ratio": 0.98, "held": True},
        {"round": 1, "group": "conv2d 3x3 512", "members": [1, 2], "kept": [1, 2], "diverged": False},
    ],
    "round": [{"round": 1, "rounds": 7, "signature": "conv2d 3x3", "members": [1], "saved_bytes": 12_000_000}],
    "test": [
        {"query": "gate", "metric": "f1", "original": 0.8, "merged": 0.79, "ratio": 0.98, "met": True, "worth": True},
        {"query": "gate", "ratio": 0.9, "target": 0.95},
    ],
    "evaluate": [{"query": "gate"}],
    "stream": [{"arm": "merged", "memory": "min", "memory_bytes": 10}],
    "profile": [{"query": "gate"}],
}  # fmt: skip


@pytest.mark.parametrize(("event", "fields"), [(name, one) for name, each in SHAPES.items() for one in each])
def test_format_event_known_fields_give_a_sentence(event, fields):
    text = EVENT_FORMATS[event](fields)
    assert text == format_event(event, fields) and "\n" not in text


def test_format_event_all_events_of_the_packages_are_known():
    emitted = set()
    for folder in ("merger", "gemel"):
        for path in (ROOT / folder).rglob("*.py"):
            emitted |= set(re.findall(r"\b_?progress\(\s*\"(\w+)\"", path.read_text(encoding="utf-8")))
    assert emitted - STAGE_EVENTS <= EVENT_FORMATS.keys()


def test_format_event_plain_english():
    assert format_event("ancestry", {"kin": False, "similarity": {"a": 0.0}, "donor": "gate"}) == (
        "the originals are not from the same pretrained weights; donor: gate"
    )
    fields = {"query": "night-lane", "moved": 1788, "channels": 1792}
    assert format_event("aligned", fields) == ("night-lane: permuted 1,788 of 1,792 channels to match other models")


def test_format_event_unknown_is_printed_with_its_fields():
    assert format_event("new_thing", {"query": "gate", "count": 3}) == "new thing (query gate, count 3)"
    assert format_event("round", {"turn": 3}) == "round (turn 3)"


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def log():
    """(log, clock, output) of a log whose clock is set by the test, with a limit of 100 s."""
    clock, out = Clock(), io.StringIO()
    return ProgressDisplay(out, clock, limit_s=100.0), clock, out


def texts(out):
    return [line.split("] ", 1)[1] for line in out.getvalue().splitlines()]


def test_log_stages_are_nested(log):
    progress, _, out = log
    progress("stages", names=["render", "merge", "report"])
    progress("stage", name="render")
    progress("stage", name="merge")
    progress("stages", names=["read", "train"])
    progress("stage", name="train")
    progress("stage", name="report")
    assert texts(out) == [
        "3 stages: render, merge, report", "render (1 of 3)", "merge (2 of 3)", "2 stages: read, train",
        "merge (2 of 3), train (2 of 2)", "report (3 of 3)",
    ]  # fmt: skip


def test_log_same_work_again_is_not_nested(log):
    progress, _, out = log
    for _ in range(2):
        progress("stages", names=["read", "train"])
        progress("stage", name="train")
    assert texts(out)[-1] == "train (2 of 2)"


def test_log_unannounced_stage_is_not_counted(log):
    progress, _, out = log
    progress("stages", names=["merging", "reporting"])
    for name in ("merging", "reading", "evaluating", "reporting"):
        progress("stage", name=name)
    assert texts(out)[-3:] == ["merging (1 of 2), reading", "merging (1 of 2), evaluating", "reporting (2 of 2)"]


def test_log_running_stage_is_printed_once_a_minute(log):
    progress, clock, out = log
    progress("stage", name="train")
    for second in range(1, 121):
        clock.now = float(second)
        progress("epoch", queries=["a"], epoch=second, epochs=500)
        progress("part", done=0.4, seconds_left=500.0)
        progress.print_if_quiet()
    assert texts(out) == [
        "train", "epoch 60 of 500 (a); 1 min 00 s so far, 40 % done, about 40 s left",
        "epoch 120 of 500 (a); 2 min 00 s so far, 40 % done",
    ]  # fmt: skip


def test_show_progress_file_gets_lines_and_the_thread_ends():
    out = io.StringIO()
    with show_progress(out) as progress:
        progress("stage", name="read")
        assert any(one.name == "progress" for one in threading.enumerate())
    assert "read" in out.getvalue()
    assert not any(one.name == "progress" for one in threading.enumerate())


def test_show_progress_terminal_shows_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    master, slave = os.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, show_progress(terminal) as progress:
        assert isinstance(progress, ProgressDisplay) and progress.bars is not None
        progress("stages", names=["read", "train"])
        progress("stage", name="train")
        progress("warning", text="few clips")
        progress("epoch", queries=["a"], epoch=1, epochs=4)
        progress("part", done=0.4, seconds_left=50.0)
        progress.bars.refresh()
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while more := os.read(master, 1 << 16):
            shown += more
    os.close(master)
    assert "train (2 of 2)" in shown.decode() and "few clips" in shown.decode()
    assert "40 % done, about 50 s left" in shown.decode()
