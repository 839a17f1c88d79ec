"""Times sessions of merged queries against what people run: ONNX Runtime, OpenVINO and torch.compile.

Usage: python -m benchmarks.engines.rivals [MODEL ...] [--rounds N] [--compile] [--json FILE]

A MODEL is a name of the zoo or an ONNX file (default: MODELS). Four queries share all
weights of convolutions and differ in norms and heads; with tied scales they differ in biases and heads. One thread, one
prepared frame, processor time, cases in turns, medians, as ratios to ONNX Runtime with the folded model of one query.
`whole` is a frame of 1280x720 pixels to predictions, against the bare session and nothing else. Memory: what a process
grows by, in a process of its own, for the sessions of four queries and of one, with what their runs leave in use.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.bundles.samples import CLASSES, bundle_query, write_measured_bundle
from benchmarks.engines.engines import run_in_turns, show
from benchmarks.machine import held_bytes, machine
from edge_runtime.engines.registry import engine_class, make_engine, open_sessions_by
from edge_runtime.engines.session import SessionEngine, open_sessions
from edge_runtime.engines.setup import resident_arena
from models import zoo
from models.bundle import Bundle, BundleQuery, open_bundle
from models.export import export_query
from models.workload import load_workload
from models.zoo import build_query

MODELS = {"resnet18": 224, "resnet50": 224, "mobilenet_v2": 224, "ssdlite320_mobilenet_v2": 320}
QUERIES = ("first", "second", "third", "fourth")
BARE = "ONNX Runtime"
ASKED = {"resnet18": 1.10, "resnet50": 1.10, "mobilenet_v2": 1.25, "ssdlite320_mobilenet_v2": 1.25}
ASKED_OF_FILE, ASKED_MEMORY = 1.15, 1.10
PICTURE = (720, 1280, 3)


def main() -> None:
    """Measure the models; print a table and one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="zoo names or ONNX files")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--compile", action="store_true", help="also torch.compile: a minute a model")
    parser.add_argument("--json", type=Path, help="also write the JSON here")
    parser.add_argument("--weigh", nargs=2, metavar=("BUNDLE", "COUNT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.weigh:  # in a process of its own
        print(json.dumps(weigh(Path(options.weigh[0]), int(options.weigh[1]))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models or MODELS:
            rows += time_model(model, Path(folder), options.rounds, options.compile)
    show(rows)
    text = json.dumps({"date": date.today().isoformat(), "machine": machine(), "rows": rows})
    print(text)
    if options.json:
        options.json.write_text(text)


def time_model(model: str, folder: Path, rounds: int, compiles: bool) -> list[dict[str, Any]]:
    """A row for each case of a model."""
    torch.manual_seed(0)
    models, queries = build_queries(model, folder)
    apart = write_measured_bundle(folder / "apart.safetensors", differing(models, scales=True), queries)
    file = folder / "first.onnx"
    export_query(apart, "first", file)
    size = queries[0].preprocess.size
    frames = torch.rand(1, 3, *size)
    cases, sessions = rival_cases(file, frames.numpy()), {}
    engines = {query: one for group in open_sessions(apart, QUERIES) for query, one in group.items()}
    sessions["session of four"] = engines["second"]
    sessions["session of one"] = next(open_sessions(apart, QUERIES[:1]))["first"]
    memory = weigh_apart(apart, engines)
    tied = write_measured_bundle(folder / "tied.safetensors", differing(models, scales=False), queries)
    sessions["session of four, scales tied"] = next(open_sessions(tied, QUERIES))["second"]
    if not engine_class("openvino").missing("cpu"):
        for precision in ("fp32", "bf16"):
            own = next(iter(open_sessions_by("openvino", apart, QUERIES, precision=precision)))
            cases[f"openvino session of four, {precision}"] = lambda one=own["second"]: one.forward(frames)
    cases |= {name: lambda one=one: one.forward(frames) for name, one in sessions.items()}
    picture = np.random.default_rng(0).integers(0, 256, PICTURE, np.uint8)
    cases["whole, session of four"] = lambda: engines["second"].run([picture])
    eager = make_engine("torch", apart, "first")
    arena = resident_arena(apart, {"first": eager})
    last = frames.contiguous(memory_format=torch.channels_last)
    cases["torch"] = lambda: eager.forward(last)
    if compiles:
        network = torch.compile(apart.build("first", copy=True).requires_grad_(False))
        cases["torch.compile"] = lambda: network(frames)
    wall, cpu = run_in_turns(cases, rounds)
    arena.close()
    asked = ASKED.get(model, ASKED_OF_FILE)
    return [
        {
            "model": Path(model).stem, "case": case, "cpu_ms": round(median(times), 2),
            "wall_ms": round(median(wall[case]), 2), "ratio": round(median(times) / median(cpu[BARE]), 3),
            "asked": asked if case in sessions else None,
            **(memory if case == "session of four" else dict.fromkeys(memory)),
        }
        for case, times in cpu.items()
    ]  # fmt: skip


def build_queries(model: str, folder: Path) -> tuple[dict[str, nn.Module], list[BundleQuery]]:
    """Equal models of four queries, and the records of the queries."""
    if not model.endswith(".onnx"):
        size = MODELS.get(model, 224)
        task: Any = "detection" if model in zoo.names("detection") else "classification"
        first = zoo.build(model, CLASSES, {}, size, task).eval().state_dict()
        models = {name: zoo.build(model, CLASSES, {}, size, task).eval() for name in QUERIES}
        for one in models.values():
            one.load_state_dict(first)
        return models, [bundle_query(name, model, CLASSES, size) for name in QUERIES]
    keys = [{"id": name, "camera": "one", "model": str(Path(model).resolve())} for name in QUERIES]
    (folder / "w.yaml").write_text(json.dumps({"cameras": {"one": {"source": "one.mp4"}}, "queries": keys}))
    queries = [load_workload(folder / "w.yaml").query(name) for name in QUERIES]
    return {query.id: build_query(query).eval() for query in queries}, [BundleQuery.of(query) for query in queries]


@torch.no_grad()
def differing(models: Mapping[str, nn.Module], scales: bool) -> Mapping[str, nn.Module]:
    """The models with biases and heads, and norms' scales too, of their own; weights of convolutions stay equal."""
    for model in models.values():
        for key, tensor in model.state_dict().items():
            is_shift = key.endswith(("bias", "running_mean"))
            is_scale = tensor.ndim == 1 and key.endswith(("weight", "running_var"))
            is_head = tensor.ndim == 2
            if tensor.is_floating_point() and (is_shift or is_head or (is_scale and scales)):
                tensor.mul_(1 + 0.02 * torch.randn_like(tensor)).add_(0.01 * torch.randn_like(tensor) * (not is_scale))
    if not scales:
        first = next(iter(models.values())).state_dict()
        for model in models.values():
            own = model.state_dict()
            for key, tensor in own.items():
                if tensor.ndim == 1 and key.endswith(("weight", "running_var")):
                    tensor.copy_(first[key])
    return models


def rival_cases(file: Path, frames: np.ndarray) -> dict[str, Callable[[], object]]:
    """ONNX Runtime with all that it does by default, and OpenVINO in float32 where it is installed."""
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = settings.inter_op_num_threads = 1
    settings.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), settings, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: frames}
    cases: dict[str, Callable[[], object]] = {BARE: lambda: session.run(None, feed)}
    with contextlib.suppress(ImportError):
        import openvino  # pyright: ignore[reportMissingImports]

        core = openvino.Core()
        hints = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
        request = core.compile_model(core.read_model(str(file)), "CPU", hints).create_infer_request()
        cases["OpenVINO"] = lambda: request.infer({0: frames})
    return cases


def weigh_apart(bundle: Bundle, engines: Mapping[str, SessionEngine]) -> dict[str, Any]:
    """MiB of a process by the number of queries in it, and the ratio of four to one, by bytes beyond none."""
    found = {}
    for count in (0, 1, 4):
        command = [sys.executable, "-m", "benchmarks.engines.rivals", "--weigh", str(bundle.path), str(count)]
        ended = subprocess.run(command, check=True, capture_output=True, text=True)
        found[count] = json.loads(ended.stdout.splitlines()[-1])["anonymous"]
    held = {id(one.shared): one.shared.nbytes for one in engines.values()}
    return {
        "session_mib": round(sum(held.values()) / 2**20, 1),
        "one_mib": round((found[1] - found[0]) / 2**20, 1),
        "four_mib": round((found[4] - found[0]) / 2**20, 1),
        "memory": round((found[4] - found[0]) / (found[1] - found[0]), 3),
    }


def weigh(path: Path, count: int) -> dict[str, int]:
    """Bytes of this process with the sessions of so many queries, after runs of each."""
    from models.process import trim_heap

    bundle = open_bundle(path)
    names: Sequence[str] = QUERIES[: max(1, count)]
    list(open_sessions(bundle, QUERIES))  # what making them leaves in memory is in all three
    gc.collect()
    engines = {query: one for group in open_sessions(bundle, names) for query, one in group.items()} if count else {}
    for engine in engines.values():
        for _ in range(3):
            engine.forward(torch.zeros(1, 3, *engine.query.preprocess.size))
    gc.collect()
    trim_heap()
    return held_bytes()


if __name__ == "__main__":
    main()
