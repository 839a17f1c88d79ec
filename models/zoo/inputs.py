"""Whether a model takes a query's frames, and answers with as many classes as were asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.compiler import without_compiler
from models.errors import InputError
from models.zoo.foreign import reason
from models.zoo.registry import ENTRIES


def check_answer(model: str, module: nn.Module, input_size: int, task: str, width: int) -> None:
    """Raise InputError when the module fails on a frame of (3, input_size, input_size), or its logits are not
    (1, width).

    The frame is sent through on the meta device, which computes nothing. Only where that fails, and the module has
    weights, does a real one decide: a user's module may do what the meta device cannot.
    """
    try:
        answer = _on_meta(module, input_size)
    except Exception as error:
        if _is_meta(module):
            raise _refused(model, input_size, error) from error
        try:
            answer = _for_real(module, input_size)
        except Exception as real_error:
            raise _refused(model, input_size, real_error) from real_error
    if task == "classification":
        check_logits(model, answer, width)


def check_logits(model: str, answer: Any, width: int) -> None:
    """Raise InputError when a classifier's answer to one frame is not a tensor (1, width)."""
    if isinstance(answer, Tensor) and answer.shape == (1, width):
        return
    if isinstance(answer, Tensor) and answer.ndim == 2:
        fault = f"answers with {answer.shape[1]} classes where {width} were asked for"
        raise InputError(model, fault, "make its last layer `num_classes` wide", "classes")
    given = f"a tensor {tuple(answer.shape)}" if isinstance(answer, Tensor) else f"a {type(answer).__name__}"
    fault = f"answers one frame with {given}, not with logits (1, {width})"
    raise InputError(model, fault, "return one row of plain logits for each frame", "model")


def answer_on_meta(module: nn.Module, input_size: int) -> Any:
    """What the module answers to one frame on the meta device; None where it cannot run there."""
    try:
        return _on_meta(module, input_size)
    except Exception:  # a user's module may fail in any way
        return None


def _on_meta(module: nn.Module, input_size: int) -> Any:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    with without_compiler(), _evaluating(module), torch.no_grad(), torch.device("meta"):
        return functional_call(module, state, (torch.zeros(1, 3, input_size, input_size),))


def _for_real(module: nn.Module, input_size: int) -> Any:
    device = next(module.parameters()).device
    with _evaluating(module), torch.no_grad():
        return module(torch.zeros(1, 3, input_size, input_size, device=device))


def _is_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in module.state_dict().values())


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Eval mode for a while; each part goes back to the mode it had."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training


def _refused(model: str, input_size: int, error: Exception) -> InputError:
    entry = ENTRIES.get(model)
    remedy = f"choose another input_size; it was made for {entry.input_size}" if entry else "mend its forward"
    return InputError(model, f"cannot take frames of {input_size}x{input_size} ({reason(error)})", remedy, "input_size")
