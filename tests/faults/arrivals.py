"""Hostile clients of the port for Frigate's detectors, and clips of events on a disk that is full."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from tests.edge_runtime.detector_client import Client
from tests.edge_runtime.events.bright import BRIGHT, PARTS, write_spot_box
from tests.edge_runtime.events.test_clips import write_video
from tests.edge_runtime.http.push_box import SPOTTER, write_push_box
from tests.edge_runtime.running import Running, adds_up
from tests.edge_runtime.tiny import FACTORY
from tests.faults.cameras import HTTP
from tests.faults.delivery import small_disk
from tests.faults.scenario import Found, Missing, Tell

ENDPOINT = re.compile(r"zmq at (tcp://\S+)")
HEIGHT, WIDTH = 32, 48
FRAME = np.full((1, HEIGHT, WIDTH, 3), 220, np.uint8)
INTERVAL_S = 0.2
CLIPS_BYTES = 96 * 2**20
"""More than clips leave free."""
HEAD = {"shape": [1, HEIGHT, WIDTH, 3], "dtype": "uint8"}
LIES = [
    (HEAD, b"short"), ({**HEAD, "dtype": "float32"}, FRAME.tobytes()), ({**HEAD, "shape": [1, -1, 2, 3]}, b""),
    ({**HEAD, "shape": [1, 65536, 65536, 3]}, b"x"), (b"\xff{", b""), (b"[" * 4000, b""),
    ({"model_data": True, "model_name": "new.onnx"}, b"half a model"),
]  # fmt: skip
"""What a client says of its tensor, and what it sends."""


def lying_detectors(folder: Path, seconds: int, tell: Tell) -> Found:
    """Clients that lie, send half a model, leave or never read, beside one that keeps the rules."""
    try:
        import zmq
    except ModuleNotFoundError as error:
        raise Missing("pyzmq is not installed") from error

    write_push_box(folder)
    cameras = {"door": {"source": "push", "timeout_s": 60}, "left": {"source": "left.mp4", "loop": True}}
    keys = {"factories": [FACTORY, SPOTTER], "cameras": cameras, "zmq": "tcp://127.0.0.1:0"}
    seen, found = Counter[str](), Found()
    with Running(folder, **keys, http={**HTTP, "token_file": "token"}) as box:
        box.until(lambda: ENDPOINT.search(box.read_stderr()))
        endpoint = ENDPOINT.findall(box.read_stderr())[0]
        ends = time.monotonic() + seconds

        def lie() -> None:
            for header, tensor in itertools.cycle(LIES):
                with Client(endpoint) as client:
                    client.open("spots.onnx")
                    answer = client.ask(header, tensor)
                    seen["refused" if b"error" in answer else f"{header!r:.60}: {answer!r:.80}"] += 1
                with Client(endpoint) as leaving:
                    leaving.open("spots.onnx")
                    leaving.send(HEAD, FRAME.tobytes())
                if time.monotonic() >= ends:
                    return
                time.sleep(INTERVAL_S)

        def flood() -> None:
            with zmq.Context() as context, context.socket(zmq.DEALER) as unread:
                unread.setsockopt(zmq.LINGER, 0)
                unread.setsockopt(zmq.RCVHWM, 1)
                unread.connect(endpoint)
                while time.monotonic() < ends:
                    unread.send_multipart([b"", json.dumps({"model_request": True, "model_name": "x.onnx"}).encode()])
                    time.sleep(INTERVAL_S / 100)

        strangers = [threading.Thread(target=play) for play in (lie, flood)]
        with Client(endpoint) as client:
            client.open("spots.onnx")
            box.until(lambda: len(client.ask(HEAD, FRAME.tobytes())) == 480)
            for stranger in strangers:
                stranger.start()
            while time.monotonic() < ends:
                answer = client.ask(HEAD, FRAME.tobytes())
                seen["answered" if len(answer) == 480 else "declined"] += 1
                time.sleep(INTERVAL_S)
        for stranger in strangers:
            stranger.join()
        tell(str(dict(seen)))
        ended, summary = box.stop(), box.ledger()
    found.said = (
        f"{seen['refused']} lies refused; of {seen['answered'] + seen['declined']} tensors beside them "
        f"{seen['answered']} answered with boxes, {seen['declined']} with an error, 0 without an answer"
    )
    found.figures = dict(seen)
    others = seen.keys() - {"refused", "answered", "declined"}
    found.hold(seen["refused"] and not others, f"a lie was answered: {others}")
    found.hold(seen["answered"], "no tensor was answered")
    found.in_time(seen["declined"] <= 0.05 * seen["answered"], f"{seen['declined']} tensors were declined")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found


def clips_without_room(folder: Path, times: int, tell: Tell) -> Found:
    """The disk of clips fills up and has room again: events go on all the while, clips come back."""
    places = [None] * 10 + [20] * 15 + [None] * 10
    write_spot_box(folder, [4], {"spot": {"tracking": True, **PARTS}})
    write_video(folder / "spots.mp4", places)
    rules = {"tracking": True, "events": [{"kind": "enter", "frames": "2 of 3"}]}
    found, counts = Found(), Counter[str]()
    with small_disk(folder / "disk", CLIPS_BYTES) as disk:
        keys = {
            "bundle": "spots.safetensors", "factories": [BRIGHT, FACTORY], "queries": {"spot": rules},
            "cameras": {"left": {"source": "spots.mp4", "loop": True}}, "http": HTTP,
            "clips": {"path": "disk/clips", "before_s": 0.5, "after_s": 0.2},
        }  # fmt: skip
        with Running(folder, **keys) as box:
            clips = folder / "disk" / "clips"
            for index in range(times):
                before = len(list(clips.glob("*")))
                box.until(lambda before=before: len(list(clips.glob("*"))) > before)
                disk.fill()
                box.news()
                events = list[dict[str, Any]]()

                def has_more(events: list[dict[str, Any]] = events) -> bool:
                    events += [record for record in box.news() if "event" in record]
                    return len(events) >= 4

                box.until(has_more)
                counts["events on the full disk"] += len(events)
                disk.empty()
                tell(f"{index + 1} of {times}")
            box.until(lambda: list(clips.glob("*")))
            torn = [path.name for path in clips.iterdir() if not path.stat().st_size]
            ended, summary = box.stop(), box.ledger()
    found.said = (
        f"{times} times full: {counts['events on the full disk']} messages of events meanwhile; clips came back"
    )
    found.figures = dict(counts)
    found.hold(not torn, f"empty files are kept: {torn}")
    found.hold(ended == 0 and adds_up(summary), "the ledger does not add up")
    return found
