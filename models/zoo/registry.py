"""The zoo's registry: a name, the task it answers, how it is built, how its input is scaled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from models.frames.preprocess import IMAGENET_MEAN, IMAGENET_STD

Factory = Callable[..., nn.Module]
Triple = tuple[float, float, float]
Scaling = tuple[Triple, Triple]
"""Mean and deviation by which the values of a frame, from 0 to 1, are normalised."""


@dataclass(frozen=True)
class ZooEntry:
    """One architecture: `factory(num_classes, input_size, **model_args)` builds it with random weights.

    `input_size` is the side it was published with, `width` the classes (a detector's background among them),
    `published` torchvision's name for it, whose weights fit it, and `auxiliary` how the names of those published
    tensors begin that only its training needed.
    """

    name: str
    task: str
    factory: Factory
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    input_size: int = 224
    published: str | None = None
    auxiliary: tuple[str, ...] = ()
    width: int = 1000


PUBLISHED_WIDTH = {"classification": 1000, "detection": 91}
"""ImageNet's classes; COCO's as torchvision counts them."""
ENTRIES: dict[str, ZooEntry] = {}


def register(
    name: str,
    task: str,
    scaling: Scaling = (IMAGENET_MEAN, IMAGENET_STD),
    input_size: int = 224,
    published: str | None = None,
    auxiliary: tuple[str, ...] = (),
    width: int | None = None,
) -> Callable[[Factory], Factory]:
    """Enter a factory into the zoo under `name`; detectors count the background among num_classes."""

    def enter(factory: Factory) -> Factory:
        if name in ENTRIES:
            raise ValueError(f"the zoo has two entries named {name}")
        classes = width or PUBLISHED_WIDTH[task]
        ENTRIES[name] = ZooEntry(name, task, factory, *scaling, input_size, published, auxiliary, classes)
        return factory

    return enter
