"""Where models have parted: CKA does not mind rotation, scale, the order of channels or few frames."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from merger.core.context import MergeContext
from merger.core.probing import as_input, raw_frames, tapped
from merger.mending.similarity import linear_cka, parted
from merger.start.alignment import orderable
from merger.start.channels import permuted


@given(seed=st.integers(0, 2**16), scale=st.floats(0.01, 100), shift=st.floats(-10, 10))
@settings(max_examples=25, deadline=None)
def test_rotated_scaled_and_shifted_features_are_the_same(seed: int, scale: float, shift: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(20, 6, generator=generator)
    rotation = torch.linalg.qr(torch.randn(6, 6, generator=generator))[0]
    assert linear_cka(one, scale * one @ rotation + shift) == pytest.approx(1, abs=1e-3)


def test_unrelated_features_give_about_zero_however_many_there_are() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [
        linear_cka(torch.randn(32, 400, generator=generator), torch.randn(32, 400, generator=generator))
        for _ in range(20)
    ]
    assert abs(sum(draws) / len(draws)) < 0.03 and max(map(abs, draws)) < 0.3  # a biased estimate gives about 0.9


def test_a_layer_that_never_changes_is_like_nothing() -> None:
    assert linear_cka(torch.ones(8, 3), torch.randn(8, 3)) == 0.0


def test_a_merged_model_has_parted_where_it_answers_otherwise_and_not_where_channels_changed_places(
    ctx: MergeContext,
) -> None:
    original, paths = ctx.originals["q0"], ["stem.0", "body.0", "last.0"]
    channels = orderable(ctx, "q0")
    assert channels is not None and channels.widths
    orders = {space: torch.arange(width).roll(1) for space, width in channels.widths.items()}
    model = ctx.models(["q0"], {"q0": permuted(original.state_dict(), channels, orders)})["q0"]
    found = parted(ctx, "q0", model, paths)
    assert list(found) == paths and max(map(abs, found.values())) < 1e-3
    frames = as_input(ctx, "q0", raw_frames(ctx, "q0", 16))
    with torch.no_grad(), tapped(model.eval(), paths) as mine, tapped(original.eval(), paths) as theirs:
        for one in (model, original):
            one(frames)
    moved = [float((mine[path][1] - theirs[path][1]).square().mean() / theirs[path][1].var()) for path in paths]
    assert max(moved) > 0.1, "place by place they are far apart"
    with torch.no_grad():
        model.get_parameter("body.0.weight")[1:] = 0  # one channel is left
    found = parted(ctx, "q0", model, paths)
    assert abs(found["stem.0"]) < 1e-3 < 5e-3 < found["body.0"]


def test_too_few_frames_say_nothing(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("merger.mending.similarity.FRAMES", 3)
    assert parted(ctx, "q0", ctx.models(["q0"])["q0"], ["stem.0", "body.0"]) == {}
