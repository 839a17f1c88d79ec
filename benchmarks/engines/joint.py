"""One pass for four merged queries against a run for each, in the same engine: processor time, wall clock, outputs.

Usage: python -m benchmarks.engines.joint --json FILE [--rounds N]

Four ResNet-18 (and others) as a bundle, random weights: every layer tied but norms and heads (`norms`), or but also the
stem and the first stage (`early`), or all tied up to a head (`prefix`: one camera, one frame for all four). The torch
engine, one thread; ratios come from turns in one process, and the smallest time of each counts. `grouped`: the private
stem as one grouped convolution over stacked weights against one convolution after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.machine import machine
from benchmarks.schedule.cases import markdown
from gemel.edge_runtime.engines.joint_run import JointRunner
from gemel.edge_runtime.engines.layouts import resident_arena
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.models import zoo
from gemel.models.bundle import BundleQuery, Made, open_bundle, write_bundle
from gemel.models.preprocess import Preprocess

QUERIES = ("one", "two", "three", "four")
CLASSES = ("a", "b", "c", "d")
NORMS, EARLY, PREFIX = "norms", "early", "prefix"
FIRST_STAGE = ("conv1", "layer1", "features.0", "features.1", "features.2", "stem")
CASES = (
    ("resnet18", 224, NORMS), ("resnet18", 96, NORMS), ("resnet18", 224, PREFIX), ("resnet18", 96, PREFIX),
    ("resnet18", 224, EARLY), ("resnet18", 96, EARLY), ("mobilenet_v2", 224, NORMS),
)  # fmt: skip
HEADS = ("model", "pixels", "private", "alone, ms", "one pass, ms", "one pass / alone", "frames in the same time",
         "largest difference")  # fmt: skip


def is_private(key: str, tensor: Tensor, private: str) -> bool:
    """Whether each query has its own tensor at this key."""
    if key.startswith(("fc", "classifier")):
        return True
    return private != PREFIX and (tensor.dim() <= 1 or (private == EARLY and key.startswith(FIRST_STAGE)))


def make_engines(folder: Path, name: str, size: int, private: str) -> dict[str, TorchEngine]:
    """Four queries of a bundle, bound in an arena where every tensor is resident."""
    models: dict[str, nn.Module] = {}
    for seed, query in enumerate(QUERIES):
        torch.manual_seed(seed)
        models[query] = zoo.build(name, CLASSES, {}, size).eval()
        with torch.no_grad():
            for tensor in models[query].state_dict().values():
                if tensor.dim() == 1 and tensor.is_floating_point():
                    tensor.add_(0.1 * torch.rand_like(tensor))
    first = models[QUERIES[0]].state_dict()
    tied = {key: tensor for key, tensor in first.items() if not is_private(key, tensor, private)}
    for model in models.values():
        model.load_state_dict(tied, strict=False)
    queries = [
        BundleQuery(
            id=query, camera=query, task="classification", classes=CLASSES, model=name, model_args={}, input_size=size,
            preprocess=Preprocess((size, size)), fps=None, sla_ms=1000.0, accuracy_target=0.95,
        )
        for query in QUERIES
    ]  # fmt: skip
    path = folder / f"{name}-{size}-{private}.safetensors"
    write_bundle(path, models, queries, Made("joint", "none", 0))
    bundle = open_bundle(path)
    engines = {query: TorchEngine(bundle, query) for query in QUERIES}
    resident_arena(bundle, engines)
    return engines


def time_turns(calls: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """The least seconds of processor time and of wall clock of each call, called in turns."""
    found = {name: (float("inf"), float("inf")) for name in calls}
    for round_index in range(rounds + 1):
        for name, call in calls.items():
            wall, thread = time.perf_counter(), time.thread_time()
            call()
            thread, wall = time.thread_time() - thread, time.perf_counter() - wall
            if round_index:
                found[name] = min(found[name][0], thread), min(found[name][1], wall)
    return found


def measure(folder: Path, name: str, size: int, private: str, rounds: int) -> dict[str, Any]:
    """Four queries, a frame each: the runs of each alone, and one pass."""
    engines = make_engines(folder, name, size, private)
    noise = np.random.default_rng(0)
    frames = {query: [noise.integers(0, 256, (size, size, 3), np.uint8)] for query in engines}
    if private == PREFIX:
        frames = dict.fromkeys(engines, frames[QUERIES[0]])
    runner = JointRunner(engines)
    calls = {
        "alone": lambda: [engine.run(frames[query]) for query, engine in engines.items()],
        "joint": lambda: runner.run(frames),
    }
    times = time_turns(calls, rounds)
    alone, joint = calls["alone"](), calls["joint"]()
    difference = max(abs(one[0].score - joint[query][0].score) for query, one in zip(engines, alone))
    return {
        "model": name, "size": size, "private": private, "alone_s": times["alone"], "joint_s": times["joint"],
        "ratio": times["joint"][0] / times["alone"][0], "frames_ratio": times["alone"][0] / times["joint"][0],
        "difference": difference,
    }  # fmt: skip


def measure_grouped(size: int, rounds: int) -> dict[str, float]:
    """Seconds of four private stems of a ResNet: one grouped convolution, and one convolution after the other."""
    weights = [torch.rand(64, 3, 7, 7) for _ in QUERIES]
    stacked = torch.cat(weights)
    frames = torch.rand(4, 3, size, size).contiguous(memory_format=torch.channels_last)
    side_by_side = frames.reshape(1, 12, size, size).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        times = time_turns(
            {
                "grouped": lambda: torch.conv2d(side_by_side, stacked, None, 2, 3, 1, 4),
                "sequential": lambda: torch.cat(
                    [torch.conv2d(frames[i : i + 1], weight, None, 2, 3) for i, weight in enumerate(weights)]
                ),
            },
            rounds,
        )
    return {name: thread for name, (thread, _) in times.items()}


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write what was measured")
    parser.add_argument("--rounds", type=int, default=20, help="of each case; 20 unless given")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            rows.append(measure(Path(folder), *case, given.rounds))
            print(rows[-1], file=sys.stderr)
    document = {
        "command": "python -m benchmarks.engines.joint", "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(), "rows": rows, "grouped_s": {str(size): measure_grouped(size, given.rounds)
                                                          for size in (224, 96)},
    }  # fmt: skip
    given.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = [
        (row["model"], row["size"], row["private"],
         *(f"{1000 * row[name][0]:.1f}" for name in ("alone_s", "joint_s")),
         f"{row['ratio']:.2f}", f"{row['frames_ratio']:.2f} x", f"{row['difference']:.0e}")
        for row in rows
    ]  # fmt: skip
    print(markdown(HEADS, table))
    print(document["grouped_s"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
