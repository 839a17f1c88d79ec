"""What a merge of the tiny networks does surely, whatever originals another processor trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemel.merger.context import MergeContext
from gemel.merger.evaluate import tie_and_evaluate
from gemel.models.bundle import open_bundle
from gemel.models.workload import Workload

FACTORIES = ["tests.merger.tiny:tiny_net"]


def _halve_ratios(*given: Any) -> tuple[Any, dict[str, float]]:
    models, ratios = tie_and_evaluate(*given)
    return models, {query: ratio / 2 for query, ratio in ratios.items()}


def must_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """No method finds a state that holds without training."""
    for module in ("gemel", "joint_training"):
        monkeypatch.setattr(f"gemel.merger.methods.{module}.tie_and_evaluate", _halve_ratios)


def ratios_on_val(workload: Workload, bundle: str | Path) -> dict[str, float]:
    """What each query of a bundle keeps of its original on val, which a merge promises; test says so within luck."""
    found = open_bundle(bundle, FACTORIES)
    networks = {query.id: query.substitution.query for query in found.queries if query.substitution}
    ctx = MergeContext(workload).substitute(networks)
    return {query.id: ctx.ratio(query.id, found.build(query.id)) for query in found.queries}
