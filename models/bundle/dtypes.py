"""The dtypes of a bundle's tensors: their codes in the container, torch's names for them, their sizes.

A bundle is looked at without torch, whose import takes longer than the looking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_CODES = {name: code for code, name in _NAMES.items()}
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one number by code; the codes are all that a bundle may have."""


def code_of(dtype: torch.dtype) -> str:
    """The code of torch's dtype; KeyError for one that no bundle holds."""
    return _CODES[str(dtype).removeprefix("torch.")]


def has_code(dtype: torch.dtype) -> bool:
    """Whether a bundle can hold tensors of torch's dtype."""
    return str(dtype).removeprefix("torch.") in _CODES


def dtype_of(code: str) -> torch.dtype:
    """Torch's dtype of a code."""
    import torch

    return getattr(torch, _NAMES[code])
