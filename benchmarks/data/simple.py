"""Two workloads on which the simplest rules of a merge are measured, from the data of `domains`, at 96 pixels.

`simple`: a resnet18 and a resnet34 with classes of their own; `gemel train` trains them.
`simple-frozen`: two mobilenet_v2 fine-tuned from one ImageNet network with its norms folded and frozen, which
`gemel train` does not do: `python -m benchmarks.data.simple OUT` writes their weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.data.domains import write_task
from benchmarks.data.files import copy_whole, need, say
from gemel.merger.training.data import Batches, TrainingSet
from gemel.models.batchnorm import batchnorms_of
from gemel.models.data import PreparedFrames, load_split
from gemel.models.files.weights import load_matching, save_weights
from gemel.models.measures.evaluation import predict, score
from gemel.models.tasks import task_of
from gemel.models.workload import Query, load_workload
from gemel.models.zoo import build_query

TASKS = ("pavements", "solar_ir")
INIT = "mobilenet_v2_from_coral_ptq.pth"
FROZEN = Path(__file__).resolve().parents[1] / "workloads" / "simple-frozen.yaml"
RATE, BATCH, FRAMES = 5e-4, 16, 3000


def prepare(data: Path, out: Path) -> dict[str, Any]:
    """Write the images of the two tasks, what training starts from and the second workload; returns the counts."""
    copy_whole(need(data / "models" / INIT), out / "init" / "mobilenet_v2.pth")
    counts = {name: write_task(data, out, name) for name in TASKS}
    copy_whole(FROZEN, out / "frozen.yaml")
    return counts


def fine_tune(query: Query) -> float:
    """Train a query from its `init` with norms in eval mode and frozen, store its weights; its metric on test."""
    torch.manual_seed(0)
    model, data = build_query(query), TrainingSet(query, PreparedFrames(query, load_split(query, "train")).load())
    assert isinstance(query.init, Path) and isinstance(query.weights, Path)
    query.weights.parent.mkdir(exist_ok=True)
    load_matching(model, query.init)
    for norm in batchnorms_of(model):
        norm.requires_grad_(False)
    steps = FRAMES // BATCH
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    batches = Batches({query.id: data}, BATCH, BATCH, steps, 0, prepares=[query.id])
    model.train()
    for norm in batchnorms_of(model):
        norm.eval()
    for step in range(steps):
        for batch in batches.at(step)[query.id]:
            loss = nn.functional.cross_entropy(model(data.model_input(batch.images, torch.device("cpu"))),
                                               torch.tensor(batch.targets))  # fmt: skip
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    save_weights(query.weights, model.eval().state_dict())
    test = PreparedFrames(query, load_split(query, "test"))
    answers, labels = predict(model, query, test), test.split.labels or []
    return score(task_of(query), answers, labels, query.classes, 0.0)


def main(arguments: list[str] | None = None) -> int:
    """Train the originals of `simple-frozen`."""
    parser = argparse.ArgumentParser(description="Fine-tunes two mobilenet_v2 with frozen norms.")
    parser.add_argument("out", type=Path, help="the folder that `benchmarks.data.prepare simple` wrote")
    for query in load_workload(parser.parse_args(arguments).out / "frozen.yaml").queries:
        if not (isinstance(query.weights, Path) and query.weights.exists()):
            say(f"{query.id}: {fine_tune(query):.3f} on test")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
