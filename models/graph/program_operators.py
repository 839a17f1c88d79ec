"""The operators that a program may call: those of tensors, and arithmetic of sizes.

An operator is looked up among torch's own and passed on by the name that it has there, with the names of arguments
that its schema lists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from gemel.models.errors import one_line
from gemel.models.graph.program_fields import ProgramFault, check_integer

PLAIN_OPERATORS = "export a model of plain operators"
TARGET = re.compile(r"torch\.ops\.(aten|torchvision|prims)\.(\w{1,99})\.(\w{1,99})", re.ASCII)
SIZE_OPERATORS = frozenset({
    "_operator.add", "_operator.sub", "_operator.mul", "_operator.floordiv", "_operator.truediv", "_operator.mod",
    "_operator.neg", "_operator.pos", "_operator.pow", "_operator.eq", "_operator.ne", "_operator.lt", "_operator.le",
    "_operator.gt", "_operator.ge", "_operator.and_", "_operator.or_", "math.trunc", "torch.sym_not", "torch.sym_int",
    "torch.sym_float", "torch.sym_ite", "torch.sym_max", "torch.sym_min", "torch.sym_sqrt",
})  # fmt: skip
SIZES_OF_TENSORS = frozenset(
    {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset", "item", "_local_scalar_dense"}
)
"""Operators of tensors that answer with a number."""
CHECKS = frozenset({"_assert_async", "_assert_scalar", "_assert_tensor_metadata", "sym_constrain_range",
                    "sym_constrain_range_for_size"})  # fmt: skip
"""Operators that answer with nothing."""
REFUSED = frozenset({"from_file"})
"""Operators of files."""
ARGUMENT_TYPES = frozenset({"Tensor", "Optional", "List", "int", "SymInt", "float", "bool", "number", "str", "Device",
                            "Generator", "Layout", "MemoryFormat", "ScalarType"})  # fmt: skip
TEXTS = frozenset({
    "none", "tanh", "trunc", "floor", "constant", "reflect", "replicate", "circular", "nearest", "nearest-exact",
    "linear", "bilinear", "bicubic", "trilinear", "area", "zeros", "border", "reflection", "valid", "same", "left",
    "right", "lower", "higher", "midpoint", "ij", "xy", "mean", "sum", "prod", "amax", "amin", "max", "min", "add",
    "multiply", "reduced", "complete", "forward", "backward", "ortho", "L", "U",
})  # fmt: skip
"""What an argument that is a text may say; einsum's equation apart."""
EQUATION = re.compile(r"[A-Za-z.,> -]{1,200}", re.ASCII)
CHECK = "a check of the program"
MAX_SIZE_BITS = 512
"""Of a number that arithmetic of sizes may make, a symbol's being 64: each product of two adds theirs."""
MAX_EXPONENT = 4


@dataclass(frozen=True)
class ProgramOperator:
    """An operator by its name in torch, and the names of its arguments; None where they have none."""

    target: str
    arguments: frozenset[str] | None
    returns_nothing: bool = False


def find_operator(target: str) -> ProgramOperator:
    """The operator that a node calls; ProgramFault for a function that is none of tensors or sizes."""
    if target in SIZE_OPERATORS:
        return ProgramOperator(target, None)
    match = TARGET.fullmatch(target)
    operator = _look_up(*match.groups()) if match else None
    if operator is None:
        raise ProgramFault(f"its program calls {one_line(target[:200])}", PLAIN_OPERATORS)
    return operator


def _look_up(namespace: str, name: str, overload: str) -> ProgramOperator | None:
    # Its operators are registered at import.
    if namespace == "torchvision":
        import torchvision  # noqa: F401  registers them

    packet = getattr(getattr(torch.ops, namespace), name, None)
    operator = getattr(packet, overload, None)
    if not isinstance(operator, torch._ops.OpOverload) or name in REFUSED:
        return None
    schema = operator._schema
    arguments = [str(argument.type) for argument in schema.arguments]
    returns = [str(result.type) for result in schema.returns]
    # An argument of another type could be an object or a function.
    if not all(set(re.findall(r"\w+", kind)) <= ARGUMENT_TYPES for kind in (*arguments, *returns)):
        return None
    answers = bool(returns) and all("Tensor" in kind for kind in returns)
    if not answers and not (name in SIZES_OF_TENSORS or (name in CHECKS and not returns)):
        return None
    names = frozenset(argument.name for argument in schema.arguments)
    return ProgramOperator(
        f"torch.ops.{namespace}.{name}.{overload}", names, returns_nothing=not returns
    )


def check_text(argument: str, value: Any) -> str:
    """The text of an operator's argument: one of those that operators know."""
    if not isinstance(value, str):
        raise ProgramFault("its program has a value that is no text where one belongs")
    if argument == "assert_msg":
        return CHECK
    if value in TEXTS or (argument == "equation" and EQUATION.fullmatch(value)):
        return value
    raise ProgramFault(
        f"its program has an operator with '{one_line(value[:200])}'", PLAIN_OPERATORS
    )


class SizeBounds:
    """Bounds the numbers that a program's arithmetic of sizes makes, before any of it is computed."""

    def __init__(self) -> None:
        self.bits: dict[str, int] = {}

    def add(self, target: str, operands: list[str | int | float | bool], result: str) -> None:
        """Count an operation of these names and numbers; ProgramFault where its result is too large."""
        sizes = [self._bits_of(operand) for operand in operands]
        if target == "_operator.pow":
            bits = sizes[0] * _exponent(operands[-1])
        elif target == "_operator.mul":
            bits = sum(sizes)
        else:
            bits = max(sizes, default=1) + 1
        if bits > MAX_SIZE_BITS:
            raise ProgramFault("its program computes a size that no tensor has")
        self.bits[result] = bits

    def _bits_of(self, operand: str | int | float | bool) -> int:
        if isinstance(operand, str):
            return self.bits.get(operand, 64)
        return operand.bit_length() if isinstance(operand, int) else 64


def _exponent(value: str | int | float | bool) -> int:
    """The whole number that bounds an exponent."""
    if isinstance(value, float) and abs(value) <= MAX_EXPONENT:
        return MAX_EXPONENT
    return abs(check_integer(value, -MAX_EXPONENT, MAX_EXPONENT))
