"""Videos of every kind of damage: a line that names the file, a camera that ends, and no library's words."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
import yaml

from edge_runtime.capture.sources import DECODERS, CameraConfig, SourceLost, decode_shot, open_source
from models.data import load_split
from models.errors import InputError
from models.video import OPTIONS, PROTOCOLS, Video, is_path, opencv
from models.workload import load_workload
from tests.exhaustive import paired
from tests.hostile.asking import A, ask
from tests.hostile.harness import Seen, refused, tried

Make = Callable[[Path], Any]


def _changed(change: Callable[[bytes], bytes]) -> Make:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def _patched(atom: bytes, offset: int, *values: int) -> Make:
    """Other numbers in an atom of the film's index, so many bytes behind its name."""

    def change(data: bytes) -> bytes:
        at = data.rindex(atom) + len(atom) + offset
        return data[:at] + struct.pack(f">{len(values)}L", *values) + data[at + 4 * len(values) :]

    return _changed(change)


def _all(*steps: Make) -> Make:
    return lambda path: [step(path) for step in steps]


def _sound_alone(path: Path) -> None:
    path.unlink()
    with av.open(str(path), "w") as film:
        stream = film.add_stream("aac", rate=44_100, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 44_100), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 44_100
        film.mux([*stream.encode(sound), *stream.encode(None)])


def _test_card(path: Path, size: tuple[int, int]) -> None:
    with av.open(str(path), "w", format="mpegts") as film:
        stream = film.add_stream("mpeg2video", rate=25)
        stream.width, stream.height = size
        for shade in range(50):
            picture = np.full((*size[::-1], 3), 5 * shade, np.uint8)
            film.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        film.mux(stream.encode(None))


def _playlist(entry: str) -> Make:
    text = f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{entry}\n#EXT-X-ENDLIST\n"
    return lambda path: path.write_text(text)


def _replaced(make: Make) -> Make:
    return lambda path: (path.unlink(), make(path))


