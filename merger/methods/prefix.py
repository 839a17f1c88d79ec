"""`--share-prefix`: queries of one camera run their first layers once a frame (Mainstream, USENIX ATC 2018).

It follows any method. The donor of the queries of one camera with one network, preparation and region is the network
that all were trained from, where they name one `init`, as in the paper; else the query with the most train frames. Each
query takes the donor's first layers with their norms. The longest such prefix with which it reaches its target is found
by bisection: for each length what follows is trained, while the prefix and what is shared stay frozen. The part of val
that accepts then tests the lengths that hold, from the shortest to the first that it refuses: a fixed order needs no
smaller error (Maurer, Hothorn and Lehmacher, 1995). A layer that leaves one set joins the donor's; the layers of an
`init` are then added once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from merger.acceptance import ACCEPTANCE
from merger.checkpoint import Checkpoint, State, Step, StepCache, storable
from merger.config import MergeOptions
from merger.context import MergeContext, Merged
from merger.evaluate import training_flops
from merger.events import Event
from merger.methods.epochs import bisect_options, freeze_shared
from merger.methods.mainstream import Family, find_donor, find_families, freeze_prefix
from merger.methods.registry import MergeTask, prepare_task
from merger.methods.repair import Repaired, repair_recipe, train_unfrozen
from models.bundle import BundleQuery
from models.notes import add_note
from models.sharing.flop_rates import flops_before, layers_by_query
from models.sharing.passes import fed_alike
from models.sharing.plan import SharingPlan
from models.workload import Query

SHARING_PREFIXES = "sharing the first layers of each camera's queries"


@storable
@dataclass(frozen=True)
class CameraPrefix:
    """The longest prefix that a query shares, its best ratio on val with it and its state there (None without one), and
    all lengths tried with their ratios."""

    length: int
    ratio: float | None
    state: State | None
    tried: list[list[float]]


def share_prefixes(ctx: MergeContext, merged: Merged, options: MergeOptions, checkpoint: Checkpoint) -> Merged:
    """What is merged, with each query's longest prefix tied to its camera's donor."""
    families = find_camera_families(ctx, merged)
    if not families:
        add_note("--share-prefix", "no two queries of one camera have one architecture and are fed alike")
        return merged
    task = prepare_task(ctx, merged.plan, options, checkpoint)
    task = replace(task, recipe=repair_recipe(task))
    receivers = {query: family for family in families for query in family.queries if query != family.donor_query}
    trials = {query: math.ceil(math.log2(len(family.paths) + 1)) for query, family in receivers.items()}
    most = sum(count * training_flops(ctx, [query], task.recipe) for query, count in trials.items())
    ctx.begin(SHARING_PREFIXES, flops=min(most, task.budget.flops_left))
    take_budget = task.budget.divide(len(receivers))

    def search(cache: StepCache, query: str) -> CameraPrefix:
        alone = replace(task, budget=take_budget(), checkpoint=cache)
        return find_longest_prefix(alone, receivers[query], query, merged)

    found = ctx.for_each_query(checkpoint, Step.CAMERA_PREFIXES, receivers, search)
    plan, states = merged.plan, dict(merged.states)
    for family in families:
        lengths = common_lengths(family, {query: one.length for query, one in found.items() if query in family.queries})
        plan = tie_prefixes(plan, family, lengths)
        for query in (name for name in family.queries if name in receivers):
            one, common = found[query], lengths.get(query, 0)
            if common and one.state is not None:
                states[query] = one.state
            task.report(
                Event.CAMERA_PREFIX, query=query, donor=family.donor_query, common=common, of=len(family.paths),
                ratio=one.ratio, required=task.required[query], tried=one.tried,
                saved_flops_per_s=_saved_flops(ctx, family, query, lengths),
            )  # fmt: skip
    return Merged(plan, states, merged.networks)


def find_camera_families(ctx: MergeContext, merged: Merged) -> list[Family]:
    """Queries of one camera whose networks are alike and fed alike; a donor that is one of them is as it was merged."""

    def donor_of(_: MergeContext, queries: Sequence[str]) -> tuple[State, str | None]:
        state, donor = find_donor(ctx, queries)
        return (state, None) if donor is None else (merged.states[donor], donor)

    return find_families(ctx, _camera_key, donor_of)


def find_longest_prefix(task: MergeTask, family: Family, query: str, merged: Merged) -> CameraPrefix:
    """The longest prefix with which a query reaches its target; length 0 without a state where none does."""
    tried: list[list[float]] = []
    held: dict[int, Repaired] = {}

    def attempt(index: int) -> tuple[bool, Repaired]:
        length = len(family.paths) - index
        with task.checkpoint.open_step(Step.PREFIX, str(length)) as step:
            if not step.done:
                model = freeze_prefix(task.ctx, family, query, length, merged.states[query])
                freeze_shared({query: model}, merged.plan.with_private(query, family.paths[:length]))
                step.value = train_unfrozen(task, {query: model})
        holds = step.value.ratio >= task.required[query]
        if holds:
            held[length] = step.value
        tried.append([length, step.value.ratio])
        task.ctx.report(Event.ATTEMPT, query=query, prefix=length, ratio=step.value.ratio, held=holds)
        return holds, step.value

    bisect_options(len(family.paths), attempt, lambda: task.budget.over)
    length = prove_longest(task, query, {length: one.state for length, one in held.items()}, merged)
    found = held.get(length)
    return CameraPrefix(length, found.ratio if found else None, found.state if found else None, tried)


def prove_longest(task: MergeTask, query: str, states: Mapping[int, State], merged: Merged) -> int:
    """The longest of these prefixes such that it and all shorter ones are accepted; 0 where the shortest is not.

    What the query shares without a prefix is tested first. Queries share the error evenly.
    """
    ctx = task.ctx
    if ctx.references[query].proof is None:
        return max(states, default=0)
    error, longest = ACCEPTANCE.error / len(ctx.judged), 0
    begun = {0: merged.states[query]} if query in merged.plan.queries() or query in ctx.networks else {}
    for length, state in sorted({**begun, **states}.items()):
        p_value, near = ctx.prove(query, ctx.models([query], {query: state})[query])
        if not (p_value <= error or (ctx.accept_unproven and near)):
            break
        longest = length
    return longest


def common_lengths(family: Family, longest: Mapping[str, int]) -> dict[str, int]:
    """How many of the donor's first layers each query takes, of a donor that is a query all; none without a second."""
    lengths = {query: length for query, length in longest.items() if length}
    if family.donor_query is not None:
        lengths[family.donor_query] = len(family.paths)
    return lengths if len(lengths) > 1 else {}


