"""Merging: how fast a card trains two models that share, how busy it is, and whether it learns what the CPU does."""

from __future__ import annotations

import time
from pathlib import Path

import cv2
import numpy as np
import torch
import yaml

from benchmarks.gpu.bundles import FAMILIES, FEW, SIZE, SMALL_SIZE
from benchmarks.gpu.found import Found, Setting
from edge_runtime.engines.compiled.making import in_full
from merger.training.loop import Recipe, Training, TrainingSet, Work
from models.frames.data import load_split
from models.frames.prepared import Prepared
from models.workload import Workload, load_workload
from models.zoo import build_query

LOSS_APART, LEAST_BUSY = 1e-3, 0.7
CLASSES = ("left", "right")


def merge(setting: Setting, found: Found) -> None:
    """Frames a second and how busy the device is; the loss of an epoch in fp32 against the CPU's."""
    model, size, frames = (FEW[0], SMALL_SIZE, 16) if setting.small else (FAMILIES[0], SIZE, 512)
    workload = _workload(setting.folder / "merge", model, size, frames)
    sets = {one.id: TrainingSet(one, Prepared(one, load_split(one, "train")).load()) for one in workload.queries}
    some = min(frames, 32)
    losses = [_loss(workload, sets, torch.device(kind), some) for kind in ("cpu", setting.device.type)]
    found.note("loss_cpu", losses[0])
    found.at_most("loss_apart", abs(losses[0] - losses[1]) / abs(losses[0]), LOSS_APART)
    recipe, precision = Recipe(epochs=2, frames_per_epoch=frames), "bf16" if setting.on_card else "fp32"
    training = _training(workload, sets, setting.device, recipe, precision)
    training.epoch()
    setting.synchronise()
    start = time.perf_counter()
    busy_s = _busy_s(training) if setting.on_card else None
    if busy_s is None:
        training.epoch()
    seconds = time.perf_counter() - start
    found.note("frames_per_s", len(sets) * frames / seconds)
    if busy_s is not None:
        found.note("busy", busy_s / seconds)
        if busy_s / seconds < LEAST_BUSY:
            found.missed.append(f"the card is busy {busy_s / seconds:.2f} of the time, {LEAST_BUSY} is asked")


def _busy_s(training: Training) -> float:
    """Seconds in which kernels ran during an epoch."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        training.epoch()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in traced.key_averages()) / 1e6


@in_full()
def _loss(workload: Workload, sets: dict[str, TrainingSet], device: torch.device, frames: int) -> float:
    return _training(workload, sets, device, Recipe(epochs=1, frames_per_epoch=frames), "fp32").epoch()


def _training(
    workload: Workload, sets: dict[str, TrainingSet], device: torch.device, recipe: Recipe, precision: str
) -> Training:
    """Two models of one architecture that share every convolution."""
    torch.manual_seed(0)
    models = {one.id: build_query(one).to(device) for one in workload.queries}
    first, *others = models.values()
    for other in others:
        for path, module in other.named_modules():
            if isinstance(module, torch.nn.Conv2d):
                module.weight = first.get_submodule(path).weight  # type: ignore[assignment]
    return Training(models, sets, recipe, Work(), precisions=dict.fromkeys(models, precision))


def _workload(folder: Path, model: str, size: int, frames: int) -> Workload:
    """Two queries on pictures with a bright square on one side."""
    draws, documents = np.random.default_rng(0), []
    for query in ("first", "second"):
        for split in ("train", "val", "test"):
            for label in CLASSES:
                where = folder / "data" / query / split / label
                where.mkdir(parents=True, exist_ok=True)
                for index in range(max(2, frames // 2 if split == "train" else 2)):
                    picture = draws.integers(0, 160, (48, 48, 3), np.uint8)
                    left = 4 + (24 if label == "right" else 0)
                    picture[8:24, left : left + 16] = 250
                    cv2.imwrite(str(where / f"clip{index % 4}__{index:06d}.png"), picture)
        documents.append(
            {"id": query, "camera": "c", "task": "classification", "classes": list(CLASSES), "model": model,
             "input_size": size, "data": f"data/{query}", "weights": f"{query}.safetensors"}
        )  # fmt: skip
    path = folder / "workload.yaml"
    path.write_text(
        yaml.safe_dump({"name": "gpu", "cameras": {"c": {"source": "none.mp4", "fps": 5}}, "queries": documents})
    )
    return load_workload(path)
