"""Decoders in hardware, by one of FFmpeg's in software behind the same interface: no machine here has another."""

from __future__ import annotations

import contextlib
from typing import Any

import av
import numpy as np
import pytest

from gemel.edge_runtime.capture import decoders
from gemel.edge_runtime.capture.decoders import ACCELERATORS, AUTO, CPU, Accelerator, DecoderLost, PacketDecoder
from gemel.edge_runtime.capture.skipping import FrameSkipper, Skip
from gemel.edge_runtime.capture.sources import CameraConfig
from gemel.models.files.video import Video, decode_shot
from tests.edge_runtime.capture.test_camera import play_camera
from tests.video_files import COUNT, draw_frame, write_video

CHIP = "chip"
B_FRAMES = {"bf": "2", "g": "10", "sc_threshold": "0"}


class Chip:
    """FFmpeg's own decoder as if it were hardware: frames may be late, other ones, interleaved, or end."""

    def __init__(self, context: Any, lasts: int, delay: int, brightens: bool) -> None:
        self._context, self._lasts, self._delay, self._brightens = context, lasts, delay, brightens
        self._ready: list[Any] = []
        self.skip_frame = "DEFAULT"

    def decode(self, packet: Any) -> list[Any]:
        self._lasts -= 1
        if self._lasts < 0:
            raise OSError(5, "the device is gone")
        self._ready += map(self._download, self._context.decode(packet))
        count = len(self._ready) - (self._delay if packet.size else 0)
        return [self._ready.pop(0) for _ in range(max(0, count))]

    def _download(self, frame: Any) -> Any:
        planes = frame.to_ndarray()
        if self._brightens:
            planes = planes | 8
        planar = av.VideoFrame.from_ndarray(planes, format="yuv420p")
        chip = planar.reformat(format="nv12")
        chip.pts, chip.time_base, chip.pict_type = frame.pts, frame.time_base, frame.pict_type
        chip.colorspace, chip.color_range = frame.colorspace, frame.color_range
        return chip


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts such a chip in place of a kind of hardware."""

    def build(lasts: int = 1000, delay: int = 0, brightens: bool = False) -> None:
        open_hardware = decoders.open_hardware
        monkeypatch.setitem(ACCELERATORS, CHIP, Accelerator(ending=""))
        monkeypatch.setattr(decoders, "_FAILURES", decoders.Failures())
        monkeypatch.setattr(
            decoders, "open_hardware", lambda kind, one: Chip(open_hardware(kind, one), lasts, delay, brightens)
        )

    return build


def read(path: Any, kind: str, skip: Skip | None = Skip.NONE) -> tuple[list[np.ndarray], list[float], str, list[str]]:
    """Pictures, times, what decoded at the end, and what was noted."""
    notes: list[str] = []
    made: list[PacketDecoder] = []

    def begin(stream: Any) -> PacketDecoder:
        made.append(
            PacketDecoder(
                stream, kind, FrameSkipper(skip, lambda: None), lambda text, hint="": notes.append(text),
                failures=decoders._FAILURES,
            )
        )  # fmt: skip
        return made[0]

    with contextlib.closing(Video(str(path), lambda *_: None)) as video:
        video.decode_with(begin, skip is not Skip.NONE)
        pictures, times = [], []
        while video.advance():
            pictures.append(decode_shot(video.shot()))
            times.append(video.time_s)
    return pictures, times, made[0].name, notes


@pytest.mark.parametrize("delay", [0, 3])
@pytest.mark.parametrize("lasts", [1000, 14, 8])
def test_hardware_gives_the_frames_of_the_processor_even_where_it_vanishes(tmp_path, chip, lasts, delay):
    clip = write_video(tmp_path / "a.mp4", options=B_FRAMES)
    expected, times, _, _ = read(clip, CPU)
    chip(lasts, delay)
    pictures, chip_times, name, notes = read(clip, CHIP)
    lost = set(times) - set(chip_times)
    assert len(chip_times) + len(lost) == len(times) == COUNT and chip_times == sorted(chip_times)
    assert len(lost) <= (delay > 0 and lasts < 1000), "at most what it still held of the frames before a key frame"
    same = (np.array_equal(one, expected[times.index(at)]) for one, at in zip(pictures, chip_times, strict=True))
    assert all(same), "the same bits, though chroma was interleaved"
    if lasts == 1000:
        assert (name, notes) == (CHIP, [])
    else:
        assert name == CPU and notes == [
            f"is not decoded by {CHIP} any more: the device is gone; the processor goes on"
        ]


def test_hardware_with_other_pictures_never_serves(tmp_path, chip):
    clip = write_video(tmp_path / "a.mp4", options=B_FRAMES)
    expected = read(clip, CPU)[0]
    chip(brightens=True)
    pictures, _, name, notes = read(clip, CHIP)
    assert name == CPU and "its frames are not those of the processor" in notes[0]
    assert all(map(np.array_equal, pictures, expected)) and len(pictures) == COUNT


def test_hardware_that_falls_silent_is_left(tmp_path, chip):
    clip = write_video(tmp_path / "a.mp4", [draw_frame(number) for number in range(40)], options=B_FRAMES)
    chip(delay=1000)
    pictures, _, name, notes = read(clip, CHIP)
    assert len(pictures) == 40 and name == CPU and "it gives no frame" in notes[0]


@pytest.mark.parametrize("kind", ["vaapi", "qsv", "cuda", "v4l2m2m"])
def test_missing_hardware_is_said_in_one_line(tmp_path, kind):
    clip = write_video(tmp_path / "a.mp4")
    context = av.open(str(clip)).streams.video[0].codec_context
    try:
        decoders.open_hardware(kind, context)
    except DecoderLost:
        pass
    else:
        pytest.skip(f"this machine decodes by {kind}")
    pictures, _, name, notes = read(clip, kind)
    assert len(pictures) == COUNT and name == CPU
    assert len(notes) == 1 and f"cannot be decoded by {kind}: " in notes[0]
    assert not read(clip, AUTO)[3], "what is found by itself is not said where there is none"


def test_failed_hardware_is_tried_again_later():
    now = [0.0]
    failures = decoders.Failures(lambda: now[0])
    failures.add(CHIP, "h264", "no device")
    assert failures.reason(CHIP, "h264") == "no device" and failures.reason(CHIP, "hevc") is None
    now[0] = decoders.RETRY_S
    assert failures.reason(CHIP, "h264") is None


@pytest.mark.parametrize("skip, left", [(Skip.NONREF, 8), (Skip.NONKEY, 2)])
def test_skipped_frames_are_not_decoded_and_the_others_are_the_same(tmp_path, skip, left):
    clip = write_video(tmp_path / "a.mp4", options=B_FRAMES | {"b-pyramid": "none"})
    expected, times, _, _ = read(clip, CPU)
    pictures, skipped_times, _, _ = read(clip, CPU, skip)
    assert len(pictures) == pytest.approx(left, abs=1)
    assert all(np.array_equal(one, expected[times.index(at)]) for one, at in zip(pictures, skipped_times, strict=True))


def test_camera_shows_what_decodes_it(tmp_path, chip):
    clip = write_video(tmp_path / "a.mp4")
    chip()
    with play_camera(clip, decode=CHIP, loop=True) as watched:
        watched.more(COUNT + 2)
        row = watched.until(lambda row: row["decoder"] == CHIP)
    assert row["skip"] == "none"
    assert CameraConfig("c", str(clip)).fixed_skip is Skip.NONE and CameraConfig("c", "rtsp://x/y").fixed_skip is None
