"""Resizing that averages what a pixel of the result covers: what Pillow and torchvision do with `antialias`."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    Resize = Callable[[np.ndarray, tuple[int, int]], np.ndarray]


BAND_BYTES = 2**20
"""Of an image that are copied at once: a copy of a whole frame takes six times as long, since its pages are new."""


def resize_antialiased(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """uint8 RGB (h, w, 3) -> uint8 RGB (H, W, 3), bilinear with antialiasing; `size` is (W, H).

    Pillow takes five times as long as the SIMD of fast_image_resize, which has wheels for x86 alone; their values
    differ by at most 1.
    """
    return _choose_resizer()(image, size)


@functools.cache
def _choose_resizer() -> Resize:
    try:
        import cykooz_resizer  # noqa: F401
    except ImportError:
        return resize_by_pillow
    return resize_by_simd


def resize_by_pillow(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """As `resize_antialiased`, on any processor."""
    from PIL import Image

    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR))


def resize_by_simd(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """As `resize_antialiased`, where cykooz_resizer is installed; the processor's extensions change no value."""
    from cykooz_resizer import (
        CropBox,
        FilterType,
        ImageData,
        PixelType,
        ResizeAlg,
        ResizeOptions,
        Resizer,
    )

    height, width, _ = image.shape
    columns, rows = size
    scale = height / rows
    reach = max(scale, 1.0)  # rows of the image above and below that a row of the result depends on
    rows_at_once = max(1, int(BAND_BYTES / (image[0].nbytes * scale)))
    algorithm = ResizeAlg.convolution(FilterType.bilinear)
    resizer = Resizer()  # of its own, since threads cannot share one
    bands = []
    for start in range(0, rows, rows_at_once):
        end = min(rows, start + rows_at_once)
        first = max(0, math.floor(start * scale - reach))
        last = min(height, math.ceil(end * scale + reach))
        top = start * scale - first
        box = CropBox(0, top, width, min((end - start) * scale, last - first - top))
        source = ImageData(width, last - first, PixelType.U8x3, image[first:last].tobytes())
        band = ImageData(columns, end - start, PixelType.U8x3)
        resizer.resize(
            source, band, ResizeOptions(resize_alg=algorithm, crop_box=box, use_alpha=False)
        )
        bands.append(np.frombuffer(band.get_buffer(), np.uint8).reshape(-1, columns, 3))
    return bands[0] if len(bands) == 1 else np.concatenate(bands)
