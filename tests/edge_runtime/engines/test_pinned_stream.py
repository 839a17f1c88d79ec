"""What overflows to a GPU: read ahead into two buffers, copied on a stream apart, each waiting for what it must."""

from __future__ import annotations

import torch

from edge_runtime.engines import torch_engine as eager
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.engines.weight_streaming import PinnedStream
from edge_runtime.memory.arena import Arena
from edge_runtime.memory.store import Store
from tests.edge_runtime.memory.fake_cuda import FakeCuda
from tests.edge_runtime.tiny import picture, tiny_bundle

CPU = torch.device("cpu")


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
        patched.setattr(eager, "PinnedStream", lambda *given: made.append(given))
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
    arena = Arena(Store.of_bundle(bundle), 2**20)
    arena.change((), bundle.names_in_order("gate"))
    for one in (engine, plain):
        one.bind(arena.tensor)
    for seed in range(2):
        assert torch.equal(engine.outputs([picture(seed)]), plain.outputs([picture(seed)]))
    assert ("wait", "compute", 1) in cuda.record
    arena.close()
