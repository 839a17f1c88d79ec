"""Clips: a scene's frames as an H.264 file, and the truth about them as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
from av.error import FFmpegError

from gemel.video_samples.junction import junction
from gemel.video_samples.renderer import FrameTruth, Renderer
from gemel.video_samples.scene import Scene
from gemel.video_samples.square import square
from gemel.video_samples.traffic import STEP_S

SCENES: dict[str, Callable[[], Scene]] = {
    "junction-day": lambda: junction(night=False),
    "junction-night": lambda: junction(night=True),
    "square": square,
}
QUALITY_CRF, KEYFRAME_EVERY = 26, 50
ENCODER_OPTIONS = {"preset": "superfast", "crf": str(QUALITY_CRF), "flags": "+bitexact"}
CONTAINER_OPTIONS = {"fflags": "+bitexact", "movflags": "+faststart"}


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


def render(clip: Clip) -> Iterator[tuple[np.ndarray, list[FrameTruth]]]:
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
        self.path = path
        with self._explain_errors():
            self._container: Any = av.open(str(path), "w", options=CONTAINER_OPTIONS)
            self._stream = self._container.add_stream(
                "libx264", rate=Fraction(fps).limit_denominator(1000), options=ENCODER_OPTIONS
            )
            self._stream.width, self._stream.height = size
            context = self._stream.codec_context
            context.gop_size = KEYFRAME_EVERY
            context.max_b_frames = 0
            context.thread_count = 1

    def add(self, frame: np.ndarray) -> None:
        """Appends a frame; OSError with the encoder's own words when it has given up."""
        planes = np.asarray(cv2.cvtColor(frame, cv2.COLOR_RGB2YUV_I420), np.uint8)
        with self._explain_errors():
            self._container.mux(
                self._stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p"))
            )

    def close(self) -> None:
        """Ends the file; OSError with the encoder's own words when it failed."""
        with self._explain_errors():
            self._container.mux(self._stream.encode(None))
            self._container.close()

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except (FFmpegError, OSError) as error:
            raise OSError(f"{self.path}: the encoder failed: {error.strerror}") from error

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(FFmpegError, OSError):
                self._container.close()


def record(clip: Clip, folder: Path) -> list[list[FrameTruth]]:
    """Renders a clip to `folder/<unit>.mp4` and `<unit>.gt.jsonl`; returns every object of every frame."""
    view = SCENES[clip.camera]().view
    truths = []
    with Recorder(folder / f"{clip.unit}.mp4", (view.width, view.height), clip.fps) as recorder:
        for frame, objects in render(clip):
            recorder.add(frame)
            truths.append(objects)
    write_truth(folder / f"{clip.unit}.gt.jsonl", truths)
    return truths


def write_truth(path: Path, truths: Sequence[Sequence[FrameTruth]]) -> None:
    """One line for each object that shows well enough: frame, track, class, box, visible."""
    with path.open("w", encoding="utf-8") as file:
        for index, objects in enumerate(truths):
            for truth in objects:
                if truth.counts:
                    row = {
                        "frame": index,
                        "track": truth.track,
                        "class": truth.kind,
                        "box": truth.box,
                        "visible": truth.visible,
                    }
                    file.write(json.dumps(row) + "\n")


def join(sources: Sequence[Path], target: Path) -> None:
    """Puts clips of one camera behind each other without encoding again."""
    with av.open(str(target), "w", options=CONTAINER_OPTIONS) as joined:
        stream = None
        ended = 0
        for path in sources:
            with av.open(str(path)) as source:
                video = source.streams.video[0]
                stream = stream or joined.add_stream_from_template(video)
                for packet in source.demux(video):
                    if packet.dts is None or packet.pts is None:  # the end
                        continue
                    packet.dts = packet.dts + ended
                    packet.pts = packet.pts + ended
                    packet.stream = stream
                    joined.mux(packet)
                ended += video.duration or 0


def read_frames(path: Path, every: int = 1) -> Iterator[tuple[int, np.ndarray]]:
    """Index and picture, uint8 RGB, of every n-th frame as a decoder sees it."""
    video = cv2.VideoCapture(str(path))
    index = 0
    while video.grab():
        if index % every == 0:
            yield index, cv2.cvtColor(video.retrieve()[1], cv2.COLOR_BGR2RGB)
        index += 1
    video.release()
