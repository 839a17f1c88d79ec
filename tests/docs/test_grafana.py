"""The Grafana dashboard asks for metrics that a box exports, and leaves none out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gemel.edge_runtime.http.metrics import Metrics
from tests.edge_runtime.http.box import Box

GRAFANA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "grafana.json").read_text())
METRIC = re.compile(r"\b(?:gemel|process_cpu)_\w+")
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
RESERVED = {"instance", "le"}
"""Labels that Prometheus and its histograms give."""


def expressions(value: Any) -> Iterator[str]:
    """Every query to Prometheus that stands anywhere in the dashboard."""
    if isinstance(value, dict):
        yield from (text for key, text in value.items() if key in ("expr", "query") and isinstance(text, str))
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from expressions(one)


def read_exported_metrics() -> dict[str, set[str]]:
    """The labels of each metric that a box exports, by name."""
    text = Metrics(["bridge-cars"]).to_text(Box().status).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found: dict[str, set[str]] = {}
    for sample in samples:
        found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_it_asks_for_what_a_box_exports_and_for_all_of_that() -> None:
    there = read_exported_metrics()
    asked = {name for text in expressions(GRAFANA) for name in re.findall(METRIC, text)}
    assert asked <= there.keys()
    assert {HISTOGRAM.sub("", name) for name in asked} == {HISTOGRAM.sub("", name) for name in there}


def test_it_groups_by_labels_that_are_there() -> None:
    there = read_exported_metrics()
    for panel in GRAFANA["panels"]:
        for target in panel.get("targets", []):
            names = re.findall(METRIC, target["expr"])
            groups = re.findall(r"by \(([^)]*)\)", target["expr"]) + re.findall(
                r"\{\{(\w+)\}\}", target["legendFormat"]
            )
            labels = {label.strip() for group in groups for label in group.split(",")} - RESERVED
            assert names and all(labels <= there[name] for name in names), target["expr"]


def test_nothing_overlaps() -> None:
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in GRAFANA["panels"]
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(taken) == len(set(taken)) and max(x for x, _ in taken) < 24
