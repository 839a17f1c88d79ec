"""A box at work as it is seen over HTTP: the counts add up at every moment, and it ends with the box."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from edge_runtime.daemon import run
from models.errors import InputError
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder

TIMEOUT_S = 60


@pytest.fixture
def box(tmp_path: Path) -> Path:
    """A folder with a bundle and two looped cameras."""
    tiny_bundle(tmp_path / "tiny.safetensors")
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    return tmp_path


def free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


def send_request(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def until(port: int, path: str, wanted: int) -> bytes:
    ends = time.monotonic() + TIMEOUT_S
    while time.monotonic() < ends:
        status, body = send_request(port, path)
        if status == wanted:
            return body
        time.sleep(0.05)
    raise AssertionError(f"{path} was never {wanted}")


def write_looped(box: Path, port: int, **keys) -> Path:
    cameras = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "loop": True}}
    results = [{"kind": "jsonl", "path": str(box / "results.jsonl")}]
    return write_config(box, cameras=cameras, sinks=results, http={"bind": f"127.0.0.1:{port}"}, **keys)


def test_running_box_status_balances(box: Path) -> None:
    port, stopping, done = free_port(), threading.Event(), []
    config = write_looped(box, port)
    working = threading.Thread(target=lambda: done.append(run(config, stop=stopping)))
    working.start()
    try:
        until(port, "/readyz", 200)
        assert send_request(port, "/healthz")[0] == 200
        until(port, "/api/cameras/left/frame.jpg", 200)
        for _ in range(20):
            samples = [
                (sample.name, sample.labels.get("query"), sample.value)
                for family in text_string_to_metric_families(send_request(port, "/metrics")[1].decode())
                for sample in family.samples
                if sample.name.startswith("gemel_frames_")
            ]
            for query in ("gate", "yard", "road"):
                counts = {name: 0.0 for name, *_ in samples}
                for name, of, value in samples:
                    counts[name] += value if of == query else 0.0
                settled = sum(counts.get(f"gemel_frames_{name}", 0.0)
                              for name in ("processed_total", "dropped_total", "failed_total", "pending"))  # fmt: skip
                assert counts["gemel_frames_received_total"] == settled
        status = json.loads(send_request(port, "/api/status")[1])
    finally:
        stopping.set()
        working.join(TIMEOUT_S)
    assert [one["id"] for one in status["queries"]] == ["gate", "yard", "road"]
    assert all(one["ledger"]["processed"] > 0 and one["resident"] for one in status["queries"])
    gate, yard, road = (one["bytes"] - one["own_bytes"] for one in status["queries"])
    assert gate == yard > 0 and road == 0, "of two queries that share a tensor it is nobody's own"
    assert {one["state"] for one in status["cameras"]} == {"streaming"} and status["sinks"][0]["state"] == "up"
    record = json.loads((box / "results.jsonl").read_text().splitlines()[0])
    assert record["run"] == status["run"] == done[0]["run"] and record["bundle"] == status["bundle"]
    assert done[0]["hanging"] == [] and send_request(port, "/healthz")[0] == 0


def test_used_address_is_refused_before_start(box: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=r"http\.bind: 127\.0\.0\.1:\d+ is not available"):
            run(write_looped(box, taken.getsockname()[1]), check=True)
