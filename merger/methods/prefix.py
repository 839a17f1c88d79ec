"""`--share-prefix`: queries of one camera run their first layers once a frame (Mainstream, USENIX ATC 2018).

It follows any method. The donor of the queries of one camera with one network, preparation and region is the network
that all were trained from, where they name one `init`, as in the paper; else the query with the most train frames. Each
query takes the donor's first layers with their norms. The longest such prefix with which it reaches its target is found
by bisection: for each length what follows is trained, while the prefix and what is shared stay frozen. The lengths that
hold are then proven, from the shortest to the first that is not: a fixed order needs no smaller error (Maurer, Hothorn
and Lehmacher, 1995). A layer that leaves one set joins the donor's; the layers of an
`init` are then added once.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import nn

from gemel.merger.checkpoint import Checkpoint, State, Step, StepCache, snapshot, storable
from gemel.merger.config import MergeOptions
from gemel.merger.context import MergeContext, Merged
from gemel.merger.evaluate import training_flops
from gemel.merger.events import Event
from gemel.merger.methods.epochs import bisect_options, freeze_shared
from gemel.merger.methods.private import Trained, private_recipe, train_schedules
from gemel.merger.methods.registry import MergeTask, prepare_task
from gemel.merger.proof import PROOF, prove_query
from gemel.models.bundle import BundleQuery
from gemel.models.files.weights import load_matching
from gemel.models.notes import add_note
from gemel.models.sharing.flop_rates import flops_before, layers_by_query
from gemel.models.sharing.layers import weight_key
from gemel.models.sharing.passes import fed_alike
from gemel.models.sharing.plan import SharingPlan
from gemel.models.workload import Query
from gemel.models.zoo.user_models import is_model_file

SHARING_PREFIXES = "sharing the first layers of each camera's queries"


@dataclass(frozen=True)
class Family:
    """Queries of one architecture: the layers a prefix may hold, in order, and the donor's state.

    `end` is the path of the first layer that no prefix may hold; `donor_query` is that whose original is the donor.
    """

    queries: tuple[str, ...]
    paths: tuple[str, ...]
    end: str
    donor: State
    donor_query: str | None

    def prefix(self, state: Iterable[str], length: int) -> list[str]:
        """The names of a state dict that belong to a prefix of so many layers: all before the next layer's weight."""
        names = list(state)
        following = self.paths[length] if length < len(self.paths) else self.end
        return names[: names.index(weight_key(names, following))] if length else []


@storable
@dataclass(frozen=True)
class CameraPrefix:
    """The longest prefix that a query shares, its best ratio with it and its state there (None without one), and
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
    task = replace(task, recipe=private_recipe(task))
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
    alike: dict[Hashable, list[str]] = defaultdict(list)
    for name in ctx.judged:
        alike[_camera_key(ctx.queries[name])].append(name)
    found = []
    for queries in alike.values():
        layers = [layer for layer in ctx.layers if layer.query == queries[0]]
        first_head = next((index for index, layer in enumerate(layers) if layer.head), len(layers) - 1)
        if len(queries) < 2 or first_head < 1:
            continue
        paths = tuple(layer.path for layer in layers[:first_head])
        donor, donor_query = load_ancestor(ctx, queries), None
        if donor is None:
            donor_query = max(queries, key=lambda query: len(ctx.train[query]))
            donor = merged.states[donor_query]
        usable = next((i for i, path in enumerate(paths) if weight_key(donor, path) not in donor), len(paths))
        end = paths[usable] if usable < len(paths) else layers[first_head].path
        if usable:
            found.append(Family(tuple(queries), paths[:usable], end, donor, donor_query))
    return found


def load_ancestor(ctx: MergeContext, queries: Sequence[str]) -> State | None:
    """The weights all were trained from, if they name them; a file that is a network itself has no names that fit."""
    ancestors = {ctx.queries[query].init for query in queries}
    ancestor = ancestors.pop()
    if ancestor is None or ancestors or is_model_file(str(ancestor)):
        return None
    model = copy.deepcopy(ctx.originals[queries[0]])
    loaded = set(load_matching(model, ancestor))
    return {name: tensor for name, tensor in snapshot(model).items() if name in loaded}


def find_longest_prefix(task: MergeTask, family: Family, query: str, merged: Merged) -> CameraPrefix:
    """The longest prefix with which a query reaches its target; length 0 without a state where none does."""
    tried: list[list[float]] = []
    held: dict[int, Trained] = {}

    def try_length(index: int) -> bool:
        length = len(family.paths) - index
        with task.checkpoint.open_step(Step.PREFIX, str(length)) as step:
            if not step.done:
                model = freeze_prefix(task.ctx, family, query, length, merged.states[query])
                freeze_shared({query: model}, merged.plan.with_private(query, family.paths[:length]))
                step.value = train_schedules(task, {query: model})
        holds = step.value.ratio >= task.required[query]
        if holds:
            held[length] = step.value
        tried.append([length, step.value.ratio])
        task.ctx.report(Event.ATTEMPT, query=query, prefix=length, ratio=step.value.ratio, held=holds)
        return holds

    bisect_options(len(family.paths), try_length, lambda: task.budget.over)
    length = prove_longest(task, query, {length: one.state for length, one in held.items()}, merged)
    found = held.get(length)
    return CameraPrefix(length, found.ratio if found else None, found.state if found else None, tried)


def prove_longest(task: MergeTask, query: str, states: Mapping[int, State], merged: Merged) -> int:
    """The longest of these prefixes such that it and all shorter ones are proven; 0 where the shortest is not.

    What the query shares without a prefix is tested first. Queries share the error evenly. With `accept_unproven` a
    plain ratio does.
    """
    ctx = task.ctx
    error, longest = PROOF.error / len(ctx.judged), 0
    begun = {0: merged.states[query]} if query in merged.plan.queries() or query in ctx.networks else {}
    for length, state in sorted({**begun, **states}.items()):
        model = ctx.models([query], {query: state})[query]
        if ctx.accept_unproven:
            holds = ctx.plain_ratio(query, ctx.answer_val(query, model)) >= ctx.queries[query].accuracy_target
        else:
            holds = prove_query(ctx.observe(query, model), error).proven
        if not holds:
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


def freeze_prefix(ctx: MergeContext, family: Family, query: str, length: int, state: State) -> nn.Module:
    """The query's model, with the weights of `state`, and the donor's frozen prefix of so many layers."""
    model = ctx.models([query], {query: state})[query]
    names = set(family.prefix(model.state_dict(), length))
    model.load_state_dict({name: t for name, t in family.donor.items() if name in names}, strict=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in names)
    return model
