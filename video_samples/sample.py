"""The sample workload: footage of three cameras, labelled frames cut from it, and the workload file."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import yaml

from video_samples.footage.casting import cast
from video_samples.footage.clips import SCENES, Clip, join, read_frames, record, write_truth
from video_samples.footage.questions import QUESTIONS, Rect
from video_samples.rendering.renderer import Truth

Told = Callable[[float], None]
"""Called with how much is rendered, from 0 to 1."""

WORKERS = 2
WORKLOAD = "workload.yaml"
JPEG_QUALITY = 92
CAMERA_FPS, QUERY_FPS = 5, 5


@dataclass(frozen=True)
class SplitSize:
    """How much footage a split gets per camera: clips, seconds each, frames a second, every how many is labelled."""

    clips: int
    seconds: float
    fps: float
    label_every: int


SPLITS = {
    "train": SplitSize(10, 26.0, 1.0, 1),
    "val": SplitSize(5, 21.0, 1.0, 1),
    "test": SplitSize(4, 13.0, CAMERA_FPS, 2),
}


@dataclass(frozen=True)
class _Job:
    clip: Clip
    split: str
    label_every: int
    out: Path


@dataclass(frozen=True)
class _Cut:
    """The truth of every frame of a clip, and its detection frames (query, file name, width, height, boxes)."""

    truths: list[list[Truth]]
    annotated: list[tuple[str, str, int, int, list[Rect]]]


def write_sample(
    out_dir: Path | str,
    seed: int = 0,
    splits: dict[str, SplitSize] | None = None,
    workers: int = WORKERS,
    told: Told | None = None,
) -> Path:
    """Renders the sample into `out_dir` and returns its workload file.

    `footage/<unit>.mp4` and `.gt.jsonl` are the clips; a unit belongs to one split only. `clips/<camera>.mp4` plays the
    test clips one after the other, for the box. `data/<query>` are labelled frames. The weights the workload file
    names do not exist yet: training makes them. Files of an earlier sample in `out_dir` are replaced; the workload
    file comes last, so a sample without one is not complete. OSError when something cannot be written.
    """
    out, splits = Path(out_dir), splits or SPLITS
    (out / WORKLOAD).unlink(missing_ok=True)
    for folder in ("footage", "clips", *(f"data/{question.id}" for question in QUESTIONS)):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    jobs = [
        _Job(
            Clip(f"{camera}-{split}-{i + 1}", camera, _seed(seed, camera, split, i), size.seconds, size.fps),
            split,
            size.label_every,
            out,
        )
        for split, size in splits.items()
        for camera in SCENES
        for i in range(size.clips)
    ]
    jobs.sort(key=lambda job: -job.clip.frames)
    done: dict[_Job, _Cut] = {}
    frames = sum(job.clip.frames for job in jobs)
    for job, cut in zip(jobs, _in_processes(jobs, workers) if workers > 1 else map(_run, jobs)):
        done[job] = cut
        if told is not None:
            told(sum(job.clip.frames for job in done) / frames)
    _write_annotations(out, done)
    for camera in SCENES:
        played = [job for job in jobs if job.clip.camera == camera and job.split == "test"]
        join([out / "footage" / f"{job.clip.unit}.mp4" for job in played], out / "clips" / f"{camera}.mp4")
        write_truth(out / "clips" / f"{camera}.gt.jsonl", [frame for job in played for frame in done[job].truths])
    return _write_workload(out)


def _seed(seed: int, camera: str, split: str, index: int) -> int:
    """A seed of its own for every clip."""
    return ((seed * 3 + list(SCENES).index(camera)) * 3 + ("train", "val", "test").index(split)) * 10_000 + index * 100


def _in_processes(jobs: list[_Job], workers: int) -> Iterator[_Cut]:
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=_quiet_worker)
    try:
        yield from pool.map(_run, jobs)
    finally:
        pool.shutdown(cancel_futures=True)


def _quiet_worker() -> None:
    """One thread for each worker; Ctrl-C is the parent's to handle."""
    cv2.setNumThreads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(job: _Job) -> _Cut:
    """Records one clip, then cuts labelled frames from what a decoder makes of it."""
    truths = record(cast(job.clip), job.out / "footage")
    annotated = []
    questions = [question for question in QUESTIONS if question.camera == job.clip.camera]
    for index, frame in read_frames(job.out / "footage" / f"{job.clip.unit}.mp4", job.label_every):
        name = f"{job.clip.unit}__{round(index * 1000 / job.clip.fps):06d}.jpg"
        for question in questions:
            x0, y0, x1, y1 = question.roi
            folder = job.out / "data" / question.id / job.split
            if question.zone is None:
                annotated.append((question.id, name, x1 - x0, y1 - y0, question.boxes(truths[index])))
                folder = folder / "images"
            else:
                label = question.label(truths[index])
                if label is None:
                    continue
                folder = folder / label
            folder.mkdir(parents=True, exist_ok=True)
            crop = cv2.cvtColor(frame[y0:y1, x0:x1], cv2.COLOR_RGB2BGR)
            cv2.imwrite(str(folder / name), crop, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return _Cut(truths, annotated)


def _write_annotations(out: Path, done: dict[_Job, _Cut]) -> None:
    """COCO files of the detection queries, one for each split."""
    for question in (q for q in QUESTIONS if q.zone is None):
        for split in {job.split for job in done}:
            images, annotations = [], []
            for job, cut in done.items():
                for query, name, width, height, boxes in cut.annotated if job.split == split else ():
                    if query != question.id:
                        continue
                    images.append({"id": len(images) + 1, "file_name": name, "width": width, "height": height})
                    for x0, y0, x1, y1 in boxes:
                        bbox = [round(v, 1) for v in (x0, y0, x1 - x0, y1 - y0)]
                        annotations.append(
                            {
                                "id": len(annotations) + 1,
                                "image_id": len(images),
                                "category_id": 1,
                                "bbox": bbox,
                                "area": round(bbox[2] * bbox[3], 1),
                                "iscrowd": 0,
                            }
                        )
            document = {
                "images": images,
                "annotations": annotations,
                "categories": [{"id": 1, "name": question.classes[0]}],
            }
            (out / "data" / question.id / split / "annotations.json").write_text(json.dumps(document), encoding="utf-8")


def _write_workload(out: Path) -> Path:
    queries = [
        {
            "id": q.id,
            "camera": q.camera,
            "task": q.task,
            "classes": list(q.classes),
            "model": q.model,
            **({"model_args": dict(q.model_args)} if q.model_args else {}),
            "input_size": q.input_size,
            "weights": f"weights/{q.id}.safetensors",
            "fps": QUERY_FPS,
            "sla_ms": q.sla_ms,
            "roi": list(q.roi),
            "data": f"data/{q.id}",
        }
        for q in QUESTIONS
    ]
    document = {
        "name": "sample",
        "accuracy_target": 0.95,
        "cameras": {camera: {"source": f"clips/{camera}.mp4", "fps": CAMERA_FPS} for camera in SCENES},
        "queries": queries,
    }
    path = out / WORKLOAD
    path.write_text(yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110), encoding="utf-8")
    return path
