"""What one more query costs: added to the bundle of ten others, beside the merge of these ten.

Usage: python -m benchmarks.merging.onto FOLDER [--data DIR] [--weights fp32] [--queries 11] [--out FILE.json]

Eleven questions of four CIFAR-10 classes each, in other frames, fine-tuned from one published ResNet-20. `FOLDER` gets
frames, originals and bundles; what is there is used. Processor time of one thread, without the training of originals.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.data.files import data_folder
from benchmarks.machine import machine
from gemel.merger import MergeOptions, TrainOptions, merge, train_originals
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.bundle.delta import write_update
from gemel.models.workload import Workload, load_workload

REPOSITORY = Path(__file__).parents[2]
MODEL = "benchmarks.merging.onto:cifar_resnet20"
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FRAMES = {"train": 80, "val": 80, "test": 50}
"""Of one class of one query; no frame is given to two."""
ORIGINALS = TrainOptions(rate=5e-4, passes=600, max_cycles=1)


class Block(nn.Module):
    """Two convolutions; the shortcut pads channels (He et al., CVPR 2016, option A)."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.stride = 1 if channels == out else 2
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, self.stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, H, W) -> (N, C', H / stride, W / stride)."""
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            more = (y.shape[1] - x.shape[1]) // 2
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, more, more))
        return functional.relu(x + y)


class CifarResNet(nn.Module):
    """ResNet-20 for 32x32 pixels, under the names of its published weights."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16), Block(16, 16), Block(16, 16))
        self.layer2 = nn.Sequential(Block(16, 32), Block(32, 32), Block(32, 32))
        self.layer3 = nn.Sequential(Block(32, 64), Block(64, 64), Block(64, 64))
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 32, 32) -> (N, C)."""
        x = self.layer3(self.layer2(self.layer1(functional.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def cifar_resnet20(num_classes: int) -> nn.Module:
    """The factory that the workload names."""
    return CifarResNet(num_classes)


def choose_classes(count: int) -> list[tuple[str, ...]]:
    """So many sets of four classes, all different."""
    sets: list[tuple[str, ...]] = list(itertools.combinations(LABELS, 4))
    random.Random(0).shuffle(sets)
    return sets[:count]


def write_workload(folder: Path, data: Path, count: int) -> Path:
    """The workload and its frames."""
    path = folder / "workload.yaml"
    asked = {f"q{index:02d}": classes for index, classes in enumerate(choose_classes(count))}
    queries = [
        {"id": query, "camera": query, "task": "classification", "classes": list(classes), "model": MODEL,
         "input_size": 32, "data": f"data/{query}", "weights": f"weights/{query}.safetensors",
         "init": str(data / "models" / "cifar_resnet20-12fca82f.th")}
        for query, classes in asked.items()
    ]  # fmt: skip
    cameras = {query: {"source": "none.mp4", "fps": 5} for query in asked}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({"name": "grown", "cameras": cameras, "queries": queries}))
    if (folder / "data").exists():
        return path
    with tarfile.open(data / "datasets" / "cifar10_jpeg_pack.tar") as pack:
        names = sorted(name for name in pack.getnames() if name.endswith(".jpg"))
        left = {label: {part: iter([name for name in names if name.startswith(f"{part}/{label}/")])
                        for part in ("train", "test")} for label in LABELS}  # fmt: skip
        for query, classes in asked.items():
            for label, (split, frames) in itertools.product(classes, FRAMES.items()):
                target = folder / "data" / query / split / label
                target.mkdir(parents=True)
                for number in range(frames):
                    file = pack.extractfile(next(left[label]["test" if split == "test" else "train"]))
                    assert file is not None
                    (target / f"{number:04d}.jpg").write_bytes(file.read())
    return path


def timed_merge(workload: Workload, out: Path, options: MergeOptions, onto: Path | None) -> dict[str, Any]:
    """Processor seconds of a merge, and what came out."""
    out.unlink(missing_ok=True)
    began = time.process_time()
    report = merge(workload, out, options=options, onto=onto)
    seconds = time.process_time() - began
    proven = sum(row.state.value in ("proven", "unchanged") for row in report.queries)
    return {
        "seconds": round(seconds, 1), "flops": report.flops, "bytes_before": report.bytes_before,
        "bytes_after": report.bytes_after, "merged": len(report.queries), "proven_or_unchanged": proven,
        "ratios": [round(row.ratio, 3) for row in report.queries], "addition": report.addition,
    }  # fmt: skip


def compare(before: Path, after: Path) -> dict[str, Any]:
    """The difference of two bundles, and whether every query of the first is in the second as it was."""
    old, new = open_bundle(before), open_bundle(after)
    same = [
        new.query(query.id) == query and all(old.read_bytes(name) == new.read_bytes(name) for name in names)
        for query in old.queries
        for names in [query.places().values()]
    ]
    difference = write_update(before, after, None)
    part = round(difference.bytes / difference.bundle_bytes, 4)
    return {"difference_bytes": difference.bytes, "bundle_bytes": difference.bundle_bytes, "part": part,
            "kept_bit_for_bit": sum(same), "of": len(same), "problems": verify_bundle(after, [MODEL])}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--weights", default="fp32")
    parser.add_argument("--queries", type=int, default=11)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    folder = given.folder.absolute()
    whole = load_workload(write_workload(folder, data_folder(given.data, REPOSITORY), given.queries))
    train_originals(whole, seed=0, options=ORIGINALS)
    options = MergeOptions(weights=given.weights, documents=True)
    ten = replace(whole, queries=whole.queries[:-1])
    before, after = folder / f"{given.weights}-before.safetensors", folder / f"{given.weights}-after.safetensors"
    first = timed_merge(ten, before, options, None)
    print(json.dumps({"merge": first}), flush=True)
    added = timed_merge(whole, after, options, before)
    result = {
        "command": f"python -m benchmarks.merging.onto FOLDER --weights {given.weights} --queries {given.queries}",
        "machine": machine(), "merge": first, "onto": added, "time": round(added["seconds"] / first["seconds"], 3),
        "difference": compare(before, after),
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
