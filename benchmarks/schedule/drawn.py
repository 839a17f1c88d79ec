"""Workloads drawn at random: what no schedule was tuned on. The same seed and number give the same workload."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

QUERIES, MODELS = (3, 9), (2, 4)
FPS, SLAS_MS, CAMERAS_FPS = (1, 2, 2, 5, 5, 5, 10, 10, 10, 15, 30), (50, 100, 100, 100, 200, 200, 500), (5, 10, 15, 30)
CLASSES = ("car", "bus", "truck", "person", "bicycle", "van", "tram", "free")
SIZES = (160, 192, 224, 256, 320, 384, 416)
"""Pixels, of models that were published with no size of their own or are as often given another."""
OWN_SIZE = {
    "inception_v3": 299, "efficientnet_b3": 300, "vit_b_16": 224, "swin_t": 224,
    "cifar_resnet20": 32, "cifar_resnet32": 32, "cifar_resnet44": 32, "cifar_resnet56": 32,
    "ssd300_vgg16": 300, "ssd320_squeezenet1_0": 320, "ssd_resnet18": 300, "ssdlite320_mobilenet_v2": 320,
    "ssdlite320_mobilenet_v3_large": 320, "fasterrcnn_mobilenet_v3_large_320_fpn": 320, "yolov3": 416,
    "yolov3_tiny": 416, "fastestdet": 352,
}  # fmt: skip
"""Pixels a side of the models that take one size, or are hardly given another."""
FACTORIES = {
    "fastestdet": ("fastestdet",), "yolov3": ("yolov3", "yolov3_tiny"),
    "focal_loss_detectors": ("fcos_resnet50_fpn", "retinanet_resnet50_fpn", "retinanet_resnet50_fpn_v2"),
}  # fmt: skip
PLUGINS = {name: f"benchmarks.workloads.{module}:{name}" for module, names in FACTORIES.items() for name in names}
"""The catalogue's own networks, which are no names of the zoo."""


def draw_workload(seed: int, number: int, kinds: dict[str, str]) -> dict[str, Any]:
    """One workload as its file would hold it: 3 to 9 queries of 2 to 4 models; `kinds` gives each model its task.

    A model is drawn first and its size with it, so that queries of one model share layers; each query has a camera of
    its own, rates and deadlines drawn apart.
    """
    rng = random.Random(f"{seed}/{number}")
    names = rng.sample(sorted(kinds), rng.randint(*MODELS))
    count = max(len(names), rng.randint(*QUERIES))
    models = [*names, *(rng.choice(names) for _ in range(count - len(names)))]
    rng.shuffle(models)
    sizes = {name: OWN_SIZE.get(name) or (224 if rng.random() < 0.5 else rng.choice(SIZES)) for name in names}
    cameras, queries = {}, []
    for place, name in enumerate(models):
        cameras[f"camera-{place}"] = {"source": f"clips/{place}.mp4", "fps": rng.choice(CAMERAS_FPS)}
        queries.append({
            "id": f"q{place}-{name}", "camera": f"camera-{place}", "task": kinds[name],
            "classes": list(CLASSES[: rng.randint(2, len(CLASSES))]), "model": name, "input_size": sizes[name],
            "fps": rng.choice(FPS), "sla_ms": rng.choice(SLAS_MS),
        })  # fmt: skip
    return {"name": f"drawn-{seed}-{number}", "accuracy_target": 0.95, "cameras": cameras, "queries": queries}


def write_drawn(folder: Path, seed: int, number: int) -> Path:
    """The workload as a file of that folder; JSON is YAML."""
    from gemel.models import zoo

    kinds = {name: task for task in ("classification", "detection") for name in zoo.names(task)}
    workload = draw_workload(seed, number, kinds | dict.fromkeys(PLUGINS, "detection"))
    for query in workload["queries"]:
        query["model"] = PLUGINS.get(query["model"], query["model"])
    path = folder / f"{workload['name']}.yaml"
    path.write_text(json.dumps(workload, indent=1) + "\n", encoding="utf-8")
    return path
