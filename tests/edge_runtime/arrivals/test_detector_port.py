"""Frigate's detector `zmq` in its own protocol, over real sockets, answered by a real box."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemel.edge_runtime.arrivals.detector_port import (
    MAX_ERROR_CHARS,
    MAX_HEADER_BYTES,
    DetectorError,
    DetectorOutcome,
    DetectorPort,
    detection_rows,
    parse_header,
    read_pixels,
)
from gemel.edge_runtime.http.metrics import Metrics
from gemel.edge_runtime.life.config import DetectorPortConfig, any_device, load_config
from gemel.edge_runtime.life.daemon import find_open_access
from gemel.models.errors import InputError
from tests.edge_runtime.detector_client import Client, endpoint_of
from tests.edge_runtime.http.push_box import CLASSES, TOKEN, address_of, write_push_box
from tests.edge_runtime.local_box import LocalBox
from tests.edge_runtime.tiny import query, write_config

HEIGHT, WIDTH = 32, 48
SPOTS = [[1, 0.9, 0.5, 0.5, 1.0, 1.0], [0, 0.35, 0.25, 0.0, 0.75, 0.5]]
"""What the detector of the box finds in a bright frame, best first."""


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBox]:
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'gemel[zmq]'")
    with LocalBox(write_push_box(tmp_path_factory.mktemp("zmq"), zmq="tcp://127.0.0.1:0")) as box:
        address_of(box)  # it is warmed up
        yield box


def frame(value: int = 220) -> np.ndarray:
    return np.full((1, HEIGHT, WIDTH, 3), value, np.uint8)


def sample(box: LocalBox, name: str, **labels: str) -> float:
    """The value of a metric."""
    request = urllib.request.Request(f"http://{address_of(box)}/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(name) and all(text in line for text in wanted):
                return float(line.rsplit(" ", 1)[1])
    return 0.0


def test_client_gets_the_boxes_of_the_query_that_it_named(box: LocalBox) -> None:
    with Client(endpoint_of(box)) as client:
        assert client.open("spots.onnx") == {"model_available": True, "model_loaded": True}
        rows = client.detect(frame())
        np.testing.assert_allclose(rows[:2], SPOTS, atol=1e-3)
        assert not rows[2:].any()
        planes = np.ascontiguousarray(frame().transpose(0, 3, 1, 2))
        np.testing.assert_array_equal(client.detect(planes), rows)
        assert not client.detect(frame(0)).any()


def test_tensors_have_the_deadline_of_the_clients_in_the_schedule(box: LocalBox) -> None:
    costed = box.service._runtime.active.box.costed
    assert costed.loaded.bundle.query("spots").sla_ms > 200
    for costs in (costed.whole, box.service._inference.executor.costs):
        kinds = {name: cost.sla_s for name, cost in costs.queries.items()}
        assert kinds["spots"] == pytest.approx(0.15)
        assert kinds["kind"] == costed.loaded.bundle.query("kind").sla_ms / 1000, "no detection"
    assert DetectorPortConfig("", timeout_ms=400).run_within_s == pytest.approx(0.3)


def test_answers_are_those_of_http_and_are_counted(box: LocalBox) -> None:
    outcomes = (DetectorOutcome.ANSWERED, DetectorOutcome.LATE)

    def count_answers() -> float:
        return sum(sample(box, "gemel_zmq_tensors_total", query="spots", outcome=outcome) for outcome in outcomes)

    before = count_answers()
    with Client(endpoint_of(box)) as client:
        client.open("spots.onnx")
        rows = client.detect(frame())
    assert count_answers() == before + 1
    head = json.dumps({"inputs": [{"name": "image", "datatype": "UINT8", "shape": [HEIGHT, WIDTH, 3],
                                   "data": frame().ravel().tolist()}]}).encode()  # fmt: skip
    url = f"http://{address_of(box)}/v2/models/spots/infer"
    request = urllib.request.Request(url, head, {"Authorization": f"Bearer {TOKEN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        outputs = {row["name"]: row["data"] for row in json.loads(response.read())["outputs"]}
    boxes = np.reshape(outputs["boxes"], (-1, 4))
    order = np.argsort([-score for score in outputs["scores"]])
    scaled = (boxes / [WIDTH, HEIGHT, WIDTH, HEIGHT])[order][:, [1, 0, 3, 2]]
    np.testing.assert_allclose(rows[: len(scaled), 2:], scaled, atol=1e-6)
    np.testing.assert_allclose(rows[: len(scaled), 1], np.array(outputs["scores"])[order], atol=1e-6)
    assert box.service.summary()["balanced"]


@pytest.mark.parametrize("name", ["unknown.onnx", "kind.onnx", "gate.onnx", "", "../spots/x"])
def test_models_that_are_no_pushed_detection_query_are_refused(box: LocalBox, name: str) -> None:
    with Client(endpoint_of(box)) as client:
        assert client.open(name) == {"model_available": False, "model_loaded": False}
        answer = json.loads(client.ask({"model_data": True, "model_name": name}, b"half a model"))
        assert answer["model_saved"] is answer["model_loaded"] is False and "accept_models" in answer["error"]
        assert b"ask for a model first" in client.ask({"shape": [1, 2, 2, 3], "dtype": "uint8"}, bytes(12))


@pytest.mark.parametrize(
    ("header", "tensor", "problem"),
    [
        ({"shape": [1, 32, 48, 3], "dtype": "uint8"}, bytes(100), "has 100 bytes, its shape [1, 32, 48, 3] takes 4608"),
        ({"shape": [1, 32, 48, 3], "dtype": "float32"}, bytes(18432), "input_dtype: int"),
        ({"shape": [2, 32, 48, 3], "dtype": "uint8"}, bytes(9216), "is not [1, H, W, 3]"),
        ({"shape": [1, -32, 48, 3], "dtype": "uint8"}, b"", "shape.1"),
        ({"shape": [1, 65536, 65536, 3], "dtype": "uint8"}, b"x", "has 1 bytes"),
        ({"shape": "all", "dtype": "uint8"}, b"", "shape"),
        (b"\xff{", b"", "header"),
        (b"[" * 4000, b"", "header"),
        (b" " * (MAX_HEADER_BYTES + 1), b"", "more than 4096 bytes"),
        ({}, b"", "the dtype is ''"),
    ],
)
def test_tensors_that_lie_about_themselves_get_one_line(
    box: LocalBox, header: Any, tensor: bytes, problem: str
) -> None:
    with Client(endpoint_of(box)) as client:
        client.open("spots.onnx")
        answer = client.ask(header, tensor)
        assert problem in json.loads(answer)["error"] and len(answer) < 480
        np.testing.assert_allclose(client.detect(frame())[:2], SPOTS, atol=1e-3)


def test_clients_that_never_read_or_leave_cost_no_other_client_its_answers(box: LocalBox) -> None:
    for _ in range(20):
        with Client(endpoint_of(box)) as leaving:
            leaving.open("spots.onnx")
            leaving.send({"shape": [1, HEIGHT, WIDTH, 3], "dtype": "uint8"}, frame().tobytes())
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as flooding, Client(endpoint_of(box)) as client:
        flooding.setsockopt(zmq.LINGER, 0)
        flooding.setsockopt(zmq.RCVHWM, 1)
        flooding.connect(endpoint_of(box))
        header = json.dumps({"model_request": True, "model_name": "spots.onnx"}).encode()
        for _ in range(300):
            flooding.send_multipart([b"", header])
        client.open("spots.onnx")

        def is_answered() -> bool:  # frames of clients that left may fill the query's eight places
            answer = client.ask({"shape": [1, HEIGHT, WIDTH, 3], "dtype": "uint8"}, frame().tobytes())
            return len(answer) == 480

        box.until(is_answered)


def test_messages_without_the_form_of_a_request_are_ignored(box: LocalBox) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger, Client(endpoint_of(box)) as client:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(endpoint_of(box))
        for parts in ([b""], [b"x"], [b"", b"{}", b"", b"", b""], [b"x", b"{}", b"y"]):
            stranger.send_multipart(parts)
        assert client.open("spots.onnx")["model_loaded"]


def test_second_box_on_the_address_says_so(box: LocalBox) -> None:
    second = DetectorPort(DetectorPortConfig(endpoint_of(box)), dict, Metrics([]).tensors)
    with pytest.raises(InputError, match=r"box\.yaml: zmq\.bind: .* is not available"):
        second.start("box.yaml")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"zmq": "http://127.0.0.1:1"}, "zmq"),
        ({"zmq": {"bind": "tcp://127.0.0.1:1", "models": True}}, "models"),
        ({"zmq": "tcp://127.0.0.1:1", "cameras": {"left": {"source": "left.mp4"}}}, "source: push"),
    ],
)
def test_config_with_a_wrong_port_is_refused(tmp_path: Path, keys: dict[str, Any], problem: str) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'gemel[zmq]'")
    with pytest.raises(InputError, match=problem):
        load_config(write_config(tmp_path, **keys), {}, any_device)


@pytest.mark.parametrize(("bind", "count"), [("tcp://*:5555", 1), ("tcp://127.0.0.1:5555", 0), ("ipc:///tmp/d", 0)])
def test_port_that_others_reach_is_warned_of(tmp_path: Path, bind: str, count: int) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'gemel[zmq]'")
    config = load_config(write_push_box(tmp_path, zmq=bind), {}, any_device)
    assert sum("zmq" in warning for warning in find_open_access(config)) == count


def test_detection_rows_has_the_best_twenty() -> None:
    scores: Sequence[float] = np.linspace(0.1, 0.9, 30).tolist()
    detections = [{"class": "person", "score": score, "box": [0, 0, 24, 32]} for score in scores]
    asked = query("spots", "door", task="detection", classes=CLASSES)
    rows = detection_rows(asked, {"detections": detections}, WIDTH, HEIGHT)
    np.testing.assert_allclose(rows[:, 1], sorted(scores)[:-21:-1], rtol=1e-6)
    assert (rows[:, 0] == 1).all() and rows[0, 2:].tolist() == [0, 0, 1, 0.5]


def test_read_pixels_keeps_values() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(1, 2, 4, 3)
    header = parse_header(json.dumps({"shape": [1, 2, 4, 3], "dtype": "uint8"}).encode())
    np.testing.assert_array_equal(read_pixels(header, pixels.tobytes()), pixels[0])
    with pytest.raises(DetectorError):
        read_pixels(header, b"")
    assert DetectorPortConfig("").timeout_ms == 200 and MAX_ERROR_CHARS + len('{"error": ""}') < 480
