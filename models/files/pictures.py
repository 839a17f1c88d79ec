"""JPEG and PNG pictures from others, checked against bounds before they are decoded."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gemel.models.errors import InputError, join_names
from gemel.models.files.io import open_regular, read_bounded
from gemel.models.notes import add_note

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

    from gemel.models.predictions import GroundTruth

SUFFIXES = frozenset((".jpg", ".jpeg", ".png"))
MAX_PICTURE_BYTES = 2**26
MAX_PIXELS = 2**25
"""Of a picture or a video's frame: a little more than 7680 x 4320."""
PICTURE_FORMATS = ("JPEG", "PNG")
PUSHED_FORMATS = (*PICTURE_FORMATS, "WEBP", "BMP")
"""Of pictures that clients send by HTTP."""
PICTURE_HINT = "replace or remove it"
ORIENTATION = 0x0112
"""The EXIF tag: 1 upright, 2 to 4 mirrored or upside down, 5 to 8 on its side."""
UNDECODABLE = "is not an image that decodes: no JPEG or PNG, or damaged"
DIGITS = re.compile("([0-9]+)")
SAMPLE_NAME = re.compile(r"([0-9]{15})-(.+)-[0-9]+\.png")
"""Of a sample of a spool: milliseconds, query, frame."""
PNG_DEPTH = 24
"""Where a PNG file holds the bits of a value."""
SPLIT_NAMES = {
    "train": ("train", "training"), "val": ("val", "valid", "validation", "dev"), "test": ("test", "testing"),
}  # fmt: skip
"""What each split may be called, the first preferred."""
_EXAMPLES: dict[tuple[Path, str], Path] = {}
"""The first picture that was converted in this way, by data folder: the note of a folder names this one."""


def list_pictures(folder: Path) -> list[Path]:
    """The pictures of a folder, by their suffix, in natural order of their names; empty without a folder.

    Numbers are compared as numbers: frame-9.jpg comes before frame-10.jpg. Hidden ones, such as the ._x.png that macOS
    puts beside an x.png, are left out, with a note that counts them.
    """
    if not folder.is_dir():
        return []
    pictures = [path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES]
    visible = [path for path in pictures if not path.name.startswith(".")]
    if hidden := len(pictures) - len(visible):
        text = f"{hidden} of {len(pictures)} files have a dot first and are left out"
        add_note(folder, text, "rename them if they are pictures")
    return sorted(visible, key=natural_key)


def list_all_pictures(
    folder: Path, nested: bool = False, beside: tuple[str, ...] = ()
) -> list[Path]:
    """As `list_pictures`, of a folder that is to hold nothing else but files with these suffixes; a note names others.

    With `nested` the pictures of its subfolders follow, in natural order of their paths.
    """
    pictures = list_pictures(folder)
    files = folder.iterdir() if folder.is_dir() else ()
    entries = [
        path for path in files if not path.name.startswith(".") and path.suffix not in beside
    ]
    folders = []
    if nested:
        folders = [path for path in entries if path.is_dir() and not path.is_symlink()]
    left_out = sorted(path.name for path in {*entries} - {*pictures, *folders})
    if left_out:
        counts = f"{len(left_out)} of {len(entries)} entries"
        text = f"{counts} are no .jpg or .png and are left out: {join_names(left_out, 3)}"
        hint = "save pictures as JPEG or PNG" + ("" if nested else ", in this folder itself")
        add_note(folder, text, hint)
    return pictures + [
        path
        for subfolder in sorted(folders, key=natural_key)
        for path in list_all_pictures(subfolder, nested, beside)
    ]


def natural_key(path: Path) -> tuple[list[list[str | int]], str]:
    """Orders paths by their names, in which numbers count as numbers; the suffix counts last."""
    parts = path.with_suffix("").parts
    return [
        [int(token) if at % 2 else token for at, token in enumerate(DIGITS.split(part))]
        for part in parts
    ], path.suffix


def read_picture(path: Path, note_turned: bool = True) -> np.ndarray:
    """uint8 RGB (H, W, 3), upright; transparency is left out, and 16 bits become 8.

    `note_turned` notes a picture that its EXIF tag turns. Raises InputError for a file that is no whole JPEG or PNG,
    larger than MAX_BYTES or of more than MAX_PIXELS.
    """
    return decode_picture(read_bounded(path, MAX_PICTURE_BYTES, PICTURE_HINT), path, note_turned)


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
                    # Invalid EXIF data leave the picture as decoded.
                    with contextlib.suppress(Exception):
                        orientation = int(Image.Image.getexif(image).get(ORIENTATION, 1))
        except Exception as error:
            raise InputError(path, UNDECODABLE, PICTURE_HINT) from error
    return PictureSize(
        *((height, width) if 5 <= orientation <= 8 else (width, height)), orientation
    )


