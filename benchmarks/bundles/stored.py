"""What storing weights packed loses and what running them costs.

Usage: python -m benchmarks.bundles.stored accuracy WORKLOAD.yaml ... | speed [MODEL ...]
       | memory [MODEL ...] [--json FILE]

`accuracy`: every original of the workloads on its val split, stored as fp16 and as int8 (as far as `gemel merge
--weights` would store it so, nothing widened again), over what it reaches as it is; and with
BatchNorm recalibrated on train frames, for float32 weights too, to show the effect of recalibration alone.
`error` is the size of what rounding changes over the size of the weights: with scales from the largest magnitude
(ours), and with the best of 26 scales per channel in the mean square, values beyond them clipped.
`speed`: the network on one frame in the torch engine with fp32, fp16 and int8 weights in the arena, case by case in
turn, round by round; ratios of medians to fp32.
`memory`: private bytes that no file stands behind (Anonymous of smaps_rollup) that a process of its own holds more once
it has bound and run one query.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bundles.samples import CLASSES, INPUT_SIZE, bundle_query, write_measured_bundle
from benchmarks.machine import held_bytes, machine
from gemel.models.bits import WeightBits, max_code
from gemel.models.quantization import PackedWeight, choices, pack
from gemel.models.sharing.layers import layers_of, weight_key
from gemel.models.tensors import normalise_frames
from gemel.models.workload import Query, load_workload

MODELS = ("resnet18", "resnet50", "mobilenet_v2")
WEIGHTS: tuple[WeightBits, ...] = ("fp32", "fp16", "int8")
MOST = max_code("int8")
CLIPS = torch.linspace(0.5, 1, 26).tolist()
FRAMES, BATCH = 256, 32


def main() -> None:
    """Measure; print a Markdown table and, where asked for, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("accuracy", "speed", "memory", "anonymous"))
    parser.add_argument("of", nargs="*")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "anonymous":
        print(_anonymous_bytes(options.of[0], options.of[1]))
        return
    if options.what == "accuracy":
        rows = (row for path in options.of for query in load_workload(path).queries for row in [_accuracy(query)])
    elif options.what == "speed":
        rows = (row for model in options.of or MODELS for row in _speed(model, options.rounds))
    else:
        rows = (row for model in options.of or MODELS for row in _memory(model))
    found = list(show_rows(rows))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), options.what: found}, indent=1))


