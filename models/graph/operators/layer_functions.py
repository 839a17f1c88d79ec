"""Operators with weights, norms, pooling and sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gemel.models.graph.operators.operator_registry import operator

Ints = Sequence[int]


def window_pads(
    size: Ints, kernel: Ints, stride: Ints, dilation: Ints, auto_pad: str, pads: Ints | None
) -> list[tuple[int, int]]:
    """What a window's operator pads before and after each axis of the picture, `size` the picture's."""
    rank = len(kernel)
    if auto_pad in ("NOTSET", ""):
        pads = [0] * 2 * rank if pads is None else pads
        return list(zip(pads[:rank], pads[rank:]))
    if auto_pad == "VALID":
        return [(0, 0)] * rank
    pairs = []
    for length, k, s, d in zip(size, kernel, stride, dilation):
        total = max((-(-length // s) - 1) * s + d * (k - 1) + 1 - length, 0)
        pairs.append(
            (total // 2, total - total // 2)
            if auto_pad == "SAME_UPPER"
            else (total - total // 2, total // 2)
        )
    return pairs


def flat_pads(pads: list[tuple[int, int]]) -> list[int]:
    """Pads in the order of torch: the last axis first."""
    return [side for pair in reversed(pads) for side in pair]


_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


@operator("Conv")
def _conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """A convolution in 1 to 3 dimensions."""
    rank = weight.ndim - 2
    stride = strides or [1] * rank
    dilation = dilations or [1] * rank
    sides = window_pads(x.shape[2:], weight.shape[2:], stride, dilation, auto_pad, pads)
    if all(before == after for before, after in sides):
        return _CONV[rank](
            x, weight, bias, stride, [before for before, _ in sides], dilation, group
        )
    return _CONV[rank](F.pad(x, flat_pads(sides)), weight, bias, stride, 0, dilation, group)


@operator("ConvTranspose")
def _conv_transpose(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """A transposed convolution in 1 to 3 dimensions."""
    rank = weight.ndim - 2
    stride = strides or [1] * rank
    dilation = dilations or [1] * rank
    extra = output_padding or [0] * rank
    kernel = weight.shape[2:]
    full = [
        (n - 1) * s + d * (k - 1) + 1 + e
        for n, s, d, k, e in zip(x.shape[2:], stride, dilation, kernel, extra)
    ]
    if output_shape or auto_pad.startswith("SAME"):
        targets = (
            output_shape[-rank:] if output_shape else [n * s for n, s in zip(x.shape[2:], stride)]
        )
        totals = [max(0, have - want) for have, want in zip(full, targets)]
        halves = [(total // 2, total - total // 2) for total in totals]
        sides = halves if auto_pad == "SAME_UPPER" else [(more, less) for less, more in halves]
    else:
        sides = window_pads(x.shape[2:], kernel, stride, dilation, auto_pad, pads)
    even = all(before == after for before, after in sides)
    if even and all(e < max(s, d) for e, s, d in zip(extra, stride, dilation)):
        padding = [before for before, _ in sides]
        return _CONV_TRANSPOSE[rank](x, weight, bias, stride, padding, extra, group, dilation)
    out = _CONV_TRANSPOSE[rank](x, weight, None, stride, 0, 0, group, dilation)
    out = F.pad(out, flat_pads([(-before, e - after) for (before, after), e in zip(sides, extra)]))
    return out if bias is None else out + bias.reshape(-1, *[1] * rank)


_MAX_POOL: dict[int, Callable[..., Tensor]] = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def _ceil_extra(
    size: Ints, kernel: Ints, stride: Ints, dilation: Ints, sides: list[tuple[int, int]]
) -> list[int]:
    """What `ceil_mode` adds at the end of each axis: the last window begins within the picture or its first pads."""
    extra = []
    for length, k, s, d, (before, after) in zip(size, kernel, stride, dilation, sides):
        reach = d * (k - 1) + 1
        windows = -(-(length + before + after - reach) // s) + 1
        windows -= (windows - 1) * s >= length + before
        extra.append(max(0, (windows - 1) * s + reach - (length + before + after)))
    return extra


@operator("MaxPool")
def max_pool(
    x: Tensor,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
) -> Tensor:
    """The greatest value of each window."""
    rank = len(kernel_shape)
    stride = strides or [1] * rank
    dilation = dilations or [1] * rank
    sides = window_pads(x.shape[2:], kernel_shape, stride, dilation, auto_pad, pads)
    if ceil_mode:
        extra = _ceil_extra(x.shape[2:], kernel_shape, stride, dilation, sides)
        sides = [(before, after + e) for (before, after), e in zip(sides, extra)]
    if all(before == after and before <= k // 2 for (before, after), k in zip(sides, kernel_shape)):
        return _MAX_POOL[rank](x, kernel_shape, stride, [before for before, _ in sides], dilation)
    return _MAX_POOL[rank](
        F.pad(x, flat_pads(sides), value=-math.inf), kernel_shape, stride, 0, dilation
    )


@operator("AveragePool")
def average_pool(
    x: Tensor,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """The mean of each window, of the picture's values alone unless pads are counted."""
    rank = len(kernel_shape)
    stride = strides or [1] * rank
    dilation = dilations or [1] * rank
    if any(step != 1 for step in dilation):
        raise ValueError("AveragePool with dilations")
    sides = window_pads(x.shape[2:], kernel_shape, stride, dilation, auto_pad, pads)
    extra = (
        _ceil_extra(x.shape[2:], kernel_shape, stride, dilation, sides) if ceil_mode else [0] * rank
    )
    even = all(
        before == after and before <= k // 2 for (before, after), k in zip(sides, kernel_shape)
    )
    if even and not any(extra):
        return _AVERAGE_POOL[rank](
            x, kernel_shape, stride, [a for a, _ in sides], False, bool(count_include_pad)
        )
    around = flat_pads(sides)
    beyond = flat_pads([(0, e) for e in extra])
    ones = torch.ones([1, 1, *x.shape[2:]], dtype=x.dtype, device=x.device)
    counted = F.pad(F.pad(ones, around, value=1.0 if count_include_pad else 0.0), beyond)
    total = _AVERAGE_POOL[rank](F.pad(F.pad(x, around), beyond), kernel_shape, stride)
    return total / _AVERAGE_POOL[rank](counted, kernel_shape, stride)


