"""Conversion of decoded frames to RGB: the bits of the reformatter, from memory that is used again."""

from __future__ import annotations

import av
import numpy as np
import pytest
from av.video.reformatter import VideoReformatter

from gemel.models.files import rgb
from gemel.models.files.rgb import RgbConverter, memory_of, to_planar

FORMATS = (
    *("yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p", "yuv420p10le", "yuv422p10le"),
    *("nv12", "p010le", "gray", "bgr24", "rgb24", "gbrp", "yuv411p", "yuv440p", "rgba"),
)
SIZES = ((64, 48), (66, 50), (352, 288), (101, 77))


def make_frame(pixels: str, size: tuple[int, int], seed: int = 0, matrix: int = 2, limits: int = 0) -> av.VideoFrame:
    """A frame of noise and edges in this format, with this colour matrix and range."""
    width, height = size
    image = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    image[: height // 2] = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    frame = av.VideoFrame.from_ndarray(image, "rgb24").reformat(format=pixels)
    frame.colorspace, frame.color_range = matrix, limits
    return frame


def reformat(frame: av.VideoFrame) -> np.ndarray:
    """The frame as PyAV's reformatter gives it."""
    planar = to_planar(frame, VideoReformatter())
    return VideoReformatter().reformat(planar, format="rgb24", threads=1).to_ndarray()


@pytest.mark.parametrize("pixels", FORMATS)
def test_rgb_converter_gives_the_bits_of_the_reformatter(pixels: str) -> None:
    graphs = 0
    for size in SIZES:
        for matrix, limits in ((2, 0), (1, 1), (5, 2), (9, 1)):
            convert = RgbConverter()
            for seed in range(3):
                frame = make_frame(pixels, size, seed, matrix, limits)
                image = convert(frame)
                assert image.flags.c_contiguous and np.array_equal(image, reformat(frame)), (size, matrix, limits)
            graphs += convert._graph is not None
    assert graphs or pixels not in ("yuv420p", "yuvj420p", "nv12"), "what cameras send goes through the graph"


def test_rgb_converter_follows_frames_that_change() -> None:
    convert = RgbConverter()
    kinds = [("yuv420p", (64, 48), 1, 1), ("yuv420p", (64, 48), 5, 2), ("yuvj422p", (128, 64), 2, 0)]
    for seed, kind in enumerate(2 * kinds):
        frame = make_frame(kind[0], kind[1], seed, *kind[2:])
        assert np.array_equal(convert(frame), reformat(frame))


def test_rgb_converter_leaves_a_graph_of_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = rgb._run_graph, []
    monkeypatch.setattr(
        rgb, "_run_graph", lambda graph, frame: calls.append(1) or run(graph, make_frame("rgb24", (64, 48), 9))
    )
    convert = RgbConverter()
    for seed in range(3):
        frame = make_frame("yuv420p", (64, 48), seed)
        assert np.array_equal(convert(frame), reformat(frame))
    assert len(calls) == 1


def test_rgb_converter_uses_memory_again_that_nothing_refers_to() -> None:
    convert, size = RgbConverter(), (128, 64)
    convert(make_frame("yuv420p", size))
    first = convert(make_frame("yuv420p", size, 1))
    view, address = first[2:, 2:][1:5, 1:5], first.__array_interface__["data"][0]
    expected = view.copy()
    assert memory_of(first) is not None and memory_of(view) is memory_of(first)
    assert memory_of(expected) is None and memory_of(np.frombuffer(b"1234", np.uint8)) is None
    del first
    others = [convert(make_frame("yuv420p", size, seed)) for seed in range(2, 12)]
    assert np.array_equal(view, expected) and address not in {one.__array_interface__["data"][0] for one in others}
    del view
    later = convert(make_frame("yuv420p", size, 20))
    assert later.__array_interface__["data"][0] == address
