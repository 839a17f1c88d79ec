"""Clips: a scene's frames as an H.264 file, and the truth about them as JSON lines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import cv2
import imageio_ffmpeg
import numpy as np

from video_samples.movers.traffic import STEP_S
from video_samples.rendering.renderer import Renderer, Truth
from video_samples.scenes.junction import junction
from video_samples.scenes.scene import Scene
from video_samples.scenes.square import square

SCENES: dict[str, Callable[[], Scene]] = {
    "junction-day": lambda: junction(night=False),
    "junction-night": lambda: junction(night=True),
    "square": square,
}
QUALITY_CRF, KEYFRAME_EVERY = 26, 50


@dataclass(frozen=True)
class Clip:
    """One stretch of footage of one camera; `fps` divides the simulation's 10 steps a second."""

    unit: str
    camera: str
    seed: int
    seconds: float
    fps: float = 10.0

    @property
    def frames(self) -> int:
        return round(self.seconds * self.fps)


def render(clip: Clip) -> Iterator[tuple[np.ndarray, list[Truth]]]:
    """The frames of a clip, uint8 RGB (H, W, 3), each with every object in it, however hidden; the seed decides all."""
    renderer = Renderer(SCENES[clip.camera](), clip.seed)
    steps = round(1 / clip.fps / STEP_S)
    for index in range(clip.frames):
        if index:
            for _ in range(steps):
                renderer.world.step()
        yield renderer.frame()


class Recorder:
    """Writes RGB frames to an H.264 mp4; the same frames give the same bytes."""

    def __init__(self, path: Path, size: tuple[int, int], fps: float) -> None:
        command = [
            imageio_ffmpeg.get_ffmpeg_exe(),
            "-v",
            "error",
            "-y",
            "-f",
            "rawvideo",
            "-pix_fmt",
            "yuv420p",
            "-s",
            f"{size[0]}x{size[1]}",
            "-r",
            str(fps),
            "-i",
            "-",
            "-c:v",
            "libx264",
            "-preset",
            "superfast",
            "-crf",
            str(QUALITY_CRF),
            "-pix_fmt",
            "yuv420p",
            "-bf",
            "0",
            "-g",
            str(KEYFRAME_EVERY),
            "-threads",
            "1",
            "-fflags",
            "+bitexact",
            "-flags:v",
            "+bitexact",
            "-movflags",
            "+faststart",
            str(path),
        ]
        self.path = path
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)

    def add(self, frame: np.ndarray) -> None:
        """Appends a frame; OSError with the encoder's own words when it has given up."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(cv2.cvtColor(frame, cv2.COLOR_RGB2YUV_I420).tobytes())
        except BrokenPipeError:
            self.close()

    def close(self) -> None:
        """Ends the file; OSError with the encoder's own words when it failed."""
        assert self._process.stdin is not None and self._process.stderr is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        words = self._process.stderr.read().decode(errors="replace").strip()
        if self._process.wait():
            raise OSError(f"{self.path}: the encoder failed: {words}")

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        elif self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def record(clip: Clip, folder: Path) -> list[list[Truth]]:
    """Renders a clip to `folder/<unit>.mp4` and `<unit>.gt.jsonl`; returns every object of every frame."""
    view = SCENES[clip.camera]().view
    truths = []
    with Recorder(folder / f"{clip.unit}.mp4", (view.width, view.height), clip.fps) as recorder:
        for frame, objects in render(clip):
            recorder.add(frame)
            truths.append(objects)
    write_truth(folder / f"{clip.unit}.gt.jsonl", truths)
    return truths


def write_truth(path: Path, truths: Sequence[Sequence[Truth]]) -> None:
    """One line for each object that shows well enough: frame, track, class, box, visible."""
    with path.open("w", encoding="utf-8") as file:
        for index, objects in enumerate(truths):
            for one in objects:
                if one.counts:
                    row = {
                        "frame": index,
                        "track": one.track,
                        "class": one.kind,
                        "box": one.box,
                        "visible": one.visible,
                    }
                    file.write(json.dumps(row) + "\n")


def join(sources: Sequence[Path], target: Path) -> None:
    """Puts clips of one camera behind each other without encoding again."""
    listing = target.with_suffix(".txt")
    listing.write_text("".join(f"file '{path.resolve()}'\n" for path in sources), encoding="utf-8")
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-y",
        "-f",
        "concat",
        "-safe",
        "0",
        "-i",
        str(listing),
        "-c",
        "copy",
        "-fflags",
        "+bitexact",
        "-movflags",
        "+faststart",
        str(target),
    ]
    subprocess.run(command, check=True)
    listing.unlink()


def read_frames(path: Path, every: int = 1) -> Iterator[tuple[int, np.ndarray]]:
    """Index and picture, uint8 RGB, of every n-th frame as a decoder sees it."""
    video = cv2.VideoCapture(str(path))
    index = 0
    while video.grab():
        if index % every == 0:
            yield index, cv2.cvtColor(video.retrieve()[1], cv2.COLOR_BGR2RGB)
        index += 1
    video.release()
