"""Video files of every kind that people have, made by PyAV's encoders."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from av.stream import Disposition

SIZE = (96, 64)
FPS, COUNT = 10, 20
TURNS = {
    "90": (0, 1, -1, 0), "180": (-1, 0, 0, -1), "270": (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1), "transposed": (0, 1, 1, 0),
}  # fmt: skip
"""Elements a, b, c, d of display matrices."""


def draw_frame(number: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """Red in the upper left corner, green at the lower right, and a blue bar that moves with the number."""
    width, height = size
    image = np.full((height, width, 3), 90, np.uint8)
    image[height // 8 : height * 3 // 8, width // 16 : width // 4] = (255, 0, 0)
    image[height * 5 // 8 : height * 7 // 8, width * 5 // 8 : width * 7 // 8] = (0, 255, 0)
    left = number * 4 % width
    image[: height // 16 * 2, left : left + 4] = (0, 0, 255)
    return image


def turn_frame(image: np.ndarray, turn: str) -> np.ndarray:
    """The frame as a player shows it by this display matrix."""
    turns: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "90": lambda one: np.rot90(one, -1), "180": lambda one: np.rot90(one, 2), "270": np.rot90,
        "mirrored": lambda one: one[:, ::-1], "transposed": lambda one: one.swapaxes(0, 1),
    }  # fmt: skip
    return turns[turn](image)


def write_video(
    path: Path,
    images: Iterable[np.ndarray] | None = None,
    codec: str = "libx264",
    pixels: str = "yuv420p",
    options: dict[str, str] | None = None,
    colours: dict[str, Any] | None = None,
    times_ms: Sequence[int] | None = None,
) -> Path:
    """Encode these pictures, else COUNT of `draw_frame`, at FPS or at these times; `colours` tag the stream."""
    images = [draw_frame(number) for number in range(COUNT)] if images is None else list(images)
    with av.open(str(path), "w") as file:
        stream: Any = file.add_stream(codec, rate=FPS)
        stream.height, stream.width = images[0].shape[:2]
        stream.pix_fmt, stream.options = pixels, {"g": "5"} | (options or {})
        stream.codec_context.thread_count = 1  # the bytes, and so what damage hits, differ by the number of threads
        if times_ms:
            stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for name, value in (colours or {}).items():
            setattr(stream.codec_context, name, value)
        for number, image in enumerate(images):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if times_ms:
                frame.pts, frame.time_base = times_ms[number], Fraction(1, 1000)
            full_range = (colours or {}).get("color_range")
            frame = frame.reformat(
                format=pixels, dst_colorspace=(colours or {}).get("colorspace"), dst_color_range=full_range
            )
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path


def set_turn(path: Path, turn: str) -> Path:
    """Write this display matrix into the header of an MP4's track."""
    data = bytearray(path.read_bytes())
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    at = data.index(upright, data.index(b"tkhd"))
    a, b, c, d = TURNS[turn]
    data[at : at + 36] = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    return path


def damage(path: Path, at: float, nbytes: int) -> Path:
    """Overwrite bytes at this share of an MP4's frames."""
    data = bytearray(path.read_bytes())
    first = data.index(b"movi" if path.suffix == ".avi" else b"mdat") + 4
    begin = first + int(at * (len(data) - first))
    data[begin : begin + nbytes] = np.random.default_rng(0).bytes(nbytes)
    path.write_bytes(data)
    return path


def write_with_other_streams(path: Path, cover: bool) -> Path:
    """The frames of `draw_frame` behind a smaller video, or behind the picture of a cover."""
    size = (32, 32)
    with av.open(str(path), "w") as file:
        first: Any = file.add_stream("mjpeg" if cover else "libx264", rate=FPS)
        second: Any = file.add_stream("libx264", rate=FPS)
        first.width, first.height, first.pix_fmt = *((400, 400) if cover else size), "yuvj420p" if cover else "yuv420p"
        second.width, second.height, second.pix_fmt = *SIZE, "yuv420p"
        if cover:
            first.disposition = Disposition.attached_pic
        for number in range(COUNT):
            if number == 0 or not cover:
                small = np.zeros((first.height, first.width, 3), np.uint8)
                file.mux(first.encode(av.VideoFrame.from_ndarray(small, format="rgb24")))
            file.mux(second.encode(av.VideoFrame.from_ndarray(draw_frame(number), format="rgb24")))
        file.mux(first.encode())
        file.mux(second.encode())
    return path


def write_cover(path: Path) -> Path:
    """Sound with the picture of a cover."""
    with av.open(str(path), "w") as file:
        sound: Any = file.add_stream("aac", rate=16000, layout="mono")
        cover: Any = file.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = *SIZE, "yuvj420p"
        cover.disposition = Disposition.attached_pic
        file.mux(cover.encode(av.VideoFrame.from_ndarray(draw_frame(0), format="rgb24")))
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 16000
        file.mux(sound.encode(silence))
        for stream in (sound, cover):
            file.mux(stream.encode())
    return path
