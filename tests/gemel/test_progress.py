"""Progress of long commands: one line an event in a file, a bar on a terminal."""

import contextlib
import io
import os
import re
import threading
from pathlib import Path

import pytest

from gemel.merger.events import Event
from gemel.models.stages import Stages
from gemel.progress import EVENT_FORMATS, ProgressDisplay, format_event, print_note, show_progress

ROOT = Path(__file__).parents[2]
STAGE_EVENTS = {"stages", "stage", "part"}
EPOCH = {"queries": ["gate"], "epoch": 3, "epochs": 8, "loss": 0.3}
INT8 = {
    "step": "weights in int8",
    "query": "gate",
    "saved_bytes": 2**20,
    "ratio": 0.99,
    "required": 0.95,
    "taken": True,
}
INT8 |= {"kept_bytes": 2**19, "flops_per_s": 2e9, "agreement": 0.985, "in_integers": True, "bits": ["fp16", "int8"]}
ROUND = {"round": 1, "rounds": 7, "signature": "conv2d 3x3 512", "saved_bytes": 2**20, "ceiling_bytes": 2**21}
ATTEMPT = {"round": 1, "group": "conv2d 3x3 512", "members": [1, 2], "kept": [1], "diverged": False}
SENTENCES = [
    ("forecast", {"text": "1.40 usd, 50 min 00 s on here; 0.9 usd, 1 h 20 min on spot", "first": True},
     "about 1.40 usd, 50 min 00 s on here; 0.9 usd, 1 h 20 min on spot"),
    ("query", {"query": "gate", "index": 1, "count": 3}, "gate: training the original (1 of 3)"),
    ("cycle", {"query": "gate", "cycle": 1, "cycles": 3, "val": 0.9}, "gate: cycle 1 of at most 3, 0.900 on val"),
    ("original", {"query": "gate", "metric": "f1", "val": 0.9, "test": 0.88, "seconds": 64.0},
     "gate: original trained, F1 0.900 on val, 0.880 on test, in 1 min 04 s"),
    ("epoch", EPOCH, "epoch 3 of 8 (gate): loss 0.3"),
    ("epoch", {**EPOCH, "queries": ["gate", "lane"], "ratios": {"gate": 0.93, "lane": 0.99}},
     "epoch 3 of 8 (joint): lowest ratio 0.93 (gate)"),
    ("reference", {"query": "gate", "metric": "f1", "val": 0.81, "needed": 0.77},
     "gate: original F1 0.810 on val, 0.770 is required"),
    ("processes", {"queries": [["gate", "lane"], []]}, "2 processes: gate, lane; none"),
    ("identical", {"sets": 3, "saved_bytes": 9}, "3 sets of layers are identical: 9 bytes saved without training"),
    ("accepted", {"lower_ends": {}, "accepted": ["gate"], "unproven": [], "refused": ["lane"]},
     "proofs: accepted: gate; refused: lane"),
    ("recipe", {"rate": 5e-4, "epochs": 4}, "training: learning rate 0.0005, 4 epochs"),
    ("step", {"step": "shared layers, trained", "query": "gate", "saved_bytes": 9, "ratio": 0.9, "required": 0.95,
              "taken": False},
     "gate                 shared layers, trained                        9 bytes  0.900  not taken: 0.950 is required"),
    ("left-out", {"step": "shared layers, trained", "possible_bytes": 9, "price_bytes": 10},
     "shared layers, trained: left out, could save 9 bytes more, costs 10 bytes"),
    ("step", INT8,
     "gate                 weights in int8                               1.0 MiB  0.990  taken; keeps 512.0 KiB, "
     "2 GFLOP/s, answers as before 98.5 %, in integers"),
    ("camera-prefix", {"query": "gate", "donor": "lane", "common": 0, "of": 9, "ratio": 0.9, "saved_flops_per_s": 0.0},
     "gate: first 0 of 9 layers in common with lane"),
    ("camera-prefix", {"query": "gate", "donor": None, "common": 4, "of": 9, "ratio": 0.98, "saved_flops_per_s": 2e9},
     "gate: first 4 of 9 layers in common with the network that it was trained from, ratio 0.980, saves 2 GFLOP/s"),
    ("attempt", {"query": "gate", "prefix": 4, "ratio": 0.98, "held": True},
     "gate: 4 frozen layers, ratio 0.98 (enough)"),
    ("attempt", ATTEMPT, "round 1, conv2d 3x3: 1 of 2 layers share"),
    ("round", ROUND, "round 1 of 7, conv2d 3x3: 1.0 MiB of at most 2.0 MiB saved"),
    ("test", {"query": "gate", "metric": "f1", "original": 0.8, "merged": 0.79, "ratio": 0.98, "met": True,
              "worth": True, "reason": ""},
     "gate on test: F1 0.800 -> 0.790, ratio 0.980 (target met)"),
    ("test", {"query": "gate", "ratio": 0.9, "met": False, "worth": True, "reason": ""},
     "gate on test: ratio 0.900 (target missed)"),
    ("test", {"query": "gate", "ratio": 1.2, "met": False, "worth": True, "reason": "one answer"},
     "gate on test: ratio 1.200 (no evidence: one answer)"),
    ("evaluate", {"query": "gate"}, "gate: evaluating merged model and original on test"),
    ("stream", {"arm": "merged", "memory": "min", "memory_bytes": 10}, "simulating the stream: merged, 10 bytes (min)"),
    ("profile", {"query": "gate"}, "gate: measuring"),
    ("new_thing", {"query": "gate", "count": 3}, "new thing (query gate, count 3)"),
    ("round", {"turn": 3}, "round (turn 3)"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "fields", "text"), SENTENCES)