@operator("LpPool")
def lp_pool(
    x: Tensor,
    kernel_shape: Ints,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    dilations: Ints | None = None,
    p: int = 2,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """The p-norm of each window."""
    mean = average_pool(
        x.abs() ** p, kernel_shape, auto_pad, ceil_mode, 1, dilations, pads, strides
    )
    return (mean * math.prod(kernel_shape)) ** (1 / p)


@operator("GlobalAveragePool")
def global_average_pool(x: Tensor) -> Tensor:
    """The mean of each channel."""
    return x.mean(list(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(x: Tensor) -> Tensor:
    """The greatest value of each channel."""
    return x.amax(list(range(2, x.ndim)), keepdim=True)


@operator("BatchNormalization")
def _batch_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    mean: Tensor,
    variance: Tensor,
    epsilon: float = 1e-5,
    momentum: float = 0.9,
    spatial: int = 1,
) -> Tensor:
    """Normalised by recorded statistics."""
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, epsilon)


@operator("InstanceNormalization")
def instance_norm(x: Tensor, scale: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """Normalised in each channel of each picture."""
    axes = list(range(2, x.ndim))
    mean = x.mean(axes, keepdim=True)
    variance = (x - mean).square().mean(axes, keepdim=True)
    shape = [1, -1] + [1] * (x.ndim - 2)
    return (x - mean) * torch.rsqrt(variance + epsilon) * scale.reshape(shape) + bias.reshape(shape)


@operator("LayerNormalization")
def layer_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Tensor:
    """Normalised over the axes from one on."""
    shape = x.shape[axis:]
    if scale.shape == shape:
        return F.layer_norm(x, shape, scale, bias, epsilon)
    normed = F.layer_norm(x, shape, None, None, epsilon) * scale
    return normed if bias is None else normed + bias


@operator("RMSNormalization")
def rms_norm(
    x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Tensor:
    """Divided by the root of the mean square over the axes from one on."""
    axes = list(range(axis % x.ndim, x.ndim))
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + epsilon) * scale


@operator("GroupNormalization", opset=True)
def group_norm(
    x: Tensor,
    scale: Tensor,
    bias: Tensor,
    num_groups: int,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    opset: int = 21,
) -> Tensor:
    """Normalised in groups of channels; before opset 21 scale and bias are by group."""
    if opset < 21:
        repeats = x.shape[1] // num_groups
        scale = scale.repeat_interleave(repeats)
        bias = bias.repeat_interleave(repeats)
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("LpNormalization")
def lp_normalise(x: Tensor, axis: int = -1, p: int = 2) -> Tensor:
    """Divided by the p-norm along an axis."""
    return x / x.norm(p, axis, keepdim=True)


@operator("LRN")
def local_response_norm(
    x: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> Tensor:
    """Normalised by the channels beside."""
    return F.local_response_norm(x, size, alpha, beta, bias)


@operator("MeanVarianceNormalization")
def mean_variance_norm(x: Tensor, axes: Ints = (0, 2, 3)) -> Tensor:
    """Mean 0 and variance 1 over axes."""
    centred = x - x.mean(list(axes), keepdim=True)
    return centred / (centred.square().mean(list(axes), keepdim=True).sqrt() + 1e-9)


@operator("Attention")
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: int = 0,
    scale: float | None = None,
    q_num_heads: int | None = None,
    kv_num_heads: int | None = None,
    softcap: float = 0.0,
    qk_matmul_output_mode: int = 0,
    softmax_precision: int | None = None,
) -> Tensor:
    """Scaled dot-product attention; inputs of three axes have their heads side by side."""
    if softcap:
        raise ValueError("Attention with softcap")
    flat = q.ndim == 3
    if flat:
        if q_num_heads is None or kv_num_heads is None:
            raise TypeError("Attention of three axes without the numbers of heads")
        q = q.unflatten(-1, (q_num_heads, -1)).transpose(1, 2)
        k, v = (heads.unflatten(-1, (kv_num_heads, -1)).transpose(1, 2) for heads in (k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], 1) for heads in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal == 1, scale=scale)
    return out.transpose(1, 2).flatten(2) if flat else out


@operator("GridSample")
def grid_sample(
    x: Tensor,
    grid: Tensor,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Tensor:
    """Sampled at the places of a grid."""
    torch_mode = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    return F.grid_sample(x, grid, torch_mode, padding_mode, bool(align_corners))


@operator("RoiAlign", opset=True)
def _roi_align(
    x: Tensor,
    rois: Tensor,
    batch_indices: Tensor,
    coordinate_transformation_mode: str | None = None,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
    opset: int = 16,
) -> Tensor:
    """The mean of regions, each sampled at a grid."""
    from torchvision.ops import roi_align as align

    if mode != "avg":
        raise ValueError("RoiAlign with mode max")
    shifted = (
        coordinate_transformation_mode or ("half_pixel" if opset >= 16 else "output_half_pixel")
    ) == "half_pixel"
    boxes = torch.cat([batch_indices.to(rois.dtype)[:, None], rois], 1)
    return align(
        x, boxes, (output_height, output_width), spatial_scale, sampling_ratio or -1, shifted
    )


@operator("DeformConv")
def _deform_conv(
    x: Tensor,
    weight: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    offset_group: int = 1,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Tensor:
    """A convolution whose places are moved by offsets."""
    from torchvision.ops import deform_conv2d

    stride = strides or [1, 1]
    dilation = dilations or [1, 1]
    sides = pads or [0] * 4
    if list(sides[:2]) != list(sides[2:]):
        raise ValueError("DeformConv with other pads after the picture than before it")
    stride, sides, dilation = ((pair[0], pair[1]) for pair in (stride, sides, dilation))
    return deform_conv2d(x, offset, weight, bias, stride, sides, dilation, mask)


@operator("DequantizeLinear")
def dequantise(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    axis: int = 1,
    block_size: int = 0,
    output_dtype: int = 0,
) -> Tensor:
    """(x - zero point) * scale, by tensor or along an axis."""
    if block_size:
        raise ValueError("DequantizeLinear by block")
    if scale.numel() > 1:
        shape = [-1 if other == axis % x.ndim else 1 for other in range(x.ndim)]
        scale = scale.reshape(shape)
        zero_point = None if zero_point is None else zero_point.reshape(shape)
    values = x.to(scale.dtype)
    return (values if zero_point is None else values - zero_point.to(scale.dtype)) * scale
