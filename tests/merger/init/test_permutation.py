"""Channel permutation: shuffled channels are put back, and every model computes what it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import merger.init.permutation as alignment
from merger.checkpoint import State, StepCache, snapshot
from merger.config import MergeOptions
from merger.context import MergeContext
from merger.evaluate import as_input, raw_frames
from merger.init.permutation import (
    Channels,
    CrossMoments,
    align_channels,
    match_channels,
    orderable,
    permute_channels,
)
from merger.methods.top_down import whole_plan
from merger.training.distillation import record_inputs, watched_layers


def test_align_channels_undoes_a_shuffle(ctx: MergeContext) -> None:
    first = snapshot(ctx.originals["q0"])
    ctx.originals["q2"].load_state_dict(_shuffle(ctx, "q0", first))
    states = align_channels(ctx, whole_plan(ctx, MergeOptions()), "q0", StepCache())
    assert all(torch.equal(states["q2"][name], first[name]) for name in first)


def test_align_channels_keeps_outputs_and_head_inputs(ctx: MergeContext) -> None:
    originals = {query: snapshot(model) for query, model in ctx.originals.items()}
    states = align_channels(ctx, whole_plan(ctx, MergeOptions()), "q1", StepCache())
    moved = []
    for query, model in ctx.models(ctx.queries, states).items():
        frames = as_input(ctx, query, raw_frames(ctx, query, 8))
        heads = watched_layers(ctx.queries[query], model)
        with (
            torch.no_grad(),
            record_inputs(model, heads) as mine,
            record_inputs(ctx.originals[query], heads) as theirs,
        ):
            assert torch.allclose(model(frames), ctx.originals[query](frames), atol=1e-4)
        assert mine and all(torch.allclose(one, other, atol=1e-4) for one, other in zip(mine, theirs))
        moved += [query for name in originals[query] if not torch.equal(originals[query][name], states[query][name])]
        kept = ctx.originals[query].state_dict()
        assert all(torch.equal(kept[name], originals[query][name]) for name in kept)
    assert set(moved) == {"q0", "q2"}  # all but the donor


def test_output_check_runs_in_full_float32_on_a_gpu(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    frames, seen = as_input(ctx, "q2", raw_frames(ctx, "q2", 2)), list[bool]()
    monkeypatch.setattr(alignment, "as_input", lambda *_: frames)
    channels, own = orderable(ctx, "q2"), MergeContext.models

    def models(*given: Any) -> Any:
        found = own(*given)
        found["q2"].register_forward_pre_hook(lambda *_: seen.append(torch.backends.cudnn.allow_tf32))
        return found

    monkeypatch.setattr(MergeContext, "models", models)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    ctx.originals, ctx.device = dict(ctx.originals), torch.device("cuda")
    assert channels is not None
    assert alignment._keeps_outputs(ctx, "q2", snapshot(ctx.originals["q2"]), channels, {})
    assert seen == [False, False] and torch.backends.cudnn.allow_tf32


def test_model_without_a_readable_graph_stays_unchanged(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    events, read = [], alignment.channels_of
    ctx.progress = lambda event, **fields: events.append((event, fields))
    unreadable = ctx.originals["q1"]
    monkeypatch.setattr(alignment, "channels_of", lambda model: None if model is unreadable else read(model))
    states = align_channels(ctx, whole_plan(ctx, MergeOptions()), "q0", StepCache())
    assert all(torch.equal(states["q1"][name], tensor) for name, tensor in unreadable.state_dict().items())
    assert [fields["text"] for event, fields in events if event == "warning"] == [
        "q1: the graph of its model cannot be read, so its channels stay in their order"
    ]
    assert [fields["query"] for event, fields in events if event == "aligned"] == ["q2"]


def test_wrongly_read_graph_is_found_by_the_outputs(ctx: MergeContext, monkeypatch: pytest.MonkeyPatch) -> None:
    events, read = [], alignment.channels_of
    ctx.progress = lambda event, **fields: events.append(fields.get("text", ""))

    def forgetful(model: torch.nn.Module) -> Channels:
        channels = read(model)
        assert channels is not None
        return Channels(channels.widths, {use: layout for use, layout in channels.uses.items() if use[1] == 0})

    monkeypatch.setattr(alignment, "channels_of", forgetful)
    states = align_channels(ctx, whole_plan(ctx, MergeOptions()), "q0", StepCache())
    for query, model in ctx.originals.items():
        assert all(torch.equal(states[query][name], tensor) for name, tensor in model.state_dict().items())
    assert sum("gives other outputs" in text for text in events) == 2


@given(width=st.integers(1, 12), seed=st.integers(0, 2**16))
@settings(max_examples=50, deadline=None)
def test_match_channels_finds_a_planted_permutation(width: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    wanted = torch.randperm(width, generator=generator)
    scores = 0.5 * torch.rand(width, width, generator=generator)
    scores[wanted, torch.arange(width)] = 1.0
    assert torch.equal(match_channels(scores), wanted)


def test_cross_moments_over_batches_equal_all_samples() -> None:
    random = np.random.default_rng(0)
    own, its = random.normal(3, 2, (90, 4)), random.normal(-1, 1, (90, 4))
    its[:, 1] += own[:, 2]
    own[:, 3] = 7.0
    moments = CrossMoments()
    for part in np.array_split(np.arange(90), 4):
        moments.add(torch.from_numpy(own[part]).float(), torch.from_numpy(its[part]).float())
    wanted = np.corrcoef(own[:, :3].T, its.T)[:3, 3:]
    found = moments.correlations().numpy()
    assert np.allclose(found[:3], wanted, atol=1e-4) and np.all(found[3] == 0)


def _shuffle(ctx: MergeContext, query: str, state: State) -> State:
    channels = orderable(ctx, query)
    assert channels is not None and len(channels.widths) == 2
    generator = torch.Generator().manual_seed(0)
    orders = {space: torch.randperm(width, generator=generator) for space, width in channels.widths.items()}
    return permute_channels(state, channels, orders)
