"""The zoo's registry: a name, the task it answers, how it is built, how its input is scaled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from models.preprocess import IMAGENET_MEAN, IMAGENET_STD

Factory = Callable[..., nn.Module]
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class ZooEntry:
    """One architecture: `factory(num_classes, input_size, **model_args)` builds it with random weights.

    `input_size` is the side it was published with; `published` torchvision's name for it, whose weights fit it.
    """

    name: str
    task: str
    factory: Factory
    mean: Triple = IMAGENET_MEAN
    std: Triple = IMAGENET_STD
    input_size: int = 224
    published: str | None = None


ENTRIES: dict[str, ZooEntry] = {}


def register(
    name: str,
    task: str,
    mean: Triple = IMAGENET_MEAN,
    std: Triple = IMAGENET_STD,
    input_size: int = 224,
    published: str | None = None,
) -> Callable[[Factory], Factory]:
    """Enter a factory into the zoo under `name`; detectors count the background among num_classes."""

    def enter(factory: Factory) -> Factory:
        if name in ENTRIES:
            raise ValueError(f"the zoo has two entries named {name}")
        ENTRIES[name] = ZooEntry(name, task, factory, mean, std, input_size, published)
        return factory

    return enter
