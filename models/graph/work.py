"""How much work a node is, from the sizes that it reads and gives, before it is computed; and how much is permitted.

Constants are computed while a file is read. A file of a few bytes can ask for hours of it, so all of it is counted
against one budget, which grows with the weights that the file has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gemel.models.errors import InputError, size_text
from gemel.models.graph.document_bounds import HINT

MAX_OPERATIONS, OPERATIONS_PER_BYTE = 10**10, 32
"""Of all that is computed while a file is read: this many, and more for each byte of the file's constants."""
MAX_FOLDED_BYTES, FOLDED_PER_BYTE = 2**28, 4
"""Of all constants that are computed while a file is read: this many, and more for each byte that it has."""
MAX_FRAME_OPERATIONS = 10**14
"""Of a network for one frame; the largest published detectors have 10**12."""
TOUCH, CALL = 4, 200_000
"""Operations that reading or writing a value counts as, and finding out the sizes of a result."""
INTEGER_PRODUCT = 4
"""How often a product of integers counts, which no library makes fast."""
Size = Sequence[int]
Sizes = Sequence[Size | None]


class TooMuchWork(InputError):
    """A file whose constants take too long or too much memory."""


class WorkBudget:
    """What is left of the work that reading a file may be; `file_bytes` are those of its constants."""

    def __init__(self, file_bytes: int, where: str) -> None:
        self.where = where
        self.operations = MAX_OPERATIONS + OPERATIONS_PER_BYTE * file_bytes
        self.max_bytes = MAX_FOLDED_BYTES + FOLDED_PER_BYTE * file_bytes

    def spend(self, operations: int, subject: str) -> None:
        """Count operations before they are done; TooMuchWork where none are left."""
        self.operations -= operations
        if self.operations < 0:
            raise TooMuchWork(
                self.where, f"{subject}: to compute the file's constants would take too long", HINT
            )

    def check_bytes(self, nbytes: int, subject: str) -> None:
        """Refuse constants of more bytes in all."""
        if nbytes > self.max_bytes:
            problem = (
                f"{subject}: the file's constants would fill more than {size_text(self.max_bytes)}"
            )
            raise TooMuchWork(self.where, problem, HINT)


def count_operations(
    operator: str,
    inputs: Sizes,
    outputs: Sequence[Size],
    options: Mapping[str, Any],
    is_float: bool = True,
) -> int:
    """Operations of a node: its products, its windows, and TOUCH for each value that it reads or writes."""
    values = sum(math.prod(size) for size in (*inputs, *outputs) if size is not None)
    per_node = math.prod(outputs[0]) if outputs else 0
    products = per_node * count_products(operator, inputs, outputs, options)
    return TOUCH * values + products * (1 if is_float else INTEGER_PRODUCT)


def count_products(
    operator: str, inputs: Sizes, outputs: Sequence[Size], options: Mapping[str, Any]
) -> int:
    """Operations for each value of the first output, without reading and writing."""
    first = inputs[0] if inputs and inputs[0] is not None else ()
    second = inputs[1] if len(inputs) > 1 and inputs[1] is not None else ()
    if operator == "MatMul":
        return 2 * (first[-1] if first else 1)
    if operator == "Gemm":
        return 2 * (math.prod(first) // max(1, math.prod(outputs[0][:1])))
    if operator in ("Conv", "DeformConv"):
        return 2 * math.prod(second[1:])
    # Counted by what is read: each value is spread over a window.
    if operator == "ConvTranspose":
        per_value = 2 * math.prod(second[1:])
        return -(-per_value * math.prod(first) // max(1, math.prod(outputs[0])))
    if operator in ("MaxPool", "AveragePool", "LpPool"):
        return math.prod(options.get("kernel_shape", ()))
    if operator == "LRN":
        return int(options.get("size", 1))
    if operator == "Einsum":
        return _count_einsum(str(options.get("equation", "")), inputs, outputs)
    if operator in ("Resize", "Upsample"):
        return _count_taps(first, outputs[0], options)
    if operator == "Attention":
        return 4 * (second[-2] if len(second) > 1 else 1)
    if operator in ("LSTM", "GRU", "RNN"):
        return 2 * 4 * ((first[-1] if first else 1) + int(options.get("hidden_size", 0)))
    if operator == "TopK":
        return math.ceil(math.log2(max(2, *first))) if first else 1
    return 1


def _count_einsum(equation: str, inputs: Sizes, outputs: Sequence[Size]) -> int:
    """The product of all its letters' sizes for each operand, by value of the output."""
    sizes: dict[str, int] = {}
    terms = equation.replace(" ", "").split("->")[0].replace("...", "").split(",")
    for term, size in zip(terms, inputs):
        for letter, length in zip(reversed(term), reversed(size or ())):
            sizes[letter] = max(length, sizes.get(letter, 1))
    total = len(inputs) * math.prod(sizes.values())
    return -(-total // max(1, math.prod(outputs[0])))


def _count_taps(before: Size, after: Size, options: Mapping[str, Any]) -> int:
    """What each value of a resized tensor is made of, axis by axis."""
    if options.get("mode", "nearest") == "nearest":
        return 1
    reach = 4 if options.get("mode") == "cubic" else 2
    taps = 0
    for old, new in zip(before, after):
        if old != new:
            stretch = -(-old // max(1, new)) if options.get("antialias") else 1
            taps += reach * max(1, stretch)
    return 2 * max(1, taps)
