"""Elementwise operators, reductions, products, and what compares or selects."""

from __future__ import annotations

import operator as python
from functools import reduce as fold
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gemel.models.graph.operators.operator_registry import (
    OPERATORS,
    Numbers,
    Operator,
    integers,
    number,
    operator,
)

for _name, _function in {
    "Abs": torch.abs, "Acos": torch.acos, "Add": python.add, "And": torch.logical_and, "Asin": torch.asin,
    "Celu": F.celu, "Elu": F.elu, "Gelu": F.gelu, "HardSwish": F.hardswish,
    "Atan": torch.atan, "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh, "Equal": python.eq, "Erf": torch.erf,
    "Exp": torch.exp, "Floor": torch.floor, "Greater": python.gt, "GreaterOrEqual": python.ge, "IsNaN": torch.isnan,
    "Less": python.lt, "LessOrEqual": python.le, "Log": torch.log, "MatMul": torch.matmul, "Mul": python.mul,
    "Neg": torch.neg, "Not": torch.logical_not, "Or": torch.logical_or, "Reciprocal": torch.reciprocal,
    "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin,
    "Sinh": torch.sinh, "Softsign": F.softsign, "Softplus": F.softplus, "Mish": F.mish, "Sqrt": torch.sqrt,
    "Sub": python.sub, "Tan": torch.tan, "Tanh": torch.tanh, "Where": torch.where, "Xor": torch.logical_xor,
}.items():  # fmt: skip
    OPERATORS[_name] = Operator(_function)


