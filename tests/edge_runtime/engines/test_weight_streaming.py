"""Queries that overflow give the same bits as resident ones in less memory, and leave other queries alone."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from edge_runtime.device import Device, arena_bytes
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.engines.weight_streaming import streamable_layers
from edge_runtime.executor import Executor
from edge_runtime.memory.allocator import ALIGNMENT_BYTES
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from edge_runtime.policies import policy_named
from edge_runtime.queues import Frame, Ledger, Mailboxes
from edge_runtime.results import Publisher, RunIdentity
from edge_runtime.scheduler import QuerySpec
from edge_runtime.scheduler.costs import BatchCost, Costs, QueryCost, all_bytes
from edge_runtime.scheduler.eviction import Overflow, overflow_of, scratch_bytes
from models import zoo
from models.bits import BIT_WIDTHS, Bits
from models.bundle import Bundle, BundleQuery, Made, open_bundle, write_bundle
from models.preprocess import Preprocess
from models.quantization import PackedWeight, choices, pack
from tests.edge_runtime.engines.test_packed_weights import ATTENDING, attending
from tests.edge_runtime.tiny import RecordKeeper, picture
from tests.parameters import every

SIZES = {"resnet18": 64, "ssdlite320_mobilenet_v2": 96, "swin_t": 32, ATTENDING: 16}
CLASSES = ("a", "b", "c")
STAGED = (
    "resnet18", "resnet18 int8", "ssdlite320_mobilenet_v2", "swin_t", ATTENDING,
    f"{ATTENDING} int8", "resnet18 int4", f"{ATTENDING} int4",
)  # fmt: skip


def filled(name: str) -> nn.Module:
    """A model whose outputs depend on the frame."""
    torch.manual_seed(0)
    if name == ATTENDING:
        return attending(len(CLASSES)).eval()
    task = "detection" if name in zoo.names("detection") else "classification"
    model = zoo.build(name, CLASSES, {}, SIZES[name], task).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and not tensor.any():
                tensor.copy_(torch.rand_like(tensor) * 0.02)
    return model


def asked(query_id: str, model: str) -> BundleQuery:
    task = "detection" if model in zoo.names("detection") else "classification"
    size = SIZES[model]
    return BundleQuery(
        id=query_id,
        camera="left",
        task=task,
        classes=CLASSES,
        model=model,
        model_args={},
        input_size=size,
        preprocess=Preprocess(size),
        fps=None,
        sla_ms=20_000.0,
        accuracy_target=0.95,
    )


def packed_of(model: nn.Module, width: Bits) -> dict[str, PackedWeight]:
    kinds = {key: choices(key, tensor.shape, width) for key, tensor in model.state_dict().items()}
    return {key: pack(model.state_dict()[key], own[0]) for key, own in kinds.items() if own}


def write(path: Path, models: dict[str, tuple[str, nn.Module]], stored: dict[str, dict[str, PackedWeight]]) -> Bundle:
    write_bundle(
        path,
        {query: model for query, (_, model) in models.items()},
        [asked(query, name) for query, (name, _) in models.items()],
        Made("streaming", "wide", 0),
        packed=stored,
    )
    return open_bundle(path, [ATTENDING])


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
        return streamable_layers(bundle.build(query, "meta"), own.input_size, own.tensors, own.stored, "cpu")

    return overflow_of(costs_of(bundle), budget, layers)


def least_of(bundle: Bundle, query: str) -> int:
    return within(bundle, 1).lacking[query]


def bound(bundle: Bundle, query: str, found: Overflow) -> tuple[TorchEngine, Arena]:
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
    model = filled(name)
    bundle = write(
        tmp_path / "b.safetensors", {"one": (name, model)}, {"one": packed_of(model, how)} if how in BIT_WIDTHS else {}
    )
    frames, least = [picture(1), picture(2)], least_of(bundle, "one")
    whole = costs_of(bundle)
    plain = TorchEngine(bundle, "one")
    arena = Arena(Store.of_bundle(bundle), whole.weights_bytes("one"))
    arena.change((), whole.queries["one"].tensors)
    plain.bind(arena.tensor)
    wanted = tree_leaves(plain.outputs(frames))
    for budget in (least, (least + whole.alone_bytes("one")) // 2):
        found = within(bundle, budget)
        engine, arena = bound(bundle, "one", found)
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
    layers = {layer.path: layer for layer in streamable_layers(model, 8, names, {}, "cpu")}
    assert {path: layer.times for path, layer in layers.items()} == {"": 1, "first": 2, "second": 1}
    order = list(layers)
    assert [order[index] for index in layers["first"].outer] == [""] and layers[""].outer == ()
    assert scratch_bytes(tuple(layers.values()), set(names)) == 2 * 64 * 64 * 4 + 64 * 4


@pytest.fixture
def two(tmp_path: Path) -> Bundle:
    """`big` and `small`, which shares the first layers of `big`."""
    big, small = filled("resnet18"), filled("resnet18")
    with torch.no_grad():
        for key, tensor in small.state_dict().items():
            if key.startswith(("layer3", "layer4", "fc")) and tensor.is_floating_point():
                tensor.mul_(0.5)
    late = ("layer3", "layer4")
    stored = {"small": {key: one for key, one in packed_of(small, "int8").items() if key.startswith(late)}}
    return write(tmp_path / "two.safetensors", {"big": ("resnet18", big), "small": ("resnet18", small)}, stored)


class Watched(TorchEngine):
    """Notes what the arena counts while it runs."""

    arena: Arena
    used: list[int]

    def forward(self, batch: Tensor) -> object:
        self.used.append(self.arena.residency.resident_bytes + self.arena.residency.workspace_bytes)
        return super().forward(batch)


@pytest.mark.parametrize("policy", ["adaptive", "gemel"])
def test_overflow_beside_another_query_keeps_the_budget(two: Bundle, policy: str) -> None:
    costs = costs_of(two)
    budget = costs.alone_bytes("small") + 2**20
    found = within(two, budget)
    assert list(found.tensors) == ["big"] and all_bytes(found.costs) > budget, "they take turns"
    engines = {query: Watched(two, query, overflow=found.tensors.get(query, ())) for query in ("big", "small")}
    arena = Arena(Store.of_bundle(two), arena_bytes(found.costs, budget), budget_bytes=budget)
    for engine in engines.values():
        engine.arena, engine.used = arena, []
    ledger, sink = Ledger(engines), RecordKeeper()
    mailboxes = Mailboxes(engines, ledger)
    device = Device(arena, engines, found.costs, budget)
    publisher = Publisher(sink, ledger, {query.id: query for query in two.queries}, RunIdentity("0" * 64))
    demands = dict.fromkeys(engines, QuerySpec(5.0))
    executor = Executor(device, policy_named(policy), demands, mailboxes, publisher)
    executor.warm_up(dict.fromkeys(engines, picture(0)))
    for index in range(6):
        for query in engines:
            mailboxes.put(query, Frame(index, executor.clock(), 0.0, picture(index)))
        while executor.step():
            pass
    assert executor.device.max_used_bytes <= budget and max(max(engine.used) for engine in engines.values()) <= budget
    assert not any(row["last_failure"] for row in executor.to_json())
    assert arena.swaps > 2 and {record["query"] for record in sink.records} == set(engines)
    for record in sink.records:
        asked_of = two.query(record["query"])
        batch = asked_of.preprocess.normalise(torch.stack([asked_of.preprocess.resize(picture(record["frame"]))]))
        with torch.inference_mode():
            scores = two.build(asked_of.id)(batch).softmax(1)[0]
        assert record["label"] == CLASSES[int(scores.argmax())]
        assert record["score"] == pytest.approx(float(scores.max()), rel=1e-5)


def test_overflow_from_a_truncated_file_fails_the_run_alone(two: Bundle) -> None:
    found = within(two, least_of(two, "big"))
    engine, _ = bound(two, "big", found)
    small = TorchEngine(two, "small")
    arena = Arena(Store.of_bundle(two), costs_of(two).weights_bytes("small"))
    arena.change((), two.names_in_order("small"))
    small.bind(arena.tensor)
    before = small.outputs([picture(1)])
    os.truncate(two.path, two.path.stat().st_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES // 2)
    with pytest.raises(OSError, match="the bundle has become shorter"):
        engine.run([picture(1)])
    assert torch.equal(small.outputs([picture(1)]), before)
    with pytest.raises(OSError, match="the bundle has become shorter"):
        Arena(Store.of_bundle(two), 2**27).change((), two.names_in_order("small"))


def test_overflow_of_packed_weights_to_gpu_takes_packed_scratch(tmp_path: Path) -> None:
    model = filled("resnet18")
    bundle = write(tmp_path / "b.safetensors", {"one": ("resnet18", model)}, {"one": packed_of(model, "int8")})
    plain, own = bundle.build("one", "meta"), bundle.query("one")
    here, card = (
        next(
            part
            for layer in streamable_layers(plain, 64, own.tensors, own.stored, device)
            for part in layer.parts
            if part.key == "layer4.1.conv2.weight"
        )
        for device in ("cpu", "cuda")
    )
    nbytes = 512 * 512 * 9
    assert (here.kept_bytes, here.overflow_bytes) == (4 * nbytes, 4 * nbytes)
    assert (card.kept_bytes, card.overflow_bytes) == (4 * nbytes, 5 * nbytes)
