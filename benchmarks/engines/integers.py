"""Time and memory of int8 weights computed in integers, beside float32 and ONNX Runtime's own static int8.

    python -m benchmarks.engines.integers resnet18:224 resnet50:224:2 mobilenet_v2:224 yolox_nano_416.onnx

NAME:SIDE:COUNT is a bundle of networks of torchvision's architecture with equal layers, and norms and heads of their
own: drawn weights, norms of drawn frames; or a file. Arms are processes of their own without torch, on one thread:
`plain` opens a session of ONNX Runtime for each network in float32, `static` one for what its `quantize_static` makes
of that (QDQ, a scale a channel), `onnx` is the box's recipe for the bundle in int8. Ranges are those of four drawn
frames. Time is processor time of a frame, the best of all rounds, in turns. `differs` is the distance of the answers to
a drawn frame from those of `plain`, over their spread: drawn weights say nothing about accuracy, which merges measure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines.mapped import run_child, write_originals

DEFAULT = ("resnet18:224", "resnet50:224", "resnet50:224:2", "mobilenet_v2:224")
ARMS = {"plain": "plain", "static": "plain", "onnx": "onnx"}
"""The arms, and how `benchmarks.engines.mapped` opens each."""
CALIBRATION_FRAMES, TURNS = 4, 3


def make_networks(text: str, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The models of NAME:SIDE:COUNT or of a file by query, and their records."""
    from gemel.models import zoo
    from gemel.models.bundle import BundleQuery
    from gemel.models.files.weights import load_weights
    from gemel.models.preprocess import Preprocess
    from gemel.models.workload import load_workload

    if text.endswith(".onnx"):
        query = {"id": "q0", "camera": "c", "model": str(Path(text).absolute())}
        path = folder / "file.yaml"
        path.write_text(json.dumps({"name": "file", "cameras": {"c": {"source": "0"}}, "queries": [query]}))
        queries = load_workload(path).queries
        models = {query.id: load_weights(query, zoo.build_query(query)).eval() for query in queries}
        return models, [BundleQuery.of(query) for query in queries]
    name, side, count = [*text.split(":"), "1"][:3]
    models = draw_models(name, int(side), int(count))
    records = [
        BundleQuery(
            id=query, camera="c", task="classification", classes=tuple("abcdefghij"), model=name, model_args={},
            input_size=int(side), preprocess=Preprocess((int(side), int(side))), fps=None, sla_ms=100.0,
            accuracy_target=0.95,
        )
        for query in models
    ]  # fmt: skip
    return models, records


def draw_models(name: str, side: int, count: int) -> dict[str, Any]:
    """Models with equal convolutions; norms have the statistics of drawn frames, and scales of their own."""
    import copy

    import torch

    from gemel.models import zoo

    torch.manual_seed(0)
    base = zoo.build(name, tuple("abcdefghij"), {}, side, "classification").train()
    for module in base.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None  # the mean of all batches
    models = {}
    with torch.no_grad():
        for _ in range(2):
            base(torch.randn(8, 3, side, side))
        for place in range(count):
            model = models[f"q{place}"] = copy.deepcopy(base.eval())
            for module in model.modules():
                if isinstance(module, torch.nn.BatchNorm2d):
                    module.weight.mul_(torch.empty_like(module.weight).uniform_(0.9, 1.1))
    return models


