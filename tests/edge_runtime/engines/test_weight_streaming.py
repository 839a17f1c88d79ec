"""Weights staged for a run: packed ones, and ones that overflow, give the outputs of resident ones in less memory."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gemel.edge_runtime.engines import torch_engine, weight_streaming
from gemel.edge_runtime.engines.tensor_engine import TensorEngine
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.engines.weight_streaming import PinnedStream, streamable_layers
from gemel.edge_runtime.memory.allocator import ALIGNMENT_BYTES
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store, channels_last_layouts
from gemel.edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost
from gemel.edge_runtime.scheduler.eviction import MIN_OVERFLOW_BYTES, Overflow, overflow_of, scratch_bytes
from gemel.models.bits import BIT_WIDTHS
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError
from gemel.models.preprocess import Preprocess
from tests.edge_runtime import tiny
from tests.edge_runtime.engines.sample_bundles import (
    ATTENDING,
    BRANCHING,
    bind,
    build_model,
    make_query,
    pack_weights,
    reference,
    write_and_open,
)
from tests.edge_runtime.memory.fake_cuda import FakeCuda
from tests.edge_runtime.tiny import picture, tiny_bundle
from tests.parameters import every

CPU = torch.device("cpu")
SIZES = {"resnet18": 64, "ssdlite320_mobilenet_v2": 96, "swin_t": 32, ATTENDING: 16}
STAGED = (
    "resnet18", "resnet18 int8", "ssdlite320_mobilenet_v2", "swin_t", ATTENDING,
    f"{ATTENDING} int8", "resnet18 int4", f"{ATTENDING} int4",
)  # fmt: skip


@pytest.fixture(params=["int8", "fp16", "int4"])
def packed_bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Bundle:
    """`gate` and `yard` share a convolution; `hall` attends."""
    models: dict[str, nn.Module] = {name: tiny.trained_looking(seed) for seed, name in enumerate(("gate", "yard"), 1)}
    models["hall"] = build_model(ATTENDING, 16)
    models["yard"].get_submodule("3").weight = models["gate"].get_submodule("3").weight
    queries = [tiny.query("gate", "left"), tiny.query("yard", "right"), make_query("hall", ATTENDING, 16)]
    weights = {name: pack_weights(model, request.param, least=True) for name, model in models.items()}
    return write_and_open(tmp_path / "n.safetensors", models, queries, weights)


@pytest.mark.parametrize("query", ["gate", "yard", "hall"])
def test_packed_weights_give_bit_equal_outputs(packed_bundle: Bundle, query: str) -> None:
    engine = TorchEngine(packed_bundle, query)
    bind(engine, packed_bundle)
    for seed in (1, 2):
        assert torch.equal(engine.outputs([picture(seed)]), reference(packed_bundle, query, seed))
    both = engine.outputs([picture(1), picture(2)])
    torch.testing.assert_close(both[0], reference(packed_bundle, query, 1)[0])


@pytest.mark.parametrize("packed_bundle", ["int8", "fp16"], indirect=True)
def test_packed_weights_channels_last_are_unpacked_so(packed_bundle: Bundle) -> None:
    engine = TorchEngine(packed_bundle, "yard")
    arena = bind(engine, packed_bundle, layouts=channels_last_layouts(Store.of_bundle(packed_bundle).kinds))
    seen: list[Any] = []
    layer = engine.model.get_submodule("3")
    layer.register_forward_hook(lambda *_: seen.append(layer.weight))
    torch.testing.assert_close(engine.outputs([picture(3)]), reference(packed_bundle, "yard", 3), rtol=1e-5, atol=1e-4)
    assert arena.tensor(packed_bundle.query("yard").tensors["3.weight"]).is_contiguous(
        memory_format=torch.channels_last
    )
    assert seen[0].is_contiguous(memory_format=torch.channels_last) and seen[0].dtype == torch.float32


def test_packed_shared_tensor_changed_in_place_changes_both_queries(packed_bundle: Bundle) -> None:
    engines = [TorchEngine(packed_bundle, query) for query in ("gate", "yard")]
    arena = bind(engines[1], packed_bundle, bind(engines[0], packed_bundle))
    before = [engine.outputs([picture(5)]) for engine in engines]
    arena.tensor(packed_bundle.query("gate").tensors["3.weight"]).neg_()
    assert all(not torch.equal(engine.outputs([picture(5)]), old) for engine, old in zip(engines, before))


def test_scratch_holds_the_largest_layer_and_counts_as_workspace(packed_bundle: Bundle) -> None:
    plain = TensorEngine.workspace_of
    # A float32 for each weight, and the byte that unpacking takes beside it.
    each = 4 if packed_bundle.query("yard").stored["3.weight"].shape is None else 5
    large = each * 48 * 108
    for query in ("gate", "yard"):
        engine = TorchEngine(packed_bundle, query)
        assert large <= engine.workspace_bytes - plain(engine, 1) <= large + 4 * 64
    attention, mix, own = 64 * 192 + 64 * 64, 64 * 64, 4 * 64
    hall = TorchEngine(packed_bundle, "hall")
    # Attention reads its child's weights, and the module around all of it has a packed weight of its own.
    assert hall.workspace_bytes - plain(hall, 1) == each * (own + max(attention, mix))


def test_layer_called_again_is_not_unpacked_again(packed_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    widen, count = weight_streaming.unpack, [0]

    def count_and_widen(*args: Any) -> Tensor:
        count[0] += 1
        return widen(*args)

    engine = TorchEngine(packed_bundle, "hall")
    bind(engine, packed_bundle)
    monkeypatch.setattr(weight_streaming, "unpack", count_and_widen)
    engine.outputs([picture(1)])
    assert count[0] == len(packed_bundle.query("hall").stored)


def test_unpacking_waits_for_tensor_and_scale(packed_bundle: Bundle) -> None:
    engine, waited, names = TorchEngine(packed_bundle, "gate"), list[str](), packed_bundle.names_in_order("gate")
    arena = bind(engine, packed_bundle)

    def wait(wanted: Iterable[str]) -> None:
        waited.extend(wanted)

    engine.bind(arena.tensor, wait)
    assert torch.equal(engine.outputs([picture(1)]), reference(packed_bundle, "gate", 1))
    assert set(waited) == set(names)


def test_engine_without_packed_support_refuses_in_one_line(packed_bundle: Bundle) -> None:
    class Wide(TorchEngine):
        name = "wide"
        runs_packed = frozenset()

    with pytest.raises(InputError, match=r"query gate has weights stored as .*, which engine wide cannot run; take"):
        Wide(packed_bundle, "gate")


@pytest.mark.parametrize("packed_bundle", ["fp16"], indirect=True)
@pytest.mark.parametrize("query", ["gate", "yard", "hall"])
def test_fp16_weights_on_a_half_device_are_not_unpacked(packed_bundle: Bundle, query: str) -> None:
    engine, wide = TorchEngine(packed_bundle, query, half=True), TorchEngine(packed_bundle, query)
    assert engine.workspace_of(1) < wide.workspace_of(1)
    arena = bind(engine, packed_bundle)
    assert wide._staging.keys and not engine._staging.keys
    bound = [slot.bound for slot in engine._slots if slot.bound is not None and slot.bound is arena.tensor(slot.name)]
    dtypes = {tensor.dtype for tensor in bound}
    assert torch.float16 in dtypes
    found, expected = engine.outputs([picture(1)]).float(), reference(packed_bundle, query, 1)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))


@functools.lru_cache(maxsize=1)
def costs_of(bundle: Bundle) -> Costs:
    queries = {}
    for query in bundle.queries:
        engine = TorchEngine(bundle, query.id)
        first, second = (BatchCost(count, 0.01 * count, engine.workspace_of(count)) for count in (1, 2))
        queries[query.id] = QueryCost(bundle.names_in_order(query.id), 0.01, first.workspace_bytes, 20.0, (second,))
    names = {name for cost in queries.values() for name in cost.tensors}
    return Costs(queries, {name: bundle.nbytes(name) for name in names}, 1e9)


def within(bundle: Bundle, budget: int) -> Overflow:
    def layers(query: str):
        own = bundle.query(query)
        return streamable_layers(bundle.build(query, "meta"), own, "cpu")

    return overflow_of(costs_of(bundle), budget, layers)


def least_of(bundle: Bundle, query: str) -> int:
    return within(bundle, 1).lacking[query]


def bind_engine(bundle: Bundle, query: str, found: Overflow) -> tuple[TorchEngine, Arena]:
    engine = TorchEngine(bundle, query, overflow=found.tensors[query])
    assert engine.workspace_bytes == found.costs.queries[query].workspace_bytes, "counted before anything is bound"
    kept = found.costs.queries[query].tensors
    arena = Arena(Store.of_bundle(bundle), found.costs.resident_bytes(kept))
    arena.change((), kept)
    engine.bind(arena.tensor)
    return engine, arena


@pytest.mark.parametrize(
    "kind",
    every(STAGED, few=["resnet18 int4", ATTENDING, f"{ATTENDING} int4"]),
)
def test_overflow_outputs_are_bit_equal_in_the_planned_scratch(kind: str, tmp_path: Path) -> None:
    name, _, how = kind.partition(" ")
    model, queries = build_model(name, SIZES[name]), [make_query("one", name, SIZES[name])]
    weights = {"one": pack_weights(model, how)} if how in BIT_WIDTHS else {}
    bundle = write_and_open(tmp_path / "b.safetensors", {"one": model}, queries, weights)
    frames, least = [picture(1), picture(2)], least_of(bundle, "one")
    whole = costs_of(bundle)
    plain = TorchEngine(bundle, "one")
    bind(plain, bundle)
    wanted = tree_leaves(plain.outputs(frames))
    for budget in (least, (least + whole.alone_bytes("one")) // 2):
        found = within(bundle, budget)
        engine, arena = bind_engine(bundle, "one", found)
        for _ in range(2):
            got = tree_leaves(engine.outputs(frames))
            assert len(got) == len(wanted) and all(map(torch.equal, got, wanted))
        assert engine.overflow_bytes == 2 * found.run_bytes["one"]
        assert arena.bytes_moved == bundle.manifest.bytes.after - sum(map(bundle.nbytes, found.tensors["one"]))
        assert engine.workspace_bytes + arena.residency.resident_bytes <= budget
        unbound_state = engine.model.state_dict()
        staged = [key for key, tensor in bundle.query("one").tensors.items() if tensor in found.tensors["one"]]
        assert staged and all(unbound_state[key].is_meta for key in staged), "nothing is held between runs"


class Tied(nn.Module):
    """One layer called twice with another between, and a weight around both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.around = nn.Parameter(torch.zeros(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        """(N, 3, S, S) -> (N, 64)."""
        return self.first(self.second(self.first(x.mean((1, 2, 3))[:, None] @ self.around[:1])))


def test_overflow_layer_is_counted_as_often_as_it_is_filled() -> None:
    with torch.device("meta"):
        model = Tied()
    names = {key: key for key in model.state_dict()}
    query: Any = SimpleNamespace(preprocess=Preprocess((8, 8)), tensors=names, stored={})
    layers = {layer.path: layer for layer in streamable_layers(model, query, "cpu")}
    assert {path: layer.times for path, layer in layers.items()} == {"": 1, "first": 2, "second": 1}
    order = list(layers)
    assert [order[index] for index in layers["first"].outer] == [""] and layers[""].outer == ()
    assert scratch_bytes(tuple(layers.values()), set(names)) == 2 * 64 * 64 * 4 + 64 * 4


def test_overflow_from_a_truncated_file_fails_the_run_alone(tmp_path: Path) -> None:
    models = {name: build_model("resnet18", 64, seed) for seed, name in enumerate(("big", "small"))}
    queries = [make_query(name, "resnet18", 64) for name in models]
    bundle = write_and_open(tmp_path / "two.safetensors", models, queries)
    engine, _ = bind_engine(bundle, "big", within(bundle, least_of(bundle, "big")))
    small = TorchEngine(bundle, "small")
    bind(small, bundle)
    before = small.outputs([picture(1)])
    os.truncate(bundle.path, bundle.path.stat().st_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES // 2)
    with pytest.raises(OSError, match="the bundle has become shorter"):
        engine.run([picture(1)])
    assert torch.equal(small.outputs([picture(1)]), before)
    with pytest.raises(OSError, match="the bundle has become shorter"):
        Arena(Store.of_bundle(bundle), 2**27).change((), bundle.names_in_order("small"))


def test_overflow_of_packed_weights_to_gpu_takes_packed_scratch(tmp_path: Path) -> None:
    model = build_model("resnet18", 64)
    packed, queries = {"one": pack_weights(model, "int8")}, [make_query("one", "resnet18", 64)]
    bundle = write_and_open(tmp_path / "b.safetensors", {"one": model}, queries, packed)
    plain, own = bundle.build("one", "meta"), bundle.query("one")
    here, card = (
        next(
            part
            for layer in streamable_layers(plain, own, device)
            for part in layer.parts
            if part.key == "layer4.1.conv2.weight"
        )
        for device in ("cpu", "cuda")
    )
    nbytes = 512 * 512 * 9
    assert (here.kept_bytes, here.overflow_bytes) == (4 * nbytes, 4 * nbytes)
    assert (card.kept_bytes, card.overflow_bytes) == (4 * nbytes, 5 * nbytes)


def test_pinned_stream_orders_copies_with_computing():
    cuda = FakeCuda()
    streamed = PinnedStream(64, CPU, cuda)
    scratch = torch.zeros(64, dtype=torch.uint8)
    rooms = []

    def read(room: torch.Tensor) -> torch.Tensor:
        cuda.record.append(("read", "host", None))
        rooms.append(room)
        return room.view(torch.float32).fill_(len(rooms)).view(2, 4)

    for number in (1, 2, 3):
        found = streamed.copy(read, scratch[:32])
        assert found.shape == (2, 4) and bool((found == number).all()) and found.data_ptr() == scratch.data_ptr()
    expected = []
    for index in range(3):
        expected += [("wait", "host", 0)] if index == 2 else []
        expected += [
            ("read", "host", None),
            ("behind compute", "copy", None),
            ("event", "copy", index),
            ("wait", "compute", index),
        ]
    assert cuda.record == expected, "the processor waits for a buffer that is still being copied from alone"
    assert rooms[0].data_ptr() == rooms[2].data_ptr() != rooms[1].data_ptr()


def test_overflow_to_gpu_uses_pinned_memory(tmp_path, monkeypatch):
    bundle, made, taken = tiny_bundle(tmp_path / "tiny.safetensors"), [], []
    names = bundle.names_in_order("gate")
    with monkeypatch.context() as patched:
        patched.setattr(torch_engine, "PinnedStream", lambda *given: made.append(given))
        TorchEngine(bundle, "gate", "cuda", overflow=names)
        TorchEngine(bundle, "gate", overflow=names)
    assert made == [(max(map(bundle.nbytes, names)), torch.device("cuda"))]
    monkeypatch.setattr(torch, "empty", lambda *_, pin_memory, **__: taken.append(pin_memory))
    PinnedStream(64, torch.device("cuda"), FakeCuda())
    assert taken == [True] * 2


def test_overflow_through_pinned_stream_is_bit_equal(tmp_path):
    bundle, cuda = tiny_bundle(tmp_path / "tiny.safetensors"), FakeCuda()
    names = frozenset(bundle.names_in_order("gate"))
    engine, plain = TorchEngine(bundle, "gate", overflow=names), TorchEngine(bundle, "gate")
    engine._staging._streamed = PinnedStream(max(map(bundle.nbytes, names)), CPU, cuda)
    bind(plain, bundle, bind(engine, bundle))
    for seed in range(2):
        assert torch.equal(engine.outputs([picture(seed)]), plain.outputs([picture(seed)]))
    assert ("wait", "compute", 1) in cuda.record


@pytest.mark.parametrize(("model", "size"), [("resnet18", 32), (BRANCHING, 32), (ATTENDING, 16), ("swin_t", 32)])
def test_overlapping_copies_overwrite_nothing_that_is_queued(tmp_path, model, size):
    """A GPU may begin a copy as soon as the event is over that it waits for: whatever is queued later still runs."""
    cuda = FakeCuda()
    bundle = write_and_open(
        tmp_path / "b.safetensors", {"one": build_model(model, size)}, [make_query("one", model, size)]
    )
    names = frozenset(name for name in bundle.names_in_order("one") if bundle.nbytes(name) >= MIN_OVERFLOW_BYTES)
    engine, plain = (TorchEngine(bundle, "one", overflow=given, overlaps=bool(given)) for given in (names, ()))
    serial = TorchEngine(bundle, "one", overflow=names)
    assert engine.workspace_of(1) - plain.workspace_of(1) == 2 * (serial.workspace_of(1) - plain.workspace_of(1))
    used: list[tuple[int, int, int]] = []
    streamed = PinnedStream(max(map(bundle.nbytes, names)), CPU, cuda)
    copy, waited = streamed.copy, []

    def check(read, target, after=None):
        assert after is not None
        begin, end = target.data_ptr(), target.data_ptr() + target.nbytes
        queued_at = cuda.record.index(("event", "compute", after.index))
        assert not [at for at, start, stop in used if at > queued_at and start < end and begin < stop]
        waited.append(any(at > queued_at for at, *_ in used))
        return copy(read, target, after)

    def note(module, *_given):
        for tensor in module.parameters(recurse=False):
            used.append((len(cuda.record), tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes))
            cuda.record.append(("use", "compute", None))

    streamed.copy = check
    engine._staging._streamed = streamed
    for module in engine.model.modules():
        module._forward_hooks = OrderedDict({-1: note, **module._forward_hooks})
    bind(plain, bundle, bind(engine, bundle))
    for seed in range(2):
        assert torch.equal(engine.outputs([picture(seed)]), plain.outputs([picture(seed)]))
    assert sum(waited) > len(waited) // 3, "copies begin before all that was queued is over"
