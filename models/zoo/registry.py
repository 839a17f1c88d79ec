"""The zoo's registry: names, factories, input scaling, bounds of model arguments, construction without memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from models.errors import InputError, size_text
from models.preprocess import IMAGENET_MEAN, IMAGENET_STD

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


MAX_BYTES = 2**31
"""Of one model's weights: some four times those of the largest in the zoo."""
REMEDY = "correct `model_args`"
MAX_TOLD = 60


class Kind(NamedTuple):
    """What an argument must be: in words, and whether a value is it."""

    wanted: str
    is_one: Callable[[Any], bool]


def _number(least: float, most: float) -> Kind:
    return Kind(f"a number from {least:g} to {most:g}", lambda value: _is_number(value) and least <= value <= most)


def _whole(least: int, most: int) -> Kind:
    wanted = f"a whole number from {least} to {most}"
    return Kind(wanted, lambda value: type(value) is int and least <= value <= most)


def _list(of: Kind, least: int, most: int) -> Kind:
    count = f"{most}" if least == most else f"{least} to {most}"

    def is_one(value: Any) -> bool:
        return isinstance(value, list | tuple) and least <= len(value) <= most and all(map(of.is_one, value))

    return Kind(f"a list of {count}, each {of.wanted}", is_one)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


_TRUTH = Kind("true or false", lambda value: isinstance(value, bool))
_PART = _number(0, 1)
_POSITIVE = _number(1e-3, 1e4)
ARGUMENTS: dict[str, Kind] = {
    **dict.fromkeys(("dropout", "attention_dropout", "stochastic_depth_prob", "drop_rate"), _PART),
    **dict.fromkeys(("zero_init_residual", "memory_efficient", "transform_input", "init_weights"), _TRUTH),
    **dict.fromkeys(("reduced_tail", "dilated"), _TRUTH),
    "width_mult": _number(0.05, 16),
    "round_nearest": _whole(1, 256),
    "groups": _whole(1, 256),
    "width_per_group": _whole(1, 1024),
    "replace_stride_with_dilation": _list(_TRUTH, 3, 3),
    "bn_size": _whole(1, 64),
    "layer_scale": _PART,
    "mlp_ratio": _number(0.25, 16),
    "representation_size": _whole(1, 65536),
    "stem_width": _whole(1, 1024),
    "anchor_scale": _number(0.01, 100),
    "scales": _list(_number(0, 100), 2, 16),
    "aspect_ratios": _list(_POSITIVE, 0, 16),
    "anchors": _list(_list(_number(0, 1e4), 2, 2), 1, 32),
}


def check_arguments(model: str, args: Mapping[str, Any]) -> None:
    """Raise InputError for an argument that no zoo model takes from a file, and for one beyond its bounds."""
    for name, value in args.items():
        kind = ARGUMENTS.get(name)
        if kind is None:
            fault = f"cannot be built: it takes no argument {_shown(name)} from a file"
            raise InputError(model, fault, f"there are {', '.join(ARGUMENTS)}", "model_args")
        if not kind.is_one(value):
            raise InputError(
                model, f"cannot be built: {name} is {_shown(value)}, not {kind.wanted}", REMEDY, "model_args"
            )


def check_size(model: str, module: nn.Module) -> None:
    """Raise InputError for an architecture, built on the device "meta", whose weights nobody could hold."""
    nbytes = sum(tensor.nbytes for tensor in module.state_dict().values())
    if nbytes > MAX_BYTES:
        fault = f"cannot be built: its weights would take {size_text(nbytes)}, more than {size_text(MAX_BYTES)}"
        raise InputError(model, fault, f"{REMEDY} or `classes`", "model_args")


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, lists within lists
        return f"a {type(value).__name__}"
    return text if len(text) <= MAX_TOLD else f"{text[:MAX_TOLD]}..."


FILLS = frozenset({Tensor.normal_, Tensor.uniform_, Tensor.erfinv_})
"""What random weights are made with, besides `torch.nn.init`."""


class _Unfilled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FILLS or getattr(func, "__module__", None) == nn.init.__name__:
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def built_on(device: str | torch.device) -> Iterator[None]:
    """What is built inside lies on this device."""
    if torch.device(device).type != "meta":
        with torch.device(device):
            yield
        return
    with torch.device(device), _Unfilled():
        yield
