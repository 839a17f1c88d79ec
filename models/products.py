"""How exactly a card multiplies 32-bit numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)


@contextmanager
def in_full(full: bool = True) -> Iterator[None]:
    """Products of 32-bit numbers are computed in full while this lasts; or in TF32, in 10 of their 23 bits.

    Unless told otherwise a card takes TF32 for convolutions and not for products of matrices.
    """
    before = [backend.allow_tf32 for backend in _BACKENDS]
    for backend in _BACKENDS:
        backend.allow_tf32 = not full
    try:
        yield
    finally:
        for backend, allowed in zip(_BACKENDS, before):
            backend.allow_tf32 = allowed
