"""Where a merge starts from: the weight that each set begins with, chosen by running it and not by belief."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from merger.features import feature_loss, watched_layers, watching
from merger.journal import Journal
from merger.workbench import State, Workbench, snapshot
from models.layers import weight_key
from models.plan import SharingPlan, tie

MOST_DONORS = 4
"""Donors tried at most, those with the most shared bytes of their own first."""
FRAMES = 64
"""Train frames of each query by which a start is judged."""


def choose_start(bench: Workbench, plan: SharingPlan, journal: Journal) -> dict[str, State]:
    """The states to start from: every set with its members' mean, or with one donor's weight wherever it has one.

    Each start is tied, its norms are measured again, and one pass of a few train frames decides: how far what goes
    into the heads lies from what goes into the originals' heads, on the mean of the queries. Originals that descend
    from one ancestor favour the mean; independent ones a donor, whose own model then begins where it was.
    """
    originals = {query: snapshot(model) for query, model in bench.originals.items()}
    starts = {"mean": averaged(plan, originals)}
    starts.update({donor: donated(plan, originals, donor) for donor in _donors(bench, plan)})
    reached = {}
    for name, states in starts.items():
        errors = journal.step(f"start {name}", partial(_errors, bench, plan, states))
        reached[name] = sum(errors.values()) / len(errors)
        bench.progress("start", start=name, error=reached[name], errors=errors)
    return starts[min(reached, key=lambda name: reached[name])]


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


def _donors(bench: Workbench, plan: SharingPlan) -> list[str]:
    size = {(layer.query, layer.path): layer.bytes for layer in bench.layers}
    held = dict.fromkeys(bench.queries, 0)
    for members in plan.shared:
        for member in members:
            held[member[0]] += size[member]
    return sorted((query for query in held if held[query]), key=lambda query: -held[query])[:MOST_DONORS]


@torch.no_grad()
def _errors(bench: Workbench, plan: SharingPlan, states: Mapping[str, State]) -> dict[str, float]:
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
