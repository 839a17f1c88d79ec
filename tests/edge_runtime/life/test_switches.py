"""What a person sets of a running box holds over a restart and fits the config, and the log tells it."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gemel.edge_runtime.events.tracking import DEFAULT_TRACKING
from gemel.edge_runtime.life.switches import SWITCHES_FILE, Switches, SwitchFile, parse_order
from gemel.models.errors import InputError
from tests.edge_runtime.events.bright import write_spot_box
from tests.edge_runtime.local_box import LocalBox

CAMERAS = {"cars": "left", "bins": "left", "gate": "back"}
LANE = {"lane": [[0, 0], [1, 0], [1, 1], [0, 1]]}
RULES: dict[str, Any] = {"tracking": True, "zones": LANE, "events": [{"kind": "enter", "zone": "lane"}]}


def accept(values: SwitchFile) -> None:
    """Any order fits."""


def test_switches_hold_over_a_restart_and_say_who_changed_what(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    switches = Switches(tmp_path)
    for _ in range(2):
        switches.order("query", "gate", {"on": False, "fps": 2.0}, "mqtt a", accept)
    switches.order("camera", "left", {"on": False}, "http b", accept)
    assert switches.list_paused(CAMERAS) == {"cars", "bins", "gate"} == Switches(tmp_path).list_paused(CAMERAS)
    switches.order("camera", "left", {"on": True}, "http b", accept)
    switches.order("query", "gate", {"fps": None}, "http b", accept)
    assert Switches(tmp_path).values == switches.values and Switches(tmp_path).list_paused(CAMERAS) == {"gate"}
    assert [record.message for record in caplog.records] == [
        "query gate: fps from null to 2.0 by mqtt a",
        "query gate: on from true to false by mqtt a",
        "camera left: on from true to false by http b",
        "camera left: on from false to true by http b",
        "query gate: fps from 2.0 to null by http b",
    ]
    assert json.loads((tmp_path / SWITCHES_FILE).read_text()) == {"queries": {"gate": {"on": False}}}


def test_switches_of_two_clients_at_once_end_as_one_of_them_said(tmp_path: Path) -> None:
    switches = Switches(tmp_path)

    def ask(fps: float) -> None:
        for turn in range(20):
            switches.order("query", "gate", {"fps": fps, "on": turn % 2 == 0}, f"mqtt {fps}", accept)

    clients = [threading.Thread(target=ask, args=(fps,)) for fps in (2.0, 5.0)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert switches.values == Switches(tmp_path).values
    gate = switches.values.queries["gate"]
    assert (gate.fps in (2.0, 5.0), gate.on) == (True, False)


@pytest.mark.parametrize("text", ["{", "[]", '{"queries": [1]}', '{"more": []}'])
def test_damaged_switches_leave_all_as_the_config_says(tmp_path: Path, caplog, text: str) -> None:
    (tmp_path / SWITCHES_FILE).write_text(text)
    assert Switches(tmp_path).list_paused(CAMERAS) == frozenset() and "all is as the config says" in caplog.text


@pytest.mark.parametrize(
    ("order", "problem"),
    [
        (b"perhaps", "Invalid JSON"),
        (b"{}", "says nothing; give some of on, fps, min_score, zones"),
        (b'{"speed": 3}', "speed: Extra inputs are not permitted; give some of"),
        (b'{"on": null}', "on: Input should be a valid boolean"),
        (b'{"fps": "5"}', "fps: Input should be a valid number"),
        (b'{"fps": 1e400}', "fps"),
        (b'{"zones": {"lane": [[0, 0], [1, 1], [1, 0], [0, 1]]}}', "zones.lane: its sides 1 and 3 cross"),
        (b'{"zones": ' + b" " * 5000 + b"{}}", "has more than 4,096 bytes"),
    ],
)
def test_orders_that_cannot_be_read_are_one_line(order: bytes, problem: str) -> None:
    with pytest.raises(InputError) as told:
        parse_order("query", order)
    assert problem in str(told.value) and "\n" not in str(told.value)


def test_box_gives_a_query_no_frames_while_it_is_off(tmp_path: Path) -> None:
    cameras = {"left": {"source": "clip", "fps": 20, "loop": True}}
    rules = {"spot": {"tracking": True, "events": [{"kind": "enter", "frames": "1 of 1"}]}}
    with LocalBox(write_spot_box(tmp_path, [20, 21], rules, cameras=cameras, spool="spool")) as box:
        box.more("spot", count=3)
        runtime = box.service._runtime
        with pytest.raises(KeyError, match="no query 'gone'"):
            runtime.order("query", "gone", b'{"on": false}', "test")
        runtime.order("query", "spot", b'{"on": false}', "test")
        ended = lambda: [one for one in box.records() if one.get("type") == "end"]  # noqa: E731
        box.until(lambda: ended() and ended()[-1]["after"]["end_reason"] == "off")
        count = len([one for one in box.records("spot") if "detections" in one])
        box.more("kind", count=5)
        assert len([one for one in box.records("spot") if "detections" in one]) == count
        runtime.order("query", "spot", b'{"on": true}', "test")
        box.more("spot", count=2)
    assert json.loads((tmp_path / "spool" / SWITCHES_FILE).read_text()) == {}


def test_box_changes_rate_scores_and_zones_while_it_runs(tmp_path: Path, caplog) -> None:
    cameras = {"left": {"source": "clip", "fps": 20, "loop": True}}
    path = write_spot_box(tmp_path, [20, 21], {"spot": RULES}, cameras=cameras, spool="spool")
    with LocalBox(path) as box:
        runtime = box.service._runtime
        detections = lambda: [one for one in box.records("spot") if "detections" in one]  # noqa: E731
        box.until(lambda: detections() and detections()[-1]["detections"])
        for kind, name, order, problem in (
            ("query", "spot", b'{"fps": 30}', "camera left gives 20 frames a second"),
            ("query", "spot", b'{"fps": 1}', "it needs 2 frames a second, and the query gets 1"),
            ("camera", "left", b'{"fps": 1}', "it needs 2 frames a second, and the query gets 1"),
            ("query", "spot", b'{"min_score": {"lorry": 0.5}}', "the query has no class 'lorry'"),
            ("query", "spot", b'{"zones": {"kerb": [[0, 0], [1, 0], [1, 1]]}}', "the config has no zone 'kerb'"),
            ("query", "kind", b'{"min_score": 0.5}', "a query of the task classification has no boxes"),
        ):
            with pytest.raises(InputError, match=problem):
                runtime.order(kind, name, order, "test")
        assert runtime.switches.values == SwitchFile()
        runtime.order("query", "spot", b'{"min_score": 0.95}', "test")
        box.until(lambda: not detections()[-1]["detections"])
        runtime.order("query", "spot", b'{"min_score": null}', "test")
        box.until(lambda: detections()[-1]["detections"])
        runtime.order("query", "spot", b'{"zones": {"lane": [[0, 0], [0.2, 0], [0.2, 0.2]]}}', "test")
        box.until(lambda: detections()[-1]["detections"] and detections()[-1]["detections"][0]["zones"] == [])
        runtime.order("camera", "left", b'{"fps": 4}', "test")
        box.until(lambda: runtime.settings("spot")["fps"] == 4)
        frames = [one["frame"] for one in box.more("kind", count=6)][2:]
        assert [after - before for before, after in pairwise(frames)] == [5, 5, 5]
        assert runtime.active.executor._specs["kind"].fps == 4
        weak_scores = {name: engine.weak_score for name, engine in runtime.active.box.engines.items()}
        assert weak_scores == {"spot": DEFAULT_TRACKING.weak_score, "kind": math.inf}
        assert box.reload() is None and runtime.settings("kind")["fps"] == 4
    with LocalBox(path) as box:
        runtime = box.service._runtime
        assert runtime.settings("spot")["fps"] == 4 and runtime.settings("spot")["zones"]["lane"][1] == (0.2, 0)
        config, queries = runtime.active.box.config, runtime.active.queries
        narrow = replace(config, cameras={"left": replace(config.cameras["left"], fps=3.0)})
        assert runtime.switches.adjust(narrow, queries).rates == {"spot": 3.0, "kind": 3.0}
    assert "camera left: what was set for it is left out: camera left: fps: camera left gives 3" in caplog.text
