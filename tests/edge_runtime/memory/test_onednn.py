"""Weights in oneDNN's blocked order, in the arena's own memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from edge_runtime.device import arena_bytes
from edge_runtime.engines.arranging import arranged, layouts_for, occupying, resident
from edge_runtime.engines.eager.engine import TorchEngine
from edge_runtime.engines.registry import make_engine
from edge_runtime.memory import onednn
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.layout import ChannelsLast, Layout, Order
from edge_runtime.memory.onednn import MAX_PADDING, Blocked, Convolution, blocked, convolutions_of, convolve, usable
from edge_runtime.memory.placing import footprint_bytes
from edge_runtime.memory.store import Store
from edge_runtime.scheduler.costs import Costs, QueryCost, all_bytes
from tests.edge_runtime.engines.sharing_bundle import SIZE, sharing_bundle
from tests.edge_runtime.tiny import picture, tiny_bundle

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")

CASES = [  # out, in / groups, kernel, stride, groups, frames
    (128, 128, 3, 1, 1, 6),
    (512, 256, 1, 1, 1, 14),
    (1024, 512, 1, 2, 1, 8),
    (256, 64, 3, 1, 4, 9),
    (512, 64, 5, 2, 1, 9),
]


def convolution(out, inner, kernel, stride, groups, size) -> Convolution:
    return Convolution((out, inner, kernel, kernel), (stride,) * 2, (kernel // 2,) * 2, (1, 1), groups, (size, size))


def test_this_torch_takes_weights_at_an_address_of_ours():
    assert usable()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("frames", [1, 3])
def test_a_blocked_weight_convolves_as_the_stored_one(case, frames):
    torch.manual_seed(0)
    shape = convolution(*case)
    layout = blocked(shape)
    assert layout is not None and layout.nbytes <= MAX_PADDING * Layout(torch.float32, shape.shape).nbytes
    weight = torch.randn(shape.shape)
    images = torch.randn(frames, shape.shape[1] * shape.groups, *shape.size).contiguous(
        memory_format=torch.channels_last
    )
    whole = torch.full((1024 + layout.nbytes // 4 + 1024,), 7.0)
    start = 4096 + -whole.data_ptr() % 64
    whole[start // 4 : start // 4 + weight.numel()] = weight.reshape(-1)
    layout.arrange(whole, start)
    with torch.inference_mode():
        found = convolve(
            layout.view(whole, start), None, images, shape.stride, shape.padding, shape.dilation, shape.groups
        )
        wanted = F.conv2d(images, weight, None, shape.stride, shape.padding, shape.dilation, shape.groups)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    end = (start + layout.nbytes) // 4
    assert torch.all(whole[: start // 4] == 7) and torch.all(whole[end:] == 7), "it stays within its room"


def test_what_is_small_is_not_blocked():
    assert blocked(convolution(64, 64, 3, 1, 1, 56)) is None


@pytest.mark.parametrize("channels", [20, 24, 28, 40, 48])
def test_what_this_processors_onednn_pads_to_much_more_is_not_blocked(channels):
    """Blocks of 16 channels make a third more of 24, blocks of 8 nothing."""
    shape = convolution(channels, 144 * 64, 1, 1, 1, 56)
    padded = onednn._wanted(torch.zeros(shape.shape), shape).taken > MAX_PADDING * 4 * math.prod(shape.shape)
    assert (blocked(shape) is None) == padded


@pytest.mark.parametrize(("padding", "kept"), [(1.0, True), (MAX_PADDING, True), (MAX_PADDING + 0.01, False)])
def test_how_much_padding_is_too_much(monkeypatch, padding, kept):
    shape = convolution(25, 100 * 100, 1, 1, 1, 56)  # 10^6 bytes
    wanted = Blocked(torch.float32, shape.shape, shape, b"", int(padding * 10**6))
    monkeypatch.setattr(onednn, "_wanted", lambda *_: wanted)
    assert onednn.blocked.__wrapped__(shape) == (wanted if kept else None)


def test_a_weight_lives_as_long_as_the_view_of_it():
    layout = blocked(convolution(*CASES[0]))
    assert layout is not None
    whole = torch.zeros(layout.nbytes)
    view = layout.view(whole, 0)
    assert getattr(view, "memory") is whole  # noqa: B009


class Net(nn.Module):
    """A convolution called on two sizes, one that is read too, one only read so, and one with reflected borders."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 16, 3, 1, 1)
        self.both = nn.Conv2d(16, 16, 3, 1, 1)
        self.read = nn.Conv2d(16, 16, 3)
        self.mirrored = nn.Conv2d(16, 16, 3, 1, 1, padding_mode="reflect")

    def forward(self, frames):
        seen = self.head(frames)
        more = F.conv2d(self.both(seen), self.both.weight.flip(-1)).mean() + self.head(frames[..., ::2, ::2]).mean()
        return self.mirrored(F.conv2d(seen, self.read.weight)).mean() + more


def test_convolutions_are_found_with_the_largest_frames_they_are_called_on():
    found = convolutions_of(Net().to("meta"), 32)
    assert found == {"head.weight": Convolution((16, 3, 3, 3), (1, 1), (1, 1), (1, 1), 1, (32, 32))}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return sharing_bundle(tmp_path_factory.mktemp("bundle") / "resnet18.safetensors", "resnet18")


def engines_of(bundle):
    return {query.id: TorchEngine(bundle, query.id) for query in bundle.queries}


