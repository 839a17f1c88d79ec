"""A workload of a classifier pair and a detector, bundles of it, and spools that a box would have left."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import yaml
from torch import nn

from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.frames.queues import Frame
from gemel.edge_runtime.frames.results import RunIdentity, result_record
from gemel.edge_runtime.frames.samples import sample_bytes, sample_name
from gemel.models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from gemel.models.files.weights import load_weights, save_weights
from gemel.models.workload import Workload, load_workload
from gemel.models.zoo import build_query
from tests.edge_runtime.tiny import picture

CLASSIFIER = {"task": "classification", "classes": ["empty", "busy"], "model": "cifar_resnet20", "input_size": 32}
DETECTOR = {"task": "detection", "classes": ["car", "bus"], "model": "ssdlite320_mobilenet_v3_large", "input_size": 64}
KINDS = {
    "a": CLASSIFIER,
    "b": {**CLASSIFIER, "roi": [8, 4, 40, 30], "frame_size": [48, 32]},
    "d": {**DETECTOR, "roi": [2, 2, 46, 31], "frame_size": [48, 32]},
}


def write_workload(folder: Path) -> Workload:
    """Queries `a` and `b` (cifar_resnet20) and `d` (SSDLite) of the camera `gate`, with weights of their own."""
    (folder / "weights").mkdir()
    queries = [
        {"id": name, "camera": "gate", "sla_ms": 10_000, "weights": f"weights/{name}.safetensors", **kind}
        for name, kind in KINDS.items()
    ]
    path = folder / "workload.yaml"
    path.write_text(yaml.safe_dump({
        "name": "gate", "accuracy_target": 0.9, "cameras": {"gate": {"source": "gate.mp4"}}, "queries": queries,
    }))  # fmt: skip
    load = load_workload(path)
    for seed, query in enumerate(load.queries):
        torch.manual_seed(seed)
        save_weights(
            folder / "weights" / f"{query.id}.safetensors", _recalibrate_norms(build_query(query)).state_dict()
        )
    return load


def _recalibrate_norms(model: nn.Module) -> nn.Module:
    """A classifier whose answers differ from picture to picture: its head's bias is what it says of an average one."""
    head = getattr(model, "fc", None) or getattr(model, "linear", None)
    if isinstance(head, nn.Linear):
        model.eval()
        with torch.no_grad():
            shown = torch.stack([torch.from_numpy(picture(seed, 32, 32)).permute(2, 0, 1) for seed in range(40)])
            said = model((shown.float() - 115) / 57)
            head.bias.sub_(said.median(dim=0).values)
    return model


def originals(load: Workload) -> dict[str, nn.Module]:
    return {query.id: load_weights(query, build_query(query)).eval() for query in load.queries}


def write_merged(path: Path, load: Workload, *broken: str) -> Bundle:
    """A bundle of the originals in which `a` and `b` share what they can, and these queries answer otherwise."""
    models = originals(load)
    with torch.no_grad():
        for name in broken:
            for parameter in list(models[name].parameters())[-2:]:
                parameter.neg_()
    records = [BundleQuery.of(query, threshold=0.05 if query.task == "detection" else None) for query in load.queries]
    write_bundle(path, models, records, Made(load.name, "wide", 0))
    return open_bundle(path)


def answer(spool: Path, bundle: Bundle, frames: Iterable[int], queries: Iterable[str] = KINDS) -> None:
    """The samples that a box leaves which runs the bundle on these frames, one a minute."""
    folder = spool / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    identity = RunIdentity(bundle.digest, "0011")
    for query in map(bundle.query, queries):
        engine, device = TorchEngine(bundle, query.id), torch.device("cpu")
        state = {name: bundle.tensor(name).to(device) for name in bundle.names_in_order(query.id)}
        engine.bind(state.__getitem__)
        for frame in frames:
            image = np.ascontiguousarray(picture(frame))
            record = result_record(
                query, Frame(frame, 0.0, 1.7e9 + 60 * frame, image), engine.run([image])[0], 0.01, identity
            )
            (folder / sample_name(record)).write_bytes(sample_bytes(record, image, query))
