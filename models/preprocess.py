"""Preprocessing: crop, resize and normalise a decoded frame into a network's input."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from gemel.models.errors import InputError

if TYPE_CHECKING:
    import numpy as np


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
NORMALISATIONS: dict[str, dict[str, Any]] = {
    "imagenet": {"mean": IMAGENET_MEAN, "std": IMAGENET_STD},
    "unit": {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)},
}
"""Name -> mean and deviation: of ImageNet, which most classifiers were trained with; values from 0 to 1 as they are."""
UNPREPARED_HINT = (
    "add as it was trained `preprocess: imagenet` (ImageNet's mean and deviation), `preprocess: unit` (values from 0 "
    "to 1), or its keys"
)


Roi = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels or fractions of the frame."""
FURTHEST_PIXEL = 1e6
"""Bound of pixel coordinates: no frame is this wide."""
MAX_SIDE = 4096
"""Of a network's input, in pixels."""


ASPECT_TOLERANCE = 0.01
"""Frames whose width over height differs by more than this part show another picture."""


@dataclass(frozen=True)
class Region:
    """The part of a camera's frames that a query looks at; all of them without a `roi`.

    `roi` is in fractions where no value exceeds 1, else in pixels of frames of `frame_size` (width, height), which are
    scaled to frames of another size; without `frame_size` in pixels of whatever frames come.
    """

    roi: Roi | None = None
    frame_size: tuple[int, int] | None = None

    @property
    def fractions(self) -> Roi | None:
        """The region in fractions of a frame; None where it is in pixels of an unknown size."""
        if self.roi is None or max(self.roi) <= 1:
            return self.roi or (0.0, 0.0, 1.0, 1.0)
        if self.frame_size is None:
            return None
        return tuple(edge / side for edge, side in zip(self.roi, self.frame_size * 2, strict=True))  # type: ignore[return-value]

    def pixels(self, frame_size: tuple[int, int]) -> tuple[int, int, int, int]:
        """The region in whole pixels of a frame (width, height); it may reach beyond the frame."""
        fractions = self.fractions
        edges = (
            self.roi
            if fractions is None
            else [a * b for a, b in zip(fractions, frame_size * 2, strict=True)]
        )
        return tuple(map(round, edges))  # type: ignore[return-value, arg-type]

    def crop(self, frame: np.ndarray) -> np.ndarray:
        """The part of a frame (H, W, 3), empty where the region lies outside."""
        if self.roi is None:
            return frame
        x0, y0, x1, y1 = self.pixels((frame.shape[1], frame.shape[0]))
        return frame[y0:y1, x0:x1]

    def find_problem(self, frame_size: tuple[int, int]) -> str:
        """Why the region does not fit frames of this (width, height); empty where it does."""
        width, height = frame_size
        stated_size = self.frame_size
        if self.roi is None:
            return ""
        if (
            stated_size
            and abs(width * stated_size[1] / (height * stated_size[0]) - 1) > ASPECT_TOLERANCE
        ):
            stated = f"{stated_size[0]}x{stated_size[1]}"
            return f"looks at a part of frames of {stated}; {width}x{height} pixels have another aspect"
        x0, y0, *_ = self.pixels(frame_size)
        inside = x0 < width and y0 < height
        return (
            ""
            if inside
            else f"looks at {list(self.roi)}, outside frames of {width}x{height} pixels"
        )

    def least_frame(self) -> tuple[int, int]:
        """(width, height) of frames that hold the region."""
        if self.roi is None or self.fractions is not None:
            return self.frame_size or (0, 0)
        return math.ceil(self.roi[2]), math.ceil(self.roi[3])


Size = tuple[int, int]
"""Height and width of a network's input."""
InputSize = int | Size
"""The side of a square input, or its height and width."""
Resize = Literal["stretch", "letterbox", "center-crop"]
Anchor = Literal["centre", "top-left"]
"""Where a letterbox puts the frame: borders on both sides, or to the right and below (YOLOX)."""


