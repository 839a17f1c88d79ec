"""The second stage of a box: what its queries cost and whether they fit its budget, before anything is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edge_runtime.config import BoxConfig
from edge_runtime.engines.base import FrameEngine
from edge_runtime.engines.eager.staging import layers_of
from edge_runtime.engines.registry import FALLBACK, make_engine
from edge_runtime.opening import OpenBox
from edge_runtime.policies import policy_named
from edge_runtime.scheduler import Policy
from edge_runtime.scheduler.costs import BATCHES, BatchCost, Costs, QueryCost, all_bytes
from edge_runtime.scheduler.eviction import Overflow, OverflowLayer, overflow_of
from edge_runtime.simulation.profile_io import (
    PROFILE_HINT,
    MeasuredProfile,
    machine_mismatch,
    measured_costs,
    monotone_batches,
    profile_path,
    read_profile,
)
from models.bundle import Bundle
from models.errors import InputError, exact_text, size_text

# Before anything is measured: a rate that no copy reaches.
UNKNOWN_COPY_BYTES_PER_S = 1e12

log = logging.getLogger("gemel.run")


@dataclass(frozen=True, eq=False)
class FittedBox:
    """A box whose queries fit its budget with these `engines`, unbound as they are.

    `whole` are the costs with every weight resident, `within` those in which the budget is kept, where queries may
    overflow; `profile` is what was measured here, if anything.
    """

    box: OpenBox
    policy: Policy
    engines: Mapping[str, FrameEngine]
    profile: MeasuredProfile | None
    whole: Costs
    within: Overflow

    @property
    def stays(self) -> bool:
        """Whether all weights fit at once, so that each is loaded once."""
        return all_bytes(self.policy.view(self.within.costs)) <= self.box.config.budget_bytes

    def on(self, engines: Mapping[str, FrameEngine]) -> FittedBox:
        """The same box with other engines; those of queries that overflow stay.

        Raises InputError where one needs more than the budget leaves it.
        """
        overflow, box = self.within.tensors, self.box
        mixed = {**engines, **{query: self.engines[query] for query in overflow}}
        whole, within = _costs_of(box, mixed, self.profile)
        for query in within.tensors.keys() - overflow.keys():
            fault = f"query '{query}' fits the budget on engine {FALLBACK}, not on {engines[query].name}"
            raise InputError(box.config.path, fault, f"use engine {FALLBACK}", "engine")
        return FittedBox(box, self.policy, mixed, self.profile, whole, within)

    def to_json(self) -> dict[str, Any]:
        """What is known before the start: what is needed, whether all of it can stay resident, and what overflows."""
        costs, config, bundle = self.policy.view(self.whole), self.box.config, self.box.bundle
        return {
            "bundle": str(bundle.path), "digest": bundle.digest, "device": config.device, "engine": config.engine,
            "budget_bytes": config.budget_bytes, "weights_bytes": costs.resident_bytes(costs.tensor_bytes.keys()),
            "workspace_bytes": max(cost.workspace_bytes for cost in costs.queries.values()),
            "damaged": self.box.damaged, "held_back": dict(self.box.held_back),
            "fits": all_bytes(costs) <= config.budget_bytes,
            "least_budget_bytes": max(map(costs.alone_bytes, costs.queries)), "overflow_bytes": self.within.run_bytes,
        }  # fmt: skip


def fit(box: OpenBox) -> FittedBox:
    """What the box's queries cost on the engine that runs everything: preparing others may take minutes.

    Raises InputError, which says how much is needed, where a query does not fit the budget even alone: with an
    overflow, if the config allows that.
    """
    config, bundle = box.config, box.bundle
    policy = policy_named(config.policy, str(config.path), "policy")
    engines = {query.id: make_engine(FALLBACK, bundle, query.id, config.device) for query in bundle.queries}
    profile = _usable_profile(config, bundle)
    whole, within = _costs_of(box, engines, profile)
    return FittedBox(box, policy, engines, profile, whole, within)


def known_costs(bundle: Bundle, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None) -> Costs:
    """What is known before anything ran: as measured, else bytes and deadlines.

    What is not known is learned while running.
    """
    if profile is not None:
        return measured_costs(bundle, profile)
    queries = {}
    for query in bundle.queries:
        first, *larger = monotone_batches(
            BatchCost(count, 0.0, engines[query.id].workspace_of(count)) for count in BATCHES
        )
        queries[query.id] = QueryCost(
            bundle.names_in_order(query.id), 0.0, first.workspace_bytes, query.sla_ms / 1000, tuple(larger)
        )
    names = {name for cost in queries.values() for name in cost.tensors}
    return Costs(queries, {name: bundle.nbytes(name) for name in names}, UNKNOWN_COPY_BYTES_PER_S)


def _costs_of(
    box: OpenBox, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None
) -> tuple[Costs, Overflow]:
    """The costs with every weight resident, and those within the budget; InputError where there are none."""
    config, bundle = box.config, box.bundle

    def layers(query: str) -> Sequence[OverflowLayer]:
        asked = bundle.query(query)
        return layers_of(engines[query].model, asked.input_size, asked.tensors, asked.stored, config.device)

    whole = known_costs(bundle, engines, profile)
    within = overflow_of(whole, config.budget_bytes, layers)
    _refuse_too_large(config, whole, within)
    return whole, within


def _refuse_too_large(config: BoxConfig, whole: Costs, within: Overflow) -> None:
    budget = exact_text(config.budget_bytes)
    if within.lacking and config.overflow:
        query, needed = max(within.lacking.items(), key=lambda one: one[1])
        fault = f"query '{query}' alone needs {exact_text(needed)} even with an overflow, the budget is {budget}"
        raise InputError(config.path, fault, f"give at least {exact_text(needed)}", "budget")
    too_large = {*within.lacking, *within.tensors}
    if not too_large or config.overflow:
        return
    query = max(too_large, key=whole.alone_bytes)
    needed, workspace = whole.alone_bytes(query), whole.queries[query].workspace_bytes
    fault = (
        f"query '{query}' alone needs {exact_text(needed)}, {size_text(needed - workspace)} of weights and "
        f"{size_text(workspace)} of workspace, the budget is {budget}"
    )
    least = within.lacking.get(query)
    remedy = (
        f"give at least {exact_text(least)} with `overflow: true`"
        if least is not None
        else f"set `overflow: true`: it copies {size_text(within.run_bytes[query])} in every run then"
    )
    raise InputError(config.path, fault, f"give at least {exact_text(needed)}, or {remedy}", "budget")


def _usable_profile(config: BoxConfig, bundle: Bundle) -> MeasuredProfile | None:
    """What `gemel profile` measured on this machine with the engine asked for; None, with a warning, without it."""
    try:
        profile = read_profile(bundle)
    except InputError as error:
        log.warning("%s", error)
        return None
    differing = machine_mismatch(profile, config.device)
    if differing is None and profile.engine != config.engine:
        differing = f"engine {profile.engine}, here {config.engine}"
    if differing is None:
        return profile
    log.warning(
        "%s: measured on another machine or engine (%s); %s", profile_path(bundle.path), differing, PROFILE_HINT
    )
    return None
