"""Three workloads on which a merge is seen for the first time, from the data of `domains`.

`kinds`: one task three times, as a resnet18, a resnet34 and a mobilenet_v2.
`ancestor`: two mobilenet_v2 with classes of their own, fine-tuned from one ImageNet network, norms and all.
`boxes`: two FastestDet with classes of their own, fine-tuned from one COCO network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.data.domains import INIT as DETECTOR
from benchmarks.data.domains import write_task
from benchmarks.data.files import copy_whole, need
from benchmarks.data.simple import INIT as CLASSIFIER


def prepare_kinds(data: Path, out: Path) -> dict[str, Any]:
    """Write the images of `kinds` and what its mobilenet_v2 starts from; returns the counts."""
    return _prepare(data, out, {"mobilenet_v2.pth": CLASSIFIER}, ("pavements",))


def prepare_ancestor(data: Path, out: Path) -> dict[str, Any]:
    """Write the images of `ancestor` and what its networks start from; returns the counts."""
    return _prepare(data, out, {"mobilenet_v2.pth": CLASSIFIER}, ("pavements", "solar_ir"))


def prepare_boxes(data: Path, out: Path) -> dict[str, Any]:
    """Write the images of `boxes` and what its networks start from; returns the counts."""
    return _prepare(data, out, {"fastestdet.pth": DETECTOR}, ("bccd", "deeppcb"))


def _prepare(data: Path, out: Path, init: dict[str, str], tasks: tuple[str, ...]) -> dict[str, Any]:
    for name, source in init.items():
        copy_whole(need(data / "models" / source), out / "init" / name)
    return {name: write_task(data, out, name) for name in tasks}
