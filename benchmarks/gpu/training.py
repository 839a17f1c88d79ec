"""Merging: how fast a GPU trains two models that share, how busy it is, whether it learns what the CPU does, how a
step is laid out that does not fit, and whole merges.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml

from benchmarks.gpu.bundles import FAMILIES, FEW, SIZE, SMALL_SIZE
from benchmarks.gpu.found import Found, Setting
from gemel.merger import MergeOptions, TrainOptions, train_originals
from gemel.merger import merge as merged
from gemel.merger.training.data import TrainingSet
from gemel.merger.training.loop import Training
from gemel.merger.training.recipe import Flops, Recipe
from gemel.merger.training.step_config import MemoryPlan
from gemel.models.bundle import verify_bundle
from gemel.models.data import PreparedFrames, load_split
from gemel.models.device import disable_tf32
from gemel.models.measures.evaluation import EvidenceConfig
from gemel.models.workload import Workload, load_workload
from gemel.models.zoo import build_query

LOSS_APART, GRADIENT_APART, MIN_BUSY = 1e-3, 1e-2, 0.7
"""Bounds of relative differences in the first step; later ones amplify rounding, since AdamW divides by its size."""
CLASSES = ("left", "right")


def merge(setting: Setting, found: Found) -> None:
    """Frames a second and how busy the device is; the loss of an epoch in fp32 against the CPU's."""
    model, size, frames = (FEW[0], SMALL_SIZE, 16) if setting.small else (FAMILIES[0], SIZE, 512)
    workload = square_workload(setting.folder / "merge", model, size, frames)
    sets = {one.id: TrainingSet(one, PreparedFrames(one, load_split(one, "train")).load()) for one in workload.queries}
    one_step = Recipe(epochs=1, frames_per_epoch=min(frames, 16))
    on_cpu, there = (
        _first_step(_training(workload, sets, torch.device(kind), one_step, "fp32"))
        for kind in ("cpu", setting.device.type)
    )
    found.note("loss_cpu", on_cpu[0])
    found.at_most("loss_apart", abs(on_cpu[0] - there[0]) / abs(on_cpu[0]), LOSS_APART)
    # Augmented pixels round otherwise on a GPU, which the gradient of random weights amplifies.
    found.note("gradient_apart", float((on_cpu[1] - there[1]).norm() / on_cpu[1].norm()))
    recipe, precision = Recipe(epochs=3, frames_per_epoch=frames), "bf16" if setting.on_gpu else "fp32"
    training = _training(workload, sets, setting.device, recipe, precision)
    training.epoch()
    setting.synchronise()
    start = time.perf_counter()
    training.epoch()
    setting.synchronise()
    seconds = time.perf_counter() - start
    found.note("frames_per_s", len(sets) * frames / seconds)
    if setting.on_gpu:  # the profiler takes seconds to start, so the timed epoch runs without it
        busy_s = _busy_s(training)
        found.note("busy", busy_s / seconds)
        if busy_s / seconds < MIN_BUSY:
            found.missed.append(f"the GPU is busy {busy_s / seconds:.2f} of the time, {MIN_BUSY} is asked")


