"""What a merge comes to: a sharing plan, and the weights that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from models.sharing.plan import SharingPlan

State = dict[str, Tensor]


@dataclass(frozen=True)
class Merged:
    """A plan and the state of every query's model under it."""

    plan: SharingPlan
    states: Mapping[str, State]

    def to_plain(self) -> dict[str, Any]:
        """Plain values and tensors, for a journal."""
        return {"plan": self.plan.to_json(), "states": {query: dict(state) for query, state in self.states.items()}}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any]) -> Merged:
        """Inverse of `to_plain`."""
        return cls(SharingPlan.from_json(value["plan"]), value["states"])


def snapshot(model: nn.Module) -> State:
    """A copy of a model's state, in the processor's memory: a merge keeps several, and a card has room for none."""
    return {name: _kept(tensor) for name, tensor in model.state_dict().items()}


def _kept(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def snapshots(models: Mapping[str, nn.Module]) -> dict[str, State]:
    """A copy of each model's state, as `snapshot` makes it."""
    return {query: snapshot(model) for query, model in models.items()}