def write_bundles(text: str, folder: Path) -> tuple[Path, Path, list[np.ndarray]]:
    """Bundles of float32 and of int8 weights with ranges; and the frames of these."""
    import torch

    from gemel.merger.computed import QueryNetwork
    from gemel.models.bundle import Made, write_bundle
    from gemel.models.decoders.graph_model import GraphAnswers
    from gemel.models.export.export_document import export_documents
    from gemel.models.graph.stored import store_graph
    from gemel.models.quantization import choices, pack

    torch.set_num_threads(1)
    models, records = make_networks(text, folder)
    documents = export_documents(models, records)
    height, width = records[0].preprocess.size
    frames = torch.randn(CALIBRATION_FRAMES, 3, height, width)
    wide, narrow = folder / "float32.safetensors", folder / "int8.safetensors"
    write_bundle(wide, models, records, Made("integers", "none", 0), documents=documents)
    packed, computed = {}, []
    for record in records:
        model = models[record.id]
        packed[record.id] = {
            key: pack(tensor, widths[0])
            for key, tensor in model.state_dict().items()
            if tensor.is_floating_point()
            and (widths := choices(key, tensor.shape, "int8", len(tensor) == len(record.classes)))
        }
        is_graph = isinstance(model, GraphAnswers)
        document = store_graph(model.source) if is_graph else documents[record.id]
        named = replace(record, graph=record.model) if is_graph else record
        ranges = QueryNetwork(named, document, model, packed[record.id]).measure(frames)
        computed.append(replace(record, activations=ranges))
    write_bundle(narrow, models, computed, Made("integers", "none", 0), packed=packed, documents=documents)
    return wide, narrow, [frame[None] for frame in frames.numpy()]


def write_static(source: Path, target: Path, frames: Sequence[np.ndarray]) -> None:
    """What ONNX Runtime's static quantisation makes of a file."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from gemel.models.graph.upgrade import upgrade_to_axes

    model, _ = upgrade_to_axes(onnx.load(source))

    class Frames(CalibrationDataReader):
        """Gives each frame once."""

        def __init__(self) -> None:
            self._left: Iterator[np.ndarray] = iter(frames)

        def get_next(self) -> dict[str, np.ndarray] | None:
            frame = next(self._left, None)
            return None if frame is None else {model.graph.input[0].name: frame}

    upgraded, prepared = target.with_suffix(".upgraded"), target.with_suffix(".prepared")
    onnx.save(model, upgraded)
    quant_pre_process(str(upgraded), str(prepared), skip_symbolic_shape=True)
    quantize_static(
        prepared, target, Frames(), quant_format=QuantFormat.QDQ, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
    )  # fmt: skip


def difference(folder: Path, other: Path) -> float:
    """How far answers are from those of `plain`, over the spread of these; the worst output."""
    plain, answers = np.load(folder / "plain.npz"), np.load(other)
    spread = {name: float(np.linalg.norm(plain[name] - plain[name].mean())) or 1.0 for name in plain.files}
    return max(float(np.linalg.norm(answers[name] - plain[name])) / spread[name] for name in plain.files)


def compare(text: str, folder: Path) -> dict[str, Any]:
    """All arms of one case."""
    wide, narrow, frames = write_bundles(text, folder)
    folders = {arm: folder / arm for arm in ARMS}
    for path in folders.values():
        path.mkdir()
    write_originals(wide, folders["plain"])
    for source in folders["plain"].glob("*.onnx"):
        write_static(source, folders["static"] / source.name, frames)
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(TURNS):
        for arm, way in ARMS.items():
            row: Mapping[str, Any] = json.loads(run_child("--arm", way, str(narrow), str(folders[arm])))
            ms = min(row["ms"], rows.get(arm, row)["ms"])
            rows[arm] = {"ms": round(ms, 2), "anonymous_bytes": row["anonymous_bytes"], "pss_bytes": row["pss_bytes"]}
    for arm in ("static", "onnx"):
        rows[arm]["differs"] = round(difference(folders["plain"], folders[arm] / f"{ARMS[arm]}.npz"), 3)
        rows[arm]["ratio"] = round(rows[arm]["ms"] / rows["plain"]["ms"], 3)
    return {"networks": text, **rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=DEFAULT, metavar="NAME:SIDE:COUNT|FILE.onnx")
    for text in parser.parse_args(arguments).networks:
        with tempfile.TemporaryDirectory(prefix="gemel-integers-") as folder:
            print(json.dumps(compare(text, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
