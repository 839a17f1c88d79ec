"""A box with engine `auto` serves on torch at once, and goes over to what was measured meanwhile."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_runtime.daemon import run
from edge_runtime.engines.background import Background
from edge_runtime.engines.base import FrameEngine
from edge_runtime.engines.preparing import Wish, engines_for
from edge_runtime.engines.registry import engine_named
from edge_runtime.serving import switching
from models.bundle import Bundle
from models.predictions import Prediction
from tests.edge_runtime.engines.paced import AFTER, FAULT, HEARD, RUNS, Greedy, Nimble, Quick, Slow, only
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder

LOOPING = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}
FRAMES = {"gate": 12, "yard": 10, "road": 12}
"""Frames in a lap of each query's camera."""
SECONDS = 600.0
ENOUGH_RUNS = 20


class AtOnce:
    """Stands for the process in the background: measures in the thread that waits for it."""

    def __init__(self, bundle: Bundle, wish: Wish) -> None:
        self._bundle, self._wish = bundle, wish

    def wait(self) -> str | None:
        try:
            engines_for(self._bundle, "auto", self._wish)
        except RuntimeError as error:
            return str(error)
        return None

    def stop(self) -> None: ...


class StopWhen(logging.Handler):
    """Asks a box to stop once its log says this."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said, self.stop = said, threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.said in record.getMessage():
            self.stop.set()


@pytest.fixture
def stopping_when() -> Iterator[Callable[[str], threading.Event]]:
    """Gives events that are set once the log of boxes says this or that."""
    log, handlers = logging.getLogger("gemel.run"), []

    def stopping(said: str) -> threading.Event:
        handlers.append(StopWhen(said))
        log.addHandler(handlers[-1])
        return handlers[-1].stop

    yield stopping
    for handler in handlers:
        log.removeHandler(handler)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Path:
    torch.set_num_threads(1)
    caplog.set_level(logging.INFO, "gemel.run")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_bundle(tmp_path / "tiny.safetensors")
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    return tmp_path


def served(box: Path, name: str, stop: threading.Event | None = None, **keys: Any) -> dict[str, Any]:
    """The summary of a box that writes to NAME.jsonl; SECONDS only end it where nothing else does."""
    given = {"cameras": LOOPING, "engine": "auto", "sinks": [{"kind": "jsonl", "path": f"{name}.jsonl"}], **keys}
    return run(write_config(box, **given), stop=stop, seconds=SECONDS)


def records(box: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (box / f"{name}.jsonl").read_text().splitlines()]


def stopping_after_runs(monkeypatch: pytest.MonkeyPatch, kind: type[Quick]) -> threading.Event:
    """An event that is set once the engine has run often enough."""
    stop = threading.Event()
    monkeypatch.setitem(HEARD, kind.name, lambda: RUNS[kind.name] >= ENOUGH_RUNS and stop.set())
    return stop


def check_answers(box: Path, name: str, within: float = 1e-5) -> None:
    """Every result is the one that the plain torch engine gives for the same picture."""
    served(box, "reference", engine="torch", cameras={"left": {"source": "left.mp4"}, "right": {"source": "right"}})
    wanted = {(one["query"], one["frame"]): one for one in records(box, "reference")}
    compared = 0
    for one in records(box, name):
        same = wanted.get((one["query"], one["frame"] % FRAMES[one["query"]]))
        if same is not None:
            compared += 1
            assert (one["label"], one["score"]) == (same["label"], pytest.approx(same["score"], abs=within))
    assert compared > ENOUGH_RUNS


def test_the_first_result_comes_before_measuring_ends_and_results_after_the_switch_are_the_same(
    box, monkeypatch, caplog
):
    only(monkeypatch, torch=Slow, quick=Quick)
    monkeypatch.setenv(AFTER, str(box / "first.jsonl"))
    summary = served(box, "first", stopping_after_runs(monkeypatch, Quick))
    said = [record.getMessage() for record in caplog.records]
    begun = said.index("serving on torch; measuring quick in the background")
    switched = next(index for index, text in enumerate(said) if text.startswith("switched 3 queries to quick: "))
    assert begun < switched and any("one frame of" in text for text in said[begun:switched])
    assert "faster; frames waited" in said[switched]
    assert summary["stopped_by"] == "asked to stop" and set(summary["engines"].values()) == {"quick"}
    assert summary["balanced"] and not any(account["failed"] for account in summary["ledger"])
    assert len(records(box, "first")) == sum(account["processed"] for account in summary["ledger"])
    assert summary["bytes_moved"] == summary["swaps"] == 0, "what the warm-ups moved is counted apart"
    check_answers(box, "first")
    RUNS.clear()
    caplog.clear()
    again = served(box, "again", stopping_after_runs(monkeypatch, Quick))
    assert set(again["engines"].values()) == {"quick"} and RUNS.keys() == {"quick"}, "the choice is kept"
    assert "measuring" not in caplog.text


MAX_S = 30.0


def gone(group: int) -> bool:
    """Whether a group of processes is no more; what was killed is still listed until the system has cleared it away."""
    ends = time.monotonic() + MAX_S
    while time.monotonic() < ends:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def test_a_box_that_stops_first_ends_what_is_measured(box, monkeypatch, caplog):
    only(monkeypatch, torch=Slow, quick=Quick)
    monkeypatch.setenv(AFTER, str(box / "never"))
    begun: list[Background] = []

    class Noted(Background):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            begun.append(self)

    monkeypatch.setattr(switching, "Background", Noted)
    cameras = {"left": {"source": "left.mp4"}, "right": {"source": "right", "fps": 12}}
    summary = served(box, "ended", cameras=cameras)
    assert summary["stopped_by"] == "cameras ended" and summary["balanced"]
    assert "engines were not measured to the end" in caplog.text
    assert gone(begun[0]._process.pid)


def test_where_weights_lie_alike_engines_change_and_nothing_is_loaded_again(box, monkeypatch, caplog):
    only(monkeypatch, torch=Slow, nimble=Nimble)
    monkeypatch.setattr(switching, "Background", AtOnce)
    summary = served(box, "nimble", stopping_after_runs(monkeypatch, Nimble))
    assert set(summary["engines"].values()) == {"nimble"} and summary["balanced"]
    assert summary["warm_up"]["swaps"] == 3, "once for each query, at the start"
    check_answers(box, "nimble")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["onnx", pytest.param("compiled", marks=pytest.mark.exhaustive)])
def test_real_engines_are_taken_up_from_torch_and_answer_as_it_does(box, monkeypatch, name):
    kind = engine_named(name)
    why = kind.missing("cpu")
    if why is not None:
        pytest.skip(why)
    only(monkeypatch, torch=Slow, **{name: kind})
    monkeypatch.setattr(switching, "Background", AtOnce)
    stop, plain = threading.Event(), kind.run

    def run_and_count(engine: FrameEngine, frames: Sequence[np.ndarray]) -> list[Prediction]:
        RUNS[name] += 1
        if RUNS[name] >= ENOUGH_RUNS:
            stop.set()
        return plain(engine, frames)

    monkeypatch.setattr(kind, "run", run_and_count)
    summary = served(box, name, stop)
    assert set(summary["engines"].values()) == {name} and RUNS[name] >= ENOUGH_RUNS
    assert summary["balanced"] and not any(account["failed"] for account in summary["ledger"])
    check_answers(box, name, 1e-4)


def test_a_faster_engine_that_fails_gives_way_to_torch_again(box, monkeypatch, caplog, stopping_when):
    only(monkeypatch, torch=Slow, quick=Quick)
    monkeypatch.setattr(switching, "Background", AtOnce)
    monkeypatch.setattr(Quick, "faulty", True)
    summary = served(box, "back", stopping_when("back on torch"))
    assert summary["stopped_by"] == "asked to stop" and set(summary["engines"].values()) == {"torch"}
    assert summary["balanced"] and not any(account["failed"] for account in summary["ledger"])
    assert "a faster engine failed at gate, road, yard: back on torch" in caplog.text


def test_measuring_that_fails_leaves_the_box_on_torch(box, monkeypatch, caplog, stopping_when):
    only(monkeypatch, torch=Slow, quick=Quick)
    monkeypatch.setattr(switching, "Background", AtOnce)
    monkeypatch.setenv(FAULT, "1")
    summary = served(box, "kept", stopping_when("could not be measured"))
    assert set(summary["engines"].values()) == {"torch"} and summary["balanced"]
    assert "engines could not be measured (no tools): serving stays on torch" in caplog.text


def test_a_faster_engine_for_which_there_is_no_room_is_left_out(box, monkeypatch, caplog, stopping_when):
    only(monkeypatch, torch=Slow, greedy=Greedy)
    monkeypatch.setattr(switching, "Background", AtOnce)
    summary = served(box, "without", stopping_when("cannot be taken up"))
    assert set(summary["engines"].values()) == {"torch"} and summary["balanced"]
    cameras = {"left": {"source": "left.mp4"}, "right": {"source": "right", "fps": 12}}
    again = served(box, "again", cameras=cameras)
    assert set(again["engines"].values()) == {"torch"} and "engine torch runs all queries" in caplog.text


def test_a_box_that_measures_first_serves_on_torch_where_that_fails(box, monkeypatch, caplog, stopping_when):
    only(monkeypatch, torch=Slow, quick=Quick)
    monkeypatch.setenv(FAULT, "1")
    summary = served(box, "traced", stopping_when("engine torch runs all queries"), trace="box.trace")
    assert set(summary["engines"].values()) == {"torch"} and summary["balanced"]
    assert "RuntimeError: no tools; engine torch runs all queries" in caplog.text


def test_a_box_that_records_a_trace_measures_before_it_serves(box, monkeypatch, caplog):
    only(monkeypatch, torch=Slow, quick=Quick)
    summary = served(box, "traced", stopping_after_runs(monkeypatch, Quick), trace="box.trace")
    assert set(summary["engines"].values()) == {"quick"} and RUNS["torch"] == 0
    assert "in the background" not in caplog.text
