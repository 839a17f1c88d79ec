"""Runs replayed from graphs, over a stand-in that does an operation again when it is replayed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gemel.edge_runtime.engines import cuda_graphs as graphs
from gemel.edge_runtime.engines import layouts as arranging
from gemel.edge_runtime.engines.cuda_graphs import CudaGraphs, cuda_graphs_for
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.memory.transfer import compute_stream
from tests.edge_runtime.memory.fake_cuda import FakeCuda, FakeGraph
from tests.edge_runtime.tiny import picture, tiny_bundle

CARD = torch.device("cuda")


def at_work() -> FakeCuda:
    """A GPU whose compute stream is the current one, as for the thread that serves."""
    cuda = FakeCuda()
    cuda.active = compute_stream(CARD, cuda)
    return cuda


class CountedNetwork:
    """Two convolutions and a count of the plain runs."""

    def __init__(self) -> None:
        self.network: nn.Module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        self.runs = 0

    def __call__(self, frames: Tensor) -> dict[str, Tensor]:
        self.runs += 1
        return {"out": self.network(frames), "sum": frames.sum((1, 2, 3))}


@torch.inference_mode()
def test_graphs_recurring_placement_is_captured_and_replayed():
    made, plain = CudaGraphs(CARD, at_work()), CountedNetwork()
    frames = [torch.rand(1, 3, 8, 8) for _ in range(6)]
    for index, batch in enumerate(frames):
        if index == 4:
            next(plain.network.parameters()).mul_(2.0)  # shared, and changed in place
        found = made.run("here", plain, batch)
        expected = CountedNetwork.__call__(plain, batch)
        plain.runs -= 1
        assert all(torch.allclose(found[key], expected[key], atol=1e-6) for key in expected)
    assert plain.runs == 4, "to see it, for the answer, to see that it waits for nothing, and to be captured"
    kept = made.run("here", plain, frames[0])["out"].clone()
    before = made.run("here", plain, frames[0])["out"]
    made.run("here", plain, frames[1])
    assert torch.equal(before, kept), "what was handed out is nobody else's memory"


@torch.inference_mode()
def test_graphs_per_placement_and_batch_share_one_pool(monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    cuda, plain = at_work(), CountedNetwork()
    made = CudaGraphs(CARD, cuda)
    one, two = torch.rand(1, 3, 8, 8), torch.rand(2, 3, 8, 8)
    for placement, batch in (("here", one), ("there", one), ("here", two)):
        for _ in range(3):
            made.run(placement, plain, batch)
    assert plain.runs == 12 and len(set(cuda.pools)) == 1
    made.run("here", plain, two)
    assert plain.runs == 12
    made.run("here", plain, one)
    assert plain.runs > 12, "the oldest made way"
    made.clear()
    before = plain.runs
    made.run("here", plain, two)
    assert plain.runs == before + 1
    made.run("here", plain, two)
    assert cuda.pools[-1] not in cuda.pools[:-1], "torch has let go of the memory that no graph used any more"


@torch.inference_mode()
def test_graphs_without_a_sound_capture_run_plainly(monkeypatch, caplog):
    class Asks(CountedNetwork):
        def __call__(self, frames: Tensor) -> dict[str, Tensor]:
            cuda.wait_for_result()
            return super().__call__(frames)

    cuda, batch = at_work(), torch.rand(1, 3, 8, 8)
    asks, made = Asks(), CudaGraphs(CARD, cuda)
    for _ in range(4):
        assert made.run("here", asks, batch)["out"].shape == (1, 2, 4, 4)
    assert asks.runs == 4 and not made._graphs and not caplog.text
    assert not cuda.captures, "torch's allocator would not recover"
    assert not cuda.refuses_waiting

    plain, made = CountedNetwork(), CudaGraphs(CARD, at_work())
    monkeypatch.setattr(FakeGraph, "replay", lambda graph: graph.operations[-1][-1].zero_())
    for _ in range(3):
        assert made.run("here", plain, batch)["sum"].item() == pytest.approx(batch.sum().item())
    assert "differs from the plain run" in caplog.text and not made._graphs


@torch.inference_mode()
def test_graphs_failed_capture_restores_the_stream():
    class Hungry(CountedNetwork):
        def __call__(self, frames: Tensor) -> dict[str, Tensor]:
            if cuda.active.name == "capture":
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(frames)

    cuda, batch, hungry = at_work(), torch.rand(1, 3, 8, 8), Hungry()
    stream, made = cuda.active, CudaGraphs(CARD, cuda)
    for _ in range(3):
        assert made.run("here", hungry, batch)["out"].shape == (1, 2, 4, 4)
        assert cuda.active is stream
    assert cuda.captures == 1 and not made._graphs


@torch.inference_mode()
def test_graphs_out_of_memory_are_dropped_before_weights(caplog):
    class Hungry(CountedNetwork):
        hungry = True

        def __call__(self, frames: Tensor) -> dict[str, Tensor]:
            if self.hungry:
                self.hungry = False
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(frames)

    for one in list(graphs._ALL):
        one.refuse()
    batch, plain = torch.rand(1, 3, 8, 8), CountedNetwork()
    with pytest.raises(torch.OutOfMemoryError):
        CudaGraphs(CARD, at_work()).run("here", Hungry(), batch)
    first, second = CudaGraphs(CARD, at_work()), CudaGraphs(CARD, at_work())
    for _ in range(2):
        first.run("here", plain, batch)
    assert first._graphs
    assert second.run("here", Hungry(), batch)["out"].shape == (1, 2, 4, 4)
    assert not first._graphs and "no memory for graphs" in caplog.text


def test_graphs_of_an_engine_are_dropped_when_unbound(tmp_path, monkeypatch):
    bundle, cuda = tiny_bundle(tmp_path / "tiny.safetensors"), at_work()
    assert cuda_graphs_for(torch.device("cpu")) is None and TorchEngine(bundle, "gate")._graphs is None
    engine, plain = TorchEngine(bundle, "gate"), TorchEngine(bundle, "gate")
    engine._graphs = made = CudaGraphs(CARD, cuda)
    arena = arranging.resident_arena(bundle, {"gate": engine})
    plain.bind(arena.tensor)
    for seed in range(4):
        assert torch.allclose(engine.outputs([picture(seed)]), plain.outputs([picture(seed)]), atol=1e-5)
    (graph,) = made._graphs.values()
    assert graph.graph.replays == 3 and engine.replays and not plain.replays
    engine.bind(arena.tensor, lambda _names: None)
    engine.outputs([picture(0)])
    assert graph.graph.replays == 3, "while tensors are arriving each layer waits for its own"
    engine.unbind()
    assert not made._graphs
    arena.close()
