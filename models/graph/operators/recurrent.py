"""Recurrent layers over a sequence: LSTM, GRU and RNN with their usual activations, one or both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gemel.models.graph.operators.operator_registry import MAX_STEPS, operator

Step = Callable[[Tensor, list[Tensor], Tensor, Tensor], list[Tensor]]
"""From the input's part of the gates (N, G * H), the states (N, H), the recurrence (G * H, H) and its bias."""
ACTIVATIONS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}
FIRST_STATES = {"LSTM": (5, 6), "GRU": (5,), "RNN": (5,)}
"""The inputs that are the states before the first step, zeros where they are left out."""
LENGTHS, PEEPHOLES = 4, 7


def _lstm_step(x: Tensor, states: list[Tensor], recurrence: Tensor, bias: Tensor) -> list[Tensor]:
    h, c = states
    i, o, f, g = (x + F.linear(h, recurrence, bias)).chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def _gru_step(
    x: Tensor, states: list[Tensor], recurrence: Tensor, bias: Tensor, before: bool
) -> list[Tensor]:
    (h,) = states
    size = h.shape[1]
    xz, xr, xn = x.chunk(3, dim=1)
    z, r = (
        (torch.cat([xz, xr], 1) + F.linear(h, recurrence[: 2 * size], bias[: 2 * size]))
        .sigmoid()
        .chunk(2, dim=1)
    )
    last = recurrence[2 * size :]
    offset = bias[2 * size :]
    n = xn + (r * F.linear(h, last, offset) if before else F.linear(r * h, last, offset))
    return [(1 - z) * n.tanh() + z * h]


def _rnn_step(x: Tensor, states: list[Tensor], recurrence: Tensor, bias: Tensor) -> list[Tensor]:
    return [(x + F.linear(states[0], recurrence, bias)).tanh()]


@operator("LSTM", "GRU", "RNN", count=True)
def _recurrent(
    x: Tensor,
    weight: Tensor,
    recurrence: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    h: Tensor | None = None,
    c: Tensor | None = None,
    peepholes: Tensor | None = None,
    *,
    count: int,
    hidden_size: int = 0,
    direction: str = "forward",
    layout: int = 0,
    linear_before_reset: int = 0,
    activations: Sequence[str] = (),
    clip: float = 0.0,
    input_forget: int = 0,
) -> tuple[Tensor, ...]:
    """x (T, N, I), weight (D, G * H, I), recurrence (D, G * H, H) -> outputs (T, D, N, H) and last states (D, N, H).

    With `layout` the batch is the first axis.
    """
    ways, rows, size = recurrence.shape
    kind = {4: "LSTM", 3: "GRU", 1: "RNN"}[rows // size]
    if lengths is not None or peepholes is not None or clip or input_forget:
        raise ValueError("lengths of sequences, peepholes, clip and input_forget are not computed")
    if activations and tuple(activations) != ACTIVATIONS[kind] * ways:
        raise ValueError(f"activations other than {', '.join(ACTIVATIONS[kind])} are not computed")
    x = x.transpose(0, 1) if layout else x
    if len(x) > MAX_STEPS:
        raise ValueError(f"a sequence of {len(x)} steps is longer than {MAX_STEPS}")
    by_way = []
    for way in range(ways):
        first_states = (h, c)[: len(FIRST_STATES[kind])]
        zeros = x.new_zeros(x.shape[1], size)
        states = [
            zeros if state is None else state[:, way] if layout else state[way]
            for state in first_states
        ]
        offsets = x.new_zeros(2, rows) if bias is None else bias[way].unflatten(0, (2, rows))
        gates = F.linear(x, weight[way], offsets[0])
        steps = []
        backwards = direction == "reverse" or way == 1
        for gate in reversed(gates.unbind()) if backwards else gates.unbind():
            if kind == "GRU":
                states = _gru_step(
                    gate, states, recurrence[way], offsets[1], bool(linear_before_reset)
                )
            else:
                step: Step = _lstm_step if kind == "LSTM" else _rnn_step
                states = step(gate, states, recurrence[way], offsets[1])
            steps.append(states[0])
        by_way.append((torch.stack(steps[::-1] if backwards else steps), *states))
    outputs, *last = (
        torch.stack(parts, 1 if place == 0 else 0) for place, parts in enumerate(zip(*by_way))
    )
    if layout:
        outputs = outputs.permute(2, 0, 1, 3)
        last = [state.transpose(0, 1) for state in last]
    results = (outputs, *last)
    return results[:count] if count > 1 else outputs  # type: ignore[return-value]
