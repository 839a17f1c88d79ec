"""A LitServe server of ONNX files, as its guide writes one with several models: all are opened in `setup`.

MODELS and INPUTS are JSON objects {model: path}, PORT is where it listens. A request is a form: `model`, `shape`, and
the picture as the file `frame`. LitServe reads annotations as types, so they are not postponed.
"""

import base64
import json
import os
from typing import Any

import litserve  # pyright: ignore[reportMissingImports]
import numpy as np
import onnxruntime
from child import read_pictures  # pyright: ignore[reportMissingImports]
from fastapi import Request  # pyright: ignore[reportMissingImports]


class Models(litserve.LitAPI):
    """Answers a picture for one model with the outputs, as base64 with their shapes."""

    def setup(self, device: str) -> None:
        """Open all sessions, on one thread each."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        files, inputs = json.loads(os.environ["MODELS"]), json.loads(os.environ["INPUTS"])
        self.sessions = {
            model: onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            for model, path in files.items()
        }
        read = {model: read_pictures(path) for model, path in inputs.items()}
        self.inputs = {model: type(one)(one.pictures[:0].copy(), one.mean, one.std, one.bgr)
                       for model, one in read.items()}  # fmt: skip

    def decode_request(self, request: Request) -> tuple[str, np.ndarray]:
        """The model, and the picture as it takes it, float32 (1, 3, H, W)."""
        form: Any = request
        picture = np.frombuffer(form["frame"].file.read(), np.uint8).reshape(json.loads(form["shape"]))
        return form["model"], self.inputs[form["model"]].prepare(picture)

    def predict(self, x: tuple[str, np.ndarray]) -> Any:
        """The outputs of the model."""
        session = self.sessions[x[0]]
        return session.run(None, {session.get_inputs()[0].name: x[1]})

    def encode_response(self, output: list[np.ndarray]) -> dict[str, Any]:
        """The outputs as JSON."""
        return {"outputs": [[base64.b64encode(value.tobytes()).decode(), value.shape] for value in output]}


if __name__ == "__main__":
    server = litserve.LitServer(Models(), accelerator="cpu", workers_per_device=1)
    server.run(port=int(os.environ["PORT"]), host="127.0.0.1", generate_client_file=False, log_level="warning")
