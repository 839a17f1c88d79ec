"""Where a merge starts from: the weight that each set begins with, chosen by running it and not by belief."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from merger.alignment import aligned, by_shared_bytes
from merger.ancestry import COMMON, kinship
from merger.features import feature_loss, watched_layers, watching
from merger.journal import Journal
from merger.similarity import forecast
from merger.solving import solved
from merger.workbench import State, Workbench, snapshot
from models.layers import weight_key
from models.plan import SharingPlan, tie

MOST_DONORS = 4
"""Donors tried at most, those with the most shared bytes of their own first."""
WORTH_SOLVING = 0.5
"""The error from which a start is solved: it costs a third of an epoch, which a near start does not need."""
FRAMES = 64
"""Train frames of each query by which a start is judged."""


def choose_start(bench: Workbench, plan: SharingPlan, journal: Journal) -> dict[str, State]:
    """The states to start from: every set with its members' mean, or with one donor's weight wherever it has one.

    Each start is tied, its norms are measured again, and one pass of a few train frames decides: how far what goes
    into the heads lies from what goes into the originals' heads, on the mean of the queries. Originals that descend
    from one ancestor favour the mean; independent ones a donor, whose own model then begins where it was. Where they
    have no common ancestor, the mean of models whose channels were brought into one order is tried too. Where even the
    best of these is far off, it is tried once more with every tied layer solved by least squares. Progress hears of
    the ancestry, of a forecast for every set, and of the error of every start.
    """
    originals = {query: snapshot(model) for query, model in bench.originals.items()}
    donors = by_shared_bytes(bench, plan)[:MOST_DONORS]
    _tell_forecast(bench, plan, journal)
    starts = {"mean": (originals, averaged(plan, originals))}
    starts.update({donor: (originals, donated(plan, originals, donor)) for donor in donors})
    if not _have_common_ancestor(bench, plan, originals):
        ordered = journal.step("aligned", lambda: aligned(bench, plan, donors[0], journal, originals))
        starts["aligned mean"] = (ordered, averaged(plan, ordered))
    reached = {name: _reached(bench, plan, name, states, journal) for name, (_, states) in starts.items()}
    best = min(reached, key=lambda name: reached[name])
    if reached[best] > WORTH_SOLVING:
        wanted, states = starts[best]
        found = journal.step("solved", lambda: solved(bench, plan, wanted, states, journal))
        if _reached(bench, plan, f"{best}, solved", found, journal) < reached[best]:
            return found
    return starts[best][1]


def averaged(plan: SharingPlan, states: Mapping[str, State]) -> dict[str, State]:
    """Every member of a set gets the mean of the members' weights."""
    changed = {query: dict(state) for query, state in states.items()}
    for members in plan.shared:
        weights = [states[query][weight_key(states[query], path)] for query, path in members]
        mean = torch.stack(weights).mean(dim=0)
        for query, path in members:
            changed[query][weight_key(states[query], path)] = mean
    return changed


def donated(plan: SharingPlan, states: Mapping[str, State], donor: str) -> dict[str, State]:
    """Every member of a set gets the donor's weight, or the first member's where the donor is not in the set."""
    changed = {query: dict(state) for query, state in states.items()}
    for members in plan.shared:
        giver, path = next((member for member in members if member[0] == donor), members[0])
        weight = states[giver][weight_key(states[giver], path)]
        for query, path in members:
            changed[query][weight_key(states[query], path)] = weight
    return changed


def _have_common_ancestor(bench: Workbench, plan: SharingPlan, states: Mapping[str, State]) -> bool:
    """Whether all that share do; then their channels are in one order already."""
    found = kinship(plan, bench.layers, states)
    common = min(found.values()) >= COMMON
    bench.progress("ancestry", common=common, kinship=found)
    return common


def _tell_forecast(bench: Workbench, plan: SharingPlan, journal: Journal) -> None:
    likeness = journal.step("forecast", lambda: forecast(bench, plan, journal))
    for index in sorted(likeness, key=lambda index: likeness[index]):
        members = [list(member) for member in plan.shared[index]]
        bench.progress("forecast", members=members, likeness=likeness[index])


def _reached(bench: Workbench, plan: SharingPlan, name: str, states: Mapping[str, State], journal: Journal) -> float:
    errors = journal.step(f"start {name}", partial(features_error, bench, plan, states))
    error = sum(errors.values()) / len(errors)
    bench.progress("start", start=name, error=error, errors=errors)
    return error


@torch.no_grad()
def features_error(bench: Workbench, plan: SharingPlan, states: Mapping[str, State]) -> dict[str, float]:
    """Relative squared error of the heads' inputs, 1 for features that say nothing about the original's."""
    queries = sorted({query for members in plan.shared for query, _ in members})
    models = bench.models(queries, states, plan)
    tie(models, plan)
    errors = {}
    for query, model in models.items():
        data, found = bench.train[query], bench.queries[query]
        bench.calibrate(query, model, FRAMES)
        indices = torch.linspace(0, len(data) - 1, min(FRAMES, len(data))).long().tolist()
        frames = data.preprocess.normalise(data.prepared.batch(indices)).to(bench.device)
        paths = watched_layers(found, model)
        with watching(model.eval(), paths) as mine, watching(bench.originals[query], paths) as theirs:
            model(frames)
            bench.originals[query](frames)
        bench.work.add(found, 2 * len(indices))
        errors[query] = float(feature_loss(mine, theirs))
    return errors
