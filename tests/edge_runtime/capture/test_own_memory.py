"""Frames in memory of their own: used again, never while somebody still looks at them, and given back."""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.machine import held_bytes
from edge_runtime.capture.camera import Camera
from edge_runtime.capture.reader import SPARE, FramePool
from edge_runtime.capture.sources import CameraConfig, FrameRequest
from edge_runtime.http.snapshots import Snapshot, Snapshots
from edge_runtime.queues import Frame
from tests.edge_runtime.tiny import write_folder

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


def drawn(memory: FramePool, value: int, size: tuple[int, int, int] = SIZE) -> np.ndarray:
    """A frame that is all of this value."""
    image = memory.decode_shot(lambda: np.full(size, value, np.uint8))
    assert image is not None and image.shape == size and (image == value).all()
    return image


def place(image: np.ndarray) -> int:
    """Where its pixels lie."""
    return image.__array_interface__["data"][0]


def content(kept: Any) -> bytes:
    """The bytes of whatever was kept of a frame."""
    return kept.numpy().tobytes() if isinstance(kept, torch.Tensor) else np.asarray(kept).tobytes()


def test_memory_is_used_again_once_the_frame_is_gone() -> None:
    memory, places, shown = FramePool(), set(), None
    for value in range(100):
        image = drawn(memory, value)
        shown = image  # the one before goes
        places.add(place(image))
    assert shown is not None and len(places) <= SPARE + 1


@pytest.mark.parametrize("what", KEPT)
def test_what_somebody_keeps_of_a_frame_is_not_overwritten(what: str) -> None:
    memory = FramePool()
    image = drawn(memory, 200)
    kept = KEPT[what](image)
    told = content(kept)
    del image
    for value in range(50):
        drawn(memory, value)
    assert content(kept) == told and told == b"\xc8" * len(told)


def test_no_two_frames_in_use_ever_share_memory_whoever_lets_go_of_them_and_when() -> None:
    memory, chance, wrong = FramePool(), random.Random(3), []
    handed: list[list[tuple[int, Any]]] = [[] for _ in range(4)]
    done = threading.Event()

    def read(mine: list[tuple[int, Any]], chance: random.Random) -> None:
        while not done.is_set() or mine:
            if mine:
                value, kept = mine.pop(chance.randrange(len(mine)))
                wrong.extend([value] if set(content(kept)) != {value} else [])

    readers = [threading.Thread(target=read, args=(mine, random.Random(index))) for index, mine in enumerate(handed)]
    for reader in readers:
        reader.start()
    held: list[tuple[int, Any]] = []
    for number in range(1500):
        value = number % 251
        image = drawn(memory, value, (24, 32, 3) if number // 500 != 1 else (30, 32, 3))
        handed[number % 4].append((value, chance.choice(list(KEPT.values()))(image)))
        held.append((value, image))
        while len(held) > chance.randrange(1, 12):
            held.pop(chance.randrange(len(held)))
        wrong.extend(value for value, image in held if not (image == value).all())
        del image
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong


def test_frames_of_another_size_get_memory_of_their_size_and_the_former_stay_as_they_are() -> None:
    memory = FramePool()
    small = [drawn(memory, value) for value in range(4)]
    large = [drawn(memory, value, (48, 64, 3)) for value in range(4)]
    del small[1:], large[1:]
    again = [drawn(memory, value) for value in range(9, 12)]
    assert (small[0] == 0).all() and (large[0] == 0).all()
    assert [int(image[0, 0, 0]) for image in again] == [9, 10, 11]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_frames_that_waited_give_their_memory_back_though_small_things_that_stay_were_made_between_them() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    memory, picture = FramePool(), np.ones((180, 180, 3), np.uint8)  # small enough for the heap
    before = held_bytes()["anonymous"]
    waiting, stays = [], []
    for _ in range(400):
        waiting.append(memory.decode_shot(lambda: picture))
        stays.append(libc.malloc(2000))
    most = held_bytes()["anonymous"]
    waiting.clear()
    after = held_bytes()["anonymous"]
    for block in stays:
        libc.free(block)
    assert most - before > 30e6 and after - before < 5e6, (before, most, after)


def test_a_picture_that_does_not_decode_or_has_no_memory_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, kept = FramePool(), []

    def damaged() -> np.ndarray:
        raise ValueError("damaged")

    def full(*_: object, **__: object) -> None:
        raise OSError("Cannot allocate memory")

    assert memory.decode_shot(damaged) is None and memory.decode_shot(lambda: None) is None
    kept.append(drawn(memory, 1))
    monkeypatch.setattr(mmap, "mmap", full)
    assert memory.decode_shot(lambda: np.ones(SIZE, np.uint8)) is None
    monkeypatch.undo()
    assert (drawn(memory, 2) == 2).all() and (kept[0] == 1).all()


def test_what_the_dashboard_and_a_slow_reader_took_stays_while_the_camera_goes_on(tmp_path) -> None:
    kept: list[tuple[Frame, bytes, Snapshot, bytes]] = []
    gallery, frames = Snapshots({"q": "c"}), 0
    record = {"query": "q", "label": "bus", "score": 0.5, "captured_at": 0.0, "finished_at": 0.0}

    def put(query: str, frame: Frame) -> None:
        nonlocal frames
        assert frame.image is not None
        frames += 1
        gallery.saw("c", frame.index, frame.captured_unix, frame.image)
        gallery.answered({**record, "captured_at": frame.captured_unix})
        picture = gallery.picture("c")
        assert picture is not None
        if frames % 7 == 1:
            kept.append((frame, frame.image.tobytes(), picture, picture.jpeg()))

    config = CameraConfig("c", str(write_folder(tmp_path / "f", 40)), 1000.0)
    Camera(config, {"q": FrameRequest()}, put, clock=lambda: 0.0).play()
    assert frames == 40 and len({told for _, told, _, _ in kept}) == len(kept) > 4
    for frame, told, picture, jpeg in kept:
        assert frame.image is not None and frame.image.tobytes() == told and picture.jpeg() == jpeg
