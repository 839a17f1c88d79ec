"""What sessions of exported models take in ONNX Runtime, beside the merged bytes and sessions without weights.

Usage: python -m benchmarks.bundles.exported [--model FILE.onnx] [--sessions N] --json FILE

Queries of one network share every weight but those of norms and heads. Each measurement is a process of its own: the
growth of its memory (heap and weights.bin, pages mapped several times counted once) by N sessions that have run once.
`default` are sessions without options, which copy weights; `shared` those of docs/guide.md, which use them where they
are; `without weights` takes every weight from the caller. `ratio` = taken / (merged bytes + sessions without weights).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.bundles.samples import bundle_query, write_measured_bundle
from gemel.models.export.export_folder import WEIGHTS, export_folder
from gemel.models.files.io import open_atomic

MODEL, SESSIONS = "resnet50", 8
SHARED, DEFAULT, WITHOUT_WEIGHTS = "shared", "default", "without weights"
FOLDING = ["ConvMulFusion", "ConvAddFusion", "ConvBNFusion"]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="a zoo name, or an ONNX file")
    parser.add_argument("--sessions", type=int, default=SESSIONS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--measure", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(taken_bytes(options.measure[0], Path(options.measure[1]), options.sessions))
        return
    with tempfile.TemporaryDirectory(prefix="exported-") as folder:
        record = measure(options.model, options.sessions, Path(folder))
    text = json.dumps({**record, "date": datetime.date.today().isoformat()}, indent=2)
    print(text)
    if options.json:
        with open_atomic(options.json, overwrite=True) as file:
            file.write(text.encode() + b"\n")


def measure(model: str, sessions: int, folder: Path) -> dict[str, Any]:
    """The memory of N sessions of each kind, and the ratio to what sharing alone would take."""
    bundle = write_tied(model, sessions, folder / "box.safetensors")
    exported = export_folder(bundle, folder / "onnx")
    taken = {}
    for mode in (SHARED, DEFAULT, WITHOUT_WEIGHTS):
        words = [sys.executable, "-m", "benchmarks.bundles.exported", "--sessions", str(sessions)]
        done = subprocess.run([*words, "--measure", mode, str(folder / "onnx")], check=True, capture_output=True)
        taken[mode] = int(done.stdout)
    merged = bundle.manifest.bytes.after
    bound = merged + taken[WITHOUT_WEIGHTS]
    return {
        "model": Path(model).stem,
        "sessions": sessions,
        "originals_bytes": bundle.manifest.bytes.before,
        "merged_bytes": merged,
        "weights_file_bytes": exported.weights_bytes,
        "taken_bytes": taken,
        "ratio": {mode: round(taken[mode] / bound, 3) for mode in (SHARED, DEFAULT)},
    }


def write_tied(name: str, count: int, path: Path) -> Any:
    """A bundle of queries of one network that share the weights of all convolutions and linear layers but the head."""
    import torch

    from gemel.models import zoo

    torch.manual_seed(0)
    if name.endswith(".onnx"):
        return write_tied_graphs(Path(name), count, path)
    models = {f"query{index}": zoo.build(name, 10, {}, 224) for index in range(count)}
    first = next(iter(models.values()))
    heads = {key for key, tensor in first.state_dict().items() if tensor.shape[:1] == (10,)}
    for model in models.values():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter)  # norms of its own
        shared = {key: one for key, one in first.named_parameters() if one.ndim > 1 and key not in heads}
        model.load_state_dict({**dict(model.state_dict(keep_vars=True)), **shared}, assign=True)
        model.eval()
    return write_measured_bundle(path, models, [bundle_query(query, name) for query in models])


def write_tied_graphs(file: Path, count: int, path: Path) -> Any:
    """The same of an imported file, each query with scales and biases of its own."""
    import copy
    from dataclasses import replace

    import torch

    from gemel.models.decoders.files import ModelFile
    from gemel.models.decoders.graph_model import last_layers
    from gemel.models.preprocess import Preprocess

    found = ModelFile(file).complete()
    first = found.build()
    heads = {f"network.{layer}.weight" for layer in last_layers(first.network)}  # type: ignore[arg-type]
    record = bundle_query("query0", "graph", found.classes)
    size = found.size or (0, 0)
    record = replace(record, task=found.task, input_size=size[0], preprocess=Preprocess(size))
    models = {}
    for index in range(count):
        model = copy.deepcopy(first)
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1 and key not in heads:
                continue
            parameter.data *= 1 + 0.05 * torch.rand_like(parameter)
        shared = {key: one for key, one in first.named_parameters() if one.ndim > 1 and key not in heads}
        model.load_state_dict({**model.state_dict(keep_vars=True), **shared}, assign=True)
        models[f"query{index}"] = model.eval()
    return write_measured_bundle(path, models, [replace(record, id=query) for query in models])


def taken_bytes(mode: str, folder: Path, count: int) -> int:
    """By how much this process grows when it makes N sessions and each runs a frame."""
    files = sorted(folder.glob("*.onnx"))[:count]
    run_session(files[0], mode)  # what the library itself loads on first use
    before, sessions, taken = own_bytes(), [], 0
    for file in files:
        sessions.append(run_session(file, mode))
        taken = own_bytes() - before  # which gives freed memory back to the system each time
    return taken


def run_session(file: Path, mode: str) -> Any:
    """A session that has run one frame."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.enable_cpu_mem_arena = False  # a pool would keep the largest workspace of each session
    disabled = []
    if mode != DEFAULT:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        disabled = FOLDING
    source = lift_weights(file) if mode == WITHOUT_WEIGHTS else str(file)
    session = onnxruntime.InferenceSession(
        source, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
    )
    shapes = {one.name: [side if isinstance(side, int) else 1 for side in one.shape] for one in session.get_inputs()}
    session.run(None, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})  # pages never written
    return session


def lift_weights(file: Path) -> bytes:
    """The graph with its external weights as inputs."""
    import onnx

    model = onnx.load(file, load_external_data=False)
    external = [one for one in model.graph.initializer if one.data_location == onnx.TensorProto.EXTERNAL]
    for one in external:
        model.graph.input.append(onnx.helper.make_tensor_value_info(one.name, one.data_type, one.dims))
        model.graph.initializer.remove(one)
    return model.SerializeToString()


def own_bytes() -> int:
    """The memory of this process without its libraries; pages of the weights that are mapped often count once."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    total, is_counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            is_counted = len(values) < 5 or values[-1].startswith("[") or values[-1].endswith(WEIGHTS)
        elif (key == "Pss:" and is_counted) or (key == "Pss_Dirty:" and not is_counted):
            total += int(values[0]) * 1024
    return total


if __name__ == "__main__":
    main()
