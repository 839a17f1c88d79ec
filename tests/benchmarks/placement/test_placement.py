"""Fleet files of cities, and the predictions in docs/fleet.md."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.placement.city import WORKLOADS, city, places
from benchmarks.placement.predicted import predicted_of_ceiling
from gemel.fleet import load_fleet


def test_city_repeats_every_workload(tmp_path: Path) -> None:
    path, count = city(tmp_path, 2, {"device": "jetson-nano", "memory": "512MiB"})
    fleet = load_fleet(path)
    assert len(fleet.workloads) == 2 * len(places()) and len(fleet.queries) == count
    assert sum(entry.count for entry in fleet.boxes) == count


def test_fleet_page_has_the_predictions(repository: Path) -> None:
    page = (repository / "docs" / "fleet.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^\| (\w+) \| (0\.\d{3}) \| [01]\.\d{3}", page, re.MULTILINE))
    assert set(shown) == {"cifar", "gti", "domains", "published", "elsewhere"}
    for workload, predicted in shown.items():
        assert f"{predicted_of_ceiling(WORKLOADS / f'{workload}.yaml'):.3f}" == predicted, workload
