"""The masks of a split: one PNG for each picture, checked against it and against the classes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from gemel.models.errors import InputError, join_names
from gemel.models.files.io import read_bounded
from gemel.models.files.pictures import (
    MAX_PICTURE_BYTES,
    MAX_PIXELS,
    LabelledPicture,
    read_picture_size,
)
from gemel.models.notes import add_note
from gemel.models.objects.masks import IGNORED
from gemel.models.predictions import MaskLabels
from gemel.models.preprocess import Preprocess
from gemel.models.tasks.segmentation import prepare_mask

MASK_HINT = (
    "save it as PNG with one value a pixel: the position of its class in `classes`, 255 for none"
)


def read_mask(path: Path) -> np.ndarray:
    """uint8 (H, W), the values as stored (of a palette: the positions). InputError for anything but such a PNG."""
    from PIL import Image

    data = read_bounded(path, MAX_PICTURE_BYTES, MASK_HINT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
                mode = image.mode
                pixels = image.size[0] * image.size[1]
                if mode in ("L", "P", "1") and pixels <= MAX_PIXELS:
                    return np.array(image).astype(np.uint8)
    except Exception as error:  # a damaged picture can fail in any way
        raise InputError(path, "is no PNG that decodes", MASK_HINT) from error
    problem = (
        f"is no mask of 8 bits but {mode}"
        if pixels <= MAX_PIXELS
        else f"has more than {MAX_PIXELS:,} pixels"
    )
    raise InputError(path, problem, MASK_HINT)


def read_masks(
    folder: Path, pictures: Sequence[Path], classes: Sequence[str], preprocess: Preprocess
) -> list[LabelledPicture]:
    """Each picture with its mask, NAME.png in `folder`, at the resolution of the network's input.

    A value is the position of a class, 255 is none. Of two classes 0 and 255 are the first and the second where there
    are no other values, with a note. Raises InputError for a mask that is missing, or of another size or class count.
    """
    paths = [folder / f"{picture.stem}.png" for picture in pictures]
    if missing := [path.name for path in paths if not path.is_file()]:
        problem = f"{len(missing)} of {len(paths)} masks are missing: {join_names(missing, 3)}"
        raise InputError(
            folder, problem, f"give each picture a mask of its name: {MASK_HINT}", "data"
        )
    labels = list[MaskLabels]()
    shown = np.zeros(IGNORED + 1, bool)
    for path, picture in zip(paths, pictures, strict=True):
        mask = read_mask(path)
        size = read_picture_size(picture)
        if mask.shape != (size.height, size.width):
            problem = f"has {mask.shape[1]} x {mask.shape[0]} pixels, its picture {size.width} x {size.height}"
            raise InputError(path, problem, "save it in the size of its picture, upright", "data")
        values = np.unique(mask)
        if odd := [int(value) for value in values if len(classes) <= value < IGNORED]:
            problem = f"holds the value {odd[0]}, and there are {len(classes)} classes (0 to {len(classes) - 1})"
            raise InputError(
                path, problem, f"correct `classes`, or the mask: {MASK_HINT}", "classes"
            )
        shown[values] = True
        labels.append(prepare_mask(mask, preprocess))
    if len(classes) == 2 and shown[IGNORED] and not shown[1]:
        add_note(
            folder,
            f"masks hold 0 and 255 only, so 255 is taken as '{classes[1]}'",
            "use 1 if 255 is no class",
        )
        for label in labels:
            label.mask[label.mask == IGNORED] = 1
    return [
        LabelledPicture(picture, label) for picture, label in zip(pictures, labels, strict=True)
    ]
