"""What a step past the ceiling does to the heads untrained, and what goes into the layers it factorises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import merger.beyond.risk as risk_module
from merger.bench.merged import Merged
from merger.bench.probing import HEAD_FRAMES
from merger.bench.workbench import Workbench
from merger.beyond.candidates import Candidate, inside, low_rank
from merger.beyond.risk import INPUT_FRAMES, applied, errors, inputs_of, originals_answers, with_risk
from merger.journal.states import snapshot
from models.sharing.plan import SharingPlan
from tests.merger.beyond.tries import ladder_of


def test_the_risk_is_that_of_the_best_start_and_falls_with_the_rank(bench: Workbench) -> None:
    for model in bench.originals.values():  # a trained layer of so small a task is of low rank already
        torch.nn.init.normal_(model.get_parameter("wide.weight"), std=0.05)
    alone = Merged(SharingPlan(), {query: snapshot(model) for query, model in bench.originals.items()})
    theirs = originals_answers(bench, ["q0", "q1"])
    begun = bench.work.total
    before = errors(bench, alone, theirs)
    asked = 2 * HEAD_FRAMES * sum(bench.work.of(bench.queries[query]) for query in theirs)
    assert bench.work.total - begun == asked, "norms measured again, and what the merged models answer"
    ladder = ladder_of("wide", bench, alone)
    inputs = inputs_of(bench, alone, ladder)
    found = [with_risk(bench, alone, one, inputs, theirs, before) for one in ladder]
    assert found[0].risk > found[-1].risk
    assert [Candidate.from_plain(one.to_plain()) for one in found] == found
    pair = inside(bench.layers, alone.plan, 0)[0]
    by_start, own = {}, {query: theirs[query] for query in pair.queries}
    for start in ("mean", "first", "second"):
        tried = applied(bench, alone, replace(pair, start=start), {})
        by_start[start] = max(after - before[q] for q, after in errors(bench, tried, own).items())
    judged = with_risk(bench, alone, pair, {}, theirs, before)
    assert judged.start == min(by_start, key=lambda start: by_start[start])
    assert judged.risk == pytest.approx(by_start[judged.start])


def test_the_inputs_of_layers_are_measured_over_all_their_queries_in_one_pass_each(
    bench: Workbench, merged: Merged
) -> None:
    ladders = low_rank(bench.layers, bench.originals, merged.plan, 0)
    before = bench.work.total
    found = inputs_of(bench, merged, [ladder[0] for ladder in ladders])
    passes = sum(min(INPUT_FRAMES, len(bench.train[q])) * bench.work.of(bench.queries[q]) for q in bench.queries)
    assert bench.work.total - before == passes
    seen: list[torch.Tensor] = []
    for query in ("q0", "q1"):
        model = bench.models([query], merged.states, merged.plan)[query].eval()
        model.get_submodule("wide").register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        data = bench.train[query]
        with torch.no_grad():
            model(data.frames(torch.linspace(0, len(data) - 1, min(INPUT_FRAMES, len(data))).long().tolist()))
    scale = risk_module._input_scale(found, [("q0", "wide"), ("q1", "wide")])
    assert scale is not None and torch.allclose(scale, torch.cat(seen).square().mean(0).sqrt(), rtol=1e-4)
    assert risk_module._input_scale(found, [("q0", "never")]) is None


def test_the_inputs_of_a_layer_that_is_called_several_times_are_all_counted(
    bench: Workbench, merged: Merged, monkeypatch: pytest.MonkeyPatch
) -> None:
    ladder, made = ladder_of("wide", bench, merged), bench.models
    once = inputs_of(bench, merged, ladder)["q0"]["wide"]

    def models(queries: Any, states: Any, plan: Any) -> Any:
        found = made(queries, states, plan)
        for model in found.values():
            model.forward = lambda frames, forward=model.forward: (forward(frames[:5]), forward(frames[5:]))
        return found

    monkeypatch.setattr(bench, "models", models)
    squares, count = inputs_of(bench, merged, ladder)["q0"]["wide"]
    assert count == once[1] and torch.allclose(squares, once[0], rtol=1e-4)
