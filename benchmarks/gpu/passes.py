"""One pass for 1, 2, 4 and 8 queries: frames a second, bytes, outputs."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.gpu.bundles import FAMILIES, FEW, bundle_of
from benchmarks.gpu.found import Found, Setting
from gemel.edge_runtime.engines.joint_pass import Job
from gemel.edge_runtime.engines.layouts import resident_arena
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.models.device import disable_tf32

COUNTS = (1, 2, 4, 8)
CLOSE = 1e-4
MAX_PASS_OVER_RUNS = 1.0
"""A pass for several queries may not take longer than a run of each."""


def joint(setting: Setting, found: Found) -> None:
    """A frame of each query: one pass against a run of each, in the engine torch."""
    model, names = FEW[0] if setting.small else FAMILIES[0], [f"query{index}" for index in range(COUNTS[-1])]
    bundle = bundle_of(setting.folder / "joint", names, model, setting.small)
    engines = {name: TorchEngine(bundle, name, setting.device) for name in names}
    arena = resident_arena(bundle, engines)
    size = engines[names[0]].query.preprocess.size
    with setting.on_compute_stream(), torch.inference_mode(), disable_tf32():
        forward = TorchEngine.join(list(engines.values()))
        assert forward is not None, "the queries have no pass"
        frames = torch.rand(len(names), 3, *size, device=setting.device)
        frames = frames.contiguous(memory_format=torch.channels_last)
        for count in COUNTS:
            batch = frames[:count]
            jobs: list[Job] = [(place, [place]) for place in range(count)]
            own = [engines[name] for name in names[:count]]
            apart = torch.cat([engine.forward(frames[place : place + 1]) for place, engine in enumerate(own)]).clone()
            together = torch.cat(forward(batch, jobs))
            difference = float((together - apart).abs().max() / apart.abs().max())
            found.at_most(f"pass_of_{count}_apart", difference, CLOSE)
            runs_s, pass_s = setting.times(
                setting.many(30, 2), partial(_run_each, own, frames), partial(forward, batch, jobs)
            )
            found.note(f"frames_a_second_{count}_pass", count / pass_s)
            found.note(f"frames_a_second_{count}_runs", count / runs_s)
            if count > 1:
                found.takes_at_most(f"pass_of_{count}_over_runs", pass_s / runs_s, MAX_PASS_OVER_RUNS)
            needed = {tensor for name in names[:count] for tensor in bundle.names_in_order(name)}
            found.note(f"bytes_{count}", sum(map(bundle.nbytes, needed)))
    arena.close()


def _run_each(engines: list[TorchEngine], frames: torch.Tensor) -> None:
    for place, engine in enumerate(engines):
        engine.forward(frames[place : place + 1])
