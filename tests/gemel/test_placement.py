"""`gemel place`: fleet files, optimal placements, the files that it writes, and bad input in one line."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import gemel
from gemel.analytic_costs import merge_at_ceiling, original_costs
from gemel.cli import main
from gemel.conditions import Objective, PlacementOptions
from gemel.fleet import Demands, load_fleet, measure_needs, shareable_layers
from gemel.models.errors import InputError
from gemel.models.sharing.groups import ceiling_bytes
from gemel.models.sharing.layers import layers_of_all, model_bytes
from gemel.models.workload import load_workload
from gemel.placement import (
    BoxGroup,
    FilledBox,
    PlacementProblem,
    count_moved_bytes,
    count_queries,
    find_placement,
    solve_placement,
)
from tests.gemel.fleets import DEVICE, draw_demands, query, write_fleet, write_workload

MIB = 1 << 20
BOX = {"id": "north", "device": DEVICE, "memory": "1GiB"}


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Two workloads of six queries: four ResNet-18, a ResNet-34, a SqueezeNet at another camera."""
    one = write_workload(tmp_path / "one.yaml", *(query(f"a{number}") for number in range(4)))
    small = query("small", "squeezenet1_1", "bridge", priority=3)
    two = write_workload(tmp_path / "two.yaml", query("deep", "resnet34"), small)
    boxes = [{"id": "box", "device": DEVICE, "memory": "120MiB", "count": 6}]
    return write_fleet(tmp_path / "city.yaml", boxes, one, two)


def place(fleet: Path, out: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["place", str(fleet), "-o", str(out), "--json", "--max-seconds", "20", *words])
    return code, json.loads(capsys.readouterr().out)


def all_placements(demands: Demands, groups: Sequence[BoxGroup]) -> Iterator[list[FilledBox]]:
    """Every way to put queries on boxes."""
    boxes = [index for index, group in enumerate(groups) for _ in range(group.count)]
    kinds = [kind for kind, total in enumerate(demands.total) for _ in range(total)]
    for where in itertools.product(range(len(boxes) + 1), repeat=len(kinds)):
        filled = []
        for box, group in enumerate(boxes):
            here = [kind for kind, at in zip(kinds, where, strict=True) if at == box]
            counts = np.bincount(np.array(here, dtype=int), minlength=len(demands.queries))
            if here and not groups[group].can_hold(demands, counts):
                break
            if here:
                filled.append(FilledBox(group, counts))
        else:
            yield filled


@pytest.mark.parametrize("objective", ["boxes", "frames", "fair"])
@pytest.mark.parametrize("seed", range(4))
def test_solve_placement_small_fleet_is_optimal(objective: Objective, seed: int) -> None:
    problem = PlacementProblem(*draw_demands(seed, queries=4, groups=2), objective)
    found = solve_placement(problem, seconds=20.0)
    best = min(map(problem.rank, all_placements(problem.demands, problem.groups)))
    if objective == "frames":
        assert problem.score(found.boxes) == pytest.approx(best[0], rel=2e-4)
    else:
        assert problem.rank(found.boxes) == pytest.approx(best, rel=2e-4)
    assert found.value == problem.value(problem.score(found.boxes)) and found.gap <= 2e-4


def test_solve_placement_time_limit_keeps_a_valid_bound() -> None:
    demands, groups = draw_demands(5, queries=60, groups=2)
    problem = PlacementProblem(demands, [replace(group, count=30) for group in groups], "boxes")
    found = solve_placement(problem, seconds=0.5)
    assert all(groups[box.group].can_hold(demands, box.counts) for box in found.boxes)
    assert count_queries(found.boxes) == 60 and 0 <= found.bound <= found.value and 0 <= found.gap <= 1
    longer = solve_placement(problem, seconds=2)
    assert found.bound <= longer.value <= found.value


