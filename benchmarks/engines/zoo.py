"""Every family of the zoo in one engine against the plain module: outputs, what making it took, how fast it runs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.bundles.samples import bundle_query, write_measured_bundle
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.registry import FALLBACK, make_engine
from edge_runtime.engines.setup import resident_arena
from models import zoo
from models.bundle import Bundle

FAMILIES = {
    "cifar_resnet20": 32, "resnet18": 64, "resnext50_32x4d": 64, "vgg11_bn": 64, "alexnet": 96, "squeezenet1_1": 64,
    "densenet121": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64, "shufflenet_v2_x0_5": 64, "efficientnet_b0": 64,
    "convnext_tiny": 64, "googlenet": 64, "inception_v3": 96, "regnet_y_400mf": 64, "swin_t": 64, "vit_b_16": 32,
    "ssdlite320_mobilenet_v2": 96, "ssd_resnet18": 96, "ssd300_vgg16": 300, "fastestdet": 96, "fcos_resnet50_fpn": 96,
    "retinanet_resnet50_fpn": 96, "yolov3_tiny": 96, "fasterrcnn_mobilenet_v3_large_320_fpn": 96,
}  # fmt: skip
"""One architecture of each family, and a frame that is small for it."""
CLASSES = ("car", "bus", "truck")
COUNTS = (1, 3)
ROUNDS = 7


def families(folder: Path, models: Sequence[str], engine: str, kept: Path | None = None) -> list[dict[str, Any]]:
    """A row per family: the largest difference over batches of COUNTS, seconds to prepare, time over the module's.

    Rows are added to the JSON lines of `kept`, if given, and those that stand there are not measured again.
    """
    lines = kept.read_text().splitlines() if kept is not None and kept.exists() else []
    known = {(row["engine"], row["model"]): row for row in map(json.loads, lines)}
    rows = []
    for model in models:
        row = known.get((engine, model))
        if row is None:
            size = FAMILIES[model]
            print(f"{model} ...", end=" ", flush=True)
            row = {"engine": engine, "model": model, "size": size, **_compare_outputs(folder, engine, model, size)}
            print(row, flush=True)
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps(row) + "\n")
        rows.append(row)
    return rows


def _compare_outputs(folder: Path, engine: str, model: str, size: int) -> dict[str, Any]:
    bundle = _bundle(folder / f"{model}.gemel", model, size)
    options: dict[str, Any] = {} if engine == FALLBACK else {"cache": EngineCache(folder / "engines")}
    one = make_engine(engine, bundle, "only", **options)
    start = time.perf_counter()
    try:
        one.prepare()
    except EngineError as error:
        return {"difference": None, "seconds": None, "ratio": None, "note": str(error)}
    seconds = round(time.perf_counter() - start, 1)
    resident_arena(bundle, {"only": one})
    bare = bundle.build("only")
    worst, times = 0.0, {"engine": [], "bare": []}
    with torch.inference_mode():
        for count in COUNTS:
            frames = torch.rand(count, 3, size, size).contiguous(memory_format=torch.channels_last)
            wanted = bare(frames)
            worst = max(worst, apart(one.forward(frames), wanted))
        for index in range(ROUNDS + 1):
            for name, run in (("engine", one.forward), ("bare", bare)):
                start = time.process_time()
                run(frames[:1])
                if index:
                    times[name].append(time.process_time() - start)
    ratio = round(median(times["engine"]) / median(times["bare"]), 2)
    return {"difference": worst, "seconds": seconds, "ratio": ratio, "note": ""}


def apart(outputs: Any, wanted: Any) -> float:
    """The largest difference of any tensor, in shares of its largest value; infinite where any is no number."""
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(wanted), strict=True)
    found = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs if b.numel()]
    return max(math.inf if math.isnan(one) else one for one in found)


def _bundle(path: Path, model: str, size: int) -> Bundle:
    """One query, weights random, norms calibrated on noise: otherwise nothing of a frame may reach the outputs."""
    torch.manual_seed(0)
    task = "detection" if model in zoo.names("detection") else "classification"
    network = zoo.build(model, CLASSES, {}, size, task).eval()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
        if isinstance(module, nn.Linear) and not module.weight.any():  # the head of a transformer
            nn.init.normal_(module.weight, std=0.1)
    with torch.no_grad():
        network.train()(torch.rand(8, 3, size, size))
        frames = torch.rand(2, 3, size, size)
        first, second = (pytree.tree_leaves(network.eval()(one)) for one in (frames[:1], frames[1:]))
    if all(torch.allclose(a, b) for a, b in zip(first, second, strict=True)):
        raise AssertionError(f"{model}: its outputs do not depend on the frame, so they would show nothing")
    return write_measured_bundle(path, {"only": network}, [bundle_query("only", model, CLASSES, size)])
