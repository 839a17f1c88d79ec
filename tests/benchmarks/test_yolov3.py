"""The catalogue's YOLOv3 and Tiny YOLOv3 have the sizes that were published for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemel.models import zoo
from gemel.models.export.cost import flops

FOLDER = Path(__file__).parents[2] / "benchmarks" / "workloads"
PUBLISHED = {
    "yolov3": (61_949_149, 248_007_048, 65.86),
    "yolov3_tiny": (8_852_366, 35_434_956, 5.56),
}
"""Parameters; bytes of the published weights file, a header of 20 and four for each value; 10^9 operations at 416."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_yolov3_has_the_published_sizes(name: str) -> None:
    model = zoo.build(f"yolov3:{name}", 81, {}, 416, "detection", device="meta", folder=FOLDER)
    parameters, file_bytes, operations = PUBLISHED[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    state = [tensor for key, tensor in model.state_dict().items() if not key.endswith("num_batches_tracked")]
    assert 20 + 4 * sum(tensor.numel() for tensor in state) == file_bytes
    assert flops(model, 416) / 1e9 == pytest.approx(operations, abs=0.01)