def test_load_fleet_boxes_are_numbered_and_reach_all_cameras(tmp_path: Path) -> None:
    one = write_workload(tmp_path / "one.yaml", query("a"), query("b", camera="bridge"))
    boxes = [{**BOX, "count": 3, "cost": 2.5}, {**BOX, "id": "south", "cameras": ["bridge"]}]
    fleet = load_fleet(write_fleet(tmp_path / "city.yaml", boxes, one))
    north, south = fleet.boxes
    assert north.names() == ["north-1", "north-2", "north-3"] and south.names() == ["south"]
    assert north.memory_bytes == 1 << 30 and north.cost == 2.5 and south.cost == 1.0
    assert [south.reaches(one) for one in fleet.queries] == [False, True] and north.reaches(fleet.queries[0])


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"boxes": [{**BOX, "device": "toaster"}]}, "there is no profile 'toaster'"),
        ({"boxes": [{**BOX, "memory": "much"}]}, "boxes[0].memory (north)"),
        ({"boxes": [{**BOX, "cameras": ["hill"]}]}, "no camera 'hill'"),
        ({"boxes": [BOX, BOX]}, "two boxes are called 'north'"),
        ({"boxes": []}, "boxes"),
        ({"workloads": ["one.yaml", "one.yaml"]}, "one.yaml"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_load_fleet_bad_key_is_named(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    write_workload(tmp_path / "one.yaml", query("a"))
    path = tmp_path / "city.yaml"
    path.write_text(yaml.safe_dump({"name": "city", "boxes": [BOX], "workloads": ["one.yaml"], **change}))
    with pytest.raises(InputError) as raised:
        load_fleet(path)
    assert problem in str(raised.value) and str(path) in str(raised.value)


def test_load_fleet_camera_of_two_sources_is_refused(tmp_path: Path) -> None:
    one = write_workload(tmp_path / "one.yaml", query("a"))
    two = write_workload(tmp_path / "two.yaml", query("b"), cameras={"gate": {"source": "other.mp4"}})
    with pytest.raises(InputError, match="camera 'gate'"):
        load_fleet(write_fleet(tmp_path / "city.yaml", [BOX], one, two))


def test_measure_needs_bytes_are_those_of_the_ceiling(fleet: Path) -> None:
    queries = load_fleet(fleet).queries
    total, bound = sum(map(model_bytes, queries)), ceiling_bytes(layers_of_all(queries))
    apart, demands = (measure_needs(load_fleet(fleet), shared, timed=False).demands for shared in ("none", "ceiling"))
    assert (apart.weight_bytes(apart.total), demands.weight_bytes(demands.total)) == (total, total - bound)
    costs = original_costs(load_fleet(fleet).boxes[0].profile, queries)
    largest = max(cost.workspace_bytes for cost in costs.queries.values())
    assert demands.box_bytes(demands.total) == total - bound + largest
    bundle = merge_at_ceiling(queries)
    names = {name for one in bundle.queries for name in bundle.names_in_order(one.id)}
    counters = total - bound - sum(map(bundle.nbytes, names))  # of BatchNorm, equal in all of a model
    assert 0 <= counters < 8 * 20 * len(queries)


def test_measure_needs_predicted_lies_between_none_and_ceiling(fleet: Path) -> None:
    load = load_fleet(fleet)
    demands = [measure_needs(load, shared, timed=False).demands for shared in ("none", "predicted", "ceiling")]
    none, predicted, ceiling = (one.weight_bytes(one.total) for one in demands)
    assert none > predicted > ceiling
    deep = next(one for one in load.queries if one.id == "deep")
    few, many = ({layer.path for layer in shareable_layers(deep, shared)} for shared in ("predicted", "ceiling"))
    assert few < many


def test_place_sharing_needs_fewer_boxes(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, apart = place(fleet, tmp_path / "none", "--shared", "none", capsys=capsys)
    assert code == 0 and apart["unplaced"] == []
    out = tmp_path / "deep" / "er"
    code, found = place(fleet, out, capsys=capsys)
    assert code == 0 and found["objective"] == found["bound"] == len(found["boxes"]) < len(apart["boxes"])
    assert found["gap"] == 0 and found["seconds"] > 0 and found["shared"] == "predicted"
    assert sorted(one for box in found["boxes"] for one in box["queries"]) == ["a0", "a1", "a2", "a3", "deep", "small"]
    for box in found["boxes"]:
        assert 0 < box["bytes"] <= 120 * MIB and box["shared_bytes"] >= 0 and 0 <= box["frames_fraction"] <= 1
    assert 0 < found["moved_bytes"] < sum(box["bytes"] for box in found["boxes"])
    assert json.loads((out / "placement.json").read_text()) == found
    assert {path.name for path in out.iterdir()} == {"placement.json", *(f"{box['id']}.yaml" for box in found["boxes"])}
    given = {one.id: one for one in load_fleet(fleet).queries}
    for box in found["boxes"]:
        workload = load_workload(out / f"{box['id']}.yaml")
        assert [one.id for one in workload.queries] == box["queries"]
        for one in workload.queries:
            assert {**one.__dict__, "file": None} == {**given[one.id].__dict__, "file": None}
            assert workload.cameras[one.camera] == load_fleet(fleet).cameras[one.camera]


def test_place_from_a_placement_moves_little(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "placed"
    _, apart = place(fleet, out, "--shared", "none", capsys=capsys)
    _, again = place(fleet, out, "--shared", "none", "--from", str(out), capsys=capsys)
    assert again["moved_bytes"] == 0
    assert [box["queries"] for box in again["boxes"]] == [box["queries"] for box in apart["boxes"]]
    more = query("small", "squeezenet1_1", "bridge"), query("new", "squeezenet1_0"), query("deep", "resnet34")
    write_workload(tmp_path / "two.yaml", *more)
    _, grown = place(fleet, out, "--shared", "none", "--from", str(out), capsys=capsys)
    stayed = {one: box["id"] for box in apart["boxes"] for one in box["queries"]}
    now = {one: box["id"] for box in grown["boxes"] for one in box["queries"]}
    new = next(one for one in load_fleet(fleet).queries if one.id == "new")
    assert grown["moved_bytes"] == model_bytes(new) and {**stayed, "new": now["new"]} == now
    _, shared = place(fleet, out, "--from", str(out), capsys=capsys)
    assert len(shared["boxes"]) < len(grown["boxes"])
    assert {path.stem for path in out.glob("*.yaml")} == {box["id"] for box in shared["boxes"]}


def test_place_query_without_box_has_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = [query("fits"), query("large", "vgg16"), query("away", camera="hill")]
    one = write_workload(tmp_path / "one.yaml", *queries)
    boxes = [{"id": "box", "device": DEVICE, "memory": "64MiB", "cameras": ["gate"]}]
    code, found = place(write_fleet(tmp_path / "city.yaml", boxes, one), tmp_path / "out", capsys=capsys)
    assert code == 1 and found["unplaced"] == ["large", "away"] and found["boxes"][0]["queries"] == ["fits"]
    assert "more than any box has" in found["reasons"]["large"] and "no box reaches" in found["reasons"]["away"]


@pytest.mark.parametrize("objective", ["frames", "fair"])
def test_place_frames_and_fair_use_more_boxes(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str
) -> None:
    _, few = place(fleet, tmp_path / "few", capsys=capsys)
    code, found = place(fleet, tmp_path / "out", "--objective", objective, "--max-seconds", "5", capsys=capsys)
    assert code == 0 and found["objective"] <= found["bound"] * (1 + 1e-9)
    worst = [min(box["frames_fraction"] for box in one["boxes"]) for one in (few, found)]
    assert len(found["boxes"]) >= len(few["boxes"]) and worst[1] >= worst[0] - 0.02
    slow = write_workload(tmp_path / "one.yaml", query("a0", sla_ms=1))
    fleet = write_fleet(tmp_path / "slow.yaml", [BOX], slow)
    code, found = place(fleet, tmp_path / "slow", "--objective", objective, capsys=capsys)
    assert code == 1 and "longer than its SLA" in found["reasons"]["a0"]


def test_place_min_frames_limits_the_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    busy = [query(f"a{number}", fps=8, input_size=224) for number in range(4)]
    one = write_workload(tmp_path / "one.yaml", *busy, query("dense", fps=100, input_size=224))
    fleet = write_fleet(tmp_path / "city.yaml", [{**BOX, "count": 6}], one)
    _, few = place(fleet, tmp_path / "few", capsys=capsys)
    assert len(few["boxes"]) == 1 and few["boxes"][0]["frames_fraction"] < 0.9
    code, found = place(fleet, tmp_path / "timed", "--min-frames", "0.95", capsys=capsys)
    assert code == 1 and found["unplaced"] == ["dense"] and "more time alone" in found["reasons"]["dense"]
    assert found["gap"] == 0 and all(box["frames_fraction"] >= 0.9 for box in found["boxes"]) and found["boxes"]


def test_place_text_names_what_numbers_hide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = write_workload(tmp_path / "one.yaml", *(query(f"a{number}", fps=60, input_size=224) for number in range(4)))
    boxes = [{"id": "box", "device": DEVICE, "memory": "64GiB", "count": 2}]
    fleet = write_fleet(tmp_path / "busy.yaml", boxes, many)
    assert main(["place", str(fleet), "-o", str(tmp_path / "out"), "--max-seconds", "5"]) == 0
    text = capsys.readouterr().out
    assert "4 of 4 queries on 1 of 2 boxes (sharing: predicted)" in text and "bound 1: optimal" in text
    assert "box: Jetson Nano 4 GB has only 4.0 GiB" in text and "more frames than time" in text


def test_count_moved_bytes_shared_pieces_are_free(fleet: Path) -> None:
    demands = measure_needs(load_fleet(fleet), "ceiling", timed=False).demands
    alone = np.bincount([0], minlength=len(demands.queries))
    assert count_moved_bytes(demands, {"box-1": ["a0"]}, {}) == demands.weight_bytes(alone)
    twin = count_moved_bytes(demands, {"box-1": ["a0", "a1"]}, {"box-1": ["a0"]})
    assert twin == demands.private[0]
    assert count_moved_bytes(demands, {"box-1": ["a0"]}, {"box-1": ["a0", "a1"]}) == 0


def test_find_placement_same_options_give_the_same(fleet: Path) -> None:
    options = PlacementOptions(seed=3, seconds=20)
    one, other = (find_placement(load_fleet(fleet), options).to_json() for _ in range(2))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([{"id": "box-1"}], "boxes[0].queries (box-1): this key is missing"),
        (None, "boxes"),
    ],
)
def test_place_from_bad_placement_is_refused(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], boxes: Any, problem: str
) -> None:
    (tmp_path / "was").mkdir()
    (tmp_path / "was" / "placement.json").write_text(json.dumps({"boxes": boxes}))
    assert main(["place", str(fleet), "-o", str(tmp_path / "out"), "--from", str(tmp_path / "was")]) == 2
    text = capsys.readouterr().err
    assert problem in text and "placement.json" in text and not (tmp_path / "out").exists()


def test_place_never_overwrites_other_files(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["place", str(fleet), "-o", str(out), "--from", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err and not out.exists()
    out.mkdir()
    (out / "box-6.yaml").write_text("mine")
    assert main(["place", str(fleet), "-o", str(out)]) == 2
    assert "box-6.yaml: -o: exists already, and is of no earlier placement" in capsys.readouterr().err
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    assert main(["place", str(fleet), "-o", str(out / "box-6.yaml")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_place_never_overwrites_its_own_workload(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placed"
    place(fleet, out, capsys=capsys)
    one = out / "box-1.yaml"
    again = write_fleet(out / "again.yaml", [{**BOX, "id": "other"}], one)
    before = one.read_bytes()
    assert main(["place", str(again), "-o", str(out)]) == 2
    assert "is the workload" in capsys.readouterr().err and one.read_bytes() == before
    with pytest.raises(InputError, match="is the workload"):
        gemel.place(again, out)
    assert one.read_bytes() == before


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("max_moves", [0, 1, 2])
def test_solve_placement_within_a_limit_of_moves_is_optimal(seed: int, max_moves: int) -> None:
    demands, groups = draw_demands(seed, queries=4, groups=2)
    single = [replace(group, count=1) for group in groups for _ in range(group.count)]
    problem = PlacementProblem(demands, single, "boxes")
    placements = list(all_placements(demands, single))
    before = max(placements, key=len)  # spread over many boxes; one more query has none now
    counts = [
        next((box.counts for box in before if box.group == group), 0 * demands.total) for group in range(len(single))
    ]
    limited = replace(problem, before=tuple(counts), max_moves=max_moves)

    def moves(boxes: Sequence[FilledBox]) -> int:
        now = {box.group: box.counts for box in boxes}
        lost = (np.maximum(had - now.get(group, 0 * had), 0).sum() for group, had in enumerate(counts))
        return int(sum(lost))

    found = solve_placement(limited, seconds=20.0)
    best = min(problem.rank(boxes) for boxes in placements if moves(boxes) <= max_moves)
    assert moves(found.boxes) <= max_moves and problem.rank(found.boxes) == pytest.approx(best)
    assert found.gap <= 1e-6


def test_place_after_a_box_is_lost_moves_few_queries(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    _, first = place(fleet, before, capsys=capsys)
    lost = max(first["boxes"], key=lambda box: len(box["queries"]))["id"]
    code, found = place(fleet, after, "--from", str(before), "--lost", lost, "--max-moves", "0", capsys=capsys)
    now = {box["id"]: box["queries"] for box in found["boxes"]}
    assert code == 0 and found["moves"] == 0 and lost not in now
    assert all(set(box["queries"]) <= set(now[box["id"]]) for box in first["boxes"] if box["id"] != lost)
    assert main(["place", str(fleet), "-o", str(after), "--lost", lost]) == 2
    assert "--lost and --max-moves change a placement; give --from DIR" in capsys.readouterr().err
    assert main(["place", str(fleet), "-o", str(after), "--from", str(before), "--lost", "nowhere"]) == 2
    assert "--lost: no box 'nowhere'; the boxes are: box-1" in capsys.readouterr().err


def test_place_by_watts_takes_the_boxes_with_the_fewest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = write_workload(tmp_path / "one.yaml", query("a"), query("b", "squeezenet1_1"))
    cheap, thrifty = {**BOX, "cost": 1.0, "watts": 15}, {**BOX, "id": "south", "cost": 9.0, "watts": 5}
    fleet = write_fleet(tmp_path / "city.yaml", [cheap, thrifty], workload)
    for objective, box, value in (("boxes", "north", 1.0), ("watts", "south", 5.0)):
        _, found = place(fleet, tmp_path / objective, "--objective", objective, capsys=capsys)
        assert [one["id"] for one in found["boxes"]] == [box] and found["objective"] == found["bound"] == value
    write_fleet(tmp_path / "city.yaml", [cheap, {**BOX, "id": "south"}], workload)
    assert main(["place", str(fleet), "-o", str(tmp_path / "out"), "--objective", "watts"]) == 2
    assert "boxes: no watts are known of south; give each its `watts`" in capsys.readouterr().err
