"""The catalogue of workloads: fifteen files, each with the ceiling it states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gemel.models.sharing.groups import ceiling_bytes, groups
from gemel.models.sharing.layers import layers_of_all, model_bytes
from gemel.models.workload import load_workload

FOLDER = Path(__file__).parents[2] / "benchmarks" / "workloads"
CATALOGUE = sorted(path for path in FOLDER.glob("*.yaml") if re.match(r"(low|medium|high)-\d", path.name))
LEVELS = {"low": (0.0, 0.2), "medium": (0.2, 0.5), "high": (0.5, 1.0)}


def test_there_are_three_workloads_of_low_six_of_medium_and_six_of_high_sharing_potential() -> None:
    assert [sum(path.name.startswith(level) for path in CATALOGUE) for level in LEVELS] == [3, 6, 6]


@pytest.mark.parametrize("path", CATALOGUE, ids=lambda path: path.stem)
def test_a_workload_has_the_ceiling_it_states(path: Path) -> None:
    stated = re.search(r"^# Ceiling: ([\d.]+) % of all bytes", path.read_text(), re.MULTILINE)
    assert stated, f"{path} states no ceiling"
    workload = load_workload(path)
    layers = layers_of_all(workload.queries)
    total = sum(model_bytes(query) for query in workload.queries)
    fraction = ceiling_bytes(layers) / total
    assert f"{100 * fraction:.1f}" == stated[1]
    assert sum(group.saved_bytes for group in groups(layers)) == ceiling_bytes(layers)
    low, high = LEVELS[path.stem.split("-")[0]]
    assert low <= fraction < high
    assert workload.name == path.stem and 3 <= len(workload.queries) <= 12


def test_the_catalogue_mixes_families_tasks_and_cameras() -> None:
    workloads = [load_workload(path) for path in CATALOGUE]
    assert len({query.model for workload in workloads for query in workload.queries}) >= 25
    assert all(len(workload.cameras) > 1 for workload in workloads)
    both = [{query.task for query in workload.queries} for workload in workloads]
    assert sum(len(tasks) == 2 for tasks in both) >= 10
