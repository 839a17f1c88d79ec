"""Where a step past the ceiling starts from: the weights it gives, and what they do to the heads untrained."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from merger.bench.merged import Merged
from merger.bench.probing import HEAD_FRAMES, Answers, answers, distance
from merger.bench.workbench import Workbench
from merger.beyond.candidates import INSIDE, LOW_RANK, Candidate
from merger.journal.states import State
from models.bits import FACTORS
from models.parts.low_rank import factors
from models.sharing.layers import weight_key
from models.sharing.plan import Member, tie

INPUT_FRAMES = 64
"""Train frames of each query on which the inputs of a layer to be factorised are measured."""
MIN_RISK = 1e-4
Inputs = dict[str, dict[str, tuple[Tensor, int]]]
"""Query -> path of a layer -> the sum of squares of each of its inputs (channels), and how many values that sums."""


def applied(bench: Workbench, merged: Merged, candidate: Candidate, inputs: Inputs) -> Merged:
    """The plan and the states with this step taken, nothing trained; norm statistics are the old ones.

    `inputs` are those of the layers that become factors.
    """
    plan, states = candidate.as_set(merged.plan), dict(merged.states)
    if candidate.kind == INSIDE:
        weights = {"first": _weight(merged, candidate.first[0]), "second": _weight(merged, candidate.second[0])}
        weights["mean"] = (weights["first"] + weights["second"]) / 2
        for query, path in (*candidate.first, *candidate.second):
            state = states[query]
            states[query] = {**state, weight_key(state, path): weights[candidate.start]}
        return Merged(plan, states)
    scale = _input_scale(inputs, candidate.first)
    made = factors(_weight(merged, candidate.first[0]), candidate.rank, scale, bench.seed)
    for query, path in candidate.first:
        states[query] = _with_factors(states[query], path, dict(zip(FACTORS, made, strict=True)))
    return Merged(plan, states)


def with_risk(
    bench: Workbench,
    merged: Merged,
    candidate: Candidate,
    inputs: Inputs,
    theirs: Mapping[str, Answers],
    before: Mapping[str, float],
) -> Candidate:
    """The candidate with its best start and the risk of it: how much further the heads' answers come to lie.

    `before` are the `errors` of what is merged; the query that suffers most counts.
    """
    tried = []
    for start in ("mean", "first", "second") if candidate.kind == INSIDE else ("mean",):
        one = replace(candidate, start=start)
        taken = applied(bench, merged, one, inputs)
        found = errors(bench, taken, {query: theirs[query] for query in sorted(candidate.queries)})
        worse = max(found[query] - before[query] for query in found)
        tried.append(replace(one, risk=max(MIN_RISK, worse)))
    return min(tried, key=lambda one: one.risk)


def originals_answers(bench: Workbench, queries: Sequence[str]) -> dict[str, dict[str, list[Tensor]]]:
    """Query -> what the heads of its original give (merger.bench.probing)."""
    return {query: answers(bench, query, bench.originals[query]) for query in queries}


def errors(bench: Workbench, merged: Merged, theirs: Mapping[str, Answers]) -> dict[str, float]:
    """Query -> how far the answers of its heads lie from its original's, `theirs`, norms measured again."""
    models = bench.models(list(theirs), merged.states, merged.plan)
    tie(models, merged.plan)
    found = {}
    for query, model in models.items():
        bench.calibrate(query, model, HEAD_FRAMES)
        found[query] = distance(answers(bench, query, model), theirs[query])
    return found


def _weight(merged: Merged, member: Member) -> Tensor:
    query, path = member
    return merged.states[query][weight_key(merged.states[query], path)]


def _with_factors(state: State, path: str, made: Mapping[str, Tensor]) -> State:
    """The state with the factors in the layer's place; its bias goes to the last of them."""
    plain = {name: tensor for name, tensor in state.items() if name not in (f"{path}.weight", f"{path}.bias")}
    bias = {f"{path}.{FACTORS[-1]}.bias": state[f"{path}.bias"]} if f"{path}.bias" in state else {}
    return {**plain, **{f"{path}.{factor}.weight": tensor for factor, tensor in made.items()}, **bias}


@torch.no_grad()
def inputs_of(bench: Workbench, merged: Merged, candidates: Iterable[Candidate]) -> Inputs:
    """What goes into the layers that these steps would make factors, over train frames: one pass of each query."""
    members = {member for one in candidates if one.kind == LOW_RANK for member in one.first}
    found: Inputs = defaultdict(dict)

    def note(query: str, path: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        channels = 1 if isinstance(layer, nn.Conv2d) else -1
        values = inputs[0].float().movedim(channels, -1).flatten(0, -2)
        squares, count = found[query].get(path, (0, 0))
        found[query][path] = (squares + values.square().sum(0), count + len(values))

    for query in sorted({query for query, _ in members}):
        model = bench.models([query], merged.states, merged.plan)[query].eval()
        for path in (path for name, path in members if name == query):
            model.get_submodule(path).register_forward_pre_hook(partial(note, query, path))
        data = bench.train[query]
        indices = torch.linspace(0, len(data) - 1, min(INPUT_FRAMES, len(data))).long().tolist()
        model(data.frames(indices, bench.device))
        bench.work.add(bench.queries[query], len(indices))
    return dict(found)


def _input_scale(inputs: Inputs, members: Sequence[Member]) -> Tensor | None:
    """Root mean square of each input (channel) of a layer over all its queries; None if it never ran."""
    seen = [inputs[query][path] for query, path in members if path in inputs.get(query, {})]
    if not seen:
        return None
    squares = torch.stack([squares for squares, _ in seen]).sum(0)
    return (squares / sum(count for _, count in seen)).sqrt().cpu()  # where the weights of `Merged` lie
