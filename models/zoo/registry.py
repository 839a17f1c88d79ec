"""The zoo's registry: names, factories, input scaling, bounds of model arguments, construction without memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gemel.models.errors import InputError, size_text
from gemel.models.preprocess import IMAGENET_MEAN, IMAGENET_STD

Factory = Callable[..., nn.Module]
Triple = tuple[float, float, float]
Scaling = tuple[Triple, Triple]
"""Mean and deviation by which the values of a frame, from 0 to 1, are normalised."""


@dataclass(frozen=True)
class ZooEntry:
    """One architecture: `factory(num_classes, input_size, **model_args)` builds it with random weights.

    `input_size` is the side it was published with, `width` the classes (a detector's background among them),
    `published` torchvision's name for it, whose weights fit it, and `auxiliary` the prefixes of published tensors that
    only its training needed.
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


PUBLISHED_WIDTH = {"classification": 1000, "detection": 91, "segmentation": 21, "keypoints": 2}
"""ImageNet's classes; COCO's as torchvision counts them; Pascal VOC's with the background."""
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
    """Add a factory to the zoo under `name`; detectors count the background among num_classes."""

    def add(factory: Factory) -> Factory:
        if name in ENTRIES:
            raise ValueError(f"the zoo has two entries named {name}")
        classes = width or PUBLISHED_WIDTH[task]
        ENTRIES[name] = ZooEntry(
            name, task, factory, *scaling, input_size, published, auxiliary, classes
        )
        return factory

    return add


MAX_BYTES = 2**31
"""Of one model's weights: about four times those of the largest in the zoo."""
MAX_NUMBER, MAX_ITEMS, MAX_ARGUMENT_DEPTH = 65_536, 32, 2
ARGUMENTS = frozenset((
    "dropout", "attention_dropout", "stochastic_depth_prob", "drop_rate", "zero_init_residual", "memory_efficient",
    "transform_input", "init_weights", "reduced_tail", "dilated", "width_mult", "round_nearest", "groups",
    "width_per_group", "replace_stride_with_dilation", "bn_size", "layer_scale", "mlp_ratio", "representation_size",
    "stem_width", "anchor_scale", "num_keypoints", "scales", "aspect_ratios",
))  # fmt: skip
"""The arguments that a file may give a zoo model; each architecture takes some of them."""


def check_arguments(model: str, args: Mapping[str, Any]) -> None:
    """Raise InputError for an unknown argument, and for a value that is no boolean, bounded number or list of such."""
    for name, value in args.items():
        if name not in ARGUMENTS:
            problem = f"cannot be built: it takes no argument '{name[:60]}' from a file"
            raise InputError(
                model, problem, f"there are {', '.join(sorted(ARGUMENTS))}", "model_args"
            )
        if not _is_bounded(value, MAX_ARGUMENT_DEPTH):
            allowed = (
                f"true, false, a number from 0 to {MAX_NUMBER:,}, or a list of at most {MAX_ITEMS}"
            )
            problem = f"cannot be built: {name} is {str(value)[:60]}, not {allowed}"
            raise InputError(model, problem, "correct `model_args`", "model_args")


def _is_bounded(value: Any, depth: int) -> bool:
    if isinstance(value, list | tuple):
        return (
            depth > 0
            and len(value) <= MAX_ITEMS
            and all(_is_bounded(item, depth - 1) for item in value)
        )
    return type(value) in (bool, int, float) and math.isfinite(value) and 0 <= value <= MAX_NUMBER


def check_size(model: str, module: nn.Module) -> None:
    """Raise InputError for an architecture, built on the device "meta", whose weights exceed MAX_BYTES."""
    nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    if nbytes > MAX_BYTES:
        problem = f"cannot be built: its weights would take {size_text(nbytes)}, more than {size_text(MAX_BYTES)}"
        raise InputError(model, problem, "correct `model_args` or `classes`", "model_args")


FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.erfinv_})
"""What random weights are made with, besides `torch.nn.init`."""


class _Unfilled(TorchFunctionMode):
    """Skips random initialisation on the meta device."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FILLS or getattr(func, "__module__", None) == nn.init.__name__:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def built_on(device: str | torch.device) -> Iterator[None]:
    """Build modules on this device; on "meta" nothing is allocated or drawn at random."""
    if torch.device(device).type != "meta":
        with torch.device(device):
            yield
        return
    with torch.device(device), _Unfilled():
        yield


def names(task: str | None = None) -> list[str]:
    """All names of the zoo, or those of one task."""
    return sorted(name for name, entry in ENTRIES.items() if task in (None, entry.task))
