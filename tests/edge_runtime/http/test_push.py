"""Frames by HTTP in DeepStack's form and KServe's, over real HTTP, answered by a real box."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gemel.edge_runtime.capture.push import STOPPED
from gemel.edge_runtime.frames.queues import DEPTH, OVERLOAD
from gemel.edge_runtime.http import bodies
from gemel.edge_runtime.http import push as http_push
from gemel.edge_runtime.life.config import any_device, load_config
from gemel.models.errors import InputError
from tests.edge_runtime.http.push_box import GO, TOKEN, address_of, write_push_box
from tests.edge_runtime.local_box import LocalBox

BEARER = {"Authorization": f"Bearer {TOKEN}"}
CAR = {"label": "car", "confidence": 0.35, "x_min": 0, "y_min": 8, "x_max": 24, "y_max": 24}
PERSON = {"label": "person", "confidence": 0.9, "x_min": 24, "y_min": 16, "x_max": 48, "y_max": 32}
JSON_LENGTH = "Inference-Header-Content-Length"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBox]:
    with LocalBox(write_push_box(tmp_path_factory.mktemp("push"))) as box:
        yield box


@pytest.fixture(scope="module")
def address(box: LocalBox) -> str:
    return address_of(box)


def picture(value: int = 220, kind: str = "JPEG") -> bytes:
    """A picture of 48 x 32 pixels, all of one value."""
    file = io.BytesIO()
    Image.fromarray(np.full((32, 48, 3), value, np.uint8)).save(file, kind)
    return file.getvalue()


def send(address: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes, Any]:
    """Status, body and headers of a response; a POST where there is a body."""
    request = urllib.request.Request(f"http://{address}{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def get(address: str, path: str) -> tuple[int, bytes, Any]:
    """Status, body and headers of a response to a client with the token."""
    return send(address, path, None, **BEARER)


def send_form(address: str, path: str, image: bytes | None, **fields: str) -> tuple[int, Any, Any]:
    """Send a form as `requests` writes it: fields, then the file; the token is the field `api_key`."""
    boundary = uuid.uuid4().hex
    parts = [f'name="{name}"\r\n\r\n{text}'.encode() for name, text in ({"api_key": TOKEN} | fields).items()]
    if image is not None:
        parts.append(b'name="image"; filename="image"\r\n\r\n' + image)
    start = f"--{boundary}\r\nContent-Disposition: form-data; ".encode()
    body = b"".join(start + part + b"\r\n" for part in parts) + f"--{boundary}--\r\n".encode()
    kind = f"multipart/form-data; boundary={boundary}"
    status, text, headers = send(address, path, body, **{"Content-Type": kind})
    return status, json.loads(text), headers


def infer(
    address: str, tensor: dict[str, Any], rest: bytes = b"", query: str = "spots", **more: Any
) -> tuple[int, Any, bytes]:
    """Status, JSON and binary tensors of the answer to a tensor named `image`."""
    head = json.dumps({"inputs": [{"name": "image", **tensor}], **more}).encode()
    length = {JSON_LENGTH: str(len(head))} if rest else {}
    status, body, headers = send(address, f"/v2/models/{query}/infer", head + rest, **BEARER, **length)
    end = int(headers.get(JSON_LENGTH, len(body)))
    return status, json.loads(body[:end]), body[end:]


def counts(box: LocalBox, query: str) -> dict[str, Any]:
    return next(row for row in box.service.summary()["ledger"] if row["query"] == query)


def test_detection_answers_all_detections_best_first(box: LocalBox, address: str) -> None:
    before = counts(box, "spots")["processed"]
    status, found, _ = send_form(address, "/v1/vision/detection", picture())
    assert status == 200 and found["success"] is True and found["inferenceMs"] >= 0
    assert [one | {"confidence": round(one["confidence"], 3)} for one in found["predictions"]] == [PERSON, CAR]
    assert counts(box, "spots")["processed"] == before + 1 and box.service.summary()["balanced"]
    assert send_form(address, "/v1/vision/detection", picture(0, "PNG"))[1]["predictions"] == []


def test_min_confidence_leaves_out_unsure_predictions(address: str) -> None:
    _, found, _ = send_form(address, "/v1/vision/custom/spots", picture(), min_confidence="0.5")
    assert [one["label"] for one in found["predictions"]] == ["person"] and found["count"] == 1


def test_custom_classification_has_a_label_without_a_box(address: str) -> None:
    _, found, _ = send_form(address, "/v1/vision/custom/kind", picture())
    (prediction,) = found["predictions"]
    assert prediction["label"] in "abc" and prediction.keys() == {"label", "confidence"}


def test_custom_list_names_the_pushed_queries(address: str) -> None:
    assert send_form(address, "/v1/vision/custom/list", None)[1]["models"] == ["spots", "kind"]


def test_custom_list_takes_the_token_in_either_form(address: str) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    path = "/v1/vision/custom/list"
    status, body, _ = send(address, path, f"api_key={TOKEN}".encode(), **kind)
    assert status == 200 and json.loads(body)["models"] == ["spots", "kind"]
    for wrong in (b"api_key=wrong", b"", b"\xff=", b"&".join([b"a=1"] * 100), b"api_key=" + bytes(5000)):
        status, body, _ = send(address, path, wrong, **kind)
        assert status in (400, 401, 413) and json.loads(body)["success"] is False


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP"])
def test_pictures_of_other_kinds_are_answered_as_jpeg_is(address: str, kind: str) -> None:
    assert (
        send_form(address, "/v1/vision/detection", picture(kind=kind))[1]["predictions"]
        == (send_form(address, "/v1/vision/detection", picture())[1]["predictions"])
    )


def test_kinds_that_nobody_sends_are_refused(address: str) -> None:
    status, found, _ = send_form(address, "/v1/vision/detection", picture(kind="TIFF"))
    assert status == 400 and "no JPEG, PNG, WEBP or BMP, or damaged" in found["error"]


@pytest.mark.parametrize("path", ["/v2/nothing", "/v2/models/gone/config", "/v2/models/gone/stats", "/v2/models"])
def test_v2_says_errors_as_json(address: str, path: str) -> None:
    status, body, headers = get(address, path)
    assert status == 404 and isinstance(json.loads(body)["error"], str) and "json" in headers["Content-Type"]


def test_results_reach_the_sinks_and_the_dashboard(box: LocalBox, address: str) -> None:
    before = len(box.records("kind"))
    send_form(address, "/v1/vision/custom/kind", picture())
    box.until(lambda: len(box.records("kind")) == before + 1)
    assert get(address, "/api/cameras/door/frame.jpg")[0] == 200
    camera = next(one for one in json.loads(get(address, "/api/status")[1])["cameras"] if one["id"] == "door")
    assert camera["state"] == "streaming" and camera["up"] and camera["frame_age_s"] >= 0


def test_push_camera_is_ready_before_its_first_frame(tmp_path: Path) -> None:
    with LocalBox(write_push_box(tmp_path)) as box:
        address = address_of(box)
        box.until(lambda: get(address, "/v2/health/ready")[0] == 200)
        assert get(address, "/v2/health/live")[0] == get(address, "/v2/models/spots/ready")[0] == 200
        assert box.service.summary()["cameras"][0]["frames"] == 0


@pytest.mark.parametrize(
    ("path", "image", "fields", "status", "text"),
    [
        ("detection", b"GIF89a and more", {}, 400, "is not an image that decodes"),
        ("detection", picture()[:200], {}, 400, "is not an image that decodes"),
        ("detection", None, {}, 400, "no picture in the field `image`"),
        ("detection", picture(), {"min_confidence": "high"}, 400, "min_confidence 'high'"),
        ("detection", picture(), {"api_key": "x" * 32}, 401, "a token is needed"),
        ("detection", picture(50), {}, 500, "query 'spots': it failed on the frame"),
        ("custom/nothing", picture(), {}, 404, "no query 'nothing' takes frames by HTTP"),
        ("custom/gate", picture(), {}, 404, "no query 'gate' takes frames by HTTP"),
    ],
)
def test_form_that_cannot_be_answered_gets_one_error(
    address: str, path: str, image: bytes | None, fields: dict[str, str], status: int, text: str
) -> None:
    got, found, _ = send_form(address, f"/v1/vision/{path}", image, **fields)
    assert got == status and found["success"] is False and text in found["error"] and "\n" not in found["error"]


def test_frame_beside_the_region_is_refused(box: LocalBox, address: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (3, 2)).save(file, "PNG")
    before = counts(box, "kind")
    status, found, _ = send_form(address, "/v1/vision/custom/kind", file.getvalue())
    assert status == 400 and "query 'kind'" in found["error"] and counts(box, "kind") == before


def test_other_bodies_are_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"Content-Type": "image/jpeg"}
    assert send(address, "/v1/vision/detection", picture(), **BEARER, **kind)[0] == 415
    assert send(address, "/v1/vision/detection", b"x", **kind)[0] == 415
    damaged = {"Content-Type": "multipart/form-data; boundary=b"}
    assert send(address, "/v1/vision/detection", b"--c\r\nnothing", **BEARER, **damaged)[0] == 400
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 2000)
    status, found, _ = send_form(address, "/v1/vision/detection", bytes(3000))
    assert status == 413 and "more than" in found["error"]
    assert infer(address, {"datatype": "UINT8", "shape": [32, 48, 3]}, bytes(4608))[0] == 413


def test_post_without_token_is_refused_in_the_form_of_its_client(address: str) -> None:
    status, body, headers = send(address, "/v2/models/spots/infer", b"{}")
    assert status == 401 and json.loads(body) == {"error": "a token is needed"}
    assert headers["WWW-Authenticate"] == "Bearer"


def test_infer_takes_pictures_and_pixels_and_gives_equal_tensors(address: str) -> None:
    encoded, pixels = picture(220, "PNG"), np.full((32, 48, 3), 220, np.uint8)
    text = {"datatype": "BYTES", "shape": [1], "data": [base64.b64encode(encoded).decode()]}
    size = struct.pack("<I", len(encoded)) + encoded
    binary = {"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(size)}}
    raw = {"datatype": "UINT8", "shape": [1, 32, 48, 3], "parameters": {"binary_data_size": pixels.size}}
    numbers = {"datatype": "UINT8", "shape": [32, 48, 3], "data": pixels.tolist()}
    answers = [
        infer(address, text, id="7")[1], infer(address, binary, size)[1], infer(address, raw, pixels.tobytes())[1],
        infer(address, numbers)[1],
    ]  # fmt: skip
    assert answers[0]["id"] == "7" and answers[0]["model_name"] == "spots"
    for answer in answers:
        found = {one["name"]: one for one in answer["outputs"]}
        assert found["labels"]["data"] == ["person", "car"] and found["boxes"]["shape"] == [2, 4]
        assert found["boxes"]["data"] == [24, 16, 48, 32, 0, 8, 24, 24]
        assert json.loads(found["result"]["data"][0])["query"] == "spots"


def test_infer_gives_binary_outputs_where_asked(address: str) -> None:
    tensor = {"datatype": "UINT8", "shape": [32, 48, 3], "parameters": {"binary_data_size": 4608}}
    asked = [{"name": "scores", "parameters": {"binary_data": True}}, {"name": "labels"}]
    status, found, rest = infer(address, tensor, bytes([220]) * 4608, outputs=asked)
    assert status == 200 and found["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(rest, "<f4") == pytest.approx([0.9, 0.35]) and "data" not in found["outputs"][0]
    assert found["outputs"][1]["data"] == ["person", "car"]


@pytest.mark.parametrize(
    ("tensor", "rest", "text"),
    [
        ({"datatype": "FP32", "shape": [1], "data": [1]}, b"", "the data type 'FP32'"),
        ({"datatype": "UINT8", "shape": [2, 2, 3], "data": [1, 2, 3]}, b"", "has 3 values"),
        ({"datatype": "UINT8", "shape": [1, 1, 3], "data": [1, 2, 300]}, b"", "from 0 to 255"),
        ({"datatype": "UINT8", "shape": [1, 1, 3], "data": [[1], [2, 3]]}, b"", "from 0 to 255"),
        ({"datatype": "UINT8", "shape": [1, 1, 4], "data": [1, 2, 3, 4]}, b"", "is not that of a frame"),
        ({"datatype": "BYTES", "shape": [1], "data": ["?"]}, b"", "no base64"),
        ({"datatype": "BYTES", "shape": [2], "data": ["", ""]}, b"", "is not that of one picture"),
        ({"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 9}}, b"12345", "5 bytes follow"),
        ({"datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}, b"12345", "with its length"),
        ({"datatype": "BYTES", "shape": [1], "data": ["AAAA"]}, b"", "is not an image that decodes"),
        ({"datatype": "UINT8", "data": []}, b"", "shape"),
    ],
)
def test_infer_with_a_bad_tensor_gets_one_error(address: str, tensor: dict[str, Any], rest: bytes, text: str) -> None:
    status, found, _ = infer(address, tensor, rest)
    assert status == 400 and text in found["error"] and "\n" not in found["error"]


def test_infer_with_other_requests_gets_one_error(address: str) -> None:
    whole = {"datatype": "UINT8", "shape": [1, 1, 3], "data": [220, 220, 220]}
    for body in (b"", b"[", b"{}", b'{"inputs": []}', b'{"inputs": [{"name": "x"}]}'):
        status, text, _ = send(address, "/v2/models/spots/infer", body, **BEARER)
        assert status == 400 and json.loads(text).keys() == {"error"}
    assert "no output 'x', but labels, scores, boxes" in infer(address, whole, outputs=[{"name": "x"}])[1]["error"]
    assert infer(address, whole, query="gate")[0] == 404
    assert send(address, "/v2/models/spots/infer", b"{}", **BEARER, **{JSON_LENGTH: "9" * 20})[0] == 400


def test_metadata_describes_the_queries(address: str) -> None:
    assert json.loads(get(address, "/v2")[1])["extensions"][0] == "binary_tensor_data"
    found = json.loads(get(address, "/v2/models/spots")[1])
    also = {"also": {"datatype": "UINT8", "shape": [-1, -1, 3]}}
    assert found["inputs"] == [{"name": "image", "datatype": "BYTES", "shape": [1], "parameters": also}]
    assert [one["name"] for one in found["outputs"]] == ["labels", "scores", "boxes", "result"]
    assert get(address, "/v2/models/gate")[0] == get(address, "/v2/models/gate/ready")[0] == 404


def test_overload_declines_with_retry_after_and_counts_every_frame(tmp_path: Path) -> None:
    """Four times as many frames as wait: each request gets an answer, and each is in the ledger."""
    with LocalBox(write_push_box(tmp_path)) as box:
        address = address_of(box)
        GO.clear()
        try:
            with ThreadPoolExecutor(4 * DEPTH) as pool:
                sent = [pool.submit(send_form, address, "/v1/vision/detection", picture()) for _ in range(4 * DEPTH)]
                box.until(lambda: counts(box, "spots")["dropped"].get(OVERLOAD) == 3 * DEPTH)
                GO.set()
                answers = [one.result() for one in sent]
        finally:
            GO.set()
        declined = [headers for status, _, headers in answers if status == 429]
        assert sorted(status for status, _, _ in answers) == [200] * DEPTH + [429] * 3 * DEPTH
        assert all(headers["Retry-After"] == "1" for headers in declined)
        row = counts(box, "spots")
        assert (row["received"], row["processed"], row["dropped"]) == (4 * DEPTH, DEPTH, {OVERLOAD: 3 * DEPTH})
        metrics = get(address, "/metrics")[1].decode()
        assert f'gemel_frames_dropped_total{{query="spots",reason="{OVERLOAD}"}} {3.0 * DEPTH}' in metrics
        assert send_form(address, "/v1/vision/detection", picture())[0] == 200
    assert box.summary["balanced"]


def test_box_that_stops_answers_waiting_frames(tmp_path: Path) -> None:
    GO.set()
    with LocalBox(write_push_box(tmp_path)) as box, ThreadPoolExecutor(1) as pool:
        address = address_of(box)
        GO.clear()
        try:
            sent = pool.submit(send_form, address, "/v1/vision/detection", picture())
            box.until(lambda: counts(box, "spots")["pending"] == 1)
            box.signals.stopping.set()
            status, found, headers = sent.result()
        finally:
            GO.set()
    assert status == 503 and headers["Retry-After"] == "1" and http_push.STATUSES[STOPPED][1] in found["error"]


def test_reload_keeps_the_push_camera_and_numbers_of_frames(box: LocalBox, address: str) -> None:
    send_form(address, "/v1/vision/custom/kind", picture())
    before = max(one["frame"] for one in box.records("kind"))
    config = box.config.read_text()
    box.config.write_text(config.replace("timeout_s: 60", "timeout_s: 50"))
    assert box.reload() is None
    assert send_form(address, "/v1/vision/custom/kind", picture())[0] == 200
    box.until(lambda: max(one["frame"] for one in box.records("kind")) > before)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"http": None}, "http.token_file: the frames of camera door come by HTTP, which needs a token"),
        ({"http": {"bind": "127.0.0.1:0"}}, "http.token_file: the frames of camera door"),
        ({"cameras": {"door": {"source": "push", "loop": True}}}, "cameras.door.loop: does not apply"),
        ({"cameras": {"door": {"source": "push", "fps": 3}}}, "cameras.door.fps: does not apply"),
    ],
)
def test_config_of_a_push_camera_names_what_does_not_fit(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = write_push_box(tmp_path, **keys)
    with pytest.raises(InputError, match=message):
        load_config(path, {}, any_device)


@pytest.fixture(scope="module")
def triton() -> Any:
    """The module `tritonclient.http`: tried with 2.73."""
    return pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")


@pytest.fixture(scope="module")
def client(triton: Any, address: str) -> Any:
    return triton.InferenceServerClient(address, network_timeout=60, connection_timeout=60)


def tensor_of(triton: Any, values: np.ndarray, binary: bool = True, name: str = "image") -> Any:
    """An input with these values, as the client writes it."""
    kind = "BYTES" if values.dtype == np.object_ else {"uint8": "UINT8", "float32": "FP32"}[str(values.dtype)]
    tensor = triton.InferInput(name, list(values.shape), kind)
    tensor.set_data_from_numpy(values, binary_data=binary)
    return tensor


def test_triton_client_reads_what_the_box_says_of_itself(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_server_ready(dict(BEARER))
    assert client.is_model_ready("spots", headers=dict(BEARER)) and not client.is_model_ready("spots")
    assert not client.is_model_ready("gone", headers=dict(BEARER))
    assert client.get_server_metadata(dict(BEARER))["name"] == "gemel"
    metadata = client.get_model_metadata("spots", headers=dict(BEARER))
    also, (version,) = metadata["inputs"][0]["parameters"]["also"], metadata["versions"]
    assert metadata["platform"] == "gemel" and also == {"datatype": "UINT8", "shape": [-1, -1, 3]}
    config = client.get_model_config("spots", headers=dict(BEARER))
    assert {one["name"]: one["data_type"] for one in config["output"]}["boxes"] == "TYPE_FP32"
    (spots, kind) = client.get_model_repository_index(headers=dict(BEARER))
    assert (spots["name"], spots["version"], spots["state"], kind["name"]) == ("spots", version, "READY", "kind")
    assert len(client.get_inference_statistics(headers=dict(BEARER))["model_stats"]) == 2
    for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
        assert ask("spots", version, headers=dict(BEARER)) == ask("spots", headers=dict(BEARER))
        with pytest.raises(Exception, match=f"query 'spots' has the version {version} alone"):
            ask("spots", "7", headers=dict(BEARER))
    assert client.is_model_ready("spots", version, dict(BEARER)) and not client.is_model_ready(
        "spots", "7", dict(BEARER)
    )


def test_triton_client_gets_equal_answers_in_every_form(triton: Any, client: Any) -> None:
    def statistics() -> Any:
        return client.get_inference_statistics("spots", headers=dict(BEARER))["model_stats"][0]["inference_count"]

    version = client.get_model_metadata("spots", headers=dict(BEARER))["versions"][0]
    encoded = np.array([picture()], np.object_)
    pixels = np.full((32, 48, 3), 220, np.uint8)
    tensors = [
        tensor_of(triton, encoded), tensor_of(triton, np.array([base64.b64encode(picture())], np.object_), False),
        tensor_of(triton, encoded[None]), tensor_of(triton, pixels), tensor_of(triton, pixels, False),
        tensor_of(triton, pixels[None]),
    ]  # fmt: skip
    ways = [{}, {"model_version": version}, {"request_compression_algorithm": "gzip"}, {"request_id": "a-1"}]
    before = statistics()
    for tensor in tensors:
        for way in ways:  # the client writes into the headers that it gets
            answer = client.infer("spots", [tensor], headers=dict(BEARER), **way)
            assert answer.as_numpy("labels").tolist() == [b"person", b"car"]
            assert answer.as_numpy("boxes").tolist() == [[24, 16, 48, 32], [0, 8, 24, 24]]
            assert json.loads(answer.as_numpy("result")[0])["query"] == "spots"
            assert answer.get_response().get("id") == way.get("request_id")
    assert statistics() == before + len(tensors) * len(ways)
    for binary in (True, False):
        outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("scores", "boxes")]
        answer = client.infer("spots", tensors[:1], outputs=outputs, headers=dict(BEARER))
        assert answer.as_numpy("scores") == pytest.approx([0.9, 0.35]) and answer.as_numpy("result") is None
        nothing = client.infer(
            "spots", [tensor_of(triton, np.zeros_like(pixels))], outputs=outputs, headers=dict(BEARER)
        )
        assert nothing.as_numpy("boxes").shape == (0, 4) and nothing.as_numpy("scores").shape == (0,)


def test_triton_client_is_told_what_does_not_fit(triton: Any, client: Any) -> None:
    pixels = np.full((32, 48, 3), 220, np.uint8)
    plain = tensor_of(triton, pixels)
    wrong = {
        r"the shape \[2, 32, 48, 3\] is not that of a frame": np.stack([pixels, pixels]),
        r"the shape \[3, 32, 48\] is not that of a frame": pixels.transpose(2, 0, 1).copy(),
        r"the shape \[32, 48\] is not that of a frame": pixels[..., 0].copy(),
        "the data type 'FP32' is no frame": pixels.astype(np.float32),
        r"the shape \[2\] is not that of one picture": np.array([picture(), picture()], np.object_),
        "is not an image that decodes": np.array([b"no picture"], np.object_),
    }
    for message, values in wrong.items():
        with pytest.raises(triton.InferenceServerException, match=message):
            client.infer("spots", [tensor_of(triton, values)], headers=dict(BEARER))
    with pytest.raises(triton.InferenceServerException, match="the input 'pixels' is unknown"):
        client.infer("spots", [tensor_of(triton, pixels, name="pixels")], headers=dict(BEARER))
    for message, keys in {
        "has no output 'masks'": {"outputs": [triton.InferRequestedOutput("masks")]},
        "`classification` of outputs is not supported": {
            "outputs": [triton.InferRequestedOutput("scores", class_count=2)]
        },
        "query 'spots' has the version .* alone": {"model_version": "7"},
    }.items():
        with pytest.raises(triton.InferenceServerException, match=message):
            client.infer("spots", [plain], headers=dict(BEARER), **keys)
    with pytest.raises(triton.InferenceServerException, match="no query 'gate' takes frames by HTTP"):
        client.infer("gate", [plain], headers=dict(BEARER))
    with pytest.raises(triton.InferenceServerException, match="a token is needed"):
        client.infer("spots", [plain])


def test_v2_takes_the_version_of_the_bundle_in_a_path(address: str) -> None:
    (version,) = json.loads(get(address, "/v2/models/spots")[1])["versions"]
    for path in ("", "/config", "/stats", "/ready"):
        given = f"/v2/models/spots/versions/{version}{path}"
        assert get(address, given)[:2] == get(address, f"/v2/models/spots{path}")[:2]
        status, body, _ = get(address, f"/v2/models/spots/versions/7{path}")
        assert status == 404 and json.loads(body)["error"] == f"query 'spots' has the version {version} alone"


def test_frigates_deepstack_detector_reads_the_answers(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frigate's own file frigate/detectors/plugins/deepstack.py, which GEMEL_FRIGATE names."""
    path = os.environ.get("GEMEL_FRIGATE", "")
    if not path:
        pytest.skip("GEMEL_FRIGATE does not name Frigate's deepstack.py")
    pytest.importorskip("requests")
    names = {"frigate": {}, "frigate.detectors": {}, "frigate.detectors.detection_api": {"DetectionApi": object},
             "frigate.detectors.detector_config": {"BaseDetectorConfig": object}}  # fmt: skip
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    plugin: dict[str, Any] = {"__name__": "deepstack"}
    exec(compile(Path(path).read_text(), path, "exec"), plugin)
    config = SimpleNamespace(
        api_url=f"http://{address}/v1/vision/detection", api_timeout=60.0, api_key=TOKEN,
        model=SimpleNamespace(merged_labelmap={0: "person", 2: "car"}),
    )  # fmt: skip
    found = plugin["DeepStack"](config).detect_raw(np.full((1, 32, 48, 3), 220, np.uint8))
    assert found.shape == (20, 6) and found[0] == pytest.approx([0, 0.9, 0.5, 0.5, 1.0, 1.0])
    assert not found[1:].any()  # the car is below Frigate's threshold of 0.4
