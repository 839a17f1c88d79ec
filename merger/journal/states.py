"""States of models, as a merge and a training keep them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

State = dict[str, Tensor]


def snapshot(model: nn.Module) -> State:
    """A copy of a model's state, in the processor's memory: a merge keeps several, and a card has room for none."""
    return {name: _kept(tensor) for name, tensor in model.state_dict().items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def snapshots(models: Mapping[str, nn.Module]) -> dict[str, State]:
    """A copy of each model's state, as `snapshot` makes it."""
    return {query: snapshot(model) for query, model in models.items()}
