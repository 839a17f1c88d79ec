"""What all engines share: the order of upload, run and work beside it, and the workspace, counted or measured."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gemel.edge_runtime.engines import tensor_engine
from gemel.edge_runtime.engines.tensor_engine import measure_workspace
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.models.bundle import Bundle
from tests.edge_runtime.engines.sample_bundles import bind
from tests.edge_runtime.tiny import picture, tiny_bundle

CPU = torch.device("cpu")


@pytest.fixture
def bundle(tmp_path) -> Bundle:
    return tiny_bundle(tmp_path / "tiny.safetensors")


@pytest.mark.parametrize("queued", [False, True])
def test_run_uploads_frames_before_work_beside_it(bundle, queued):
    happened = []

    class RecordingEngine(TorchEngine):
        queues_whole_runs = queued

        def upload(self, batch):
            happened.append("upload")
            return super().upload(batch)

        def forward(self, batch):
            happened.append("forward")
            return super().forward(batch)

    engine = RecordingEngine(bundle, "gate")
    bind(engine, bundle)
    assert engine.run([picture(0)], lambda: happened.append("prefetch"))
    last = ["forward", "prefetch"] if queued else ["prefetch", "forward"]
    assert happened == ["upload", *last], "host work beside a queued run does not delay it"


def test_workspace_on_gpu_is_at_least_what_was_measured(bundle, monkeypatch):
    engine = TorchEngine(bundle, "gate")
    estimated, size, measured = engine.workspace_of(2), engine.query.preprocess.size, []
    seen = measure_workspace(engine.model, size, 2, CPU)
    assert estimated / 2 < seen < 3 * estimated, "the architecture alone was run, with no weight of the bundle"
    monkeypatch.setattr(tensor_engine, "measure_workspace", lambda *what: measured.append(what[1:]) or estimated + 4096)
    engine.device = torch.device("cuda")
    assert engine.workspace_of(2) == engine.workspace_of(2) == estimated + 4096
    assert measured == [(size, 2, torch.device("cuda"))]
    tensor_engine._WORKSPACES.clear()


def test_measure_workspace_is_channels_last_and_skipped_within_a_limit(monkeypatch):
    seen = []

    class RecordingConv(nn.Conv2d):
        def forward(self, frames):
            seen.append((frames, self.weight))
            return super().forward(frames)

    network = nn.Sequential(RecordingConv(3, 4, 3, device="meta"), RecordingConv(4, 4, 3, device="meta"))
    assert measure_workspace(network, (8, 8), 2, CPU)
    assert seen and all(one.is_contiguous(memory_format=torch.channels_last) for pair in seen for one in pair)
    assert measure_workspace(nn.Embedding(2, 2, device="meta"), (8, 8), 2, CPU) == 0, "what fails is not measured"
    seen.clear()
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.5)
    assert measure_workspace(network, (8, 8), 2, torch.device("cuda", 1)) == 0 and not seen
