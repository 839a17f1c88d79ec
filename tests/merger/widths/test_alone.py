"""Fewer bits alone: where the originals in their fewest bits take less than what was merged, they are stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import merger.merging as merging_module
from merger import merge
from merger.core.context import MergeContext
from merger.core.merged import Merged
from merger.merging import ALONE_IS_LESS
from merger.widths.search import fit_widths
from models.bits import Bits
from models.bundle import open_bundle, verify_bundle
from models.workload import Workload
from tests.merger.options import QUICK
from tests.merger.surely import ratios_on_val

FACTORIES = ["tests.merger.tiny:tiny_net"]


@pytest.mark.parametrize(("bears", "asked", "searched", "shares"), [
    ("fp16", "int4", ["merged", "alone"], False),
    ("int8", "int8", ["merged"], True),
    ("int8", "int4", ["merged"], True),
])  # fmt: skip
def test_what_takes_less_is_stored(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bears: Bits, asked: Bits,
    searched: list[str], shares: bool,
) -> None:  # fmt: skip
    fitted: list[str] = []

    def fit(ctx: MergeContext, merged: Merged, width: Bits, *rest: Any) -> dict[str, Any]:
        fitted.append("merged" if merged.plan.shared else "alone")
        return fit_widths(ctx, merged, bears if merged.plan.shared else width, *rest)

    monkeypatch.setattr(merging_module, "fit_widths", fit)
    report = merge(workload, tmp_path / "b.safetensors", options=replace(QUICK, weights=asked))
    assert fitted == searched, "the originals are tried only where they can take less"
    assert min(ratios_on_val(workload, report.bundle).values()) >= 0.95
    assert verify_bundle(report.bundle, FACTORIES) == []
    named = {query.tensors["last.0.weight"] for query in open_bundle(report.bundle, FACTORIES).queries}
    assert (len(named) < 3) == shares
    rows = [json.loads(row) for row in Path(f"{report.bundle}.log.jsonl").read_text().splitlines()]
    assert sum("width" in row for row in rows) >= 1
    left = [row["query"] for row in rows if row.get("after") == ALONE_IS_LESS]
    assert left == ([] if shares else ["q0", "q1", "q2"])
    outcomes = {row["outcome"] for row in rows if "set" in row}
    assert ("kept" in outcomes) == shares, "which sets are kept is for training to say"
