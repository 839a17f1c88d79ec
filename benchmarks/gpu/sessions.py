"""Sessions of ONNX Runtime whose weights lie once on the device, beside sessions of their own and the engine torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from benchmarks.gpu.bundles import FAMILIES, FEW, bundle_of
from benchmarks.gpu.found import Found, Setting
from benchmarks.gpu.running import QUERIES
from gemel.edge_runtime.engines.base import FrameEngine
from gemel.edge_runtime.engines.layouts import resident_arena
from gemel.edge_runtime.engines.mapped import SessionEngine
from gemel.edge_runtime.engines.provider_session import open_provider_sessions
from gemel.edge_runtime.engines.providers import CPU, CUDA, unavailable_reason
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.models.bundle import Bundle
from gemel.models.process import private_bytes

SHARED, OWN, TORCH = "shared", "own", "torch"
MAX_BYTES_OVER_OWN, MAX_RUN_OVER_OWN, CLOSE = 0.5, 1.1, 1e-4


def share(setting: Setting, found: Found) -> None:
    """Four queries that share all convolutions: bytes on the device, frames a second, a cold start of all."""
    provider = CUDA if setting.on_gpu else CPU
    reason = unavailable_reason(provider)
    if reason is not None:
        found.left_out["sessions"] = reason
        return
    model = FEW[0] if setting.small else FAMILIES[0]
    bundle = bundle_of(setting.folder / "sessions", QUERIES, model, setting.small, has_documents=True)
    frame = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    bytes_of, seconds_of, answers = dict[str, float](), dict[str, float](), dict[str, list[np.ndarray]]()
    for name in (SHARED, OWN, TORCH):
        before, started = used_bytes(setting), time.perf_counter()
        with engines_of(setting, bundle, name, provider) as engines:
            answers[name] = [engine.outputs([frame]) for engine in engines if isinstance(engine, SessionEngine)]
            run_all = partial(_run_all, engines, frame)
            run_all()
            setting.synchronise()
            found.note(f"{name}_start_s", time.perf_counter() - started)
            bytes_of[name] = used_bytes(setting) - before
            (seconds_of[name],) = setting.times(setting.many(51, 2), run_all)
            found.note(f"{name}_megabytes", bytes_of[name] / 1e6)
            found.note(f"{name}_frames_a_second", len(QUERIES) / seconds_of[name])
        del engines, run_all
        gc.collect()
    apart = max(float(np.abs(one - other).max()) for one, other in zip(answers[SHARED], answers[OWN], strict=True))
    found.at_most("shared_apart_from_own", apart, CLOSE)
    found.takes_at_most("shared_over_own_run", seconds_of[SHARED] / seconds_of[OWN], MAX_RUN_OVER_OWN)
    if setting.on_gpu:  # elsewhere the process holds much else
        found.at_most("shared_over_own_bytes", bytes_of[SHARED] / bytes_of[OWN], MAX_BYTES_OVER_OWN)


@contextmanager
def engines_of(setting: Setting, bundle: Bundle, name: str, provider: str) -> Iterator[Sequence[FrameEngine]]:
    """The engines of all queries, ready to run."""
    if name != TORCH:
        opened = open_provider_sessions(bundle, QUERIES, provider, shares_weights=name == SHARED)
        yield [engine for engines in opened for engine in engines.values()]
        return
    engines: dict[str, FrameEngine] = {query: TorchEngine(bundle, query, setting.device) for query in QUERIES}
    with setting.on_compute_stream(), torch.inference_mode():
        arena = resident_arena(bundle, engines)
        yield list(engines.values())
        arena.close()


def _run_all(engines: Sequence[FrameEngine], frame: np.ndarray) -> None:
    for engine in engines:
        engine.run([frame])


def used_bytes(setting: Setting) -> int:
    """What is taken of the device's memory; of the processor's by this process."""
    if not setting.on_gpu:
        return private_bytes() or 0
    setting.synchronise()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(setting.device)
    return total - free
