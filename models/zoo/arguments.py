"""Arguments that a file may give a zoo model: which there are, and within which bounds; and how large one may become.

Not every architecture takes each of them; it says itself which it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from models.errors import InputError
from models.sizes import size_text

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