def test_both_queries_run_from_one_blocked_copy_and_no_bytes_are_moved_twice(bundle):
    engines = engines_of(bundle)
    arena = resident(bundle, engines)
    names = {name for query in engines for name in bundle.names_in_order(query)}
    assert arena.bytes_moved == sum(map(bundle.nbytes, names))
    lie_blocked = {name for name in names if arena.tensor(name).is_mkldnn}
    worth = {
        bundle.query(query).tensors[key]
        for query, engine in engines_of(bundle).items()
        for key, convolution in engine.convolutions().items()
        if blocked(convolution)
    }
    assert lie_blocked == worth and worth
    for query, engine in engines.items():
        wanted = bundle.build(query)(
            engine.query.preprocess.normalise(torch.from_numpy(picture(3, SIZE, SIZE)).permute(2, 0, 1)[None])
        )
        torch.testing.assert_close(engine.outputs([picture(3, SIZE, SIZE)]), wanted, rtol=1e-4, atol=1e-4)
    arena.close()


@settings(max_examples=20, deadline=None)
@given(
    turns=st.lists(st.tuples(st.sampled_from(["first", "second"]), st.integers(2, 5)), min_size=1, max_size=6),
    spare=st.integers(0, 2**16),
)
def test_swapped_and_moved_blocked_weights_give_the_same_bits(bundle, turns, spare):
    """In an arena with little room to spare tensors come, go and are moved; padding moves with them."""
    engines, store = engines_of(bundle), Store.of_bundle(bundle)
    layouts = layouts_for(engines.values(), store.kinds, Order.BLOCKED)
    sizes = {name: layouts[name].nbytes if name in layouts else bundle.nbytes(name) for name in store.kinds}
    needs = {query: bundle.names_in_order(query) for query in engines}
    arena = Arena(
        store,
        spare + max(sum(footprint_bytes(sizes[name]) for name in need) for need in needs.values()),
        layouts=layouts,
    )
    seen = {}
    for query, every in turns:
        resident_now = sorted(arena.residency.resident)
        gone = set(resident_now) - set(needs[query]) | set(resident_now[::every])
        arena.change(gone, ())
        arena.change((), needs[query])
        assert arena.residency.resident_bytes == sum(footprint_bytes(sizes[name]) for name in needs[query])
        engines[query].bind(arena.tensor)
        out = engines[query].outputs([picture(1, SIZE, SIZE)]).clone()
        assert torch.equal(out, seen.setdefault(query, out))
    arena.close()


def test_a_weight_that_anything_but_a_convolution_reads_is_not_blocked(bundle, monkeypatch):
    engines, kinds = engines_of(bundle), Store.of_bundle(bundle).kinds
    key = "layer4.0.conv2.weight"
    weight = bundle.query("first").tensors[key]
    assert isinstance(layouts_for(engines.values(), kinds, Order.BLOCKED)[weight], Blocked)
    known = engines["second"].convolutions()
    monkeypatch.setattr(
        engines["second"], "convolutions", lambda: {path: one for path, one in known.items() if path != key}
    )
    assert isinstance(layouts_for(engines.values(), kinds, Order.BLOCKED)[weight], ChannelsLast)
    grouped = known[key]._replace(groups=2)
    monkeypatch.setattr(engines["second"], "convolutions", lambda: {**known, key: grouped})
    assert isinstance(layouts_for(engines.values(), kinds, Order.BLOCKED)[weight], ChannelsLast)


def test_the_box_counts_the_padding_and_does_without_blocks_where_it_does_not_fit(bundle, monkeypatch):
    monkeypatch.setattr(Blocked, "nbytes", property(lambda layout: layout.taken + 4096))  # some processors need none
    engines = engines_of(bundle)
    names = {name for query in engines for name in bundle.names_in_order(query)}
    queries = {query: QueryCost(bundle.names_in_order(query), 0.01, 2**20, 1.0) for query in engines}
    costs = Costs(queries, {name: bundle.nbytes(name) for name in names}, 1e9)
    grown = occupying(costs, layouts_for(engines.values(), Store.of_bundle(bundle).kinds, Order.BLOCKED))
    assert costs.moved_bytes(names) == grown.moved_bytes(names)
    assert all_bytes(costs) < all_bytes(grown) < 1.04 * all_bytes(costs)

    for budget_bytes, fits in ((all_bytes(grown), True), (all_bytes(grown) - 1, False)):
        store = Store.of_bundle(bundle)
        layouts, found = arranged(engines.values(), store.kinds, costs, budget_bytes)
        assert all_bytes(found) == all_bytes(grown if fits else costs)
        arena = Arena(store, arena_bytes(found, budget_bytes), "cpu", budget_bytes, layouts=layouts)
        arena.change((), sorted(names))
        assert any(arena.tensor(name).is_mkldnn for name in names) == fits
        assert arena.residency.resident_bytes == found.resident_bytes(names)
        arena.close()


def test_where_torch_cannot_take_an_address_weights_lie_channels_last(bundle, monkeypatch):
    blocked.cache_clear()
    usable.cache_clear()
    monkeypatch.setattr(onednn, "_opaque", lambda *_: (_ for _ in ()).throw(AttributeError("no such function")))
    try:
        layouts = layouts_for(engines_of(bundle).values(), Store.of_bundle(bundle).kinds, Order.BLOCKED)
        assert layouts and all(type(layout) is ChannelsLast for layout in layouts.values())
    finally:
        monkeypatch.undo()
        blocked.cache_clear()
        usable.cache_clear()


def test_precision_below_float32_and_other_devices_keep_channels_last(tmp_path):
    tiny = tiny_bundle(tmp_path / "tiny.safetensors")
    assert Order.BLOCKED in make_engine("torch", tiny, "gate").orders
    assert Order.BLOCKED not in make_engine("torch", tiny, "gate", precision="bf16").orders
    assert Order.BLOCKED not in make_engine("torch", tiny, "gate", "cuda").orders
