"""Traces that mean harm: replayed, or refused in one line that says which line of the file is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.simulation import trace as recorded
from edge_runtime.simulation.replay import replay
from models.errors import InputError
from tests.hostile.damages import damages
from tests.hostile.harness import refused, tried
from tests.hostile.reading.test_json import FILES, make_special

BATCH = {"count": 2, "run_s": 0.015, "workspace_bytes": 1500}
QUERY = {"tensors": [0, 1], "run_s": 0.01, "workspace_bytes": 1000, "sla_s": 0.5, "larger": [BATCH], "best_s": 0.01}
HEAD = {
    "trace": 1, "policy": "adaptive", "budget_bytes": 10_000, "demands": {"a": {"fps": 10.0, "urgency": 1.0}},
    "copy_bytes_per_s": 1e6, "load_latency_s": 0.001, "tensors": [[100, 512], [300, 512]], "queries": {"a": QUERY},
    "resident": [0],
}  # fmt: skip
FRAME = {"frame": ["a", 10.0, 10.001]}
STEP = {
    "at": 10.002, "query": "a", "count": 1, "load": [1], "evict": [], "drop": [], "load_s": 0.002, "moved_bytes": 300,
    "run_s": 0.011, "budget_bytes": 10_000, "urgency": {"a": 1.0}, "resident": [[], []],
}  # fmt: skip
LATER = {"frame": ["a", 10.1, 10.101]}
DROP = {**STEP, "at": 10.103, "query": None, "count": 0, "load": [], "drop": [["a", 10.1, "deadline"]], "load_s": None,
        "moved_bytes": 0, "run_s": None, "resident": [[0], [0]]}  # fmt: skip
LINES: list[dict[str, Any]] = [HEAD, FRAME, STEP, LATER, DROP]


def _text(lines: list[Any]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _at(index: int, **keys: Any) -> str:
    return _text([{**line, **keys} if number == index else line for number, line in enumerate(LINES)])


REFUSED = {
    "empty": ("", "is no trace of format 1"),
    "garbage": (b"\x80\x04\x95\n", "line 1"),
    "deep": ('{"trace": ' + "[" * 100_000 + "\n", "line 1"),
    "a list": ("[]\n", "line 1"),
    "not a number": (_text(LINES).replace("10.103", "NaN"), "line 5"),
    "without end": (_text(LINES).replace("10.103", "Infinity"), "line 5"),
    "a key twice": (_text(LINES).replace('"at": 10.103', '"at": 1, "at": 2'), "line 5"),
    "an empty line": (_text(LINES[:2]) + "\n" + _text(LINES[2:]), "line 3"),
    "torn in the middle": (_text(LINES[:2]) + '{"at": 1\n' + _text(LINES[2:]), "line 3"),
    "a line of another kind": (_text([*LINES, {"x": 1}]), "line 6"),
    "the head twice": (_text([*LINES, HEAD]), "line 6"),
    "another format": (_at(0, trace=2), "is no trace of format 1"),
    "a policy of nobody": (_at(0, policy="x"), "line 1: policy"),
    "no queries": (_at(0, queries={}, demands={}), "line 1: queries"),
    "a query without a demand": (_at(0, demands={}), "line 1: demands"),
    "a demand of nobody": (_at(0, demands={**HEAD["demands"], "b": {"fps": 1, "urgency": 1}}), "line 1"),
    "a tensor of nobody": (_at(0, resident=[2]), "there is no tensor 2"),
    "a loaded tensor of nobody": (_at(2, load=[10**9]), "line 3: there is no tensor 1000000000"),
    "a negative tensor": (_at(2, load=[-1]), "line 3: load"),
    "batches that descend": (_at(0, queries={"a": {**QUERY, "larger": [BATCH, BATCH]}}), "line 1: queries.a.larger"),
    "a batch of 1e9": (_at(0, queries={"a": {**QUERY, "larger": [{**BATCH, "count": 10**9}]}}), "line 1: queries.a"),
    "a frame of nobody": (_text([*LINES, {"frame": ["b", 11.0, 11.0]}]), "line 6: there is no query 'b'"),
    "a turn of nobody": (_at(2, query="b"), "line 3: there is no query 'b'"),
    "1e9 frames in a run": (_at(2, count=10**9), "line 3: count"),
    "more frames than are known": (_at(2, count=3), "line 3: count: a run of 3 frames is not known"),
    "a run of nothing": (_at(2, count=0), "line 3: count"),
    "the time goes backwards": (_at(4, at=1.0), "line 5: at: the time goes backwards"),
    "the time of frames goes backwards": (_at(3, frame=["a", 10.1, 9.0]), "line 4: frame: the time goes backwards"),
    "the end of time": (_at(4, at=1e300), "line 5: at"),
}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "box.trace"
    path.write_text(_text(LINES))
    return path


def test_the_trace_that_is_damaged_here_is_sound(trace: Path) -> None:
    found = replay(trace)
    assert found.received == {"a": 2} and found.decisions >= 1


@pytest.mark.parametrize(("text", "said"), REFUSED.values(), ids=REFUSED)
def test_a_damaged_trace_is_one_line(trace: Path, text: str | bytes, said: str) -> None:
    trace.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as refusal:
        replay(trace)
    line = str(refusal.value)
    assert line.startswith(f"{trace}: ") and said in line and len(line) < 500 and line.isprintable()


@pytest.mark.parametrize("what", ["deep", "a batch of 1e9", "the time goes backwards"])
def test_the_command_says_it_at_once(trace: Path, what: str) -> None:
    text, said = REFUSED[what]
    assert isinstance(text, str)
    trace.write_text(text)
    refused(["simulate", "--replay", trace.name], trace.parent, trace.name, said)


@pytest.mark.parametrize("kind", FILES)
def test_what_is_no_file_of_bearable_size_is_not_replayed(trace: Path, kind: str) -> None:
    trace.unlink()
    make_special(trace, kind)
    refused(["simulate", "--replay", trace], trace.parent, trace)


def test_what_follows_the_last_newline_is_left_out(trace: Path) -> None:
    whole = replay(trace)
    for torn in ('{"frame": ["a', "{", "\x00"):
        trace.write_text(_text(LINES) + torn)
        assert replay(trace) == whole


def test_a_trace_has_no_more_lines_than_are_bearable(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "MAX_TRACE_LINES", 4)
    with pytest.raises(InputError, match="has more than 4 lines"):
        replay(trace)


def test_many_frames_of_one_query_take_no_long_time(trace: Path) -> None:
    frames = (f'{{"frame":["a",{10 + index / 1000},{10 + index / 1000}]}}\n' for index in range(20_000))
    trace.write_text(_text([HEAD, *LINES[2:3]]) + "".join(frames))
    assert tried(["simulate", "--replay", trace], trace.parent).held().code == 0


def test_many_frames_that_are_yet_to_come_take_no_long_time(trace: Path) -> None:
    frames = (f'{{"frame":["a",{1e6 + index},{1e6 + index}]}}\n' for index in range(10_000))
    idle = json.dumps({**DROP, "drop": [], "resident": [[], []], "urgency": {}}) + "\n"
    trace.write_text(_text(LINES[:2]) + "".join(frames) + 5_000 * idle)
    assert tried(["simulate", "--replay", trace], trace.parent).held().code == 0


def test_whatever_place_of_a_trace_is_damaged_it_is_refused_or_replayed(trace: Path) -> None:
    outcomes = {"refused": 0, "replayed": 0}
    for index, line in enumerate(LINES):
        for what, damaged in damages(line):
            trace.write_text(_text([*LINES[:index], damaged, *LINES[index + 1 :]]))
            try:
                found = replay(trace)
                assert 0 <= found.agreement <= 1, what
                outcomes["replayed"] += 1
            except InputError as error:
                assert str(error).startswith(f"{trace}: ") and len(str(error)) < 1000, what
                outcomes["refused"] += 1
    assert outcomes["refused"] > 1000 and outcomes["replayed"] > 50
