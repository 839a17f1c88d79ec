"""Events, zones, frames by HTTP and updates of a real box: killed, reloaded wrongly, asked too much, lied to."""

from __future__ import annotations

import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from tests.edge_runtime.events.bright import BRIGHT, PARTS, write_spot_box
from tests.edge_runtime.running import Running, adds_up
from tests.edge_runtime.tiny import write_clip, write_config
from tests.edge_runtime.update_fixture import make_bundle, make_keys
from tests.edge_runtime.update_server import UpdateServer
from tests.faults.cameras import HTTP
from tests.faults.queries import BUSY, FACTORIES, bundle
from tests.faults.scenario import Found, Tell

THROUGH = [None, *range(0, 28, 2), *[27] * 4, None, None, None, None, None]
"""A spot that comes from the left, stays at the right for a while, and goes."""
ENTER = {"tracking": True, **PARTS, "events": [{"kind": "enter", "zone": "right", "frames": "1 of 1"}]}
WRONG_RULES: tuple[dict[str, Any], ...] = (
    {"zones": {"right": [[0, 0], [1, 1], [1, 0], [0, 1]]}},
    {"zones": {"right": [[0, 0], [2, 0], [1, 1]]}},
    {"schedule": {"on": "07:00-08:00"}},
    {"min_score": {"lorry": 0.5}},
    {**ENTER, "tracking": False},
)
"""A polygon that crosses itself, one outside the frame, hours without a zone, an unknown class, no tracks."""
OVERLOAD, DOOR_SIZE = 4, 96
TOKEN = "a-token-of-32-characters-or-more"


def _spot_keys(folder: Path, rules: dict[str, Any]) -> dict[str, Any]:
    write_spot_box(folder, THROUGH, {"spot": rules})
    cameras = {"left": {"source": "clip", "fps": 20, "loop": True}}
    factories = [BRIGHT, "tests.edge_runtime.tiny:net"]
    return {"bundle": "spots.safetensors", "factories": factories, "cameras": cameras, "queries": {"spot": rules},
            "http": HTTP}  # fmt: skip


def _events(box: Running) -> list[dict[str, Any]]:
    return [one for one in box.results() if "event" in one]


def kills(folder: Path, times: int, tell: Tell) -> Found:
    """Killed at random moments while events begin and end: no id twice, an end only after its start."""
    keys, found, rng = _spot_keys(folder, ENTER), Found(), random.Random(0)
    for index in range(times):
        with Running(folder, **keys) as box:
            before = len(_events(box))
            box.until(lambda before=before, box=box: len(_events(box)) > before)
            time.sleep(rng.uniform(0.0, 1.5))
            box.kill()
        tell(f"{index + 1} of {times}")
    with Running(folder, **keys) as box:
        before = len(_events(box))
        box.until(lambda: len(_events(box)) > before)
        ended = box.stop()
        events = _events(box)
    counts = Counter((one["after"]["id"], one["type"]) for one in events)
    begun = {event for event, kind in counts if kind == "new"}
    open_events = begun - {event for event, kind in counts if kind == "end"}
    found.said = (
        f"{times} kills, {len(begun):,} events: no message twice, {len(open_events)} ended by a kill without a message"
    )
    found.figures = {"events": len(begun), "without_end": len(open_events)}
    found.hold(set(counts.values()) == {1}, "a message came twice")
    found.hold({event for event, kind in counts if kind == "end"} <= begun, "an event ended that had not begun")
    stopped = {one["after"]["id"] for one in events if one["run"] == events[-1]["run"]}
    found.hold(not stopped & open_events, "an event of the run that was stopped has no end")
    found.hold(ended == 0, "the box did not stop by itself")
    return found


def wrong_rules(folder: Path, times: int, tell: Tell) -> Found:
    """Reloads with each kind of wrong rule while events go on: refused, and the events go on."""
    keys, found = _spot_keys(folder, ENTER), Found()
    with Running(folder, **keys) as box:
        box.until(lambda: _events(box))
        for index in range(times):
            for rules in WRONG_RULES:
                refused = box.status()["reloads"]["refused"]
                write_config(folder, **{"spool": "spool", **keys, "queries": {"spot": rules}})
                box.process.send_signal(signal.SIGHUP)
                box.until(lambda refused=refused: box.status()["reloads"]["refused"] > refused)
            tell(f"{index + 1} of {times}")
        before = len(_events(box))
        box.until(lambda: len(_events(box)) >= before + 4)
        ended, events, summary = box.stop(), _events(box), box.ledger()
    reasons = Counter(one["after"]["end_reason"] for one in events if one["type"] == "end")
    count = times * len(WRONG_RULES)
    found.said = f"{count} reloads with wrong rules refused; {len(events):,} messages of events, none ended by a reload"
    found.figures = {"reloads": count, "messages": len(events), "reasons": dict(reasons)}
    found.hold("reload" not in reasons, f"a refused reload ended events: {dict(reasons)}")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found


