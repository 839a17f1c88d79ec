"""How far what a merged model's heads give lies from what its original's give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from merger.core.context import MergeContext
from merger.core.probing import HEAD_FRAMES, answers, distance


def test_the_distance_is_zero_for_the_original_and_grows_with_the_damage(ctx: MergeContext) -> None:
    model, before = ctx.models(["q0"])["q0"].train(), ctx.flops.total
    theirs = answers(ctx, "q0", ctx.originals["q0"])
    assert ctx.flops.total - before == HEAD_FRAMES * ctx.flops.of(ctx.queries["q0"])
    assert distance(answers(ctx, "q0", model), theirs) == 0.0, "whatever mode it was in"
    assert model.training and not any(module._forward_hooks for module in model.modules()), "it is left as it was"
    found = [0.0]
    for _ in range(2):
        with torch.no_grad():
            model.get_parameter("body.0.weight").mul_(0.5)
        found.append(distance(answers(ctx, "q0", model), theirs))
    assert found == sorted(set(found))


@pytest.mark.parametrize(
    ("mine", "theirs", "far"),
    [
        ({"head": [[1.0, 3.0]]}, {"head": [[2.0, 4.0]]}, 1.0),
        ({"head": [[1.0, 3.0], [0.0, 2.0]]}, {"head": [[2.0, 4.0], [0.0, 2.0]]}, 0.5),
        ({"head": [[2.0, 4.0]], "other": [[0.0, 0.0]]}, {"head": [[2.0, 4.0]], "other": [[-1.0, 1.0]]}, 0.5),
        ({}, {}, 0.0),
    ],
    ids=["over the variance", "all calls of a head", "the mean over heads", "no heads"],
)
def test_what_lies_apart(mine: dict[str, Any], theirs: dict[str, Any], far: float) -> None:
    one, other = ({path: list(map(torch.tensor, calls)) for path, calls in found.items()} for found in (mine, theirs))
    assert distance(one, other) == pytest.approx(far)


def test_what_was_kept_elsewhere_is_brought_to_where_the_model_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """An original's answers come back from a checkpoint into the processor's memory, the model is on a card."""
    brought = list[object]()
    moved = torch.Tensor.to

    def to(tensor: torch.Tensor, *where: Any, **how: Any) -> torch.Tensor:
        brought.append(where[0])
        return moved(tensor, *where, **how)

    monkeypatch.setattr(torch.Tensor, "to", to)
    one = torch.ones(2)
    distance({"head": [one]}, {"head": [one]})
    assert brought == [one.device]