@operator("Identity", "Dropout")
def identity(x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The tensor itself: dropout does nothing when a model answers."""
    return x


@operator("Div")
def divide(a: Tensor | float, b: Tensor | float) -> Tensor:
    """The quotient; of integers rounded towards zero."""
    whole = not any(
        operand.is_floating_point() if isinstance(operand, Tensor) else isinstance(operand, float)
        for operand in (a, b)
    )
    if whole:
        return torch.div(torch.as_tensor(a), b, rounding_mode="trunc")
    return a / b  # type: ignore[return-value]


@operator("Mod")
def modulo(a: Tensor, b: Tensor, fmod: int = 0) -> Tensor:
    """The remainder, with the sign of `b`, or of `a` with `fmod`."""
    return torch.fmod(a, b) if fmod else torch.remainder(a, b)


@operator("Pow")
def power(a: Tensor, b: Tensor) -> Tensor:
    """`a` to the power of `b` in the type of `a`."""
    result = torch.pow(a, b)
    return result.to(a.dtype) if isinstance(a, Tensor) else result


@operator("Min")
def minimum(*tensors: Tensor) -> Tensor:
    """The least of several tensors, elementwise."""
    return fold(lambda a, b: _extreme(torch.minimum, torch.clamp_max, a, b), tensors)


@operator("Max")
def maximum(*tensors: Tensor) -> Tensor:
    """The greatest of several tensors, elementwise."""
    return fold(lambda a, b: _extreme(torch.maximum, torch.clamp_min, a, b), tensors)


def _extreme(of_tensors: Any, of_number: Any, a: Any, b: Any) -> Tensor:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return of_tensors(a, b)
    return of_number(a, b) if isinstance(a, Tensor) else of_number(b, a)


@operator("Sum")
def add_all(*tensors: Tensor) -> Tensor:
    """The sum of several tensors, elementwise."""
    return fold(python.add, tensors)


@operator("Mean")
def mean_of(*tensors: Tensor) -> Tensor:
    """The mean of several tensors, elementwise."""
    return fold(python.add, tensors) / len(tensors)


@operator("Clip", static=(1, 2))
def clip(x: Tensor, min: Numbers = None, max: Numbers = None) -> Tensor:
    """Values within bounds."""
    if min is None and max is None:
        return x
    return torch.clamp(
        x, None if min is None else number(min), None if max is None else number(max)
    )


@operator("LeakyRelu")
def leaky_relu(x: Tensor, alpha: float = 0.01) -> Tensor:
    """x, or alpha * x below zero."""
    return F.leaky_relu(x, alpha)


@operator("PRelu")
def prelu(x: Tensor, slope: Tensor) -> Tensor:
    """x, or slope * x below zero, the slope broadcast."""
    return torch.where(x < 0, x * slope, x)


@operator("ThresholdedRelu")
def thresholded_relu(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x above alpha, else zero."""
    return torch.where(x > alpha, x, torch.zeros_like(x))


@operator("Selu")
def selu(
    x: Tensor, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875
) -> Tensor:
    """Gamma times the ELU."""
    return gamma * F.elu(x, alpha)


@operator("HardSigmoid")
def hard_sigmoid(x: Tensor, alpha: float = 0.2, beta: float = 0.5) -> Tensor:
    """Alpha * x + beta within 0 and 1."""
    return torch.clamp(alpha * x + beta, 0, 1)


@operator("Swish")
def swish(x: Tensor, alpha: float = 1.0) -> Tensor:
    """x * sigmoid(alpha * x)."""
    return x * torch.sigmoid(alpha * x)


@operator("Softmax", opset=True)
def softmax(x: Tensor, axis: int | None = None, opset: int = 13) -> Tensor:
    """Softmax along an axis; before opset 13 along all from the axis on."""
    if opset >= 13:
        return torch.softmax(x, -1 if axis is None else axis)
    return torch.softmax(x.flatten(_positive(1 if axis is None else axis, x)), -1).reshape(x.shape)


@operator("LogSoftmax", opset=True)
def log_softmax(x: Tensor, axis: int | None = None, opset: int = 13) -> Tensor:
    """The logarithm of the softmax, along the same axes."""
    if opset >= 13:
        return torch.log_softmax(x, -1 if axis is None else axis)
    return torch.log_softmax(x.flatten(_positive(1 if axis is None else axis, x)), -1).reshape(
        x.shape
    )


@operator("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Tensor:
    """Alpha * a @ b + beta * c, with a or b transposed."""
    product = torch.matmul(a.t() if transA else a, b.t() if transB else b)
    product = product if alpha == 1 else product * alpha
    return product if c is None else product + (c if beta == 1 else c * beta)


@operator("Einsum")
def einsum(*tensors: Tensor, equation: str) -> Tensor:
    """The sum of products that the equation writes."""
    return torch.einsum(equation.replace(" ", ""), *tensors)


def _reduction(name: str, compute: Any) -> None:
    @operator(name, static=(1,))
    def reduce_axes(
        x: Tensor, axes: Numbers = None, keepdims: int = 1, noop_with_empty_axes: int = 0
    ) -> Tensor:
        axes = [] if axes is None else integers(axes)
        if not axes:
            if noop_with_empty_axes:
                return x
            axes = list(range(x.ndim))
        return compute(x, axes, bool(keepdims))


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((_positive(axis, x) for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


def _mean(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    return x.mean(axes, keep) if x.is_floating_point() else x.double().mean(axes, keep).to(x.dtype)


for _name, _compute in {
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keep, dtype=x.dtype),
    "ReduceMean": _mean,
    "ReduceMax": torch.amax,
    "ReduceMin": torch.amin,
    "ReduceProd": _product,
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keep, dtype=x.dtype),
    "ReduceL2": lambda x, axes, keep: torch.linalg.vector_norm(
        x, 2, axes, keep
    ),  # its gradient at zero is zero
    "ReduceSumSquare": lambda x, axes, keep: (x * x).sum(axes, keep, dtype=x.dtype),
    "ReduceLogSum": lambda x, axes, keep: torch.log(x.sum(axes, keep)),
    "ReduceLogSumExp": torch.logsumexp,
}.items():
    _reduction(_name, _compute)


@operator("ArgMax")
def arg_max(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Where the greatest value is along an axis."""
    if select_last_index:
        return x.shape[axis] - 1 - torch.argmax(x.flip(axis), axis, bool(keepdims))
    return torch.argmax(x, axis, bool(keepdims))


@operator("ArgMin")
def arg_min(x: Tensor, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Tensor:
    """Where the least value is along an axis."""
    return arg_max(-x, axis, keepdims, select_last_index)


@operator("TopK", static=(1,))
def top_k(
    x: Tensor, k: Numbers, axis: int = -1, largest: int = 1, sorted: int = 1
) -> tuple[Tensor, Tensor]:
    """The k greatest values along an axis and where they are."""
    values, places = torch.topk(x, int(number(k)), axis, bool(largest), bool(sorted))
    return values, places


@operator("CumSum", static=(1,))
def cumulative_sum(x: Tensor, axis: Numbers, exclusive: int = 0, reverse: int = 0) -> Tensor:
    """The running sum along an axis."""
    axis = int(number(axis))
    x = x.flip(axis) if reverse else x
    total = torch.cumsum(x, axis, dtype=x.dtype)
    total = total - x if exclusive else total
    return total.flip(axis) if reverse else total


@operator("IsInf")
def is_infinite(x: Tensor, detect_negative: int = 1, detect_positive: int = 1) -> Tensor:
    """Whether values are infinite, of the signs that are looked for."""
    return torch.isinf(x) & (
        (x > 0)
        if not detect_negative
        else (x < 0)
        if not detect_positive
        else torch.ones_like(x) > 0
    )


def _positive(axis: int, x: Tensor) -> int:
    return axis + x.ndim if axis < 0 else axis
