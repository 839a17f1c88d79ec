"""ONNX files for tasks without a decoder: which output counts, and a merge of one file on two cameras."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import nn

from gemel.edge_runtime.life.daemon import run
from gemel.merger import merge
from gemel.models.decoders.decoder import GraphHead, Output
from gemel.models.decoders.outputs import RawOutputs, find_outputs
from gemel.models.errors import InputError
from gemel.models.workload import load_workload
from tests.gemel import task_workload as drawn

pytest.importorskip("gemel.models.graph")
PLAIN = {"mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0], "resize": "letterbox"}


class Scores(nn.Module):
    """Probabilities of one class, as many segmentation networks for one thing give them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = drawn.Masks(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(8 * x).sigmoid()


NETWORKS = {"segmentation": Scores, "embedding": drawn.Vectors, "tensor": drawn.Maps}


def head_of(*shapes: tuple[int, ...], tail: str = "") -> GraphHead:
    return GraphHead(tuple(Output(f"o{at}", shape, frozenset({tail})) for at, shape in enumerate(shapes)), (32, 32))


@pytest.mark.parametrize(("task", "head", "found"), [
    ("segmentation", head_of((9,), (2, 8, 8)), RawOutputs(1)),
    ("segmentation", head_of((1, 8, 8), tail="Sigmoid"), RawOutputs(0, "Sigmoid", is_single=True)),
    ("embedding", head_of((64, 1, 1)), RawOutputs(0, is_flat=True)), ("embedding", head_of((64,)), RawOutputs(0)),
    ("tensor", head_of((64,), (3, 2)), RawOutputs()),
])  # fmt: skip
def test_find_outputs_takes_the_first_that_fits(task, head, found):
    assert find_outputs(head, task, 2, "a.onnx") == found


@pytest.mark.parametrize("task", ["segmentation", "embedding", "tensor"])
def test_outputs_that_do_not_fit_are_refused_in_one_line(task):
    head = head_of(*([] if task == "tensor" else [(5, 6, 7)]))
    with pytest.raises(InputError, match=r"a\.onnx: .*answers one frame with"):
        find_outputs(head, task, 2, "a.onnx")


@pytest.mark.parametrize("task", NETWORKS)
def test_one_file_on_two_cameras_takes_half_and_answers(task, tmp_path: Path):
    torch.manual_seed(2)
    network = NETWORKS[task]().train()
    with torch.no_grad():
        network(torch.rand(16, 3, 32, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            network.eval(), (torch.zeros(1, 3, 32, 32),), str(tmp_path / "net.onnx"), dynamo=False, opset_version=17
        )
    keys = {"segmentation": {"classes": ["background", "square"]}, "tensor": {"agreement": "cosine"}}.get(task, {})
    queries = [
        {"id": name, "camera": "gate", "task": task, "model": "net.onnx", "data": "frames", "preprocess": PLAIN,
         "accuracy_target": 0.999, "sla_ms": 20_000, **keys}
        for name in ("left", "right")
    ]  # fmt: skip
    drawn.write_clip(tmp_path / "gate.mp4")
    (tmp_path / "workload.yaml").write_text(
        json.dumps({"name": "w", "cameras": {"gate": {"source": "gate.mp4", "fps": 10}}, "queries": queries})
    )
    random = np.random.default_rng(0)
    (tmp_path / "frames").mkdir()
    for index in range(120):
        red, green, blue = (int(value) for value in random.integers(0, 255, 3))
        cv2.imwrite(str(tmp_path / "frames" / f"{index:03}.png"), drawn.draw_frame(random, (red, green, blue))[0])
    merged = merge(load_workload(tmp_path / "workload.yaml"), tmp_path / "box.safetensors", options=drawn.MERGE)
    assert merged.bytes_after < 0.6 * merged.bytes_before
    assert all(one.merged == pytest.approx(1) for one in merged.queries)
    run(drawn.write_box(tmp_path, []))
    records = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    key = {"segmentation": "segments", "embedding": "embedding", "tensor": "outputs"}[task]
    assert {record["query"] for record in records} == {"left", "right"} and all(record[key] for record in records)
