"""Engines: the same outputs as the plain module, in every form in which weights come; and what a run takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.gpu.bundles import FAMILIES, FEW, bundle_of
from benchmarks.gpu.found import Found, Setting
from gemel.edge_runtime.engines.base import ENGINES, EngineError, FrameEngine
from gemel.edge_runtime.engines.layouts import resident_arena
from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.memory.arena import Arena
from gemel.edge_runtime.memory.store import Store
from gemel.edge_runtime.memory.transfer import compute_stream
from gemel.edge_runtime.scheduler.costs import BATCHES
from gemel.models.bits import Bits
from gemel.models.bundle import Bundle
from gemel.models.device import disable_tf32
from gemel.models.preprocess import height_width

CLOSE, CLOSE_IN_HALF = 1e-4, 2e-2
COUNTS = (1, 3)
WAITS = "fasterrcnn_mobilenet_v3_large_320_fpn"
QUERIES = ("north", "east", "south", "west")
MAX_BYTES_OF_FOUR = 1.2
ENGINE_OVER_BARE = 1.02


def outputs(setting: Setting, found: Found) -> None:
    """Eight families, one and three frames, TF32 off, in the engine torch."""
    for model in FEW if setting.small else FAMILIES:
        bundle = bundle_of(setting.folder / model, QUERIES[:1], model, setting.small)
        compare(setting, found, bundle, "torch", CLOSE)


def forms(setting: Setting, found: Found) -> None:
    """Early start, float16, int8, weights that overflow, graphs; and one weight for all who share it."""
    model = FEW[0] if setting.small else FAMILIES[0]
    path = setting.folder / "forms"
    widths: dict[Bits, float] = {"fp16": CLOSE_IN_HALF if setting.on_gpu else CLOSE, "int8": CLOSE}
    for width, close in widths.items():
        compare(setting, found, bundle_of(path, QUERIES[:1], model, setting.small, width), "torch", close, width)
    bundle = bundle_of(path, QUERIES, model, setting.small)
    query = QUERIES[0]
    frames = _frames(setting, bundle, 1)
    expected = _bare_outputs(setting, bundle, query, frames)
    names = bundle.names_in_order(query)
    with setting.on_compute_stream(), torch.inference_mode(), disable_tf32():
        arena, early = _arena(setting, bundle), TorchEngine(bundle, query, setting.device)
        setting.busy(0.01)
        arena.start(names)
        early.bind(arena.tensor, arena.wait)
        found.at_most("early_start_apart", _difference(early.forward(frames), expected), CLOSE)
        arena.finish()
        arena.close()
        some = frozenset(name for name in names if bundle.nbytes(name) > 4096)
        kept = _arena(setting, bundle)
        kept.change((), [name for name in names if name not in some])
        both = [TorchEngine(bundle, query, setting.device, overflow=some, overlaps=given) for given in (False, True)]
        for streamed in both:
            streamed.bind(kept.tensor)
            for _ in range(3):
                found.at_most("overflow_apart", _difference(streamed.forward(frames), expected), CLOSE)
        serial, overlapping = setting.times(9, *(partial(streamed.forward, frames) for streamed in both))
        found.note("overlapping_overflow", round(overlapping / serial, 3))
        kept.close()
    _check_sharing(setting, found, bundle, frames)
    _check_replays(setting, found, bundle)
    waiting = bundle_of(setting.folder / "waiting", QUERIES[:1], WAITS, setting.small)
    _check_replays(setting, found, waiting, waits=True)


def speed(setting: Setting, found: Found) -> None:
    """A run of one frame over the plain module's: eager without and with graphs."""
    model = FEW[0] if setting.small else FAMILIES[0]
    bundle = bundle_of(setting.folder / "speed", QUERIES[:1], model, setting.small)
    query, frames = QUERIES[0], _frames(setting, bundle, 1)
    with setting.on_compute_stream(), torch.inference_mode():
        bare = _module(setting, bundle, query)
        plain, graphed = (TorchEngine(bundle, query, setting.device) for _ in range(2))
        plain._graphs = None
        for count in BATCHES:
            found.note(f"workspace_{count}", plain.workspace_of(count))
        cases: dict[str, Any] = {"torch": plain, "graphs": graphed}
        arenas = [resident_arena(bundle, {query: engine}) for engine in cases.values()]
        for engine in cases.values():
            for _ in range(3):
                engine.forward(frames)
        actions = [lambda engine=engine: engine.forward(frames) for engine in cases.values()]
        base, *taken = setting.times(setting.many(101, 2), lambda: bare(frames), *actions)
        for arena in arenas:
            arena.close()
    found.note("bare_ms", 1000 * base)
    ratios = {name: seconds / base for name, seconds in zip(cases, taken)}
    found.takes_at_most("torch_over_bare", ratios["torch"], ENGINE_OVER_BARE)
    found.takes_at_most("graphs_over_torch", ratios["graphs"] / ratios["torch"], 1.0)


