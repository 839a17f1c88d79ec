"""Frames in memory of their own: used again, never while somebody still looks at them, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from edge_runtime.capture.reader import FramePool

SIZE = (24, 32, 3)
KEPT: dict[str, Callable[[Any], Any]] = {
    "the frame": lambda image: image,
    "a crop": lambda image: image[3:9, 4:20],
    "a crop of a crop": lambda image: image[2:, 2:][1:5, 1:5],
    "a mirrored view": lambda image: image[:, ::-1, ::-1],
    "a flat view": lambda image: image.reshape(-1),
    "another type": lambda image: image.view(np.int8),
    "a tensor": torch.from_numpy,
    "a part of a tensor": lambda image: torch.from_numpy(image).permute(2, 0, 1)[:, 4:, 2:8],
    "a buffer": memoryview,
    "a part of a buffer": lambda image: memoryview(image)[5:7],
    "an array over a buffer": lambda image: np.frombuffer(memoryview(image), np.uint8)[100:],
}


def draw_image(memory: FramePool, value: int, size: tuple[int, int, int] = SIZE) -> np.ndarray:
    """A frame that is all of this value."""
    image = memory.decode(lambda: np.full(size, value, np.uint8))
    assert image is not None and image.shape == size and (image == value).all()
    return image


def place(image: np.ndarray) -> int:
    """Where its pixels lie."""
    return image.__array_interface__["data"][0]


def content(kept: Any) -> bytes:
    """The bytes of whatever was kept of a frame."""
    return kept.numpy().tobytes() if isinstance(kept, torch.Tensor) else np.asarray(kept).tobytes()


def test_frame_pool_reuses_memory() -> None:
    memory, places, shown = FramePool(), set(), None
    for value in range(100):
        image = draw_image(memory, value)
        shown = image  # the one before goes
        places.add(place(image))
    assert shown is not None and len(places) <= 1 + 1


@pytest.mark.parametrize("what", KEPT)
def test_frame_pool_keeps_referenced_frames(what: str) -> None:
    memory = FramePool()
    image = draw_image(memory, 200)
    kept = KEPT[what](image)
    told = content(kept)
    del image
    for value in range(50):
        draw_image(memory, value)
    assert content(kept) == told and told == b"\xc8" * len(told)


def test_frame_pool_follows_the_frame_size() -> None:
    memory = FramePool()
    small = [draw_image(memory, value) for value in range(4)]
    large = [draw_image(memory, value, (48, 64, 3)) for value in range(4)]
    del small[1:], large[1:]
    again = [draw_image(memory, value) for value in range(9, 12)]
    assert (small[0] == 0).all() and (large[0] == 0).all()
    assert [int(image[0, 0, 0]) for image in again] == [9, 10, 11]
