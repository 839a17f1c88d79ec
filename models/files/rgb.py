"""Decoded frames of PyAV as upright RGB pictures, in memory that is used again."""

from __future__ import annotations

import struct
import sys
from fractions import Fraction
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import av
    import numpy as np
    from av.video.reformatter import VideoReformatter

RGB = "rgb24"
PLANAR = {"nv12": "yuv420p", "p010le": "yuv420p10le"}
"""Formats with interleaved chroma, and those with the same values in planes."""
TIME_BASE = Fraction(1, 1000)
"""Of a filter graph, which needs one; a converted frame's time is not read."""


class RgbConverter:
    """Converts the frames of one stream by their own colour range and matrix; not from two threads at once.

    FFmpeg's filter graph keeps the memory of pictures that are gone for later ones, in which no page is new: half the
    time of PyAV's reformatter, which gives all but the same memory. Of each kind of frames the first is converted by
    both, and the graph serves where its bits are the same.
    """

    def __init__(self) -> None:
        from av.video.reformatter import VideoReformatter

        self._reformatter = VideoReformatter()
        self._kind: object = None
        self._graph: Any = None

    def __call__(self, frame: av.VideoFrame, matrix: tuple[int, ...] | None = None) -> np.ndarray:
        """The frame turned as a display matrix (a b u, c d v, x y w) demands, uint8 (H, W, 3), contiguous."""
        import numpy as np

        image = self._convert(to_planar(frame, self._reformatter))
        if matrix:
            a, b, _, c, d = matrix[:5]
            if abs(b) > abs(a):
                image = image.swapaxes(0, 1)
                a = c
                d = b
            image = image[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]
        return np.ascontiguousarray(image)

    def _convert(self, frame: av.VideoFrame) -> np.ndarray:
        kind = frame.format.name, frame.width, frame.height, frame.colorspace, frame.color_range
        # Frames of one stream seldom change their kind.
        if kind == self._kind:
            return (
                self._reformat(frame)
                if self._graph is None
                else _pixels(_run_graph(self._graph, frame))
            )
        image = self._reformat(frame)
        self._kind = kind
        self._graph = _prove_graph(frame, image)
        return image

    def _reformat(self, frame: av.VideoFrame) -> np.ndarray:
        return _pixels(self._reformatter.reformat(frame, format=RGB, threads=1))


def memory_of(picture: np.ndarray) -> memoryview | None:
    """What lives as long as the memory of FFmpeg that a picture is a view of; None where it is no such view."""
    # Where PyAV was not imported no picture is FFmpeg's; a box whose frames are pushed has no use for its memory.
    plane: Any = getattr(sys.modules.get("av.video.plane"), "VideoPlane", ())
    base: Any = picture
    while base is not None and not isinstance(base, memoryview):
        base = getattr(base, "base", None)
    return base if base is not None and isinstance(base.obj, plane) else None


def to_planar(frame: av.VideoFrame, reformatter: VideoReformatter) -> av.VideoFrame:
    """The frame as decoders in software give it: of interleaved chroma, as in hardware, swscale makes other colours."""
    planar = PLANAR.get(frame.format.name)
    return frame if planar is None else reformatter.reformat(frame, format=planar, threads=1)


def display_matrix(frame: av.VideoFrame) -> tuple[int, ...] | None:
    """How a player turns the frame: nine values of fixed point; None where it says nothing.

    PyAV's frame and its side data then refer to each other: its picture lives until garbage is collected.
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    return struct.unpack("=9i", bytes(matrix)) if matrix else None


def _prove_graph(frame: av.VideoFrame, expected: np.ndarray) -> Any | None:
    """A graph that converts frames like this one; None where it fails, or gives other bits than `expected`."""
    import numpy as np
    from av.error import FFmpegError
    from av.filter import Graph

    graph = Graph()
    graph.threads = 1
    try:
        source = graph.add_buffer(
            width=frame.width,
            height=frame.height,
            format=frame.format,
            time_base=frame.time_base or TIME_BASE,
        )
        steps = [
            source,
            graph.add("scale", "flags=bilinear"),
            graph.add("format", RGB),
            graph.add("buffersink"),
        ]
        graph.link_nodes(*steps).configure()
        return graph if np.array_equal(_pixels(_run_graph(graph, frame)), expected) else None
    except (FFmpegError, ValueError):
        return None


def _run_graph(graph: Any, frame: av.VideoFrame) -> av.VideoFrame:
    graph.vpush(frame)
    return graph.vpull()


def _pixels(frame: av.VideoFrame) -> np.ndarray:
    """A view of a frame of RGB, (H, W, 3)."""
    import numpy as np

    plane = frame.planes[0]
    rows = np.frombuffer(memoryview(plane), np.uint8).reshape(frame.height, plane.line_size)  # type: ignore[arg-type]
    return rows[:, : 3 * frame.width].reshape(frame.height, frame.width, 3)
