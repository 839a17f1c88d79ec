"""Time and answers of int8 weights, stored and computed, beside float32: `python -m benchmarks.engines.integers`.

For each architecture (NAME:SIDE, torchvision's, drawn weights, norms of drawn frames) three graphs run in ONNX Runtime
with one thread: float32; int8 weights behind a DequantizeLinear; and the same computed in integers, with the ranges
of four drawn frames. Time is processor time of a run, the best of five rounds, in turns; `differs` is the distance of
eight answers from those of float32, over the spread of these. Drawn weights say nothing about accuracy: every merge
measures that on real frames.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

DEFAULT = ("resnet18:224", "resnet50:224", "mobilenet_v2:224", "mobilenet_v3_small:224")
ROUNDS, RUNS = 5, 5


def measure(name: str, side: int) -> dict[str, object]:
    """One row: milliseconds of the three graphs, and how far answers differ."""
    import numpy as np
    import torch

    from gemel.merger.computed import QueryNetwork, SessionRun
    from gemel.models import zoo
    from gemel.models.bundle import BundleQuery
    from gemel.models.export_document import export_document
    from gemel.models.preprocess import Preprocess
    from gemel.models.quantization import choices, pack

    torch.manual_seed(0)
    torch.set_num_threads(1)
    classes = tuple("abcdefghij")
    model = zoo.build(name, classes, {}, side, "classification").train()
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(8, 3, side, side))  # gives the norms the statistics of their inputs
    model.eval()
    packed = {
        key: pack(tensor, widths[0])
        for key, tensor in model.state_dict().items()
        if tensor.is_floating_point() and (widths := choices(key, tensor.shape, "int8"))
    }
    record = BundleQuery(
        id="q", camera="c", task="classification", classes=classes, model=name, model_args={}, input_size=side,
        preprocess=Preprocess((side, side)), fps=None, sla_ms=100.0, accuracy_target=0.95,
    )  # fmt: skip
    document = export_document(model, side)
    wide, stored = QueryNetwork(record, document, model, {}), QueryNetwork(record, document, model, packed)
    calibration, frames = torch.randn(4, 3, side, side), torch.randn(8, 3, side, side)
    runs = {
        "float32": SessionRun(wide.build({})),
        "int8 stored": SessionRun(stored.build({})),
        "int8 computed": SessionRun(stored.build(stored.measure(calibration))),
    }
    milliseconds = dict.fromkeys(runs, np.inf)
    for _ in range(ROUNDS):
        for arm, run in runs.items():
            milliseconds[arm] = min(milliseconds[arm], time_runs(run, frames[:1]))
    answers = {arm: run(frames)[0].numpy() for arm, run in runs.items()}
    spread = float(np.linalg.norm(answers["float32"] - answers["float32"].mean(0)))
    row: dict[str, object] = {"network": name, "side": side}
    for arm, answer in answers.items():
        differs = float(np.linalg.norm(answer - answers["float32"])) / spread
        row[arm] = {"ms": round(milliseconds[arm], 2), "differs": round(differs, 3)}
    row["ratio"] = round(milliseconds["int8 computed"] / milliseconds["float32"], 2)
    return row


def time_runs(run: object, frames: object) -> float:
    """Milliseconds of processor time of one run."""
    started = sum(os.times()[:2])
    for _ in range(RUNS):
        run(frames)  # type: ignore[operator]
    return (sum(os.times()[:2]) - started) / RUNS * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=DEFAULT, metavar="NAME:SIDE")
    for text in parser.parse_args(arguments).networks:
        name, _, side = text.partition(":")
        print(json.dumps(measure(name, int(side or 224))), flush=True)


if __name__ == "__main__":
    main()