def compare(setting: Setting, found: Found, bundle: Bundle, name: str, close: float, form: str = "fp32") -> None:
    """An engine's outputs against the plain module's, in shares of each tensor's largest value."""
    query = bundle.queries[0]
    with disable_tf32():  # ONNX Runtime asks when it is made
        engine = _prepare(found, bundle, name, setting)
    if engine is None:
        return
    with setting.on_compute_stream(), torch.inference_mode(), disable_tf32():
        arena = resident_arena(bundle, {query.id: engine})
        for count in COUNTS:
            frames = _frames(setting, bundle, count)
            expected = _bare_outputs(setting, bundle, query.id, frames)
            for _ in range(3):  # the third is replayed from a graph, where there are any
                got = engine.forward(frames)
            found.at_most(f"{name}_{query.model}_{form}_{count}_apart", _difference(got, expected), close)
        arena.close()


def _check_sharing(setting: Setting, found: Found, bundle: Bundle, frames: Tensor) -> None:
    """A weight changed in place shows in all queries, and four take little more than one."""
    with setting.on_compute_stream(), torch.inference_mode():
        engines: dict[str, FrameEngine] = {query: TorchEngine(bundle, query, setting.device) for query in QUERIES}
        one = resident_arena(bundle, {QUERIES[0]: engines[QUERIES[0]]})
        alone = one.residency.resident_bytes
        one.unbind(engines[QUERIES[0]])
        one.close()
        arena = resident_arena(bundle, engines)
        found.at_most("four_over_one_bytes", arena.residency.resident_bytes / alone, MAX_BYTES_OF_FOUR)
        before = [engine.forward(frames).clone() for engine in engines.values() for _ in range(3)][2::3]
        state = bundle.query(QUERIES[0]).tensors
        weight = next(name for key, name in state.items() if len(bundle.tensor(name).shape) == 4)
        arena.tensor(weight).mul_(1.5)
        after = [engine.forward(frames) for engine in engines.values()]
        found.holds("a_shared_weight_shows_everywhere", all(_difference(*pair) > 1e-6 for pair in zip(after, before)))
        arena.close()


def _check_replays(setting: Setting, found: Found, bundle: Bundle, waits: bool = False) -> None:
    """Whether runs are replayed from a graph, where they do not wait for the GPU; those leave all as it was."""
    with setting.on_compute_stream(), torch.inference_mode():
        engine, frames = TorchEngine(bundle, QUERIES[0], setting.device), _frames(setting, bundle, 1)
        arena = resident_arena(bundle, {QUERIES[0]: engine})
        for _ in range(3):
            engine.forward(frames)
        if engine._graphs is not None:
            found.holds("what_waits_is_not_replayed" if waits else "runs_are_replayed", engine.replays != waits)
            here = torch.cuda.current_stream(setting.device) == compute_stream(setting.device)
            found.holds("the_stream_is_as_before" + "_waiting" * waits, here)
            torch.cuda.empty_cache()  # raises where a capture failed
        arena.close()


def _prepare(found: Found, bundle: Bundle, name: str, setting: Setting) -> FrameEngine | None:
    query = bundle.queries[0]
    why = ENGINES[name].missing(setting.device.type)
    try:
        if why is None:
            engine = ENGINES[name](bundle, query.id, setting.device)
            engine.prepare()
            return engine
    except EngineError as error:
        why = str(error)
    found.left_out[f"{name}_{query.model}"] = str(why)
    return None


def _arena(setting: Setting, bundle: Bundle) -> Arena:
    store = Store.of_bundle(bundle)
    return Arena(store, store.data.nbytes + 512 * len(store.extents), setting.device)


def _module(setting: Setting, bundle: Bundle, query: str) -> Any:
    model = bundle.build(query, setting.device, copy=True).requires_grad_(False).eval()
    return model.to(memory_format=torch.channels_last)


def _bare_outputs(setting: Setting, bundle: Bundle, query: str, frames: Tensor) -> Any:
    with setting.on_compute_stream(), torch.inference_mode(), disable_tf32():
        return _module(setting, bundle, query)(frames)


def _frames(setting: Setting, bundle: Bundle, count: int) -> Tensor:
    size, draws = height_width(bundle.queries[0].input_size), torch.Generator().manual_seed(count)
    frames = torch.rand(count, 3, *size, generator=draws).to(setting.device)
    return frames.contiguous(memory_format=torch.channels_last)


def _difference(got: Any, wanted: Any) -> float:
    """The largest difference of any tensor, in shares of its largest value."""
    pairs: Sequence[tuple[Any, Any]] = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True))
    apart = 0.0
    for one, other in pairs:
        if isinstance(other, Tensor) and other.numel():
            scale = float(other.abs().max()) or 1.0
            apart = max(apart, float((one.float().cpu() - other.float().cpu()).abs().max()) / scale)
    return apart
