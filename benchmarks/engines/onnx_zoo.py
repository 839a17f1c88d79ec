"""Compares the engine onnx with torch over the zoo: one model of each family, or all.

Usage: nice -n 10 python -m benchmarks.engines.onnx_zoo [--all] [--models NAME ...] [--json FILE]

Weights are random and norms calibrated on noise; frames are random and small, batches of 1 and 3 (a two-stage detector
takes them one by one). Classifiers: the largest difference of any logit, in shares of the largest logit. One-stage
detectors: the same of decoded boxes and scores. Two-stage detectors: the part of the detections that the other side has
too (label, score and box within 1e-3), on both sides. And the processor's seconds that making the graph took: 2 to 20
a model.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bundles.samples import bundle_query, write_measured_bundle
from benchmarks.engines.zoo import CLASSES, COUNTS, FAMILIES, apart
from benchmarks.machine import machine
from edge_runtime.engines.base import EngineError
from edge_runtime.engines.onnx import OnnxEngine
from edge_runtime.engines.package_cache import EngineCache
from edge_runtime.engines.registry import make_engine
from models import zoo
from models.bundle import Bundle
from models.detector import OneStage
from models.errors import InputError
from models.zoo.registry import ENTRIES
from models.zoo.user_models import answer_on_meta

TOLERANCE = 1e-3
SIDES = (32, 64, 96, 128, 224, 300, 320)


def main() -> None:
    """Compare; print a line per model and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every model, not one of each family")
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # a traced network is many small objects
    sizes = {name: smallest(name) for name in options.models or (ENTRIES if options.all else FAMILIES)}
    rows = []
    for model, size in sizes.items():
        with tempfile.TemporaryDirectory() as folder:
            rows.append({"model": model, "size": size, **compare_model(Path(folder), model, size)})
        print(rows[-1], flush=True)
        gc.collect()
    text = json.dumps({"machine": machine(), "models": rows}, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text)


def smallest(model: str) -> int:
    """The side of a small frame that the model takes."""
    for side in (FAMILIES[model],) if model in FAMILIES else SIDES:
        try:
            module = zoo.build(model, ("a", "b"), {}, side, ENTRIES[model].task, "meta")
        except InputError:
            continue
        if answer_on_meta(module.eval(), side) is not None:
            return side
    raise SystemExit(f"{model} takes no frame of {SIDES}")


def compare_model(folder: Path, model: str, size: int) -> dict[str, Any]:
    """The largest difference, or the part that is matched, and the seconds that the export took."""
    bundle = write_bundle_of(folder / "one.gemel", model, size)
    ours, eager = OnnxEngine(bundle, "only", cache=EngineCache(folder / "cache")), make_engine("torch", bundle, "only")
    start = time.process_time()
    try:
        ours.prepare()
    except EngineError as error:
        return {"difference": None, "note": str(error)}
    seconds = round(time.process_time() - start, 1)
    tensors = {name: bundle.tensor(name).clone() for name in bundle.names_in_order("only")}
    for engine in (ours, eager):
        engine.bind(tensors.__getitem__)
    worst, matched = 0.0, 1.0
    with torch.inference_mode():
        for count in COUNTS:
            frames = torch.rand(count, 3, size, size)
            got, wanted = ours.forward(frames), eager.forward(frames)
            if isinstance(ours.model, OneStage):
                wanted = ours.model.decode(wanted)
            got, wanted = ((one,) if isinstance(one, Tensor) else one for one in (got, wanted))
            if count > 1 and any(torch.allclose(one[0], one[1]) for one in wanted):
                return {"difference": None, "note": "outputs that do not depend on the frame say nothing"}
            if len(got) == 3:
                matched = min(matched, matched_part(got, wanted), matched_part(wanted, got))
                continue
            worst = max(worst, apart(got, wanted))
    row = {"seconds": seconds, "note": ""}
    return {"matched": matched, **row} if len(got) == 3 else {"difference": worst, **row}


def write_bundle_of(path: Path, model: str, size: int) -> Bundle:
    """One query of this model."""
    torch.manual_seed(0)
    task: Any = ENTRIES[model].task
    network = zoo.build(model, CLASSES, {}, size, task)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean of what is seen
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.1)  # some heads begin at zero
        network.train()(torch.rand(8, 3, size, size))
    return write_measured_bundle(path, {"only": network.eval()}, [bundle_query("only", model, CLASSES, size)])


def matched_part(found: Any, wanted: Any) -> float:
    """The part of the detections (boxes, scores, labels) that the other side has too."""
    near = (found[0][:, :, None] - wanted[0][:, None]).abs().amax(-1) <= TOLERANCE
    near &= (found[1][:, :, None] - wanted[1][:, None]).abs() <= TOLERANCE
    near &= found[2][:, :, None] == wanted[2][:, None]
    real = found[1] > 0
    return float(near.any(2)[real].float().mean()) if real.any() else 1.0


if __name__ == "__main__":
    main()