def height_width(size: InputSize) -> Size:
    """An input size as (H, W)."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def size_of_input(size: InputSize) -> str:
    """An input size as messages show it, width first."""
    height, width = height_width(size)
    return f"{width}x{height}"


def side_or_sides(size: Size) -> InputSize:
    """An input size as a factory takes it: the side of a square, else (H, W)."""
    return size[0] if size[0] == size[1] else size


@dataclass(frozen=True)
class Preprocess:
    """How a frame becomes the input (3, H, W) of a network; every manifest holds one.

    `stretch` resizes to `size`, bilinear, as Pillow does or, without `antialias`, as OpenCV does; `letterbox` keeps the
    frame's aspect, within `crop_fraction` of the input, and fills the borders with `pad`; `center-crop` keeps it and
    cuts out the middle `crop_fraction`.
    Then (x * scale / 255 - mean) / std, of channels in this order. NumPy is imported only where a frame is prepared.
    """

    size: Size
    resize: Resize = "stretch"
    crop_fraction: float = 1.0
    pad: int = 114
    scale: Literal[1, 255] = 1
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    channels: Literal["rgb", "bgr"] = "rgb"
    anchor: Anchor = "centre"
    antialias: bool = True

    def __post_init__(self) -> None:
        if not (0 < self.crop_fraction <= 1 and 0 <= self.pad <= 255):
            raise ValueError("crop_fraction must be above 0 and at most 1, pad from 0 to 255")
        if not all(math.isfinite(value) for value in (*self.mean, *self.std)) or min(self.std) <= 0:
            raise ValueError("mean and std must be finite, std above zero")
        if not 1 <= min(self.size) <= max(self.size) <= MAX_SIDE:
            raise ValueError(f"size must be [height, width] of 1 to {MAX_SIDE} pixels")

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        """uint8 RGB (h, w, 3) -> float32 (1, 3, H, W): one frame as a batch."""
        return self.normalise(self.resize_frame(frame)[None])

    def resize_frame(self, frame: np.ndarray) -> np.ndarray:
        """uint8 RGB (h, w, 3) -> uint8 RGB (3, H, W)."""
        import cv2
        import numpy as np

        from gemel.models.antialias import resize_antialiased

        left, top, width, height = self.place((frame.shape[1], frame.shape[0]))
        image = frame
        if frame.shape[:2] != (height, width):
            resize = resize_antialiased if self.antialias else cv2.resize
            image = resize(np.ascontiguousarray(frame), (width, height))
        image = image[max(0, -top) :, max(0, -left) :][: self.size[0], : self.size[1]]
        planes = np.full((3, *self.size), self.pad, np.uint8)
        rows = slice(max(0, top), max(0, top) + image.shape[0])
        columns = slice(max(0, left), max(0, left) + image.shape[1])
        cv2.split(np.ascontiguousarray(image), [plane[rows, columns] for plane in planes])
        return planes

    def normalise(self, batch: np.ndarray) -> np.ndarray:
        """uint8 RGB (N, 3, H, W) -> float32 of the same shape, contiguous."""
        import numpy as np

        mean, deviation = self.pixel_constants()
        values = (batch[:, ::-1] if self.channels == "bgr" else batch).astype(np.float32, order="C")
        if mean.any():
            values -= mean
        if (deviation != 1).any():
            values /= deviation
        return values

    def pixel_constants(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of pixels 0..255 in the order of the channels, each f32 (1, 3, 1, 1)."""
        import numpy as np

        mean, deviation = (
            np.array([255 / self.scale * value for value in values], np.float32).reshape(1, 3, 1, 1)
            for values in (self.mean, self.std)
        )
        return mean, deviation

    def place(self, frame_size: tuple[int, int]) -> tuple[int, int, int, int]:
        """Left, top, width and height of a whole frame (width, height) in pixels of the input.

        A center-crop's reaches beyond the input. Letterbox: Ultralytics' formula, at the top left YOLOX's; center-crop:
        torchvision's and timm's (shorter side to floor(side / crop_fraction), then the middle).
        """
        width, height = frame_size
        rows, columns = self.size
        if self.resize == "stretch":
            return 0, 0, columns, rows
        if self.resize == "letterbox":
            ratio = self._ratio(frame_size)
            whole = int if self.anchor == "top-left" else round
            wide = max(1, whole(width * ratio))
            high = max(1, whole(height * ratio))
            if self.anchor == "top-left":
                return 0, 0, wide, high
            return round((columns - wide) / 2 - 0.1), round((rows - high) / 2 - 0.1), wide, high
        least_wide, least_high = (math.floor(side / self.crop_fraction) for side in (columns, rows))
        if width * least_high <= height * least_wide:
            wide = least_wide
            high = height * least_wide // width
        else:
            wide = width * least_high // height
            high = least_high
        return -round((wide - columns) / 2), -round((high - rows) / 2), wide, high

    def to_frame(self, boxes: np.ndarray, frame_size: tuple[int, int]) -> np.ndarray:
        """Boxes (N, 4) in fractions of the input -> in fractions of a frame (width, height), cut at its edges."""
        return (
            boxes if self.resize == "stretch" else self.place_in_frame(boxes, frame_size).clip(0, 1)
        )

    def place_in_frame(self, places: np.ndarray, frame_size: tuple[int, int]) -> np.ndarray:
        """As `to_frame`, not cut; or places (N, 2)."""
        if self.resize == "stretch":
            return places
        offset, extent = (
            edges[: places.shape[1]].astype(places.dtype)
            for edges in self._offset_and_extent(frame_size)
        )
        return (places - offset) / extent

    def from_frame(self, boxes: np.ndarray, frame_size: tuple[int, int]) -> np.ndarray:
        """Boxes (N, 4) in fractions of a frame (width, height) -> in fractions of the input, beyond it in a crop."""
        if self.resize == "stretch":
            return boxes
        offset, extent = self._offset_and_extent(frame_size)
        return boxes * extent.astype(boxes.dtype) + offset.astype(boxes.dtype)

    def _ratio(self, frame_size: tuple[int, int]) -> float:
        """Of a letterbox: pixels of the input for one of a frame (width, height)."""
        width, height = frame_size
        rows, columns = self.size
        return min(rows * self.crop_fraction / height, columns * self.crop_fraction / width)

    def _offset_and_extent(self, frame_size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Where the frame begins in fractions of the input, and how far it reaches, each (4,)."""
        import numpy as np

        left, top, width, height = self.place(frame_size)
        rows, columns = self.size
        # Families divide by the ratio, not by the whole pixels that the frame fills.
        if self.resize == "letterbox":
            width, height = (side * self._ratio(frame_size) for side in frame_size)
        return np.array([left / columns, top / rows] * 2), np.array(
            [width / columns, height / rows] * 2
        )

    def to_json(self) -> dict[str, Any]:
        """The value as a bundle's manifest holds it."""
        return json.loads(json.dumps(asdict(self)))


WHOLE_FRAME = Region()


@dataclass(frozen=True)
class Cropped:
    """A query's whole preparation: the part of the frame that it looks at, as its network takes it."""

    preprocess: Preprocess
    region: Region = WHOLE_FRAME

    def __call__(self, frame: np.ndarray) -> np.ndarray:
        """uint8 RGB (H, W, 3) -> float32 (1, 3, H, W); boxes found in it are fractions of the part looked at.

        Raises InputError for another dtype or shape: a frame of 0..1 would be answered, too, and wrongly.
        """
        dtype = str(getattr(frame, "dtype", type(frame).__name__))
        shape = tuple(getattr(frame, "shape", ()))
        if dtype != "uint8" or shape[2:] != (3,):
            remedy = "give a decoded frame, uint8 RGB (H, W, 3)"
            raise InputError("the frame", f"is {dtype} {shape}" if shape else f"is {dtype}", remedy)
        part = self.region.crop(frame)
        height, width = frame.shape[:2]
        problem = self.region.find_problem((width, height))
        if problem or not part.size:
            fault = f"does not fit: the query {problem or 'looks at no pixel of it'}"
            raise InputError("the frame", fault, "give whole frames of the query's camera")
        return self.preprocess(part)
