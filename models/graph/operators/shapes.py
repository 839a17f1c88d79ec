"""Operators that reshape, index, join, pad and resize."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from onnx_ir import DataType
from onnx_ir.tensor_adapters import to_torch_dtype
from torch import Tensor
from torch.nn import functional as F

from gemel.models.graph.operators.operator_registry import (
    Numbers,
    check_count,
    check_places,
    integers,
    number,
    operator,
)


def dtype_of(code: int) -> torch.dtype:
    """The torch type of an ONNX type's number; half and double precision are computed in float32."""
    dtype = to_torch_dtype(DataType(code))
    return torch.float32 if dtype in (torch.float16, torch.bfloat16, torch.float64) else dtype


@operator("Cast")
def cast(x: Tensor, to: int, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """The values in another type."""
    return x.to(dtype_of(to))


@operator("CastLike")
def cast_like(x: Tensor, other: Tensor, saturate: int = 1, round_mode: str = "up") -> Tensor:
    """The values in the type of another tensor."""
    return x.to(other.dtype)


@operator("Shape")
def shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    """The sizes from one axis to another, on the CPU."""
    return torch.tensor(list(x.shape)[start:end], dtype=torch.int64)


@operator("Size")
def size(x: Tensor) -> Tensor:
    """The number of values, on the CPU."""
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("Reshape", static=(1,))
def reshape(x: Tensor, shape: Numbers, allowzero: int = 0) -> Tensor:
    """The values in another shape, in which 0 copies a size and -1 is computed."""
    sizes = integers(shape)
    if not allowzero:
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


@operator("Flatten")
def flatten(x: Tensor, axis: int = 1) -> Tensor:
    """Two axes: all before one, and all from it on."""
    axis = axis + x.ndim if axis < 0 else axis
    if axis == 1 and x.ndim > 1:
        return x.flatten(1)
    return x.reshape(math.prod(x.shape[:axis]), -1)


@operator("Squeeze", static=(1,))
def squeeze(x: Tensor, axes: Numbers = None) -> Tensor:
    """Without axes of size 1."""
    chosen = (
        [axis for axis in range(x.ndim) if x.shape[axis] == 1] if axes is None else integers(axes)
    )
    if any(x.shape[axis] != 1 for axis in chosen):
        raise ValueError(f"axes {chosen} of {list(x.shape)} are not of size 1")
    return x.squeeze(chosen) if chosen else x


@operator("Unsqueeze", static=(1,))
def unsqueeze(x: Tensor, axes: Numbers) -> Tensor:
    """With axes of size 1 at these places of the result."""
    axes = integers(axes)
    rank = x.ndim + len(axes)
    for axis in sorted(axis + rank if axis < 0 else axis for axis in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def transpose(x: Tensor, perm: list[int] | None = None) -> Tensor:
    """The axes in another order, by default reversed."""
    return x.permute(perm if perm is not None else list(range(x.ndim))[::-1])


@operator("Concat")
def concat(*tensors: Tensor, axis: int) -> Tensor:
    """Tensors joined along an axis."""
    parts = list(tensors)
    if len({part.device for part in parts}) > 1:  # parts of a shape, which are read on the CPU
        parts = [part.cpu() for part in parts]
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]


@operator("Split", static=(1,), count=True)
def split(
    x: Tensor, split: Numbers = None, axis: int = 0, num_outputs: int | None = None, count: int = 1
) -> tuple[Tensor, ...]:
    """Pieces along an axis, of given sizes or as equal as possible."""
    if split is not None:
        return torch.split(x, integers(split), axis)
    if num_outputs not in (None, count):
        raise ValueError(f"Split into {num_outputs} parts, of which the node gives {count}")
    return torch.split(x, -(-x.shape[axis] // (num_outputs or count)), axis)


@operator("Slice", static=(1, 2, 3, 4))
def slice_axes(
    x: Tensor, starts: Numbers, ends: Numbers, axes: Numbers = None, steps: Numbers = None
) -> Tensor:
    """A range of each of some axes."""
    starts = integers(starts)
    ends = integers(ends)
    axes = list(range(len(starts))) if axes is None else integers(axes)
    steps = [1] * len(starts) if steps is None else integers(steps)
    for start, end, axis, step in zip(starts, ends, axes, steps):
        places = range(
            *slice(start, end if step > 0 or end >= -x.shape[axis] else None, step).indices(
                x.shape[axis]
            )
        )
        if step > 0:
            index = [slice(None)] * (axis % x.ndim) + [
                slice(places.start, max(places.start, places.stop), step)
            ]
            x = x[tuple(index)]
        else:
            stop = places.start + len(places) * step
            index = torch.arange(places.start, stop, step, dtype=torch.int64, device=x.device)
            x = x.index_select(axis, index)
    return x


@operator("Gather")
def gather(x: Tensor, indices: Tensor | int, axis: int = 0) -> Tensor:
    """The slices at some places of an axis."""
    axis = axis + x.ndim if axis < 0 else axis
    if isinstance(indices, int):
        return x.select(axis, indices)
    places = torch.where(indices < 0, indices + x.shape[axis], indices).to(x.device)
    chosen = x.index_select(axis, places.reshape(-1))
    return chosen.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@operator("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    """The value at each place that the indices name along an axis."""
    return torch.gather(x, axis, torch.where(indices < 0, indices + x.shape[axis], indices))


@operator("GatherND")
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int = 0) -> Tensor:
    """The slices at places given by several axes."""
    depth = indices.shape[-1]
    if depth + batch_dims > x.ndim:
        raise ValueError(f"GatherND by {depth} axes of {x.ndim}")
    places = [
        torch.where(index < 0, index + size, index)
        for index, size in zip(indices.unbind(-1), x.shape[batch_dims:])
    ]
    leading = [
        torch.arange(x.shape[axis], device=x.device).reshape(
            [-1 if axis == other else 1 for other in range(indices.ndim - 1)]
        )
        for axis in range(batch_dims)
    ]
    return x[(*leading, *places)] if depth + batch_dims else x


@operator("ScatterElements")
def scatter_elements(
    x: Tensor, indices: Tensor, updates: Tensor, axis: int = 0, reduction: str = "none"
) -> Tensor:
    """Values put at the places that the indices name along an axis."""
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    if reduction == "none":
        return x.scatter(axis, indices, updates)
    return x.scatter_reduce(axis, indices, updates, _SCATTER[reduction])


@operator("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, reduction: str = "none") -> Tensor:
    """Slices put at places given by several axes."""
    if indices.shape[-1] > x.ndim:
        raise ValueError(f"ScatterND by {indices.shape[-1]} axes of {x.ndim}")
    places = tuple(
        torch.where(index < 0, index + size, index)
        for index, size in zip(indices.unbind(-1), x.shape)
    )
    if reduction in ("none", "add"):
        return x.index_put(places, updates, accumulate=reduction == "add")
    raise ValueError(f"reduction {reduction}")


_SCATTER = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("Expand", static=(1,))
def expand(x: Tensor, shape: Numbers) -> Tensor:
    """Broadcast against a shape."""
    return x.expand(torch.broadcast_shapes(x.shape, integers(shape)))


@operator("Tile", static=(1,))
def tile(x: Tensor, repeats: Numbers) -> Tensor:
    """Repeated along each axis."""
    return x.repeat(integers(repeats))


@operator("ConstantOfShape", static=(0,))
def constant_of_shape(
    shape: Numbers, value: float = 0.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """One value in a shape."""
    sizes = integers(shape)
    check_count(math.prod(sizes))
    return torch.full(sizes, value, dtype=dtype)


@operator("Range", static=(0, 1, 2))
def number_range(start: Numbers, limit: Numbers, delta: Numbers) -> Tensor:
    """Numbers from start to limit by delta."""
    start = number(start)
    limit = number(limit)
    delta = number(delta)
    check_count((limit - start) / delta)
    return torch.arange(
        start, limit, delta, dtype=torch.int64 if isinstance(start, int) else torch.float32
    )


@operator("OneHot", static=(1,))
def one_hot(indices: Tensor, depth: Numbers, values: Tensor, axis: int = -1) -> Tensor:
    """The second value where an axis' place is the index, else the first."""
    depth = int(number(depth))
    axis = axis + indices.ndim + 1 if axis < 0 else axis
    places = torch.arange(depth, device=indices.device).reshape([-1] + [1] * (indices.ndim - axis))
    return torch.where((indices % depth).unsqueeze(axis) == places, values[1], values[0])


@operator("Trilu", static=(1,))
def triangle(x: Tensor, k: Numbers = None, upper: int = 1) -> Tensor:
    """The upper or lower triangle."""
    k = 0 if k is None else int(number(k))
    return torch.triu(x, k) if upper else torch.tril(x, k)


@operator("EyeLike")
def eye_like(x: Tensor, dtype: int | None = None, k: int = 0) -> Tensor:
    """Ones on the k-th diagonal."""
    ones = torch.ones(x.shape, dtype=x.dtype if dtype is None else dtype_of(dtype), device=x.device)
    return torch.triu(torch.tril(ones, k), k)


@operator("NonZero")
def non_zero(x: Tensor) -> Tensor:
    """Where values are not zero, by axis."""
    return torch.nonzero(x).t()


@operator("DepthToSpace")
def depth_to_space(x: Tensor, blocksize: int, mode: str = "DCR") -> Tensor:
    """Channels laid out as blocks of pixels."""
    if mode == "CRD":
        return F.pixel_shuffle(x, blocksize)
    n, c, h, w = x.shape
    x = x.reshape(n, blocksize, blocksize, c // blocksize**2, h, w).permute(0, 3, 4, 1, 5, 2)
    return x.reshape(n, c // blocksize**2, h * blocksize, w * blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, blocksize: int) -> Tensor:
    """Blocks of pixels laid out as channels."""
    n, c, h, w = x.shape
    x = x.reshape(n, c, h // blocksize, blocksize, w // blocksize, blocksize).permute(
        0, 3, 5, 1, 2, 4
    )
    return x.reshape(n, c * blocksize**2, h // blocksize, w // blocksize)


@operator("Pad", static=(1, 2, 3))
def pad(
    x: Tensor, pads: Numbers, value: Numbers = None, axes: Numbers = None, mode: str = "constant"
) -> Tensor:
    """Padded at both ends of axes, or cropped where a size is negative."""
    pads = integers(pads)
    axes = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in integers(axes)]
    sides = [(0, 0)] * x.ndim
    for place, axis in enumerate(axes):
        sides[axis] = (pads[place], pads[place + len(axes)])
    if mode == "constant":
        flat = [side for pair in reversed(sides) for side in pair]
        return F.pad(x, flat, "constant", 0 if value is None else number(value))
    for axis, (before, after) in enumerate(sides):
        if before or after:
            check_places(max(before, 0) + max(after, 0) + x.shape[axis])
            x = x.index_select(
                axis, _padded_places(x.shape[axis], before, after, mode).to(x.device)
            )
    return x


@lru_cache(maxsize=32)
def _padded_places(size: int, before: int, after: int, mode: str) -> Tensor:
    modes: dict[str, Literal["reflect", "edge", "wrap"]] = {
        "reflect": "reflect",
        "edge": "edge",
        "wrap": "wrap",
    }
    places = np.pad(np.arange(size), (max(before, 0), max(after, 0)), modes[mode])
    return torch.from_numpy(places[max(-before, 0) : len(places) - max(-after, 0)].copy())


# Resizing


@operator("Resize", "Upsample", static=(1, 2, 3), opset=True)
def _resize(
    x: Tensor,
    roi: Numbers = None,
    scales: Numbers = None,
    sizes: Numbers = None,
    *,
    opset: int = 13,
    mode: str = "nearest",
    coordinate_transformation_mode: str = "half_pixel",
    nearest_mode: str = "round_prefer_floor",
    cubic_coeff_a: float = -0.75,
    exclude_outside: int = 0,
    extrapolation_value: float = 0.0,
    antialias: int = 0,
    axes: list[int] | None = None,
    keep_aspect_ratio_policy: str = "stretch",
) -> Tensor:
    """Sampled anew along axes, by scales or to sizes; the sizes of batch and channels are not looked at."""
    if (
        coordinate_transformation_mode == "tf_crop_and_resize"
        or keep_aspect_ratio_policy != "stretch"
        or exclude_outside
    ):
        raise ValueError("Resize with tf_crop_and_resize, exclude_outside or an aspect policy")
    axes = list(range(x.ndim)) if axes is None else [axis % x.ndim for axis in axes]
    has_sizes = sizes is not None and (isinstance(sizes, Tensor) or len(sizes) > 0)
    factors = (
        integers(sizes)
        if has_sizes
        else [float(scale) for scale in (scales.tolist() if isinstance(scales, Tensor) else scales)]
    )
    targets = {
        axis: (int(value), value / x.shape[axis])
        if has_sizes
        else (math.floor(x.shape[axis] * value + 1e-6), value)
        for axis, value in zip(axes, factors)
        if axis >= x.ndim - len(factors) + 2
        or (axis >= 2 and len(axes) == x.ndim)
        or len(axes) < x.ndim
    }
    targets = {
        axis: target for axis, target in targets.items() if axis >= 1 and target[0] != x.shape[axis]
    }
    if not targets:
        return x
    fast = _torch_resize(
        x, targets, (mode, coordinate_transformation_mode, nearest_mode), antialias, cubic_coeff_a
    )
    if fast is not None:
        return fast
    for axis, (size, scale) in targets.items():
        check_places(size * _tap_count(scale, mode, bool(antialias)))
        setting = (coordinate_transformation_mode, nearest_mode, cubic_coeff_a, bool(antialias))
        x = _resize_axis(x, axis, size, scale, mode, setting)
    return x


def _torch_resize(
    x: Tensor, targets: dict, modes: tuple, antialias: int, cubic: float
) -> Tensor | None:
    """What torch's own function computes, where it computes the same."""
    mode, coordinates, nearest_mode = modes
    if x.ndim != 4 or any(axis < 2 for axis in targets) or antialias:
        return None
    size = [targets.get(axis, (x.shape[axis], 1.0))[0] for axis in (2, 3)]
    if mode == "nearest":
        whole = all(target % x.shape[axis] == 0 for axis, (target, _) in targets.items())
        same = (coordinates, nearest_mode) == ("asymmetric", "floor") or (
            coordinates == "half_pixel" and nearest_mode.startswith("round")
        )
        return F.interpolate(x, size, mode="nearest") if whole and same else None
    exact = all(
        abs(scale * x.shape[axis] - target) < 1e-3 for axis, (target, scale) in targets.items()
    )
    aligned = coordinates == "align_corners"
    plain = (
        aligned
        or coordinates == "half_pixel"
        or (coordinates == "pytorch_half_pixel" and min(size) > 1)
    )
    if not exact or not plain or (mode == "cubic" and cubic != -0.75):
        return None
    return F.interpolate(
        x, size, mode="bicubic" if mode == "cubic" else "bilinear", align_corners=aligned
    )


def _resize_axis(
    x: Tensor, axis: int, size: int, scale: float, mode: str, setting: tuple
) -> Tensor:
    if x.is_meta:
        return x.new_empty(
            [size if other == axis else length for other, length in enumerate(x.shape)]
        )
    places, weights = _taps(x.shape[axis], size, scale, mode, setting)
    shape = [-1 if other == axis else 1 for other in range(x.ndim)]
    total = None
    for column, weight in zip(places, weights):
        part = x.index_select(axis, torch.from_numpy(column).to(x.device))
        if mode == "nearest":
            return part
        part = part * torch.from_numpy(weight).to(x.device, x.dtype).reshape(shape)
        total = part if total is None else total + part
    assert total is not None
    return total


@lru_cache(maxsize=32)
def _taps(
    inner: int, outer: int, scale: float, mode: str, setting: tuple
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The places that each output reads along an axis, and their weights: one list entry a tap."""
    coordinates, nearest_mode, cubic, antialias = setting
    out = np.arange(outer, dtype=np.float64)
    at = {
        "half_pixel": (out + 0.5) / scale - 0.5,
        "pytorch_half_pixel": (out + 0.5) / scale - 0.5 if outer > 1 else out * 0,
        "align_corners": out * (inner - 1) / (outer - 1) if outer > 1 else out * 0,
        "asymmetric": out / scale,
        "tf_half_pixel_for_nn": (out + 0.5) / scale,
        "half_pixel_symmetric": inner / 2 * (1 - outer / (inner * scale))
        + (out + 0.5) / scale
        - 0.5,
    }[coordinates]
    if mode == "nearest":
        rounded = {
            "round_prefer_floor": np.ceil(at - 0.5),
            "round_prefer_ceil": np.floor(at + 0.5),
            "floor": np.floor(at),
            "ceil": np.ceil(at),
        }[nearest_mode]
        return [rounded.clip(0, inner - 1).astype(np.int64)], [np.ones(outer)]
    stretch = max(1.0, 1 / scale) if antialias else 1.0
    taps = _tap_count(scale, mode, antialias)
    first = np.floor(at) - taps // 2 + 1
    places = [first + tap for tap in range(taps)]
    weights = [_kernel((place - at) / stretch, mode, cubic) for place in places]
    if antialias:
        weights = [
            np.where((place >= 0) & (place < inner), weight, 0)
            for place, weight in zip(places, weights)
        ]
        total = np.sum(weights, axis=0)
        weights = [weight / total for weight in weights]
    return [place.clip(0, inner - 1).astype(np.int64) for place in places], weights


def _tap_count(scale: float, mode: str, antialias: bool) -> int:
    """How many places each output of a resized axis reads."""
    if mode == "nearest":
        return 1
    if not 0 < scale < math.inf:
        raise ValueError(f"a scale of {scale}")
    stretch = max(1.0, 1 / scale) if antialias else 1.0
    return math.ceil((2 if mode == "cubic" else 1) * stretch) * 2


def _kernel(distance: np.ndarray, mode: str, a: float) -> np.ndarray:
    d = np.abs(distance)
    if mode == "linear":
        return np.maximum(0, 1 - d)
    near = (a + 2) * d**3 - (a + 3) * d**2 + 1
    far = a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
    return np.where(d <= 1, near, np.where(d < 2, far, 0))
