"""What a merge of the tiny networks does surely, whatever originals another processor trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from merger.core.context import MergeContext
from merger.core.snapshot import tie_and_evaluate
from merger.methods.prelude import NOTHING
from models.bundle import open_bundle
from models.workload import Workload

FACTORIES = ["tests.merger.tiny:tiny_net"]


def _halved(*given: Any) -> tuple[Any, dict[str, float]]:
    models, ratios = tie_and_evaluate(*given)
    return models, {query: ratio / 2 for query, ratio in ratios.items()}


def must_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is put together holds before it has trained, and nobody takes another's layers as they are."""
    monkeypatch.setattr("merger.methods.prelude._took", lambda *_, **__: NOTHING)
    for module in ("core.attempt", "methods.prelude", "methods.top_down"):
        monkeypatch.setattr(f"merger.{module}.tie_and_evaluate", _halved)


def ratios_on_val(workload: Workload, bundle: str | Path) -> dict[str, float]:
    """What each query of a bundle keeps of its original on val, which a merge promises; test says so within luck."""
    ctx, found = MergeContext(workload), open_bundle(bundle, FACTORIES)
    return {query.id: ctx.ratio(query.id, found.build(query.id)) for query in found.queries}
