"""Make the engines of a bundle's queries. Needs no torch where no engine does."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemel.edge_runtime.engines.base import AUTO, ENGINES, FALLBACK, ONNX, EngineError, FrameEngine
from gemel.edge_runtime.engines.providers import CPU, CUDA, unavailable_reason
from gemel.edge_runtime.memory.binding import TensorOf, WaitFor
from gemel.models.bundle import Bundle
from gemel.models.errors import InputError, message_of, one_line
from gemel.models.files.extras import MERGE, is_installed
from gemel.models.predictions import Prediction

log = logging.getLogger("gemel.run")


@dataclass(frozen=True)
class EngineRequest:
    """On which device engines run, and with which options: those that the class of each has.

    The engine onnx has the option `provider`, one of PROVIDERS, by itself cpu on a processor, else cuda.

    `overflow`: the tensors by query that are copied in every run, where it `overlaps` beside the layers before. Queries
    with an overflow run on torch. `damaged` are queries that cannot run.
    `max_workspace_bytes` bounds the runs of mapped weights, 0 does not.
    """

    device: str = "cpu"
    options: Mapping[str, Any] = field(default_factory=dict)
    overflow: Mapping[str, Collection[str]] = field(default_factory=dict)
    overlaps: bool = False
    damaged: Collection[str] = ()
    max_workspace_bytes: int = 0

    @property
    def provider(self) -> str | None:
        """The provider that a config names, None without one."""
        return self.options.get("provider")

    @property
    def chosen_provider(self) -> str:
        """The provider of the engine onnx."""
        return self.provider or (CPU if self.device == "cpu" else CUDA)

    @property
    def prefers_onnx(self) -> bool:
        """Whether the engine `auto` is onnx: with a provider, on a processor, and where torch is not installed."""
        if self.overflow or self.options.keys() - {"provider"}:
            return False
        return self.provider is not None or self.device == "cpu" or not is_installed("torchvision")


class NoEngine(FrameEngine):
    """Stands for a query whose tensors are damaged, which no engine can run."""

    name = "none"
    in_pages = True

    def __init__(self, bundle: Bundle, query_id: str) -> None:
        super().__init__(bundle, query_id)

    @property
    def weights(self) -> dict[str, int]:
        return {}

    def _check_packed(self, bundle: Bundle) -> None:
        """Nothing is used."""

    def bind(self, tensor_of: TensorOf, wait: WaitFor | None = None) -> None:
        """Nothing to bind."""

    def unbind(self) -> None:
        """Nothing to drop."""

    def forward(self, batch: Any) -> Any:
        raise EngineError("its tensors are damaged")

    def decode(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Prediction]:
        raise EngineError("its tensors are damaged")

    def workspace_of(self, count: int) -> int:
        return 0


def engines_for(
    bundle: Bundle,
    name: str,
    request: EngineRequest | None = None,
    ready: Mapping[str, FrameEngine] | None = None,
) -> dict[str, FrameEngine]:
    """The engine of each query, prepared and unbound; queries of `ready` have theirs.

    `name` is one of ENGINES, or "auto": onnx, on a GPU torch where that is installed and no provider is named.
    Where an engine cannot run a query, torch does, and a line gives the reason. Raises InputError where that is not
    installed.
    """
    request = request or EngineRequest()
    engines = dict(ready or {})
    wanted = name
    if name == AUTO:
        wanted = ONNX if request.prefers_onnx else FALLBACK
    if wanted == ONNX and len(engines) < len(bundle.queries):
        level = logging.INFO if name == AUTO else logging.WARNING
        others = [query.id for query in bundle.queries if query.id not in engines]
        engines |= _open_onnx(bundle, request, others, level)
    for query in bundle.queries:
        if query.id in engines:
            continue
        if query.id in request.damaged and wanted == ONNX:
            engines[query.id] = NoEngine(bundle, query.id)
            continue
        engines[query.id] = _make_engine(bundle, query.id, FALLBACK if wanted == ONNX else wanted, request)
    return {query.id: engines[query.id] for query in bundle.queries}


def _open_onnx(bundle: Bundle, request: EngineRequest, queries: Sequence[str], level: int) -> dict[str, FrameEngine]:
    """The engines `onnx` of as many queries as have one."""
    sound = [query for query in queries if query not in request.damaged and query not in request.overflow]
    engines: dict[str, FrameEngine] = {}
    try:
        for opened in _sessions(bundle, request, sound):
            engines |= opened
    except EngineError as error:
        others = [query for query in sound if query not in engines]
        if not is_installed("torchvision"):
            problem = f"query {others[0]} cannot run: {one_line(error)}"
            raise InputError(bundle.path, problem, f"merge it again, or pip install {MERGE}") from error
        log.log(level, "engine %s: %s; engine %s runs %s", ONNX, one_line(error), FALLBACK, ", ".join(others))
    return engines


def _sessions(bundle: Bundle, request: EngineRequest, queries: Sequence[str]) -> Iterator[Mapping[str, FrameEngine]]:
    from gemel.edge_runtime.engines.mapped import open_sessions

    provider = request.chosen_provider
    if provider == CPU:
        return open_sessions(bundle, queries, CPU, request.max_workspace_bytes)
    reason = unavailable_reason(provider)
    if reason is not None:
        raise EngineError(reason)
    from gemel.edge_runtime.engines.provider_session import open_provider_sessions

    return open_provider_sessions(bundle, queries, provider, request.max_workspace_bytes)


def _make_engine(bundle: Bundle, query: str, name: str, request: EngineRequest) -> FrameEngine:
    if name != FALLBACK and query not in request.overflow:
        try:
            kind = ENGINES.find(name)
            reason = kind.missing(request.device)
            if reason is not None:
                raise EngineError(reason)
            engine = kind(bundle, query, request.device, **request.options)
            engine.prepare()
            return engine
        except Exception as error:  # engines of others raise errors of any type
            reason = one_line(error) if isinstance(error, EngineError) else message_of(error)
            model = bundle.query(query).model
            log.warning("engine %s cannot run %s of query %s: %s; engine %s does", name, model, query, reason, FALLBACK)
    if not is_installed("torchvision"):
        raise InputError(bundle.path, f"query {query} needs torch, which is not installed", f"pip install {MERGE}")
    kind = ENGINES[FALLBACK]
    options: Any = {key: value for key, value in request.options.items() if key in kind.options}
    options |= {"overflow": request.overflow.get(query, ()), "overlaps": request.overlaps}
    return kind(bundle, query, request.device, **options)


def are_paged(engines: Collection[FrameEngine]) -> bool:
    """Whether no engine needs an arena, so that the schedule loads and evicts pages of a mapped file, if anything."""
    return all(engine.in_pages for engine in engines)


def held_bytes(engines: Collection[FrameEngine]) -> int:
    """Bytes of weights that stay: those of sessions, and mapped ones where other queries have theirs in an arena."""
    held = sum(engine.held_bytes for engine in engines)
    if are_paged(engines):
        return held
    sizes = {name: nbytes for engine in engines if engine.in_pages for name, nbytes in engine.weights.items()}
    return held + sum(sizes.values())
