"""JPEG and PNG pictures from others, checked against bounds before they are decoded."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from models.errors import InputError
from models.io import open_regular, read_bounded

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


SUFFIXES = frozenset((".jpg", ".jpeg", ".png"))
MAX_PICTURE_BYTES = 2**26
MAX_PIXELS = 2**25
"""Of a picture or a video's frame: a little more than 7680 x 4320."""
PICTURE_FORMATS = ("JPEG", "PNG")
PICTURE_HINT = "replace or remove it"
ORIENTATION = 0x0112
"""The EXIF tag: 1 upright, 2 to 4 mirrored or upside down, 5 to 8 on its side."""
UNDECODABLE = "is not an image that decodes: no JPEG or PNG, or damaged"
DIGITS = re.compile("([0-9]+)")


def list_pictures(folder: Path) -> list[Path]:
    """The pictures of a folder, by their suffix, in natural order of their names; empty without a folder.

    Numbers are compared as numbers: frame-9.jpg comes before frame-10.jpg.
    """
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    return sorted(found, key=lambda path: (_natural_key(path.stem), path.name))


def _natural_key(text: str) -> list[str | int]:
    """A text's parts, every second of which is a number."""
    return [int(part) if place % 2 else part for place, part in enumerate(DIGITS.split(text))]


def read_picture(path: Path) -> np.ndarray:
    """uint8 RGB (H, W, 3), upright; transparency is left out, and 16 bits become 8.

    Raises InputError for a file that is no whole JPEG or PNG, larger than MAX_BYTES or of more than MAX_PIXELS.
    """
    return decode_picture(read_bounded(path, MAX_PICTURE_BYTES, PICTURE_HINT), path)


class PictureSize(NamedTuple):
    """Width and height as decoded, upright, and the EXIF orientation (1 where there is none)."""

    width: int
    height: int
    orientation: int = 1


def read_picture_size(path: Path) -> PictureSize:
    """The size from the header alone. Raises InputError as `read_picture`."""
    from PIL import Image

    with open_regular(path, PICTURE_HINT) as file:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(file, formats=PICTURE_FORMATS) as image:
                    width, height = image.size
                    orientation = 1
                    with contextlib.suppress(Exception):  # invalid EXIF data leave the picture as decoded
                        orientation = int(Image.Image.getexif(image).get(ORIENTATION, 1))
        except Exception as error:
            raise InputError(path, UNDECODABLE, PICTURE_HINT) from error
    return PictureSize(*((height, width) if 5 <= orientation <= 8 else (width, height)), orientation)


def decode_picture(data: bytes, path: Path) -> np.ndarray:
    """As `read_picture`, of what was read from a file already."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=PICTURE_FORMATS) as image:
                width, height = image.size
                if width * height <= MAX_PIXELS:
                    image.load()
                    return _pixels(image)
    except Exception as error:  # a damaged picture can fail in any way
        raise InputError(path, UNDECODABLE, PICTURE_HINT) from error
    fault = f"has {width} x {height} pixels, more than {MAX_PIXELS:,}"
    raise InputError(path, fault, "make it smaller, or remove it")


def _pixels(image: Image) -> np.ndarray:
    """Pixels of a decoded picture, rotated as its EXIF data demand."""
    import numpy as np
    from PIL.Image import fromarray
    from PIL.ImageOps import exif_transpose

    with contextlib.suppress(Exception):  # invalid EXIF data leave the picture as decoded
        image = exif_transpose(image)
    if image.mode.startswith("I"):  # 16 bits of grey
        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.array(image.convert("RGB"))