NO_VIDEOS: dict[str, Make] = {
    "nothing": _changed(lambda data: b""),
    "a byte": _changed(lambda data: b"\0"),
    "text": _changed(lambda data: b"this is a video, believe me\n"),
    "zeros": _changed(lambda data: bytes(100_000)),
    "garbage": _changed(lambda data: bytes(range(256)) * 400),
    "its beginning": _changed(lambda data: data[:40]),
    "without its index": _changed(lambda data: data[: data.index(b"moov") - 4]),
    "half an index": _changed(lambda data: data[: (data.index(b"moov") + len(data)) // 2]),
    "an index without data": _changed(
        lambda data: (
            data[: data.index(b"mdat") + 4]
            + bytes(data.index(b"moov") - data.index(b"mdat") - 8)
            + data[data.index(b"moov") - 4 :]
        )
    ),
    "a billion frames": _all(
        _patched(b"stsz", 4, 1, 10**9), _patched(b"stts", 4, 1, 10**9, 1), _patched(b"stsc", 4, 1, 1, 10**9, 1)
    ),
    "an index of 2^32 frames": _patched(b"stsz", 8, 2**32 - 1),
    "an atom of 2^32 bytes": _changed(lambda data: data[:24] + b"\xff\xff\xff\xffmoov" + data[32:]),
    "no frames": _patched(b"stsz", 4, 0, 0),
    "sound alone": _sound_alone,
    "a picture": lambda path: path.write_bytes(cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1].tobytes()),
    "an SVG": lambda path: path.write_text('<svg><image href="file:///etc/passwd"/></svg>'),
    "a list of /etc/passwd": _playlist("/etc/passwd"),
    "a list of a film": lambda path: _playlist(str(path.with_name("gate.mp4")))(path),
    "a list of http": _playlist("http://127.0.0.1:9/a.ts"),
    "a list behind an ID3 tag": lambda path: path.write_bytes(b"ID3\4\0\0\0\0\0\0#EXTM3U\n#EXTINF:10,\ngate.mp4\n"),
    "a concatenation": lambda path: path.write_text("ffconcat version 1.0\nfile gate.mp4\n"),
    "a concatenation of /etc/passwd": lambda path: path.write_text("ffconcat version 1.0\nfile /etc/passwd\n"),
    "a description of a session": lambda path: path.write_text(
        "v=0\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
    ),
    "a DASH list": lambda path: path.write_text('<?xml version="1.0"?><MPD><BaseURL>gate.mp4</BaseURL></MPD>'),
    "terminal art": lambda path: path.write_bytes(b"\x1b[31mroot:x:0:0\x1b[0m\n" * 100),
    "a pipe": _replaced(os.mkfifo),
    "/dev/zero": _replaced(lambda path: path.symlink_to("/dev/zero")),
    "/dev/full": _replaced(lambda path: path.symlink_to("/dev/full")),
    "a link to itself": _replaced(lambda path: path.symlink_to(path)),
    "a link that leads nowhere": _replaced(lambda path: path.symlink_to("nowhere")),
    "a folder without frames": _replaced(Path.mkdir),
    "a folder of text": _replaced(lambda path: (path.mkdir(), (path / "a.txt").write_text("x"))),
    "a folder of a picture that is none": _replaced(lambda path: (path.mkdir(), (path / "a.jpg").write_text("x"))),
    "a folder of a pipe": _replaced(lambda path: (path.mkdir(), os.mkfifo(path / "a.jpg"))),
}
DAMAGED: dict[str, Make] = {
    "whole": lambda path: None,
    "a tail of garbage": _changed(lambda data: data + bytes(range(256)) * 400),
    "a frame of zeros": _changed(lambda data: data[:300] + bytes(100) + data[400:]),
    "half of its data": _changed(
        lambda data: (
            data[: (data.index(b"mdat") + data.index(b"moov")) // 2]
            + bytes(data.index(b"moov") - (data.index(b"mdat") + data.index(b"moov")) // 2)
            + data[data.index(b"moov") :]
        )
    ),
    "1e9 frames a second": _patched(b"mdhd", 12, 10**9),
    "a frame in 13 years": _patched(b"stts", 4, 1, 5, 2**31),
    "no time at all": _patched(b"mdhd", 12, 0),
    "a length of 2^32": _patched(b"mvhd", 16, 2**32 - 1),
}
BAD = pytest.mark.parametrize("make", NO_VIDEOS.values(), ids=NO_VIDEOS)


def _film(house: Path, make: Make) -> Path:
    path = house / "film.mp4"
    path.write_bytes((house / "gate.mp4").read_bytes())
    make(path)
    return path


@BAD
def test_a_merge_names_the_file(house: Path, make: Make) -> None:
    path = _film(house, make)
    workload = ask(house, {**A, "data": "film.mp4"}, camera={"source": "gate.mp4"})
    seen = tried(["merge", workload, "-o", "new.safetensors"], house).held()
    *told, line = seen.err.splitlines()
    assert seen.code == 2 and os.path.realpath(path) in line and not seen.changed and seen.out == ""
    assert all(re.match(r"\[ +[0-9.]+ s\]", one) for one in told), told  # how far it had come


def _looked_at(house: Path, source: str, decoder: str = "auto") -> Seen:
    """What a box says of a camera with this source: it starts without it, and tries it again."""
    config = yaml.safe_load((house / "box.yaml").read_text())
    config["cameras"]["gate"] |= {"source": source, "decoder": decoder}
    (house / "box.yaml").write_text(yaml.safe_dump(config))
    seen = tried(["run", "box.yaml", "--check"], house).held()
    assert not seen.changed and all(line.isprintable() and len(line) < 1000 for line in seen.err.splitlines()), seen
    return seen


@pytest.mark.parametrize(("decoder", "make"), paired(["auto", "opencv"], NO_VIDEOS.values()))
def test_a_box_starts_without_it(house: Path, make: Make, decoder: str) -> None:
    seen = _looked_at(house, _film(house, make).name, decoder)
    assert seen.code == 0 and "camera gate does not answer: " in seen.err
    assert all(
        re.match(r"[0-9:]{8} camera|box\.yaml: sound|cameras: gate does not answer$|sinks: jsonl", line)
        for line in seen.err.splitlines()
    ), seen.err  # no library's words


@pytest.mark.parametrize("make", DAMAGED.values(), ids=DAMAGED)
def test_what_decodes_of_a_damaged_film_is_used(house: Path, make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    path = _film(house, make)
    query = load_workload(house / ask(house, {**A, "data": "film.mp4", "roi": [2, 2, 20, 20]})).queries[0]
    try:
        split = load_split(query, "train")
    except InputError as error:
        assert str(path) in str(error)
    else:
        assert all(frame.shape == (18, 18, 3) for frame in split.frames)
        assert all(0 <= second < 1e6 for second in split.times_s)
    for decoder in ("auto", "opencv"):
        try:
            source = open_source(CameraConfig("c", str(path), decoder=decoder))
        except SourceLost:
            continue
        pictures = 0
        while source.advance():
            pictures += decode_shot(source.shot()) is not None
        source.close()
        assert pictures <= 5 and (source.fps is None or 0 < source.fps <= 1000)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("rate", [0.0, -5.0, 1e9, float("nan"), float("inf")])
def test_a_rate_that_is_none(house: Path, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cv2.VideoCapture

    class Claiming:
        def __init__(self, *given: Any) -> None:
            self._real = real(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def get(self, what: int) -> float:
            return rate if what == cv2.CAP_PROP_FPS else self._real.get(what)

    monkeypatch.setattr(cv2, "VideoCapture", Claiming)
    assert Video(str(house / "gate.mp4")).fps is None
    query = load_workload(house / ask(house, {**A, "data": "gate.mp4", "fps": 25})).queries[0]
    assert len(load_split(query, "val")) == 1


@pytest.mark.parametrize("side", [65_535, 16_384, 8_192])
def test_frames_of_too_many_pixels(house: Path, side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = cv2.VideoCapture

    class Claiming:
        def __init__(self, *given: Any) -> None:
            self._real = real(*given)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._real, name)

        def get(self, what: int) -> float:
            return side if what in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT) else self._real.get(what)

        def grab(self) -> bool:
            raise AssertionError("decoded")

    monkeypatch.setattr(cv2, "VideoCapture", Claiming)
    with pytest.raises(InputError, match=rf"gate\.mp4: has frames of {side} x {side} pixels"):
        Video(str(house / "gate.mp4"))


def test_frames_that_change_their_size(house: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = []
    for size in ((48, 32), (20, 10), (96, 64)):
        part = house / f"{size[0]}.ts"
        _test_card(part, size)
        parts.append(part.read_bytes())
    path = house / "film.ts"
    path.write_bytes(b"".join(parts))
    video = Video(str(path))
    while video.advance():
        image = video.image()
        assert image is None or image.ndim == 3
    video.close()
    query = load_workload(house / ask(house, {**A, "data": "film.ts", "roi": [30, 12, 40, 20]})).queries[0]
    split = load_split(query, "train")
    try:
        assert all(frame.size for frame in split.frames)
    except InputError as error:
        assert str(path) in str(error) and "roi" in str(error)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    "source",
    [
        "²",
        "٣",
        "1234",
        "-1",
        "0x1",
        "1e3",
        "a:b",
        "concat:gate.mp4|gate.mp4",
        "img_%03d.png",
        "videotestsrc ! appsink",
        "subfile,,start,0,end,9,,:gate.mp4",
    ],
)
def test_sources_that_are_paths_of_nothing(house: Path, source: str) -> None:
    assert is_path(source)
    seen = _looked_at(house, source)
    assert seen.code == 2 or "camera gate does not answer: " in seen.err
    seen = tried(["inspect", ask(house, A, camera={"source": source})], house).held()
    assert seen.code in (0, 2) and "cameras.gate.source" in seen.err


@pytest.mark.parametrize(
    "source", ["file:///etc/passwd", "concat://a", "x://", "://", "gopher://x/", "data://text", "x" * 5000]
)
def test_sources_that_are_no_cameras(house: Path, source: str) -> None:
    config = yaml.safe_load((house / "box.yaml").read_text())
    config["cameras"]["gate"]["source"] = source
    (house / "box.yaml").write_text(yaml.safe_dump(config))
    refused(["run", "box.yaml", "--check"], house, "box.yaml", "cameras.gate.source")


@pytest.mark.parametrize("decoder", [name for name in DECODERS if name != "gstreamer"])
def test_a_film_that_is_gone_is_a_lost_source(house: Path, decoder: str) -> None:
    with pytest.raises(SourceLost):
        open_source(CameraConfig("c", str(house / "gone.mp4"), decoder=decoder))


def test_what_ffmpeg_may_open_is_told_it_and_a_users_own_options_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, kept in (
        (None, "rtsp_transport;tcp"),
        ("rtsp_transport;udp", "rtsp_transport;udp"),
        ("protocol_whitelist;file", "protocol_whitelist;file"),
    ):
        opencv.cache_clear()
        monkeypatch.delenv(OPTIONS, raising=False) if given is None else monkeypatch.setenv(OPTIONS, given)
        opencv()
        options = dict(one.split(";") for one in os.environ[OPTIONS].split("|"))
        assert os.environ[OPTIONS].startswith(kept) and "format_whitelist" in options
        assert "concat" not in options["format_whitelist"].split(",") and "subfile" not in PROTOCOLS
    opencv.cache_clear()
    monkeypatch.delenv(OPTIONS)
    opencv()