def test_format_event_is_a_sentence(event, fields, text):
    assert format_event(event, fields) == text


def test_format_event_knows_all_events():
    emitted = {event.value for event in Event}
    for path in (ROOT / "gemel").rglob("*.py"):
        emitted |= set(re.findall(r"\b_?progress\(\s*\"(\w+)\"", path.read_text(encoding="utf-8")))
    assert emitted - STAGE_EVENTS <= EVENT_FORMATS.keys() <= {event for event, _, _ in SENTENCES}


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
    for _ in range(2):  # the same work again is not nested
        progress("stages", names=["read", "train"])
        progress("stage", name="train")
    for name in ("unannounced", "again", "report"):
        progress("stage", name=name)
    again = ["2 stages: read; train", "merge (2 of 3), train (2 of 2)"]
    assert texts(out) == [
        "3 stages: render; merge; report", "render (1 of 3)", "merge (2 of 3)", *again, *again,
        "merge (2 of 3), train (2 of 2), unannounced", "merge (2 of 3), train (2 of 2), again", "report (3 of 3)",
    ]  # fmt: skip


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


def test_log_stage_of_unknown_length_shows_the_most_that_is_left(log):
    progress, clock, out = log
    stages = Stages(progress, clock)
    stages.begin("share", 1000, is_bound=True)
    for second in (30, 60):
        clock.now = float(second)
        stages.add(100)
        progress.print_if_quiet()
    assert texts(out) == ["share", "share; 1 min 00 s so far, at most 40 s left"]  # of the limit, not 240 s
    assert "%" not in out.getvalue()


def test_show_progress_file_gets_lines_and_the_thread_ends():
    out = io.StringIO()
    with show_progress(out) as progress:
        progress("stage", name="read")
        assert any(one.name == "progress" for one in threading.enumerate())
    assert "read" in out.getvalue()
    assert not any(one.name == "progress" for one in threading.enumerate())


def test_show_progress_notes_have_their_time(capsys):
    with show_progress() as progress:
        progress("stage", name="read")
        print_note("gate.onnx: names no classes", print)
    print_note("alone", print)
    printed = capsys.readouterr()
    assert re.fullmatch(r"\[ +\d+\.\d s\] note: gate.onnx: names no classes", printed.err.splitlines()[-1])
    assert printed.out == "note: alone\n"


def test_show_progress_terminal_shows_a_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    master, slave = os.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, show_progress(terminal) as progress:
        assert isinstance(progress, ProgressDisplay) and progress.bars is not None
        progress("stages", names=["read", "train"])
        progress("stage", name="train")
        progress("evaluate", query="gate")
        print_note("gate.onnx: names no classes", print)
        progress("epoch", queries=["a"], epoch=1, epochs=4)
        progress("part", done=0.4, seconds_left=50.0)
        progress.bars.refresh()
        assert progress.bars.tasks[0].total == 1.0
        progress("stage", name="mend")
        progress("part", done=None, seconds_left=70.0)
        progress.bars.refresh()
        assert progress.bars.tasks[0].total is None  # it pulses: no percentage is known
    shown = b""
    with contextlib.suppress(OSError):  # the terminal's end
        while more := os.read(master, 1 << 16):
            shown += more
    os.close(master)
    for text in ("train (2 of 2)", "evaluating merged model", "40 % done, about 50 s left", "at most 1 min 10 s left"):
        assert text in shown.decode()
    assert "note: gate.onnx: names no classes" in shown.decode()
