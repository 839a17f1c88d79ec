"""What a box's queries cost and whether they fit its budget: all that is known before anything is allocated."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_runtime.config import BoxConfig
from edge_runtime.engines import FrameEngine
from edge_runtime.engines.eager.staging import layers_of
from edge_runtime.rehearsal.measured import (
    REMEDY,
    MeasuredProfile,
    ascending,
    foreign,
    measured_costs,
    profile_path,
    read_profile,
)
from edge_runtime.schedule.costs import BATCHES, BatchCost, Costs, QueryCost
from edge_runtime.schedule.overflow import Layer, Overflow, overflow_of
from models.bundle import Bundle
from models.errors import InputError

# Before anything is measured: a rate that no copy reaches.
UNKNOWN_COPY_BYTES_PER_S = 1e12

log = logging.getLogger("gemel.run")


@dataclass(frozen=True)
class Fitted:
    """The costs with every weight resident, and those within the budget, where queries may stream."""

    whole: Costs
    within: Overflow


def fitted(
    config: BoxConfig, bundle: Bundle, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None
) -> Fitted:
    """The costs with these engines; `profile` is what was measured here.

    Raises InputError, which says how much is needed, where a query does not fit the budget even alone: streaming, if
    the config allows that.
    """

    def layers(query: str) -> Sequence[Layer]:
        asked = bundle.query(query)
        return layers_of(engines[query].model, asked.input_size, asked.state(), asked.stored, config.device)

    whole, budget = known_costs(bundle, engines, profile), config.budget_bytes
    within = overflow_of(whole, budget, layers)
    if within.lacking and config.stream:
        query, needed = max(within.lacking.items(), key=lambda one: one[1])
        fault = f"query '{query}' alone needs {needed} bytes with its layers streamed, the budget is {budget}"
        raise InputError(config.path, fault, f"give at least {needed}", "budget")
    too_large = {*within.lacking, *within.tensors}
    if too_large and not config.stream:
        query = max(too_large, key=whole.alone_bytes)
        needed, workspace = whole.alone_bytes(query), whole.queries[query].workspace_bytes
        fault = (
            f"query '{query}' alone needs {needed} bytes ({needed - workspace} of weights, {workspace} of "
            f"workspace), the budget is {budget}"
        )
        least = within.lacking.get(query)
        remedy = (
            f"give at least {least} with `stream: true`"
            if least is not None
            else f"set `stream: true`: it copies {within.run_bytes[query]} bytes in every run then"
        )
        raise InputError(config.path, fault, f"give at least {needed}, or {remedy}", "budget")
    return Fitted(whole, within)


def usable_profile(config: BoxConfig, bundle: Bundle) -> MeasuredProfile | None:
    """What `gemel profile` measured on this machine with the engine asked for; None, with a warning, without it."""
    try:
        profile = read_profile(bundle)
    except InputError as error:
        log.warning("%s", error)
        return None
    differing = foreign(profile, config.device)
    if differing is None and profile.engine != config.engine:
        differing = f"engine {profile.engine}, here {config.engine}"
    if differing is None:
        return profile
    log.warning("%s: measured on another machine or engine (%s); %s", profile_path(bundle.path), differing, REMEDY)
    return None


def known_costs(bundle: Bundle, engines: Mapping[str, FrameEngine], profile: MeasuredProfile | None) -> Costs:
    """What is known before anything ran: as measured, else bytes and deadlines.

    What is not known is learned while running.
    """
    if profile is not None:
        return measured_costs(bundle, profile)
    queries = {}
    for query in bundle.queries:
        first, *larger = ascending(BatchCost(count, 0.0, engines[query.id].workspace_of(count)) for count in BATCHES)
        queries[query.id] = QueryCost(
            bundle.names_in_order(query.id), 0.0, first.workspace_bytes, query.sla_ms / 1000, tuple(larger)
        )
    names = {name for cost in queries.values() for name in cost.tensors}
    return Costs(queries, {name: bundle.nbytes(name) for name in names}, UNKNOWN_COPY_BYTES_PER_S)
