"""The queries of a box under test, and models that fail on request."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemel.models.bundle import Made, write_bundle
from gemel.models.preprocess import Preprocess
from tests.edge_runtime.tiny import FACTORY, SIZE, net, query

MOODY, BUSY = "tests.faults.queries:moody", "tests.faults.queries:busy"
FACTORIES = [FACTORY, MOODY, BUSY]
RAISE, HANG = "raise", "hang"


class Mood(nn.Module):
    """Passes on what it gets, unless a file says otherwise: `raise` for as long as it is there, `hang` once."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = Path(path)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(FileNotFoundError):
            mood = self._path.read_text()
            if mood == HANG:
                self._path.unlink()
                threading.Event().wait()
            if mood == RAISE:
                raise RuntimeError(f"a bad mood at 0x{id(value):x}")
        return value


def moody(num_classes: int, input_size: int = SIZE, path: str = "") -> nn.Module:
    """The tiny network behind a `Mood`."""
    return nn.Sequential(Mood(path), net(num_classes, input_size))


def busy(num_classes: int, input_size: int = SIZE, width: int = 64, depth: int = 6) -> nn.Module:
    """A network with something to do: some milliseconds for a picture of 96 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(depth):
        layers += [nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


MADE: dict[str, Callable[..., nn.Module]] = {FACTORY: net, MOODY: moody, BUSY: busy}


def bundle(folder: Path, queries: Mapping[str, Mapping[str, Any]], name: str = "tiny.safetensors") -> None:
    """Write a bundle: id of a query -> what it has of its own, its camera among it."""
    torch.manual_seed(0)
    records = [
        query(one, preprocess=Preprocess((keys.get("input_size", SIZE),) * 2), **keys) for one, keys in queries.items()
    ]
    models = {one.id: MADE[one.model](len(one.classes), one.input_size, **one.model_args).eval() for one in records}
    write_bundle(folder / name, models, records, Made("faults", "none", 0), overwrite=True)


def one_each(folder: Path, cameras: list[str], **keys: Any) -> None:
    """Write a bundle of one trivial query on each camera, called as the camera is."""
    bundle(folder, {camera: {"camera": camera, **keys} for camera in cameras})