def tie_prefixes(plan: SharingPlan, family: Family, lengths: Mapping[str, int]) -> SharingPlan:
    """The plan with each query's first layers tied to the donor's sets, or where that is no query, to new ones."""
    for query, length in lengths.items():
        if query != family.donor_query:
            plan = plan.with_private(query, family.paths[:length])
    for index, path in enumerate(family.paths):
        users = [query for query, length in lengths.items() if length > index]
        members = [(query, path) for query in sorted(users, key=lambda query: (query != family.donor_query, query))]
        plan = plan.with_pairs(pairwise(members))
    return plan


def _camera_key(query: Query) -> Hashable:
    return query.model, fed_alike(BundleQuery.of(query))


def _saved_flops(ctx: MergeContext, family: Family, query: str, lengths: Mapping[str, int]) -> float:
    """FLOPs a second that a query saves by a prefix that another one runs for the same frames."""
    length = lengths.get(query, 0)
    first = family.donor_query or max(lengths, key=lambda name: lengths[name], default=query)
    if query == first or not length:
        return 0.0
    own, donor = ctx.queries[query], ctx.queries[first]
    end = family.paths[length] if length < len(family.paths) else family.end
    return min(own.fps or 1.0, donor.fps or 1.0) * flops_before(layers_by_query([own])[query], [end])
