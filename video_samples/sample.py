"""The sample workload: clips of three cameras, labelled frames cut from them, and the workload file."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import yaml

from gemel.video_samples.clips import SCENES, Clip, join, read_frames, record, render, write_truth
from gemel.video_samples.queries import SAMPLE_QUERIES, Rect
from gemel.video_samples.renderer import FrameTruth
from gemel.video_samples.traffic import STEP_S

CANDIDATES = 10
SHARE = (0.3, 0.7)  # wanted share of "yes" among the answers of one clip
LOOK_EVERY_S = 0.5
SHORTEST_S = 5.0  # a shorter clip hardly shows two answers; it takes what comes


def select_seed(clip: Clip) -> Clip:
    """The clip with the first seed from its own on that gives balanced answers, or the most balanced of ten.

    A few short clips would otherwise often show only one answer. Only the simulation runs here; nothing is drawn.
    """
    questions = [q for q in SAMPLE_QUERIES if q.camera == clip.camera and q.zone is not None]
    if clip.seconds < SHORTEST_S:
        return clip
    best = clip
    least = 2.0
    for candidate in range(clip.seed, clip.seed + CANDIDATES):
        world = SCENES[clip.camera]().start_world(candidate)
        answers = {question.id: Counter() for question in questions}
        for _ in range(round(clip.seconds / LOOK_EVERY_S)):
            seen = [
                FrameTruth(a.track, a.kind, (0, 0, 0, 0), 1.0, (a.x, a.y)) for a in world.actors()
            ]
            for question in questions:
                answers[question.id][question.label(seen)] += 1
            for _ in range(round(LOOK_EVERY_S / STEP_S)):
                world.step()
        shares = [
            answers[q.id][q.classes[1]]
            / max(1, answers[q.id][q.classes[0]] + answers[q.id][q.classes[1]])
            for q in questions
        ]
        off = max((abs(share - 0.5) for share in shares), default=0.0)
        if off < least:
            best = Clip(clip.unit, clip.camera, candidate, clip.seconds, clip.fps)
            least = off
        if off <= SHARE[1] - 0.5:
            break
    return best


Progress = Callable[[float], None]
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
    "val": SplitSize(
        200, 1.0, 1.0, 1
    ),  # moments far apart: in clips, they would prove as little as so many clips
    "test": SplitSize(4, 13.0, CAMERA_FPS, 2),
}
UNLABELLED = "unlabelled"
UNLABELLED_SEEDS = 5000
FOOTAGE = SplitSize(6, 1040.0, 0.05, 1)
"""Footage of each camera without labels: pictures, 20 seconds apart, of 104 minutes."""


@dataclass(frozen=True)
class _Job:
    clip: Clip
    split: str
    label_every: int
    out: Path


@dataclass(frozen=True)
class _Cut:
    """The truth of every frame of a clip, and its detection frames (query, file name, width, height, boxes)."""

    truths: list[list[FrameTruth]]
    annotated: list[tuple[str, str, int, int, list[Rect]]]


def write_sample(
    out_dir: Path | str,
    seed: int = 0,
    splits: dict[str, SplitSize] | None = None,
    workers: int = WORKERS,
    footage: SplitSize | None = None,
    on_progress: Progress | None = None,
) -> Path:
    """Renders the sample into `out_dir` and returns its workload file.

    `footage/<unit>.mp4` and `.gt.jsonl` are the clips; a unit belongs to one split only. `clips/<camera>.mp4` plays the
    test clips one after the other, for the box. `data/<query>` are labelled frames. The weights the workload file
    names do not exist yet: training makes them. With `footage`, `unlabelled/<camera>` holds pictures without labels.
    Files of an earlier sample in `out_dir` are replaced; the workload file comes last, so a sample without one is not
    complete. OSError when something cannot be written.
    """
    out = Path(out_dir)
    splits = splits or SPLITS
    (out / WORKLOAD).unlink(missing_ok=True)
    for folder in (
        "footage",
        "clips",
        UNLABELLED,
        *(f"data/{question.id}" for question in SAMPLE_QUERIES),
    ):
        shutil.rmtree(out / folder, ignore_errors=True)
        (out / folder).mkdir(parents=True)
    jobs = [
        _Job(
            Clip(
                f"{camera}-{split}-{i + 1}",
                camera,
                _seed(seed, camera, split, i, size),
                size.seconds,
                size.fps,
            ),
            split,
            size.label_every,
            out,
        )
        for split, size in {**splits, **({UNLABELLED: footage} if footage else {})}.items()
        for camera in SCENES
        for i in range(size.clips)
    ]
    jobs.sort(key=lambda job: -job.clip.frames)
    done: dict[_Job, _Cut] = {}
    frames = sum(job.clip.frames for job in jobs)
    for job, cut in zip(jobs, _in_processes(jobs, workers) if workers > 1 else map(_run, jobs)):
        done[job] = cut
        if on_progress is not None:
            on_progress(sum(job.clip.frames for job in done) / frames)
    _write_annotations(out, done)
    for camera in SCENES:
        played = [job for job in jobs if job.clip.camera == camera and job.split == "test"]
        join(
            [out / "footage" / f"{job.clip.unit}.mp4" for job in played],
            out / "clips" / f"{camera}.mp4",
        )
        write_truth(
            out / "clips" / f"{camera}.gt.jsonl",
            [frame for job in played for frame in done[job].truths],
        )
    return _write_workload(out, footage is not None)


def _seed(seed: int, camera: str, split: str, index: int, size: SplitSize) -> int:
    """A seed of its own for every clip, and for its candidates."""
    first = (seed * 3 + list(SCENES).index(camera)) * 3
    step = min(100, 10_000 // size.clips)
    if split == UNLABELLED:
        return first * 10_000 + UNLABELLED_SEEDS + index * 100
    return (first + ("train", "val", "test").index(split)) * 10_000 + index * step


def _in_processes(jobs: list[_Job], workers: int) -> Iterator[_Cut]:
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_quiet_worker
    )
    try:
        yield from pool.map(_run, jobs)
    finally:
        pool.shutdown(cancel_futures=True)


def _quiet_worker() -> None:
    """One thread for each worker; Ctrl-C is the parent's to handle."""
    cv2.setNumThreads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(job: _Job) -> _Cut:
    """Records one clip, then cuts labelled frames from what a decoder makes of it; footage and moments are pictures."""
    if job.split == UNLABELLED:
        return _write_pictures(job)
    if job.clip.frames == 1:
        frame, objects = next(render(job.clip))
        truths = [objects]
        frames = [(0, frame)]
    else:
        truths = record(select_seed(job.clip), job.out / "footage")
        frames = read_frames(job.out / "footage" / f"{job.clip.unit}.mp4", job.label_every)
    annotated = []
    questions = [question for question in SAMPLE_QUERIES if question.camera == job.clip.camera]
    for index, frame in frames:
        name = f"{job.clip.unit}__{round(index * 1000 / job.clip.fps):06d}.jpg"
        for question in questions:
            x0, y0, x1, y1 = question.roi
            folder = job.out / "data" / question.id / job.split
            if question.zone is None:
                annotated.append(
                    (question.id, name, x1 - x0, y1 - y0, question.boxes(truths[index]))
                )
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


