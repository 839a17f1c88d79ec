"""Least squares: one weight that serves all members, found where there is one, and never far from the start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from merger.checkpoint import StepCache, snapshot
from merger.core.context import MergeContext
from merger.start.choosing import InitEvaluator
from merger.start.solving import FRAMES, PLACES, _best_weight, _Equations, _samples, most_flops, solved
from merger.training.recipe import Flops
from models.sharing.layers import weight_key
from models.sharing.plan import SharingPlan
from models.workload import Workload

PLAN = SharingPlan(tuple((("q0", path), ("q2", path)) for path in ("stem.0", "body.0", "last.0")))


@pytest.fixture
def ctx(workload: Workload) -> MergeContext:
    """q2's original is q0's, and both have norms that fit their frames, so that one weight can serve both."""
    ctx = MergeContext(workload)
    ctx.originals["q2"].load_state_dict(snapshot(ctx.originals["q0"]))
    for query in ("q0", "q2"):
        ctx.calibrate(query, ctx.originals[query].requires_grad_(True))  # norms at rest would stay as they are
        ctx.originals[query].requires_grad_(False)
    return ctx


def test_members_of_one_linear_map_give_it_back_with_their_own_biases() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 5, generator=generator)
    equations = []
    for member in range(2):
        x = torch.randn(400, 5, generator=generator) * (1 + 9 * member) + 2
        equation = _Equations(centre=True)
        for part in x.split(150):
            equation.add(part, part @ weight.T + member)
        equations.append(equation)
    found = _best_weight(equations, torch.zeros(3, 5))
    assert torch.allclose(found, weight, atol=0.05)
    for member, equation in enumerate(equations):
        assert torch.allclose(equation.bias(weight), torch.full((3,), float(member)), atol=1e-3)


def test_directions_that_no_frame_shows_keep_their_start() -> None:
    x = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    x[:, 3] = 0
    equation = _Equations(centre=False)
    equation.add(x, x @ torch.ones(2, 4).T)
    found = _best_weight([equation], torch.full((2, 4), 5.0))
    assert torch.allclose(found[:, :3], torch.ones(2, 3), atol=0.1)
    assert torch.allclose(found[:, 3], torch.full((2,), 5.0))


@pytest.mark.parametrize("stride", [1, 2])
def test_samples_of_a_convolution_are_what_its_weight_meets(stride: int) -> None:
    layer = nn.Conv2d(3, 4, 3, stride, 1, bias=False)
    x = torch.randn(2, 3, 9, 9)
    inputs, outputs = _samples(layer, x, layer(x), torch.Generator().manual_seed(0))
    assert torch.allclose(inputs @ layer.weight.flatten(1).T, outputs, atol=1e-5)


def test_a_damaged_start_is_mended(ctx: MergeContext) -> None:
    originals = {query: snapshot(model) for query, model in ctx.originals.items()}
    damaged = {query: dict(state) for query, state in originals.items()}
    generator = torch.Generator().manual_seed(0)
    for members in PLAN.shared:
        key = weight_key(originals["q0"], members[0][1])
        weight = originals["q0"][key]
        wrong = weight + weight.std() * torch.randn(weight.shape, generator=generator)
        for query, _ in members:
            damaged[query][key] = wrong
    found = solved(ctx, PLAN, originals, damaged, StepCache())
    before, after = (
        InitEvaluator(ctx, PLAN.queries(), StepCache()).errors("these", PLAN, states) for states in (damaged, found)
    )
    for query in ("q0", "q2"):
        assert after[query] < 0.5 * before[query]
    for members in PLAN.shared:
        (one, path), (other, _) = members
        assert torch.equal(*(found[query][weight_key(found[query], path)] for query in (one, other)))
    assert set(found["q1"]) == set(originals["q1"])
    assert all(torch.equal(found["q1"][name], originals["q1"][name]) for name in originals["q1"])


def test_a_perfect_start_stays_and_work_is_counted_once(ctx: MergeContext) -> None:
    originals = {query: snapshot(model) for query, model in ctx.originals.items()}
    journal, before = StepCache(), ctx.flops.total
    found = solved(ctx, PLAN, originals, originals, journal)
    spent = ctx.flops.total - before
    for members in PLAN.shared:
        key = weight_key(originals["q0"], members[0][1])
        start = originals["q0"][key]
        assert (found["q0"][key] - start).norm() < 0.2 * start.norm()
    assert spent > 0
    solved(ctx, PLAN, originals, originals, journal)
    assert ctx.flops.total - before == spent


def test_the_equations_are_part_of_the_work(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    originals = {query: snapshot(model) for query, model in ctx.originals.items()}
    plan = SharingPlan(PLAN.shared[:1])
    passes: list[int] = []
    add = Flops.add
    monkeypatch.setattr(
        Flops, "add", lambda self, query, count: passes.append(count * self.of(query)) or add(self, query, count)
    )
    before = ctx.flops.total
    solved(ctx, plan, originals, originals, StepCache())
    outputs, inputs = 16, 3 * 3 * 3
    samples = min(FRAMES, len(ctx.train["q0"])) * PLACES
    wanted = 2 * 2 * samples * inputs * (inputs + outputs) + 2 * inputs**3 // 3 + 4 * inputs**2 * outputs
    assert ctx.flops.total - before - sum(passes) == wanted == most_flops(ctx, plan)
