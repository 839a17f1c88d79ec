"""What a person switches off stays off, over a restart too, and gets no frames."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gemel.edge_runtime.switches import SWITCHES_FILE, Switches
from tests.edge_runtime.events.bright import write_spot_box
from tests.edge_runtime.local_box import LocalBox

CAMERAS = {"cars": "left", "bins": "left", "gate": "back"}


def test_switches_stay_off_over_a_restart_and_are_told_once(tmp_path: Path, caplog) -> None:
    caplog.set_level("INFO")
    switches = Switches(tmp_path)
    for _ in range(2):
        switches.switch("query", "gate", False, "mqtt a")
    switches.switch("camera", "left", False, "http b")
    assert switches.list_paused(CAMERAS) == {"cars", "bins", "gate"} == Switches(tmp_path).list_paused(CAMERAS)
    switches.switch("camera", "left", True, "http b")
    assert Switches(tmp_path).list_paused(CAMERAS) == {"gate"}
    assert [record.message for record in caplog.records] == [
        "query gate: switched off by mqtt a",
        "camera left: switched off by http b",
        "camera left: switched on by http b",
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"queries": [1]}', '{"more": []}'])
def test_damaged_switches_leave_everything_on(tmp_path: Path, caplog, text: str) -> None:
    (tmp_path / SWITCHES_FILE).write_text(text)
    assert Switches(tmp_path).list_paused(CAMERAS) == frozenset() and "every camera and query is on" in caplog.text


def test_box_gives_a_query_no_frames_while_it_is_off(tmp_path: Path) -> None:
    cameras = {"left": {"source": "clip", "fps": 20, "loop": True}}
    (tmp_path / "token").write_text("a-token-of-32-characters-or-more")
    http = {"bind": "127.0.0.1:0", "token_file": "token"}
    rules = {"spot": {"tracking": True, "events": [{"kind": "enter", "frames": "1 of 1"}]}}
    with LocalBox(write_spot_box(tmp_path, [20, 21], rules, cameras=cameras, http=http, spool="spool")) as box:
        box.more("spot", count=3)
        runtime = box.service._runtime
        with pytest.raises(KeyError, match="no query 'gone'"):
            runtime.switch("query", "gone", False, "test")
        runtime.switch("query", "spot", False, "test")
        ended = lambda: [one for one in box.records() if one.get("type") == "end"]  # noqa: E731
        box.until(lambda: ended() and ended()[-1]["after"]["end_reason"] == "off")
        count = len([one for one in box.records("spot") if "detections" in one])
        box.more("kind", count=5)
        assert len([one for one in box.records("spot") if "detections" in one]) == count
        runtime.switch("query", "spot", True, "test")
        box.more("spot", count=2)
    assert json.loads((tmp_path / "spool" / SWITCHES_FILE).read_text()) == {"cameras": [], "queries": []}
