"""What long work shows: sentences where nobody watches, stages and percentages on a terminal."""

import contextlib
import io
import os
import re
from pathlib import Path

import pytest

from gemel.progress import EVENT_FORMATS, ProgressLog, ProgressTable, format_event, show_progress

ROOT = Path(__file__).parents[3]
RAW = re.compile(r"^(\[ *[\d.]+ s\] )?\w+: \w+ [^;]+; \w+ ")
"""A line that shows an event as it came, `word: key value; key value`."""
STAGES = {"stages", "stage", "part"}
SHAPES = {
    "equal": [{"sets": 69, "saved_bytes": 10, "settled": ["gate"]}, {"sets": 1, "saved_bytes": 10, "settled": []}],
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
    "precision": [{"query": "gate", "model": "resnet18", "chosen": "fp32", "fp32": 0.2, "bf16": 0.4}],
    "layout": [
        {"chosen": "16 frames at once", "full": [], "precisions": {}},
        {"chosen": "8 frames at once", "full": ["16 frames at once"], "precisions": {"a": "fp32", "b": "bf16"}},
    ],
    "workers": [{"workers": 2, "on": "local", "threads": 1}, {"workers": 1, "threads": None}],
    "crew": [{"queries": [["gate", "lane"], []], "loads": [1.0, 0.0], "crossing_bytes": 12_000_000}],
    "sums": [{"steps": 10, "given_bytes": [1000, 1000]}, {"steps": 0, "given_bytes": [0, 0]}],
    "ancestry": [{"common": True, "kinship": {"a": 0.98}}, {"common": False, "kinship": {"a": 0.001}}],
    "aligned": [{"query": "gate", "spaces": 3, "moved": 1275, "channels": 1280}],
    "start": [{"start": name, "error": 0.15} for name in ("mean", "aligned mean", "gate", "mean, solved")],
    "rate": [{"rate": 5e-4, "epochs": 0.5, "regained": 0.4}, {"rate": 5e-4, "epochs": 1, "ratio": None},
             {"rate": 5e-4, "epochs": 1, "ratio": 0.9, "features": 1.0, "private": 0.1}],
    "recipe": [{"rate": 5e-4, "epochs": 4, "features": 1.0, "private": 0.1, "search_flops": 1e9}],
    "waits": [
        {"waits": "gate", "after": "the start", "lost": 0.9, "required": 0.97},
        {"waits": "gate", "after": "sprint 1", "ratio": 0.4, "required": 0.97},
    ],
    "adopting": [{"queries": ["gate", "yard"]}],
    "takes": [{"takes": "gate", "from": "yard", "layers": 3, "ratio": ratio, "required": 0.95, "epochs": 4,
               "accepted": ratio > 0.95, "accepted_bytes": 12_000_000, "flops": 1e12} for ratio in (0.93, 0.97)],
    "accepted": [{"saved_bytes": 12_000_000, "ratios": {"gate": 0.97}}],
    "alone": [{"query": "gate", "ratio": 0.98, "required": 0.97}],
    "repair": [
        {"query": "gate", "repair": "norms and head", "ratio": 0.98, "required": 0.97},
        {"query": "gate", "repair": "leaves", "required": 0.97},
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
def test_every_event_is_a_sentence(event, fields):
    told = EVENT_FORMATS[event](fields)
    assert not RAW.match(told)
    assert told == format_event(event, fields)
    assert not re.search(r"forecast|aligned mean|sprint|regained", told), told


def test_no_event_of_the_packages_is_without_a_sentence():
    emitted = set()
    for folder in ("merger", "gemel"):
        for path in (ROOT / folder).rglob("*.py"):
            emitted |= set(re.findall(r"\b_?(?:progress|tell)\(\s*\"(\w+)\"", path.read_text(encoding="utf-8")))
    assert emitted - STAGES <= EVENT_FORMATS.keys() == SHAPES.keys()


def test_words_of_the_trade_are_said_plainly():
    assert format_event("ancestry", {"common": True, "kinship": {"a": 0.98}}) == (
        "the originals are related: their weights are close (kinship 0.98 of 1)"
    )
    ratios = {"gate": 0.93, "lane": 0.99}
    assert format_event("epoch", {"queries": ["gate", "lane"], "epoch": 3, "epochs": 8, "ratios": ratios}) == (
        "training all together, epoch 3 of 8: worst query keeps 0.93 of its original (gate)"
    )


def test_an_event_that_nobody_knows_still_reads():
    assert format_event("new_thing", {"query": "gate", "saved_bytes": 12_000_000, "ratios": {"a": 0.5}}) == (
        "new thing (query gate, saved 11.4 MiB, ratios a 0.500)"
    )
    assert format_event("round", {"turn": 3}) == "round (turn 3)"
    assert not RAW.match(format_event("round", {"turn": 3, "of": 4}))


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def lines():
    """Lines on a clock of their own: (lines, clock, what was said)."""
    clock, out = Clock(), io.StringIO()
    return ProgressLog(out, clock), clock, out


def test_stages_are_said_beforehand_and_those_of_a_part_within_it(lines):
    tell, _, out = lines
    tell("stages", names=["render", "merge", "report"])
    tell("stage", name="render")
    tell("stage", name="merge")
    tell("stages", names=["read", "train all together"])
    tell("stage", name="train all together")
    tell("stage", name="report")
    assert [line.split("] ")[1] for line in out.getvalue().splitlines()] == [
        "this takes 3 stages: render, merge, report",
        "render (1 of 3)",
        "merge (2 of 3)",
        "merge takes 2 stages: read, train all together",
        "merge (2 of 3), train all together (2 of 2)",
        "report (3 of 3)",
    ]


def test_work_that_is_done_once_more_is_not_taken_for_a_part_of_itself(lines):
    tell, _, out = lines
    for _ in range(2):
        tell("stages", names=["read", "train"])
        tell("stage", name="train")
    assert out.getvalue().splitlines()[-1].endswith("] train (2 of 2)")


def test_a_stage_that_nobody_announced_is_not_counted_among_those_that_were(lines):
    tell, _, out = lines
    tell("stages", names=["merging", "reporting"])
    tell("stage", name="merging")
    tell("stage", name="reading")
    tell("stage", name="judging")
    tell("stage", name="reporting")
    assert [line.split("] ")[1] for line in out.getvalue().splitlines()[-3:]] == [
        "merging (1 of 2), reading",
        "merging (1 of 2), judging",
        "reporting (2 of 2)",
    ]


def test_no_ten_seconds_pass_in_silence(lines):
    tell, clock, out = lines
    tell("stage", name="train all together")
    for second in range(1, 121):
        clock.now = float(second)
        if second == 30:
            tell("part", done=0.4, seconds_left=50.0)
        tell.beat()
    said = [float(line[1:8]) for line in out.getvalue().splitlines()]
    assert all(later - earlier < 10 for earlier, later in zip(said, [*said[1:], 120.0]))
    assert "still at 'train all together': 40 % done, about 48 s left" in out.getvalue()
    assert "still at 'train all together': 40 % done, after 1 min" in out.getvalue(), (
        "what is over is not still to come"
    )
    assert "still at 'train all together', for 8 s now" in out.getvalue()


def test_what_comes_often_is_said_every_two_seconds(lines):
    tell, clock, out = lines
    tell("round", round=1, rounds=7, saved_bytes=12_000_000, signature="conv2d")
    for epoch in range(50):
        tell("epoch", queries=["a"], epoch=epoch, epochs=50, ratios={"a": 0.5})
    said = out.getvalue().splitlines()
    assert len(said) == 2, "fifty of what comes often are one line in two seconds"
    assert "round 1 of 7" in said[0] and "11.4 MiB" in said[0] and "keeps 0.50" in said[1]
    clock.now = 3.0
    tell("epoch", queries=["a"], epoch=51, epochs=50)
    assert len(out.getvalue().splitlines()) == 3


def test_a_pipe_gets_lines_and_the_thread_behind_them_ends():
    import threading

    out = io.StringIO()
    with show_progress(out) as progress:
        progress("stage", name="read")
        assert any(one.name == "progress" for one in threading.enumerate())
    assert "read" in out.getvalue()
    assert not any(one.name == "progress" for one in threading.enumerate())


def test_a_terminal_shows_stages_percentage_and_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, show_progress(terminal) as progress:
        progress("stages", names=["read the originals", "train all together"])
        progress("stage", name="train all together")
        progress("part", done=0.4, seconds_left=50.0)
        progress.live.refresh()  # type: ignore[attr-defined]
    said = b""
    with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
        while more := os.read(master, 1 << 16):
            said += more
    os.close(master)
    said = said.decode()
    assert "read the originals" in said and "train all together" in said
    assert "40 % done, about 50 s left" in said


def test_a_terminal_shows_bytes_saved_and_each_query_s_ratio():
    from rich.console import Console

    live = ProgressTable(io.StringIO())
    live("round", round=2, rounds=7, signature="conv2d", saved_bytes=12_000_000, ceiling_bytes=20_000_000, seconds=3.0)
    live("epoch", queries=["gate", "lane"], epoch=1, epochs=4, loss=0.5, ratios={"gate": 0.97, "lane": 0.91})
    live("test", query="gate", metric="f1", original=0.8, merged=0.79, ratio=0.9875, met=True)
    console = Console(file=io.StringIO(), width=100)
    console.print(live.draw())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "11.4 MiB saved of at most 19.1 MiB" in text
    assert "98.8 % of the original" in text and "91.0 % of the original" in text
