"""Models that a client sends are read, served beside the bundle's own and kept; what is none is refused in one line."""

from __future__ import annotations

import json
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from gemel.edge_runtime.arrivals import detector_port
from gemel.edge_runtime.arrivals.arrival_child import THRESHOLD
from gemel.edge_runtime.arrivals.sent_models import FOLDER, JOINED, MAX_MODELS, arrived_models
from gemel.edge_runtime.http.metrics import Metrics
from gemel.edge_runtime.life.config import DetectorPortConfig, any_device, load_config
from gemel.models.bundle import open_bundle
from gemel.models.errors import InputError
from gemel.packing import pack
from tests.edge_runtime.detector_client import Client, endpoint_of
from tests.edge_runtime.http.push_box import TOKEN, address_of
from tests.edge_runtime.local_box import LocalBox
from tests.edge_runtime.tiny import write_config
from tests.models.decoders.tiny_graphs import SIDE, TinyYolox, export
from tests.models.graph.onnx_files import write_classifier

NAMES = json.dumps({"0": "car", "1": "bus", "2": "truck"})


def write_arrival_box(folder: Path) -> Path:
    """The config of a box that serves `yolox` and takes models."""
    torch.manual_seed(0)
    file = export(folder / "yolox.onnx", TinyYolox(3), names=NAMES)
    pack([file], folder / "tiny.safetensors")
    (folder / "token").write_text(TOKEN)
    return write_config(
        folder, factories=None, engine="auto", cameras={"yolox": {"source": "push", "timeout_s": 60}}, spool="spool",
        zmq={"bind": "tcp://127.0.0.1:0", "accept_models": True},
        http={"bind": "127.0.0.1:0", "token_file": "token"},
    )  # fmt: skip


def detect(client: Client, name: str, frames: np.ndarray) -> np.ndarray:
    """The rows of a query for each frame, those from THRESHOLD on."""
    assert client.open(f"{name}.onnx")["model_loaded"]
    rows = np.stack([client.detect(frame[None]) for frame in frames])
    return np.where(rows[..., 1:2] >= THRESHOLD, rows, 0)


def test_models_that_arrive_answer_like_the_same_model_of_the_bundle_and_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'gemel[zmq]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = write_arrival_box(tmp_path)
    frames = np.random.default_rng(0).integers(0, 256, (8, SIDE, SIDE, 3), np.uint8)
    model, classifier = (tmp_path / "yolox.onnx").read_bytes(), write_classifier(tmp_path / "kind.onnx").read_bytes()
    models = tmp_path / "spool" / FOLDER
    with LocalBox(config) as box:
        address_of(box)
        arrived = box.service._arrived
        assert arrived is not None
        for name, data in {"text": b"no model", "half": model[: len(model) // 2], "kind": classifier}.items():
            with pytest.raises(InputError, match=f"the model '{name}'"):
                arrived.add(name, data).result()
        with pytest.raises(InputError, match="its name is no query's"):
            arrived.add("../twin", model).result()
        assert not list(models.iterdir())
        with Client(endpoint_of(box)) as client:
            assert client.open("twin.onnx") == {"model_available": False, "model_loaded": False}
            arrived.add("twin", model).result()
            expected = detect(client, "yolox", frames)
            assert expected.any()
            np.testing.assert_array_equal(detect(client, "twin", frames), expected)
        (joined,) = models.glob(f"{JOINED}*")
        assert (
            open_bundle(joined).manifest.bytes.after
            < 1.1 * open_bundle(tmp_path / "tiny.safetensors").manifest.bytes.after
        )
    with LocalBox(config) as box:
        address_of(box)
        with Client(endpoint_of(box)) as client:
            np.testing.assert_array_equal(detect(client, "twin", frames), expected)
        (models / "twin.safetensors").unlink()
        assert box.reload() is None
        with Client(endpoint_of(box)) as client:
            assert not client.open("twin.onnx")["model_available"] and client.open("yolox.onnx")["model_available"]
    assert arrived_models(models) == {} and MAX_MODELS == 32


def test_model_that_takes_long_counts_as_served_and_is_declined_until_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'gemel[zmq]'")
    monkeypatch.setattr(detector_port, "MODEL_TIMEOUT_S", 0.01)
    adding, config = Future[None](), DetectorPortConfig(f"ipc://{tmp_path}/port", accept_models=True)
    port = detector_port.DetectorPort(config, dict, Metrics([]).tensors, lambda name, data: adding)
    port.start("box.yaml")
    try:
        with Client(port.endpoint) as client:
            answer = json.loads(client.ask({"model_data": True, "model_name": "slow.onnx"}, b"a model"))
            assert answer == {"model_saved": True, "model_loaded": True}
            answer = client.ask({"shape": [1, 2, 2, 3], "dtype": "uint8"}, bytes(12))
            assert "not served, or not yet" in json.loads(answer)["error"]
            adding.set_exception(InputError("the model 'slow'", "is none", ""))
            answer = json.loads(client.ask({"model_data": True, "model_name": "slow.onnx"}, b"a model"))
            assert answer == {"model_saved": False, "model_loaded": False, "error": "the model 'slow': is none"}
    finally:
        port.stop()


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({}, "add `spool: spool`"),
        ({"spool": "spool", "public_key": "key.pub"}, "not signed"),
        ({"spool": "spool", "cameras": {"a": {"source": "push"}, "b": {"source": "push"}}}, "have one camera"),
    ],
)
def test_config_that_cannot_take_models_is_refused(tmp_path: Path, keys: dict[str, object], problem: str) -> None:
    pytest.importorskip("zmq", reason="pyzmq is not installed: pip install 'gemel[zmq]'")
    given = {"zmq": {"bind": "tcp://127.0.0.1:1", "accept_models": True}, "cameras": {"a": {"source": "push"}}}
    (tmp_path / "token").write_text(TOKEN)
    http = {"token_file": "token"}
    with pytest.raises(InputError, match=problem):
        load_config(write_config(tmp_path, http=http, **{**given, **keys}), {}, any_device)