def push_overload(folder: Path, seconds: int, tell: Tell) -> Found:
    """Senders that ask OVERLOAD times as often as the box answers one of them: each gets an answer or 429."""
    bundle(folder, {"door": {"camera": "door", "model": BUSY, "input_size": DOOR_SIZE, "sla_ms": 2000.0}})
    cameras, found = {"door": {"source": "push"}}, Found()
    (folder / "token").write_text(TOKEN)
    picture = cv2.imencode(".jpg", np.full((DOOR_SIZE, DOOR_SIZE, 3), 90, np.uint8))[1].tobytes()
    frame = (
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="a.jpg"\r\n\r\n' + picture + b"\r\n--b--\r\n"
    )
    seen, lock = Counter[str](), threading.Lock()
    http = {**HTTP, "token_file": "token"}
    with Running(folder, cameras=cameras, factories=FACTORIES, http=http) as box:
        address = box.address() + "/v1/vision/custom/door"

        def push() -> str:
            headers = {"Content-Type": "multipart/form-data; boundary=b", "Authorization": f"Bearer {TOKEN}"}
            request = urllib.request.Request(address, frame, headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return str(answer.status)
            except urllib.error.HTTPError as error:
                return f"{error.code} {error.headers.get('Retry-After')}"
            except OSError as error:
                return type(error).__name__

        box.until(lambda: push() == "200")
        began = time.monotonic()
        assert push() == "200"
        pause = (time.monotonic() - began) / OVERLOAD
        ends, senders = time.monotonic() + seconds, list[threading.Thread]()

        def count() -> None:
            answer = push()
            with lock:
                seen[answer] += 1

        while time.monotonic() < ends:
            senders.append(threading.Thread(target=count))
            senders[-1].start()
            time.sleep(pause)
        for sender in senders:
            sender.join()
        tell(str(dict(seen)))
        ended, summary = box.stop(), box.ledger()
    found.said = f"{len(senders):,} frames in {seconds} s: {seen['200']:,} answered, {seen['429 1']:,} with 429, 0 lost"
    found.figures = {"answers": dict(seen)}
    found.hold(set(seen) <= {"200", "429 1"} and seen["200"], f"other answers: {dict(seen)}")
    found.hold(seen.total() == len(senders), "a request got no answer")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found


def lying_updates(folder: Path, times: int, tell: Tell) -> Found:
    """A server of updates that offers cut, damaged and unsigned bundles and stalls: the box serves on with its own."""
    server, found = UpdateServer(), Found()
    other, _ = make_keys(folder)
    strange = make_bundle(folder, "strange.safetensors", 2, other)
    private, _ = make_keys(folder)
    new = make_bundle(folder, "new.safetensors", 2, private)
    make_bundle(folder, "tiny.safetensors", 1, private)
    offers = {
        "cut": new[: len(new) // 2], "damaged": new[:-8] + bytes(8), "no bundle": b"<html>404</html>",
        "signed by another key": strange, "not signed": make_bundle(folder, "plain.safetensors", 3, None),
    }  # fmt: skip
    write_clip(folder / "c.mp4", 30, 10)
    updates = {"url": f"{server.address}/b", "public_key": "key.pub", "every_s": 1, "watch_s": 1}
    cameras = {"left": {"source": "c.mp4", "loop": True}}
    keys = {"factories": FACTORIES, "cameras": cameras, "http": HTTP, "updates": updates}
    with Running(folder, **keys) as box:
        box.until(box.news)
        name = box.status()["bundle"]
        for index in range(times):
            for kind, data in offers.items():
                server.files["/b"] = data
                asked = len(server.asked)
                box.until(lambda asked=asked: len(server.asked) >= asked + 4)
                found.hold(box.status()["bundle"] == name, f"the box took a bundle that was {kind}")
            tell(f"{index + 1} of {times}")
        server.files["/b"] = new
        box.until(lambda: box.status()["bundle"] != name)
        ended, summary = box.stop(), box.ledger()
    found.said = f"{times * len(offers)} wrong offers refused, then a right one taken"
    found.figures = {"offers": times * len(offers)}
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found