@dataclass(frozen=True)
class LabelledPicture:
    """A picture and its label; `size` as its header says where boxes were placed by it, `unit` as a table names it."""

    path: Path
    label: GroundTruth
    size: PictureSize | None = None
    unit: str = ""

    def read(self) -> np.ndarray:
        """As `read_picture`. Raises InputError too for a picture of another size than its header says."""
        frame = read_picture(self.path, note_turned=self.size is None)
        if self.size and frame.shape[1::-1] != self.size[:2]:
            sizes = f"{frame.shape[1]} x {frame.shape[0]} pixels, and its header {self.size.width} x {self.size.height}"
            raise InputError(
                self.path, f"has {sizes}: where its boxes lie is not known", "save it again"
            )
        return frame


def decode_picture(
    data: bytes, path: Path, note_turned: bool = True, formats: tuple[str, ...] = PICTURE_FORMATS
) -> np.ndarray:
    """As `read_picture`, of what was read already; `path` is empty for a camera's picture."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=formats) as image:
                width, height = image.size
                if width * height <= MAX_PIXELS:
                    image.load()
                    _note_conversions(image, data, path, note_turned)
                    return _pixels(image)
    except Exception as error:  # a damaged picture can fail in any way
        names = " or ".join((", ".join(formats[:-1]), formats[-1]))
        problem = (
            UNDECODABLE
            if formats == PICTURE_FORMATS
            else f"is not an image that decodes: no {names}, or damaged"
        )
        raise InputError(path, problem, PICTURE_HINT) from error
    fault = f"has {width} x {height} pixels, more than {MAX_PIXELS:,}"
    raise InputError(path, fault, "make it smaller, or remove it")


def _note_conversions(image: Image, data: bytes, path: Path, note_turned: bool) -> None:
    """Note what `_pixels` changes or leaves out; one note for a data folder and change."""

    def note(text: str, hint: str) -> None:
        folder = _data_folder(path.parent)
        example = _EXAMPLES.setdefault((folder, text), path.relative_to(folder))
        pictures = f"pictures such as {example}" if path.name else "its pictures"
        add_note(folder if path.name else "a camera", f"{pictures} {text}", hint)

    if image.format == "PNG" and data[PNG_DEPTH] > 8:
        note(
            "hold 16 bits, reduced to 8 (values / 256)",
            "scale them to 8 bits if their values use a part of the range",
        )
    if image.mode == "CMYK":
        note("hold CMYK, converted to RGB without a colour profile", "save them in RGB")
    if (
        profile := _profile_name(image.info.get("icc_profile") or b"")
    ) and "srgb" not in profile.lower():
        note(
            f"hold the colour profile '{profile:.60}', which is not applied", "convert them to sRGB"
        )
    if image.has_transparency_data and min(image.convert("RGBA").getchannel("A").tobytes()) < 255:
        note(
            "have transparent parts, used as if opaque",
            "put them on the background that they should have",
        )
    if getattr(image, "n_frames", 1) > 1:
        note(
            "hold several frames, of which the first is used",
            "save the others as files of their own",
        )
    with contextlib.suppress(Exception):  # invalid EXIF data leave the picture as decoded
        if note_turned and image.getexif().get(ORIENTATION, 1) in range(2, 9):
            note(
                "are turned or mirrored as their EXIF tag says",
                "save them without the tag if it is wrong",
            )


@lru_cache
def _data_folder(folder: Path) -> Path:
    """The folder of all splits, if this one is SPLIT or SPLIT/CLASS and another split lies beside it; else itself."""
    split_of = {name: split for split, names in SPLIT_NAMES.items() for name in names}
    for candidate in (folder, folder.parent):
        other_splits = [
            name for name, split in split_of.items() if split != split_of.get(candidate.name)
        ]
        if candidate.name in split_of and any(
            (candidate.parent / name).is_dir() for name in other_splits
        ):
            return candidate.parent
    return folder


@lru_cache
def _profile_name(profile: bytes) -> str:
    """The description of an ICC profile; empty without one, and for one that cannot be read."""
    from PIL import ImageCms

    try:
        return (
            ImageCms.getProfileDescription(ImageCms.ImageCmsProfile(io.BytesIO(profile))).strip()
            if profile
            else ""
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return ""


def _pixels(image: Image) -> np.ndarray:
    """Pixels of a decoded picture, rotated as its EXIF data demand."""
    import numpy as np
    from PIL.Image import fromarray
    from PIL.ImageOps import exif_transpose

    with contextlib.suppress(Exception):  # invalid EXIF data leave the picture as decoded
        image = exif_transpose(image)
    # Pillow would cut the values off at 255.
    if image.mode.startswith("I"):  # 16 bits of grey
        image = fromarray((np.asarray(image) >> 8).astype(np.uint8))
    return np.array(image.convert("RGB"))
