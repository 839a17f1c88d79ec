"""The device whose costs the virtual clock runs by: one modelled on paper, or this machine as it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_runtime.scheduler.costs import Costs
from edge_runtime.simulation.device_profiles import costs_for
from edge_runtime.simulation.profile_io import measured_costs, read_profile
from gemel.analytic_costs import bundle_originals, find_profile
from gemel.conditions import MEASURED
from gemel.stream_eval import MERGED, ORIGINALS
from models.bundle import Bundle


@dataclass(frozen=True)
class CostModel:
    """The costs of both arms on one device, and what the report says of it."""

    costs: Mapping[str, Costs]
    told: Mapping[str, Any]

    def rows(self) -> list[dict[str, Any]]:
        """The costs as plain values, a row for each arm and query: a load brings all of its weights."""
        return [
            {
                "arm": arm,
                "query": query,
                "weights_bytes": (weights := cost.moved_bytes(one.tensors)),
                "load_ms": 1000 * cost.load_s(weights),
                "run_ms": 1000 * one.run_s,
                "workspace_bytes": one.workspace_bytes,
            }
            for arm, cost in self.costs.items()
            for query, one in cost.queries.items()
        ]


def load_cost_model(device: str, bundle: Bundle) -> CostModel:
    """A device by the name of its profile, or `measured`; InputError where there is none such."""
    if device == MEASURED:
        found = read_profile(bundle)
        costs = {ORIGINALS: measured_costs(bundle_originals(bundle), found), MERGED: measured_costs(bundle, found)}
        title = f"{found.machine['name']} ({found.device})"
        return CostModel(
            costs, _told(MEASURED, title, modelled=False, sources=[f"gemel profile, engine {found.engine}"])
        )
    profile = find_profile(device)
    costs = {ORIGINALS: costs_for(profile, bundle_originals(bundle)), MERGED: costs_for(profile, bundle)}
    return CostModel(costs, _told(profile.name, profile.title, profile.modelled, list(profile.sources)))


def _told(name: str, title: str, modelled: bool, sources: list[str]) -> dict[str, Any]:
    return {"name": name, "title": title, "modelled": modelled, "clock": "virtual clock", "sources": sources}
