"""Formats of weights: convolutions are reordered once they have arrived, and every value stays."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import (
    Store,
    changes_order,
    channels_last_layouts,
    reorder,
    row_major_strides,
    tensor_view,
)

SHAPES = {
    "stem": (4, 3, 7, 7),
    "wide": (8, 4, 3, 3),
    "point": (8, 8, 1, 1),
    "depth": (8, 1, 3, 3),
    "bias": (8,),
    "linear": (3, 8),
    "count": (),
}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.rand(shape, generator=generator) for name, shape in SHAPES.items()}
    return {**made, "half": torch.rand(8, 4, 3, 3, generator=generator).half()}


@given(shape=st.tuples(*[st.integers(1, 6)] * 4))
def test_reorder_keeps_values_and_is_reversible(shape):
    weight = torch.arange(float(torch.tensor(shape).prod())).view(shape)
    wanted = weight.contiguous(memory_format=torch.channels_last)
    memory = torch.cat([torch.zeros(2), weight.reshape(-1)])
    stored = memory.clone()
    offset = 2 * weight.itemsize
    assert torch.equal(tensor_view(memory, offset, shape, False), weight)
    assert row_major_strides(shape) == weight.stride()
    reorder(memory, offset, shape, to_channels_last=True)
    seen = tensor_view(memory, offset, shape, True)
    assert torch.equal(seen, wanted) and seen.is_contiguous(memory_format=torch.channels_last)
    assert changes_order(shape) or torch.equal(memory, stored)
    reorder(memory, offset, shape, to_channels_last=False)
    assert torch.equal(memory, stored)


@given(
    turns=st.lists(st.lists(st.sampled_from([*SHAPES, "half"]), min_size=1, unique=True), min_size=1, max_size=8),
    ahead=st.booleans(),
)
def test_layouts_under_any_swapping_keep_values(turns, ahead):
    made = tensors()
    store = Store.of_tensors(made)
    arena = Arena(store, 9 * 1024, layouts=channels_last_layouts(store.kinds))
    for wanted in turns:
        if ahead:
            arena.prefetch(wanted[:1])
        arena.change(arena.residency.resident - set(wanted), wanted)
        for name in wanted:
            seen = arena.tensor(name)
            assert torch.equal(seen, made[name])
            four = seen.ndim == 4
            assert seen.is_contiguous(memory_format=torch.channels_last if four else torch.contiguous_format)
    arena.close()