def show_rows(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for index, row in enumerate(rows):
        if not index:
            print("| " + " | ".join(row) + " |\n|" + " --- |" * len(row))
        cells = (f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values())
        print("| " + " | ".join(cells) + " |", flush=True)
        yield row


def packed_of(query: Query | None, model: nn.Module, weights: WeightBits) -> dict[str, PackedWeight]:
    """What a merge would store packed of this model, with nothing widened again."""
    state = model.state_dict()
    heads = {weight_key(state, row.path) for row in layers_of(query) if row.head} if query is not None else set()
    found = {}
    for key, tensor in state.items():
        if weights not in ("auto", "fp32") and (own := choices(key, tensor.shape, weights, key in heads)):
            found[key] = pack(tensor, own[0])
    return found


def _accuracy(query: Query) -> dict[str, Any]:
    from gemel.models.batchnorm import recalibrate_batchnorm
    from gemel.models.data import PreparedFrames, load_split
    from gemel.models.files.weights import load_weights
    from gemel.models.measures.evaluation import load_labels, predict, score, threshold_without_labels
    from gemel.models.tasks import task_of
    from gemel.models.zoo import build_query, preprocess_of

    model, task = build_query(query), task_of(query)
    load_weights(query, model)
    val, train = (PreparedFrames(query, load_split(query, name)) for name in ("val", "train"))
    answers = predict(model.eval(), query, val)
    labelled = val.split.labels
    threshold = task.choose_threshold(answers, labelled) if labelled is not None else threshold_without_labels(query)
    truths = load_labels(query, val.split, answers, threshold)
    reached = score(task, answers, truths, query.classes, threshold)

    def score_trial(trial: nn.Module) -> float:
        return score(task, predict(trial, query, val), truths, query.classes, threshold)

    chosen = torch.linspace(0, len(train) - 1, min(FRAMES, len(train))).long().tolist()
    prepare = preprocess_of(query)
    row: dict[str, Any] = {"query": query.id, "model": query.model, "val": len(val), "metric": task.metric,
                           "reached": reached}  # fmt: skip
    row |= {"MB": sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e6}
    for weights in WEIGHTS:
        trial, stored = copy.deepcopy(model), packed_of(query, model, weights)
        trial.load_state_dict({key: one.wide() for key, one in stored.items()}, strict=False)
        if stored:
            saved = sum(one.tensor.numel() * 4 - one.tensor.nbytes - _nbytes(one.scale) for one in stored.values())
            row |= {f"{weights} MB": row["MB"] - saved / 1e6, weights: score_trial(trial) / reached}
        recalibrate_batchnorm(trial, (normalise_frames(prepare, train.batch(chosen[at : at + BATCH])) for at in
                                range(0, len(chosen), BATCH)))  # fmt: skip
        row[f"{weights}, norms again"] = score_trial(trial) / reached
    row |= dict(zip(("error", "clipped error"), _errors(model, packed_of(query, model, "int8")), strict=True))
    return row


def _nbytes(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.nbytes


def _errors(model: nn.Module, stored: dict[str, PackedWeight]) -> tuple[float, float]:
    """The size of what int8 changes over that of the weights: as it is stored, and with the best clipping."""
    ours = best = whole = 0.0
    for key, one in stored.items():
        if one.width == "int8":
            rows = model.state_dict()[key].reshape(len(one.tensor), -1)
            ours += float((one.wide().reshape(rows.shape) - rows).square().sum())
            tried = []
            for clip in CLIPS:
                scale = (rows.abs().amax(1, keepdim=True) * clip / MOST).clamp(min=1e-30)
                tried.append(((rows / scale).round().clamp(-MOST, MOST) * scale - rows).square().sum(1))
            best += float(torch.stack(tried).amin(0).sum())
            whole += float(rows.square().sum())
    return (ours / whole) ** 0.5, (best / whole) ** 0.5


def _bundle(folder: Path, name: str, weights: WeightBits) -> Any:
    from gemel.models import zoo

    torch.manual_seed(0)
    model = zoo.build(name, CLASSES, {}, INPUT_SIZE).eval()
    path, stored = folder / f"{name}-{weights}.safetensors", packed_of(None, model, weights)
    return write_measured_bundle(path, {"one": model}, [bundle_query("one", name)], packed={"one": stored})


def bind_engine(bundle: Any) -> Any:
    from gemel.edge_runtime.engines.base import ENGINES
    from gemel.edge_runtime.engines.layouts import resident_arena

    engine = ENGINES["torch"](bundle, "one")
    engine.workspace_bytes  # counted on the meta device, so before anything is bound  # noqa: B018
    resident_arena(bundle, {"one": engine})  # as the box lays them for this engine
    return engine


def _speed(name: str, rounds: int) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        bundles = {weights: _bundle(Path(folder), name, weights) for weights in WEIGHTS}
        engines = {weights: bind_engine(bundle) for weights, bundle in bundles.items()}
        frame = torch.randn(1, 3, INPUT_SIZE, INPUT_SIZE).contiguous(memory_format=torch.channels_last)
        wall: dict[str, list[float]] = {weights: [] for weights in WEIGHTS}
        work: dict[str, list[float]] = {weights: [] for weights in WEIGHTS}
        with torch.inference_mode():
            for turn in range(rounds + 1):  # the first only warms up
                for weights, engine in engines.items():
                    started, spent = time.perf_counter(), time.process_time()
                    engine.forward(frame)
                    if turn:
                        wall[weights].append(time.perf_counter() - started)
                        work[weights].append(time.process_time() - spent)
        for weights, engine in engines.items():
            yield {
                "model": name, "weights": weights, "resident MB": bundles[weights].manifest.bytes.after / 1e6,
                "workspace MB": engine.workspace_bytes / 1e6, "ms": 1000 * median(wall[weights]),
                "ratio": median(wall[weights]) / median(wall["fp32"]),
                "processor's ratio": median(work[weights]) / median(work["fp32"]),
            }  # fmt: skip


def _memory(name: str) -> Iterator[dict[str, Any]]:
    for weights in WEIGHTS:
        command = [sys.executable, "-m", "benchmarks.bundles.stored", "anonymous", name, weights]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        held, resident_arena = json.loads(text.splitlines()[-1])
        yield {"model": name, "weights": weights, "resident MB": resident_arena / 1e6, "held MB": held / 1e6}


def _anonymous_bytes(name: str, weights: WeightBits) -> str:
    """Bytes held after a run above those held before the arena was made, and the resident bytes, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        bundle = _bundle(Path(folder), name, weights)
        bind_engine(bundle).forward(torch.zeros(1, 3, 32, 32))  # whatever libraries set up once
        gc.collect()
        before = held_bytes()["anonymous"]
        engine = bind_engine(bundle)
        with torch.inference_mode():
            engine.forward(torch.zeros(1, 3, 32, 32))
        gc.collect()
        return json.dumps([held_bytes()["anonymous"] - before, bundle.manifest.bytes.after])


if __name__ == "__main__":
    main()
