"""The fleet file: what stands in it, and what is wrong with it in one line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemel.fleet import load_fleet
from models.errors import InputError
from tests.gemel.placing.fleets import DEVICE, query, write_fleet, write_workload

BOX = {"id": "north", "device": DEVICE, "memory": "1GiB"}


def test_boxes_are_numbered_where_there_are_several_and_reach_all_unless_told(tmp_path: Path) -> None:
    one = write_workload(tmp_path / "one.yaml", query("a"), query("b", camera="bridge"))
    boxes = [{**BOX, "count": 3, "cost": 2.5}, {**BOX, "id": "south", "cameras": ["bridge"]}]
    fleet = load_fleet(write_fleet(tmp_path / "city.yaml", boxes, one))
    north, south = fleet.boxes
    assert north.names() == ["north-1", "north-2", "north-3"] and south.names() == ["south"]
    assert north.memory_bytes == 1 << 30 and north.cost == 2.5 and south.cost == 1.0
    assert [south.reaches(one) for one in fleet.queries] == [False, True] and north.reaches(fleet.queries[0])


def test_the_fleet_of_the_page_is_read(tmp_path: Path, repository: Path) -> None:
    page = (repository / "docs" / "fleet.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```yaml file=city.yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "city.yaml").write_text(text)
    write_workload(tmp_path / "north.yaml", query("a", camera="bridge"), query("b"))
    write_workload(tmp_path / "south.yaml", query("c", camera="square"))
    fleet = load_fleet(tmp_path / "city.yaml")
    assert [entry.names() for entry in fleet.boxes] == [["north-1", "north-2", "north-3"], ["depot"]]
    assert [[entry.reaches(one) for one in fleet.queries] for entry in fleet.boxes] == [[True, True, False], [True] * 3]


def _edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        path = folder / "city.yaml"
        document = yaml.safe_load(path.read_text())
        change(document)
        path.write_text(yaml.safe_dump(document))

    return edit


@pytest.mark.parametrize(("damage", "message"), [
    (_edited(lambda d: d["boxes"][0].update(device="abacus")), "no profile 'abacus'; choose one of: .*jetson-nano"),
    (_edited(lambda d: d["boxes"][0].update(memory="2 bananas")), r"boxes\[0\].memory .north.: .*is not a size"),
    (_edited(lambda d: d["boxes"][0].update(cameras=["moon"])), "no camera 'moon'; use one of"),
    (_edited(lambda d: d["boxes"][0].update(count=0)), r"boxes\[0\].count"),
    (_edited(lambda d: d["boxes"][0].update(memroy="1GiB")), "unknown key; did you mean memory"),
    (_edited(lambda d: d["boxes"].append({**BOX, "id": "north"})), "two boxes are called 'north'"),
    (_edited(lambda d: d["workloads"].append("two.yaml")), "query 'a' stands in .*one.yaml too"),
    (_edited(lambda d: d["workloads"].append("three.yaml")), "camera 'gate' is another in .*one.yaml"),
    (_edited(lambda d: d["workloads"].append("none.yaml")), "none.yaml"),
    (_edited(lambda d: d.pop("boxes")), "boxes: this key is missing"),
    (lambda folder: (folder / "city.yaml").write_text("- a"), "is not a mapping; start with `name:`"),
])  # fmt: skip
def test_what_is_wrong_is_one_line(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    one = write_workload(tmp_path / "one.yaml", query("a"))
    write_workload(tmp_path / "two.yaml", query("a"))
    other = {"gate": {"source": "rtsp://10.0.0.5/1"}}
    write_workload(tmp_path / "three.yaml", query("z"), cameras=other)
    write_fleet(tmp_path / "city.yaml", [BOX], one)
    damage(tmp_path)
    with pytest.raises(InputError, match=message) as refused:
        load_fleet(tmp_path / "city.yaml")
    assert "\n" not in str(refused.value)
