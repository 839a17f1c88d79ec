"""What a merge comes to: a sharing plan, and the weights that go with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from merger.checkpoint import State
from models.sharing.plan import SharingPlan


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
