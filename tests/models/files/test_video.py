"""Every kind of video through both ends, training data and the box: the same upright frames at the same times."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.capture.sources import CameraConfig, open_source
from gemel.models.data import SPLITS, load_split
from gemel.models.errors import InputError
from gemel.models.files.video import MAX_JUMP_S, MediaClock, Video
from gemel.models.notes import collect_notes
from tests.models.queries import make_query
from tests.video_files import COUNT, FPS, TURNS, damage, draw_frame, set_turn, turn_frame, write_cover, write_video
from tests.video_files import write_with_other_streams as write_two

HDR = {"color_primaries": 9, "color_trc": 16, "colorspace": 9}
X265 = "log-level=none:colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc"
VFR_MS = [40 * number for number in range(10)] + [800 + 500 * number for number in range(10)]


def join_sizes(path: Path) -> Path:
    """A stream whose frames become smaller, and whose timestamps begin anew there."""
    first = write_video(path.with_name("a.ts"), [draw_frame(number) for number in range(15)])
    rest = write_video(path.with_name("b.ts"), [draw_frame(number, (64, 48)) for number in range(15, COUNT)])
    path.write_bytes(first.read_bytes() + rest.read_bytes())
    return path


def cut_end(path: Path) -> Path:
    data = write_video(path, [draw_frame(number) for number in range(60)], options={"crf": "0"}).read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


def cut_hole(path: Path) -> Path:
    """A transport stream without the packets of three whole frames."""
    data = write_video(path).read_bytes()
    packets = [data[at : at + 188] for at in range(0, len(data), 188)]
    video = 0x100  # the packet identifier that FFmpeg gives the first stream
    starts = [at for at, one in enumerate(packets) if one[1] & 0x40 and (one[1] & 0x1F) << 8 | one[2] == video]
    path.write_bytes(b"".join(packets[: starts[8]] + packets[starts[11] :]))
    return path


Make = Callable[[Path], Path]
KINDS: dict[str, tuple[str, Make, str]] = {
    "plain": ("a.mp4", write_video, ""),
    "interlaced": ("a.mp4", lambda path: write_video(path, options={"x264-params": "interlaced=1"}), "is interlaced"),
    "interlaced MPEG-2": (
        "a.ts", lambda path: write_video(path, codec="mpeg2video", options={"flags": "+ilme+ildct"}), "is interlaced",
    ),
    "AV1": ("a.mp4", lambda path: write_video(path, codec="libsvtav1"), ""),
    "HDR10": (
        "a.mp4",
        lambda path: write_video(path, None, "libx265", "yuv420p10le", {"x265-params": X265}, HDR),
        "is HDR (PQ), read without tone mapping",
    ),
    "10 bits": ("a.mp4", lambda path: write_video(path, pixels="yuv420p10le"), "has 10 bits a colour"),
    "full range": ("a.mp4", lambda path: write_video(path, colours={"color_range": 2}), ""),
    "BT.709": ("a.mp4", lambda path: write_video(path, colours={"color_range": 1, "colorspace": 1}), ""),
    "no times": ("a.h264", write_video, ""),
    "AVI with B frames": ("a.avi", write_video, ""),
    "variable rate": ("a.mp4", lambda path: write_video(path, times_ms=VFR_MS), ""),
    "second video": ("a.mkv", lambda path: write_two(path, False), "the largest is read: stream 1, 96 x 64 pixels"),
    "cover": ("a.mp4", lambda path: write_two(path, True), ""),
    "new size": ("a.ts", join_sizes, "has timestamps that begin anew"),
    "damaged": ("a.mp4", lambda path: damage(write_video(path), 0.3, 300), " of 20 frames could not be decoded"),
    "cut": ("a.mkv", cut_end, "has no frames between"),
    "damaged MJPEG": (
        "a.avi", lambda path: damage(write_video(path, codec="mjpeg", pixels="yuvj420p"), 0.5, 300),
        " frames could not be decoded",
    ),
    "hole in a transport stream": ("a.ts", cut_hole, "lacks data, first at 0."),
    **{
        f"turned: {turn}": ("a.mp4", lambda path, turn=turn: set_turn(write_video(path), turn), "is turned upright")
        for turn in TURNS
    },
}  # fmt: skip


def read_offline(path: Path, **keys: object) -> tuple[list[np.ndarray], list[float], list[str]]:
    """The frames of the three splits, their times and the notes."""
    with collect_notes() as notes:
        splits = [load_split(make_query(data=path, **keys), name) for name in SPLITS]
    return [frame for split in splits for frame in split.frames], [t for one in splits for t in one.times_s], notes


def read_on_box(path: Path) -> tuple[list[np.ndarray], list[float]]:
    frames, times_s = [], []
    with contextlib.closing(open_source(CameraConfig(str(path), str(path)))) as source:
        while source.advance():
            frames.append(source.shot()())
            times_s.append(source.time_s)
    return frames, times_s


@pytest.mark.parametrize("kind", KINDS)
def test_video_of_every_kind_is_the_same_offline_and_on_the_box(tmp_path, kind, caplog):
    name, make, note = KINDS[kind]
    path = make(tmp_path / name)
    caplog.set_level(logging.WARNING)
    offline, times_s, notes = read_offline(path)
    frames, box_times_s = read_on_box(path)
    assert times_s == box_times_s and len(frames) == len(offline) > 10
    for number, (left, right) in enumerate(zip(offline, frames, strict=True)):
        assert left.shape == right.shape and np.abs(left.astype(int) - right).mean() < 4, number
    sizes = f"{path}: its frames change their size: 96 x 64 from 0.0 s, 64 x 48 from 1.5 s"
    logged = [record.message for record in caplog.records if record.message.startswith("camera ")]
    assert [f"camera {one}" for one in notes if one != sizes] == logged
    assert len(logged) == bool(note) and note in "".join(logged) and (sizes in notes) == (kind == "new size")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("damaged", "cut", "hole"))])
def test_video_of_every_kind_shows_the_frames_upright_in_their_colours(tmp_path, kind):
    name, make, _ = KINDS[kind]
    frames, times_s = read_on_box(make(tmp_path / name))
    assert len(frames) == COUNT
    tolerance = 8 if kind in ("HDR10", "10 bits", "interlaced MPEG-2") else 4
    for number, image in enumerate(frames):
        expected = draw_frame(number, (64, 48) if kind == "new size" and number > 14 else (96, 64))
        expected = turn_frame(expected, kind[8:]) if kind.startswith("turned") else expected
        assert image.shape == expected.shape
        error = np.abs(image.astype(int) - expected)
        assert error.mean() < tolerance, number
        assert kind not in ("full range", "BT.709") or error[44:52, 64:80].max() < 10, "green"
    expected_s = [ms / 1000 for ms in VFR_MS] if kind == "variable rate" else [i / FPS for i in range(COUNT)]
    assert times_s == pytest.approx(expected_s, abs=0.002)


def test_damaged_video_keeps_the_times_of_its_whole_frames(tmp_path):
    frames, times_s = read_on_box(damage(write_video(tmp_path / "a.mp4"), 0.6, 200))
    assert len(frames) < COUNT and set(np.round(times_s, 3)) < {number / FPS for number in range(COUNT)}
    shown = draw_frame(round(times_s[-1] * FPS))
    assert np.abs(frames[-1].astype(int) - shown).mean() < 4


def test_video_is_cut_and_thinned_by_its_own_times(tmp_path):
    path = write_video(tmp_path / "a.mp4", times_ms=VFR_MS)
    query = make_query(data=path)
    assert [len(load_split(query, name)) for name in SPLITS] == [15, 2, 3]
    _, times_s, _ = read_offline(path, fps=4.0)
    assert times_s == pytest.approx([0, 0.28, 0.8, 1.3, 1.8, 2.3, 2.8, 3.3, 3.8, 4.3, 4.8, 5.3])
    assert len(read_offline(path, fps=5.0)[1]) == COUNT, "its mean rate is lower"


def test_cover_without_video_is_refused(tmp_path):
    path = write_cover(tmp_path / "a.mp4")
    with pytest.raises(InputError, match=r"a\.mp4: has no video in it"):
        read_offline(path)


@pytest.mark.parametrize("gap_s", [61, 120, 3600])
def test_time_lapse_is_played_by_its_own_times(tmp_path: Path, gap_s: int) -> None:
    path = write_video(tmp_path / "a.mkv", times_ms=[1000 * gap_s * number for number in range(COUNT)])
    with collect_notes() as notes:
        splits = [
            load_split(make_query(data=path, task="detection", classes=("car",), fps=5.0), name) for name in SPLITS
        ]
    times_s = [time_s for split in splits for time_s in split.times_s]
    assert times_s == pytest.approx([gap_s * number for number in range(COUNT)])
    assert not any("begin anew" in note for note in notes)


def test_media_clock_begins_anew_where_times_exceed_the_file() -> None:
    clock = MediaClock(FPS, longest_s=500.0)
    assert [clock.advance(time_s) for time_s in (0.0, 400.0)] == [0.0, 400.0] and clock.restarts == 0
    assert clock.advance(10_000.0) < 401.0 and clock.restarts == 1


@given(st.lists(st.none() | st.floats(-1e6, 1e6)))
def test_media_clock_rises_by_bounded_steps(stamps):
    clock, times_s = MediaClock(FPS), [0.0]
    times_s += [clock.advance(stamp) for stamp in stamps]
    steps = np.diff(times_s)
    assert all(0 < step <= MAX_JUMP_S + 1e-6 for step in steps[1:]) and (not stamps or times_s[1] == 0)


@given(st.lists(st.floats(0.001, 0.9), min_size=1), st.floats(-1e5, 1e5))
def test_media_clock_follows_times_that_rise(steps, start):
    clock, own = MediaClock(FPS), [start, *(start + np.cumsum(steps))]
    assert [clock.advance(time_s) for time_s in own] == pytest.approx([time_s - start for time_s in own], abs=0.01)


def test_video_frees_frames_that_no_query_takes(tmp_path):
    gc.collect()
    gc.disable()
    try:
        with contextlib.closing(Video(str(write_video(tmp_path / "a.mp4")), lambda *_: None)) as video:
            while video.advance():
                pass
            frames = [one for one in gc.get_objects() if isinstance(one, av.VideoFrame)]
    finally:
        gc.enable()
    assert len(frames) < COUNT // 2, "a frame and its side data refer to each other"
