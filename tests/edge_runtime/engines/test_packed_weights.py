"""Weights stored packed stay packed in the arena, and the torch engine computes with what they are widened to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_runtime.engines.base import FrameEngine
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store, channels_last_layouts
from models.bits import Bits
from models.bundle import Bundle, Made, open_bundle, write_bundle
from models.errors import InputError
from models.quantization import PackedWeight, choices, pack
from tests.edge_runtime import tiny
from tests.edge_runtime.tiny import picture

ATTENDING = "tests.edge_runtime.engines.test_packed_weights:attending"


class Attending(nn.Module):
    """A module with a weight of its own around one that reads its child's weights, and a head called twice."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 8, 8)
        self.start_weight = nn.Parameter(torch.randn(4, 64) / 8)
        self.attention = nn.MultiheadAttention(64, 2, batch_first=True)
        self.mix = nn.Linear(64, 64)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, 16, 16) -> (N, C)."""
        x = self.patch(x).flatten(2).transpose(1, 2) + self.start_weight
        x = self.mix(self.mix(self.attention(x, x, x, need_weights=False)[0]))
        return self.head(x.mean(1))


def attending(num_classes: int, input_size: int = 16) -> nn.Module:
    """The factory that bundles of these tests name."""
    return Attending(num_classes)


def packed_all(model: nn.Module, weights: Bits) -> dict[str, PackedWeight]:
    """Every weight of two dimensions or more, however small."""
    own = {}
    for key, tensor in model.state_dict().items():
        if found := choices(key, (*tensor.shape[:1], 10**6) if tensor.ndim > 1 else tensor.shape, weights):
            own[key] = pack(tensor, found[0])
    return own


@pytest.fixture(params=["int8", "fp16", "int4"])
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Bundle:
    """`gate` and `yard` share a convolution; `hall` attends."""
    models: dict[str, nn.Module] = {name: tiny.trained_looking(seed) for seed, name in enumerate(("gate", "yard"), 1)}
    torch.manual_seed(0)
    models["hall"] = Attending(3).eval()
    models["yard"].get_submodule("3").weight = models["gate"].get_submodule("3").weight
    queries = [tiny.query("gate", "left"), tiny.query("yard", "right"), tiny.query("hall", "left", model=ATTENDING)]
    stored = {name: packed_all(model, request.param) for name, model in models.items()}
    path = tmp_path / "n.safetensors"
    write_bundle(path, models, queries, Made("tiny", "wide", 0), packed=stored)
    return open_bundle(path, [tiny.FACTORY, ATTENDING])


def reference(bundle: Bundle, query: str, seed: int) -> Tensor:
    prepare = bundle.query(query).preprocess
    with torch.inference_mode():
        return bundle.build(query)(prepare.normalise(torch.stack([prepare.resize(picture(seed))])))


def bound(bundle: Bundle, arena: Arena, query: str) -> TorchEngine:
    engine = TorchEngine(bundle, query)
    arena.change((), bundle.names_in_order(query))
    engine.bind(arena.tensor)
    return engine


def arena_of(bundle: Bundle) -> Arena:
    return Arena(Store.of_bundle(bundle), 2**20)


@pytest.mark.parametrize("query", ["gate", "yard", "hall"])
def test_packed_weights_give_bit_equal_outputs(bundle: Bundle, query: str) -> None:
    engine = bound(bundle, arena_of(bundle), query)
    for seed in (1, 2):
        assert torch.equal(engine.outputs([picture(seed)]), reference(bundle, query, seed))
    both = engine.outputs([picture(1), picture(2)])
    torch.testing.assert_close(both[0], reference(bundle, query, 1)[0])


@pytest.mark.parametrize("bundle", ["int8", "fp16"], indirect=True)
def test_packed_weights_channels_last_are_unpacked_so(bundle: Bundle) -> None:
    store = Store.of_bundle(bundle)
    arena = Arena(store, 2**20, layouts=channels_last_layouts(store.kinds))
    engine = bound(bundle, arena, "yard")
    seen: list[Any] = []
    layer = engine.model.get_submodule("3")
    layer.register_forward_hook(lambda *_: seen.append(layer.weight))
    torch.testing.assert_close(engine.outputs([picture(3)]), reference(bundle, "yard", 3), rtol=1e-5, atol=1e-4)
    assert arena.tensor(bundle.query("yard").tensors["3.weight"]).is_contiguous(memory_format=torch.channels_last)
    assert seen[0].is_contiguous(memory_format=torch.channels_last) and seen[0].dtype == torch.float32


def test_shared_tensor_changed_in_place_changes_both_queries(bundle: Bundle) -> None:
    arena = arena_of(bundle)
    engines = [bound(bundle, arena, query) for query in ("gate", "yard")]
    before = [engine.outputs([picture(5)]) for engine in engines]
    name = bundle.query("gate").tensors["3.weight"]
    assert name == bundle.query("yard").tensors["3.weight"]
    arena.tensor(name).neg_()
    assert all(not torch.equal(engine.outputs([picture(5)]), old) for engine, old in zip(engines, before))


def test_scratch_holds_the_largest_layer_and_counts_as_workspace(bundle: Bundle) -> None:
    plain = FrameEngine.workspace_of
    # A float32 for each weight, and the byte that unpacking takes beside it.
    each = 4 if bundle.query("yard").stored["3.weight"].shape is None else 5
    large = each * 48 * 108
    for query in ("gate", "yard"):
        engine = TorchEngine(bundle, query)
        assert large <= engine.workspace_bytes - plain(engine, 1) <= large + 4 * 64
    attention, mix, own = 64 * 192 + 64 * 64, 64 * 64, 4 * 64
    hall = TorchEngine(bundle, "hall")
    # Attention reads its child's weights, and the module around all of it has a packed weight of its own.
    assert hall.workspace_bytes - plain(hall, 1) == each * (own + max(attention, mix))


def test_layer_called_again_is_not_unpacked_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    import edge_runtime.engines.weight_streaming as module

    widen, count = module.unpack, [0]

    def counted(*args: Any) -> Tensor:
        count[0] += 1
        return widen(*args)

    engine = bound(bundle, arena_of(bundle), "hall")
    monkeypatch.setattr(module, "unpack", counted)
    engine.outputs([picture(1)])
    assert count[0] == len(bundle.query("hall").stored)


def test_unpacking_waits_for_tensor_and_scale(bundle: Bundle) -> None:
    arena, names = arena_of(bundle), bundle.names_in_order("gate")
    arena.change((), names)
    engine, waited = TorchEngine(bundle, "gate"), list[str]()

    def wait(wanted: Iterable[str]) -> None:
        waited.extend(wanted)

    engine.bind(arena.tensor, wait)
    assert torch.equal(engine.outputs([picture(1)]), reference(bundle, "gate", 1))
    assert set(waited) == set(names)


def test_engine_without_packed_support_refuses_in_one_line(bundle: Bundle) -> None:
    class Wide(TorchEngine):
        name = "wide"
        runs_packed = frozenset()

    with pytest.raises(InputError, match=r"query gate has weights stored as .*, which engine wide cannot run; take"):
        Wide(bundle, "gate")


@pytest.mark.parametrize("bundle", ["fp16"], indirect=True)
@pytest.mark.parametrize("query", ["gate", "yard", "hall"])
def test_fp16_weights_on_a_half_device_are_not_unpacked(bundle: Bundle, query: str) -> None:
    arena, wide = arena_of(bundle), TorchEngine(bundle, query)
    engine = TorchEngine(bundle, query, half=True)
    assert engine.workspace_of(1) < wide.workspace_of(1)
    arena.change((), bundle.names_in_order(query))
    engine.bind(arena.tensor)
    assert wide._staging.keys and not engine._staging.keys
    bound = [slot.bound for slot in engine._slots if slot.bound is not None and slot.bound is arena.tensor(slot.name)]
    dtypes = {tensor.dtype for tensor in bound}
    assert torch.float16 in dtypes
    found, expected = engine.outputs([picture(1)]).float(), reference(bundle, query, 1)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    arena.close()
