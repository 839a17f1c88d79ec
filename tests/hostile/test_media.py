"""Pictures, videos and annotations from others: refused in one line that names the file, without libraries' output."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from PIL import Image

from gemel.models.data import load_split
from gemel.models.errors import InputError
from gemel.models.files.pictures import MAX_PICTURE_BYTES, read_picture
from gemel.models.files.video import Video, plausible_rate
from gemel.models.workload import load_workload
from tests.hostile.codecs import png_chunk
from tests.hostile.harness import check_refused
from tests.video_files import draw_frame, write_video

Make = Callable[[Path], Any]


def _encode(kind: str = "JPEG", mode: str = "RGB", **options: Any) -> bytes:
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8)
    made = io.BytesIO()
    Image.fromarray(image).convert(mode).save(made, kind, **options)
    return made.getvalue()


def _png(width: int, height: int, data: bytes = b"", more: bytes = b"") -> bytes:
    head = struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", head) + more + png_chunk(b"IDAT", data) + png_chunk(b"IEND", b"")


def _jpeg_of(width: int, height: int) -> bytes:
    """A picture whose header claims other sides."""
    data = _encode()
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


JPEG, PNG = _encode(), _encode("PNG")
PICTURES: dict[str, bytes | Make] = {
    "empty": b"",
    "garbage": bytes(range(256)) * 40,
    "half a JPEG": JPEG[: len(JPEG) // 2],
    "PNG of 30,000 x 30,000": _png(30_000, 30_000, zlib.compress(bytes(10**7))),
    "PNG of 2^31 x 2^31": _png(2**31 - 1, 2**31 - 1),
    "PNG whose text unpacks to 100 MB": _png(
        8, 8, zlib.compress(bytes(200)), png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))
    ),
    "JPEG of 65,535 x 65,535": _jpeg_of(65535, 65535),
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n(/etc/passwd) run\n",
    "more than 64 MB": lambda path: (path.write_bytes(JPEG), os.truncate(path, MAX_PICTURE_BYTES + 1)),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "/dev/zero": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("content", PICTURES.values(), ids=PICTURES)
def test_damaged_picture_is_refused(tmp_path: Path, content: bytes | Make, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "u9__9.jpg"
    path.write_bytes(content if isinstance(content, bytes) else b"")
    if callable(content):
        content(path)
    with pytest.raises(InputError, match=re.escape(str(path))) as caught:
        read_picture(path)
    assert "\n" not in str(caught.value) and capfd.readouterr() == ("", "")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_picture_is_turned_as_opencv_turns_it(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    path = tmp_path / "a.jpg"
    path.write_bytes(_encode(exif=exif))
    expected = cv2.imread(str(path), cv2.IMREAD_COLOR)
    assert expected is not None and np.array_equal(read_picture(path), expected[..., ::-1])


@pytest.mark.parametrize(
    "data",
    [_encode(progressive=True), _encode(mode="CMYK"), _encode("PNG", mode="RGBA"), _encode("PNG", mode="P"),
     cv2.imencode(".png", np.full((32, 48), 40_000, np.uint16))[1].tobytes(), JPEG + bytes(1000),
     _encode(exif=b"Exif\0\0" + bytes(range(256)))],
)  # fmt: skip
def test_valid_picture_of_every_kind_is_read(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.jpg").write_bytes(data)
    image = read_picture(tmp_path / "a.jpg")
    assert image.shape == (32, 48, 3) and image.dtype == np.uint8


VIDEOS: dict[str, Make] = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 400),
    "without its index": lambda path: path.write_bytes(path.read_bytes().partition(b"moov")[0][:-4]),
    "picture": lambda path: path.write_bytes(PNG),
    "playlist of /etc/passwd": lambda path: path.write_text("#EXTM3U\n#EXTINF:10,\n/etc/passwd\n#EXT-X-ENDLIST\n"),
    "playlist behind an ID3 tag": lambda path: path.write_bytes(b"ID3\4\0\0\0\0\0\0#EXTM3U\n#EXTINF:10,\ngate.mp4\n"),
    "concatenation": lambda path: path.write_text("ffconcat version 1.0\nfile gate.mp4\n"),
    "session description": lambda path: path.write_text("v=0\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "/dev/zero": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("make", VIDEOS.values(), ids=VIDEOS)
def test_damaged_video_is_refused_as_data(house: Path, make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    (house / "film.mp4").write_bytes((house / "gate.mp4").read_bytes())
    make(house / "film.mp4")
    document = yaml.safe_load((house / "one.yaml").read_text())
    document["queries"][0]["data"] = "film.mp4"
    (house / "one.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(InputError, match=re.escape(str((house / "film.mp4").resolve()))):
        load_split(load_workload(house / "one.yaml").queries[0], "train")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("side", ["first frame", "later frame"])
def test_video_of_too_many_pixels_is_refused(tmp_path: Path, side: str, monkeypatch) -> None:
    clip = write_video(tmp_path / "a.ts", [draw_frame(0, (64, 48))] * (side == "later frame") * 5 or None)
    clip.write_bytes(clip.read_bytes() + write_video(tmp_path / "b.ts").read_bytes())
    monkeypatch.setattr("gemel.models.files.video.MAX_PIXELS", 5000)
    if side == "first frame":
        with pytest.raises(InputError, match="pixels"):
            Video(str(clip), lambda *_: None)
    else:
        with contextlib.closing(Video(str(clip), lambda *_: None)) as video:
            frames = [video.shot()() for _ in iter(video.advance, False)]
            shapes = [frame.shape for frame in frames if frame is not None]
        assert set(shapes) == {(48, 64, 3)} and video.damaged


@pytest.mark.parametrize("rate", [1e9, math.nan])
def test_video_of_absurd_rate_has_none(tmp_path: Path, rate: float) -> None:
    assert plausible_rate(rate) is None and plausible_rate(25) == 25


@pytest.mark.parametrize("source", ["file:///etc/passwd", "concat://a", "gopher://x/", "data://text"])
def test_camera_source_that_is_no_stream_is_refused(house: Path, source: str) -> None:
    config = yaml.safe_load((house / "box.yaml").read_text())
    config["cameras"]["gate"]["source"] = source
    (house / "box.yaml").write_text(yaml.safe_dump(config))
    check_refused(["run", "box.yaml", "--check"], house, "box.yaml", "cameras.gate.source")