def lay_out(setting: Setting, found: Found) -> None:
    """Train frames on the device, intermediates computed again, a step that does not fit,."""
    model, size, frames = (FEW[0], SMALL_SIZE, 16) if setting.small else (FAMILIES[0], SIZE, 64)
    workload = square_workload(setting.folder / "layout", model, size, frames)
    sets = {one.id: TrainingSet(one, PreparedFrames(one, load_split(one, "train")).load()) for one in workload.queries}
    recipe = Recipe(epochs=1, frames_per_epoch=frames)
    elsewhere = _first_step(_training(workload, sets, setting.device, recipe, "fp32"))
    kept = [data.prepared.keep_on(setting.device) for data in sets.values()]
    found.holds("frames_kept_on_device", all(kept))
    found.holds("batches_from_device", next(iter(sets.values())).prepared.batch([0]).device.type == setting.device.type)
    begins = [
        partial(_training, workload, sets, setting.device, replace(recipe, checkpointing=wanted), "fp32")
        for wanted in (False, True)
    ]
    plain, again = (_first_step(begin()) for begin in begins)
    _compare(found, "with_frames_there_", elsewhere, plain)
    _compare(found, "computed_again_", plain, again)
    peaks = [_peak_bytes(setting, begin) for begin in begins]
    found.note("peak_bytes", peaks)
    if setting.on_gpu:
        found.holds("less_is_kept", peaks[1] < peaks[0])
        found.at_most("waits_in_a_step", _waits(_training(workload, sets, setting.device, recipe, "fp32")), 1)
    memory = MemoryPlan()
    with _limit_memory(setting, sum(peaks) // 2):
        training = _training(workload, sets, setting.device, recipe, "fp32", memory)
        training.epoch()
    chosen = memory.config(recipe)
    found.note("step_config", str(chosen))
    if setting.on_gpu:
        found.holds("checkpointing_when_memory_is_full", chosen.checkpointing)


def whole(setting: Setting, found: Found) -> None:
    """Originals trained, then merged by our method and by the paper's, from the files to a bundle."""
    model, size, frames = (FEW[0], SMALL_SIZE, 16) if setting.small else (FAMILIES[0], SIZE, 64)
    workload = square_workload(setting.folder / "whole", model, size, frames)
    train_originals(workload, options=TrainOptions(passes=setting.many(1024, 64), max_cycles=1))
    for method in ("top-down", "gemel"):
        told, out = list[tuple[str, dict[str, Any]]](), setting.folder / f"{method}.safetensors"
        options = MergeOptions(Recipe(epochs=setting.many(4, 1), frames_per_epoch=frames), max_minutes=1.0)

        def tell(event: str, told: list = told, **fields: Any) -> None:
            told.append((event, fields))

        report = merged(workload, out, method, options=options, progress=tell)
        found.note(f"{method}_saves", report.saved_fraction)
        found.note(f"{method}_keeps", [query.ratio for query in report.queries])
        found.holds(f"{method}_gives_a_bundle", not verify_bundle(out))


def _peak_bytes(setting: Setting, begin: Callable[[], Training]) -> int:
    """The most memory of a GPU that was in use during an epoch."""
    training = begin()
    if not setting.on_gpu:
        training.epoch()
        return 0
    torch.cuda.reset_peak_memory_stats(setting.device)
    training.epoch()
    return torch.cuda.max_memory_allocated(setting.device)


def _first_step(training: Training) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the first step, computed exactly and by the same algorithms each time."""
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = True
    try:
        with disable_tf32():
            training._compute_gradients()
    finally:
        torch.backends.cudnn.deterministic = before
    gradients = [p.grad.flatten().cpu() for p, _, _ in training._parameters if p.grad is not None]
    return training.loss, torch.cat(gradients)


def _compare(found: Found, name: str, one: tuple[float, torch.Tensor], other: tuple[float, torch.Tensor]) -> None:
    found.at_most(f"loss_{name}apart", abs(one[0] - other[0]) / abs(one[0]), LOSS_APART)
    found.at_most(f"gradient_{name}apart", float((one[1] - other[1]).norm() / one[1].norm()), GRADIENT_APART)


@contextmanager
def _limit_memory(setting: Setting, nbytes: int) -> Iterator[None]:
    """No more memory than this may be given out within; on a processor nothing is limited."""
    if not setting.on_gpu:
        yield
        return
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / whole, setting.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)


def _waits(training: Training) -> float:
    """How often the processor waits for the GPU in a step: torch warns of each wait."""
    training.epoch()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(training.steps):
                training._compute_gradients()
                training.optimiser.step()
                training.step += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(one.message) for one in told) / training.steps


def _busy_s(training: Training) -> float:
    """Seconds in which kernels ran during an epoch."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as traced:
        training.epoch()
        torch.cuda.synchronize()
    there = [one for one in traced.key_averages() if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
    return sum(one.self_device_time_total for one in there) / 1e6


def _training(
    workload: Workload,
    sets: dict[str, TrainingSet],
    device: torch.device,
    recipe: Recipe,
    precision: str,
    memory: MemoryPlan | None = None,
) -> Training:
    """Two models of one architecture that share every convolution."""
    torch.manual_seed(0)
    models = {one.id: build_query(one).to(device) for one in workload.queries}
    first, *others = models.values()
    for other in others:
        for path, module in other.named_modules():
            if isinstance(module, torch.nn.Conv2d):
                module.weight = first.get_submodule(path).weight  # type: ignore[assignment]
    return Training(models, sets, recipe, Flops(), memory=memory or MemoryPlan(precision=precision))


def square_workload(folder: Path, model: str, size: int, frames: int) -> Workload:
    """Two queries on pictures with a bright square on one side; val and test are as small as evidence may be."""
    draws, documents = np.random.default_rng(0), []
    for query in ("first", "second"):
        for split in ("train", "val", "test"):
            for label in CLASSES:
                where = folder / "data" / query / split / label
                where.mkdir(parents=True, exist_ok=True)
                for index in range(max(2, frames // 2) if split == "train" else EvidenceConfig.min_samples):
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