def _write_pictures(job: _Job) -> _Cut:
    """The frames of a clip as pictures of its camera, without labels."""
    folder = job.out / UNLABELLED / job.clip.camera
    folder.mkdir(parents=True, exist_ok=True)
    for index, (frame, _) in enumerate(render(job.clip)):
        name = f"{job.clip.unit}__{round(index * 1000 / job.clip.fps):06d}.jpg"
        picture = cv2.cvtColor(frame, cv2.COLOR_RGB2BGR)
        cv2.imwrite(str(folder / name), picture, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    return _Cut([], [])


def _write_annotations(out: Path, done: dict[_Job, _Cut]) -> None:
    """COCO files of the detection queries, one for each split."""
    for question in (q for q in SAMPLE_QUERIES if q.zone is None):
        for split in {job.split for job in done} - {UNLABELLED}:
            images = []
            annotations = []
            for job, cut in done.items():
                for query, name, width, height, boxes in (
                    cut.annotated if job.split == split else ()
                ):
                    if query != question.id:
                        continue
                    images.append(
                        {"id": len(images) + 1, "file_name": name, "width": width, "height": height}
                    )
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
            (out / "data" / question.id / split / "annotations.json").write_text(
                json.dumps(document), encoding="utf-8"
            )


def _write_workload(out: Path, has_footage: bool) -> Path:
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
            "frame_size": [SCENES[q.camera]().view.width, SCENES[q.camera]().view.height],
            "data": f"data/{q.id}",
        }
        for q in SAMPLE_QUERIES
    ]
    document = {
        "name": "sample",
        "accuracy_target": 0.95,
        "cameras": {
            camera: {
                "source": f"clips/{camera}.mp4",
                "fps": CAMERA_FPS,
                **({"footage": f"{UNLABELLED}/{camera}"} if has_footage else {}),
            }
            for camera in SCENES
        },
        "queries": queries,
    }
    path = out / WORKLOAD
    path.write_text(
        yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=110),
        encoding="utf-8",
    )
    return path
