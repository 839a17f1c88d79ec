"""Pictures that mean harm: train, merge and eval name the file, a box counts a frame that did not decode."""

from __future__ import annotations

import os
import re
import shutil
import struct
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from edge_runtime.capture.sources import FolderSource, decode_shot
from models.pictures import MAX_PICTURE_BYTES, read_picture
from tests.hostile.asking import A, ask
from tests.hostile.harness import tried

PICTURE = cv2.resize(np.random.default_rng(0).integers(0, 256, (4, 6, 3), np.uint8), (48, 32))


def _encoded(kind: str = "JPEG", image: np.ndarray = PICTURE, mode: str = "RGB", **options: Any) -> bytes:
    made = BytesIO()
    Image.fromarray(image).convert(mode).save(made, kind, **options)
    return made.getvalue()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">L", len(data)) + kind + data + struct.pack(">L", zlib.crc32(kind + data))


def _png(width: int, height: int, data: bytes = b"", more: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    head = struct.pack(">LLBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + more + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _jpeg_of(width: int, height: int) -> bytes:
    """A picture whose header claims other sides."""
    data = _encoded()
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def _torn(data: bytes, part: float) -> bytes:
    return data[: int(len(data) * part)]


JPEG, PNG = _encoded(), _encoded("PNG")
FILES: dict[str, bytes | Callable[[Path], Any]] = {
    "nothing": b"",
    "a byte": b"\xff",
    "a beginning alone": JPEG[:3],
    "text": b"this is a picture, believe me",
    "zeros": bytes(10_000),
    "garbage": bytes(range(256)) * 40,
    "half a JPEG": _torn(JPEG, 0.5),
    "nearly all of a JPEG": _torn(JPEG, 0.95),
    "half a PNG": _torn(PNG, 0.5),
    "nearly all of a PNG": _torn(PNG, 0.9),
    "a PNG with another sum": PNG.replace(PNG[40:44], bytes(4), 1),
    "a PNG of 30,000 x 30,000": _png(30_000, 30_000, zlib.compress(bytes(10**7))),
    "a PNG of 2^31 x 2^31": _png(2**31 - 1, 2**31 - 1),
    "a PNG of no sides": _png(0, 0),
    "a PNG of negative sides": _png(2**32 - 1, 1),
    "a PNG of an unknown kind": _png(8, 8, zlib.compress(bytes(1000)), depth=3, colour=5),
    "a PNG with less data than it claims": _png(5000, 5000, zlib.compress(bytes(10))),
    "a PNG with text that unpacks to 100 MB": _png(
        8, 8, zlib.compress(bytes(200)), _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(10**8)))
    ),
    "a PNG with a profile that unpacks to 100 MB": _png(
        8, 8, zlib.compress(bytes(20)), _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(10**8)))
    ),
    "a PNG with a chunk of 2^31 bytes": PNG[:33] + struct.pack(">L", 2**31 - 1) + b"tEXt" + PNG[33:],
    "a JPEG of 65,535 x 65,535": _jpeg_of(65535, 65535),
    "a JPEG of no height": _jpeg_of(48, 0),
    "a JPEG of 20,000 x 20,000": _jpeg_of(20_000, 20_000),
    "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "a GIF": _encoded("GIF"),
    "a BMP": _encoded("BMP"),
    "a TIFF": _encoded("TIFF"),
    "a WebP": _encoded("WEBP"),
    "a zip": b"PK\3\4" + bytes(100),
    "a film": b"\0\0\0\x18ftypmp42" + bytes(100),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 100 100\n(/etc/passwd) run\n",
    "more than 64 MB": lambda path: (path.write_bytes(JPEG), os.truncate(path, MAX_PICTURE_BYTES + 1)),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "/dev/zero": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "/dev/full": lambda path: (path.unlink(), path.symlink_to("/dev/full")),
    "a link that leads nowhere": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "a link to itself": lambda path: (path.unlink(), path.symlink_to(path)),
}
SOUND: dict[str, bytes] = {
    "JPEG": JPEG,
    "PNG": PNG,
    "progressive": _encoded(progressive=True),
    "grey": _encoded(mode="L"),
    "CMYK": _encoded(mode="CMYK"),
    "transparent": _encoded("PNG", mode="RGBA"),
    "grey and transparent": _encoded("PNG", mode="LA"),
    "a palette": _encoded("PNG", mode="P"),
    "black and white": _encoded("PNG", mode="1"),
    "16 bits": cv2.imencode(".png", np.full((32, 48, 3), 40_000, np.uint16))[1].tobytes(),
    "16 bits of grey": cv2.imencode(".png", np.full((32, 48), 40_000, np.uint16))[1].tobytes(),
    "moving": _encoded("PNG", save_all=True, append_images=[Image.new("RGB", (48, 32))] * 3),
    "garbage for EXIF": _encoded(exif=b"Exif\0\0" + bytes(range(256))),
    "an orientation of 65,535": _encoded(exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\xff\xff\0\0\0\0\0\0"),
    "a tail of garbage": JPEG + bytes(range(256)) * 40,
}
BAD = pytest.mark.parametrize("content", FILES.values(), ids=FILES)


def _put(path: Path, content: bytes | Callable[[Path], Any]) -> None:
    path.write_bytes(b"")
    path.write_bytes(content) if isinstance(content, bytes) else content(path)


@BAD
def test_training_names_the_file(house: Path, content: bytes | Callable[[Path], Any]) -> None:
    path = house / "data" / "a" / "train" / "empty" / "u9__9.jpg"
    _put(path, content)
    seen = tried(["train", ask(house, {**A, "weights": "new.safetensors"})], house).held()
    *told, line = seen.err.splitlines()
    assert seen.code == 2 and str(path) in line and seen.out == "" and not seen.changed
    assert all(re.match(r"\[ +[0-9.]+ s\]", one) for one in told)  # how far it had come, and no library's words


@BAD
def test_a_camera_goes_on_without_it_and_says_nothing(
    tmp_path: Path, content: bytes | Callable[[Path], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    _put(tmp_path / "0.jpg", content)
    (tmp_path / "1.jpg").write_bytes(JPEG)
    source = FolderSource(tmp_path)
    seen = []
    while source.advance():
        seen.append(decode_shot(source.shot()))
    assert seen[0] is None and seen[1] is not None
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("command", [["merge", "-o", "new.safetensors"], ["eval", "b.safetensors"]])
@pytest.mark.parametrize("kind", ["half a JPEG", "a pipe"])
def test_merging_and_judging_name_the_file_too(house: Path, command: list[str], kind: str) -> None:
    for split in ("val", "test"):
        _put(house / "data" / "a" / split / "empty" / "u9__9.jpg", FILES[kind])
    workload = ask(house, A)
    asked = ["merge", workload, *command[1:]] if command[0] == "merge" else [*command, "workload.yaml", "-o", "judged"]
    seen = tried(asked, house).held()
    line = seen.err.splitlines()[-1]
    assert seen.code == 2 and "u9__9.jpg" in line and not seen.changed


@pytest.mark.parametrize("data", SOUND.values(), ids=SOUND)
def test_sound_pictures_of_every_kind_are_read(tmp_path: Path, data: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg"))  # a name whose bytes are no text
    path.write_bytes(data)
    image = read_picture(path)
    assert image.shape == (32, 48, 3) and image.dtype == np.uint8 and image.flags.writeable
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_are_as_opencv_turns_and_decodes_them(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    path = tmp_path / "a.jpg"
    path.write_bytes(_encoded(exif=exif))
    expected = cv2.imread(str(path), cv2.IMREAD_COLOR)
    assert expected is not None and np.array_equal(read_picture(path), expected[..., ::-1])


@pytest.mark.parametrize(
    "stem", ["u0__²5", "u0__٣", "u0__", "__", "u0__" + "9" * 200, "u0__-1", "u0__1e9", "\u202e__5"]
)
def test_names_of_frames(house: Path, stem: str) -> None:
    folder = house / "data" / "a" / "train" / "empty"
    shutil.copyfile(folder / "u0__0empty.png", folder / f"{stem}.png")
    seen = tried(["inspect", ask(house, {**A, "weights": None})], house).held()
    assert seen.code == 0 and "data" not in seen.err
