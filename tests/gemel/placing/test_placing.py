"""Whole placements: bytes as inspected, files that go on from there, few moves from where all was."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemel
from gemel.analytic_costs import merge_at_ceiling, original_costs
from gemel.cli import main
from gemel.conditions import PlacementOptions
from gemel.fleet import load_fleet
from gemel.placing.moving import moved_bytes
from gemel.placing.needs import needs_of, shared_layers
from gemel.placing.placing import place_fleet
from models.errors import InputError
from models.sharing.groups import ceiling_bytes
from models.sharing.layers import layers_of_all, model_bytes
from models.workload import load_workload
from tests.gemel.placing.fleets import DEVICE, query, write_fleet, write_workload

MIB = 1 << 20


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Two workloads of six queries: four ResNet-18, a ResNet-34, a SqueezeNet at another camera."""
    one = write_workload(tmp_path / "one.yaml", *(query(f"a{number}") for number in range(4)))
    two = write_workload(
        tmp_path / "two.yaml", query("deep", "resnet34"), query("small", "squeezenet1_1", "bridge", priority=3)
    )
    return write_fleet(
        tmp_path / "city.yaml", [{"id": "box", "device": DEVICE, "memory": "120MiB", "count": 6}], one, two
    )


def _place(fleet: Path, out: Path, *words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(["place", str(fleet), "-o", str(out), "--json", "--max-seconds", "20", *words])
    return code, json.loads(capsys.readouterr().out)


def test_a_box_takes_the_bytes_of_its_ceiling_and_the_largest_workspace(fleet: Path) -> None:
    queries = load_fleet(fleet).queries
    total, ceiling = sum(map(model_bytes, queries)), ceiling_bytes(layers_of_all(queries))
    apart, needs = (needs_of(load_fleet(fleet), shared, timed=False) for shared in ("none", "ceiling"))
    assert (apart.weights(apart.asked), needs.weights(needs.asked)) == (total, total - ceiling)
    costs = original_costs(load_fleet(fleet).boxes[0].profile, queries)
    largest = max(cost.workspace_bytes for cost in costs.queries.values())
    assert needs.taken(needs.asked) == total - ceiling + largest
    bundle = merge_at_ceiling(queries)
    names = {name for one in bundle.queries for name in bundle.names_in_order(one.id)}
    counters = total - ceiling - sum(map(bundle.nbytes, names))  # a number for each norm, equal in all of a model
    assert 0 <= counters < 8 * 20 * len(queries)


def test_what_is_predicted_to_be_shared_lies_between_nothing_and_all(fleet: Path) -> None:
    weights = {
        shared: needs.weights(needs.asked)
        for shared in ("none", "predicted", "ceiling")
        for needs in [needs_of(load_fleet(fleet), shared, timed=False)]
    }
    assert weights["none"] > weights["predicted"] > weights["ceiling"]
    deep = next(one for one in load_fleet(fleet).queries if one.id == "deep")
    assert {layer.path for layer in shared_layers(deep, "predicted")} < {
        layer.path for layer in shared_layers(deep, "ceiling")
    }


def test_sharing_needs_fewer_boxes_and_the_answer_has_the_keys_of_the_contract(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, apart = _place(fleet, tmp_path / "none", "--shared", "none", capsys=capsys)
    assert code == 0 and apart["unplaced"] == []
    code, found = _place(fleet, tmp_path / "shared", capsys=capsys)
    assert code == 0 and found["objective"] == found["bound"] == len(found["boxes"]) < len(apart["boxes"])
    assert found["gap"] == 0 and found["seconds"] > 0 and found["shared"] == "predicted"
    placed = [one for box in found["boxes"] for one in box["queries"]]
    assert sorted(placed) == ["a0", "a1", "a2", "a3", "deep", "small"]
    for box in found["boxes"]:
        assert 0 < box["bytes"] <= 120 * MIB and box["shared_bytes"] >= 0 and 0 <= box["frames_fraction"] <= 1
    assert found["moved_bytes"] == sum(box["bytes"] for box in found["boxes"]) - _workspaces(fleet, found["boxes"])
    assert json.loads((tmp_path / "shared" / "placement.json").read_text()) == found


def _workspaces(fleet: Path, boxes: Sequence[dict[str, Any]]) -> int:
    queries = load_fleet(fleet).queries
    costs = original_costs(load_fleet(fleet).boxes[0].profile, queries).queries
    return sum(max(costs[one].workspace_bytes for one in box["queries"]) for box in boxes)


def test_each_box_gets_a_workload_file_that_reads_as_the_one_it_comes_from(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "er"
    _, found = _place(fleet, out, capsys=capsys)
    written = {f"{box['id']}.yaml" for box in found["boxes"]}
    assert {path.name for path in out.iterdir()} == {"placement.json", *written}
    asked = {one.id: one for one in load_fleet(fleet).queries}
    for box in found["boxes"]:
        workload = load_workload(out / f"{box['id']}.yaml")
        assert [one.id for one in workload.queries] == box["queries"]
        for one in workload.queries:
            was = asked[one.id]
            assert {**one.__dict__, "file": None} == {**was.__dict__, "file": None}
            assert workload.cameras[one.camera] == load_fleet(fleet).cameras[one.camera]


def test_little_moves_from_where_all_was_and_what_is_used_no_more_is_removed(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placed"
    _, apart = _place(fleet, out, "--shared", "none", capsys=capsys)
    _, again = _place(fleet, out, "--shared", "none", "--from", str(out), capsys=capsys)
    assert again["moved_bytes"] == 0
    assert [box["queries"] for box in again["boxes"]] == [box["queries"] for box in apart["boxes"]]
    more = query("small", "squeezenet1_1", "bridge"), query("new", "squeezenet1_0"), query("deep", "resnet34")
    write_workload(tmp_path / "two.yaml", *more)
    _, grown = _place(fleet, out, "--shared", "none", "--from", str(out), capsys=capsys)
    stayed = {one: box["id"] for box in apart["boxes"] for one in box["queries"]}
    now = {one: box["id"] for box in grown["boxes"] for one in box["queries"]}
    new = next(one for one in load_fleet(fleet).queries if one.id == "new")
    assert grown["moved_bytes"] == model_bytes(new) and {**stayed, "new": now["new"]} == now
    _, shared = _place(fleet, out, "--from", str(out), capsys=capsys)
    assert len(shared["boxes"]) < len(grown["boxes"])
    assert {path.stem for path in out.glob("*.yaml")} == {box["id"] for box in shared["boxes"]}


def test_who_has_no_place_is_named_with_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    queries = [query("fits"), query("large", "vgg16"), query("away", camera="hill")]
    one = write_workload(tmp_path / "one.yaml", *queries)
    boxes = [{"id": "box", "device": DEVICE, "memory": "64MiB", "cameras": ["gate"]}]
    code, found = _place(write_fleet(tmp_path / "city.yaml", boxes, one), tmp_path / "out", capsys=capsys)
    assert code == 1 and found["unplaced"] == ["large", "away"] and found["boxes"][0]["queries"] == ["fits"]
    assert "more than any box has" in found["reasons"]["large"] and "no box reaches" in found["reasons"]["away"]


@pytest.mark.parametrize("objective", ["frames", "fair"])
def test_frames_count_where_they_are_asked_for(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], objective: str
) -> None:
    _, few = _place(fleet, tmp_path / "few", capsys=capsys)
    code, found = _place(fleet, tmp_path / "out", "--objective", objective, capsys=capsys)
    assert code == 0 and found["objective"] <= found["bound"] * (1 + 1e-9)

    def worst(answer: dict[str, Any]) -> float:
        return min(box["frames_fraction"] for box in answer["boxes"])

    assert len(found["boxes"]) >= len(few["boxes"]) and worst(found) >= worst(few) - 0.02
    slow = write_workload(tmp_path / "one.yaml", query("a0", sla_ms=1))
    fleet = write_fleet(tmp_path / "slow.yaml", [{"id": "box", "device": DEVICE, "memory": "1GiB"}], slow)
    code, found = _place(fleet, tmp_path / "slow", "--objective", objective, capsys=capsys)
    assert code == 1 and "longer than its SLA" in found["reasons"]["a0"]


def test_boxes_have_time_for_what_is_asked_of_them_where_that_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = [query(f"a{number}", fps=8, input_size=224) for number in range(4)]
    one = write_workload(tmp_path / "one.yaml", *busy, query("dense", fps=100, input_size=224))
    boxes = [{"id": "box", "device": DEVICE, "memory": "1GiB", "count": 6}]
    fleet = write_fleet(tmp_path / "city.yaml", boxes, one)
    _, few = _place(fleet, tmp_path / "few", capsys=capsys)
    assert len(few["boxes"]) == 1 and few["boxes"][0]["frames_fraction"] < 0.9
    code, found = _place(fleet, tmp_path / "timed", "--min-frames", "0.95", capsys=capsys)
    assert code == 1 and found["unplaced"] == ["dense"] and "more time alone" in found["reasons"]["dense"]
    assert found["gap"] == 0 and all(box["frames_fraction"] >= 0.9 for box in found["boxes"]) and found["boxes"]


def test_the_text_says_what_a_number_hides(fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = write_workload(tmp_path / "one.yaml", *(query(f"a{number}", fps=60, input_size=224) for number in range(4)))
    boxes = [{"id": "box", "device": DEVICE, "memory": "64GiB", "count": 2}]
    fleet = write_fleet(tmp_path / "busy.yaml", boxes, many)
    assert main(["place", str(fleet), "-o", str(tmp_path / "out"), "--max-seconds", "5"]) == 0
    said = capsys.readouterr().out
    assert "4 of 4 queries on 1 of 2 boxes (sharing: predicted)" in said and "bound 1: the best there is" in said
    assert "box: Jetson Nano 4 GB has no more than 4.0 GiB" in said and "more than they have time for" in said


def test_a_placement_is_the_same_again(fleet: Path) -> None:
    one, other = (place_fleet(fleet, PlacementOptions(seed=3, seconds=20)).to_json() for _ in range(2))
    assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_what_a_box_lacks_is_what_moves(fleet: Path) -> None:
    needs = needs_of(load_fleet(fleet), "ceiling", timed=False)
    alone = np.bincount([0], minlength=len(needs.sorts))
    assert moved_bytes(needs, {"box-1": ["a0"]}, {}) == needs.weights(alone)
    twin = moved_bytes(needs, {"box-1": ["a0", "a1"]}, {"box-1": ["a0"]})
    assert twin == needs.sorts[0].private_bytes  # the rest is there
    assert moved_bytes(needs, {"box-1": ["a0"]}, {"box-1": ["a0", "a1"]}) == 0


def test_bad_words_are_one_line_and_nothing_is_written(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["place", str(fleet), "-o", str(out), "--from", str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder" in capsys.readouterr().err and not out.exists()
    (tmp_path / "empty").mkdir()
    assert main(["place", str(fleet), "-o", str(out), "--from", str(tmp_path / "empty")]) == 2
    said = capsys.readouterr().err
    assert "placement.json" in said and said.count("\n") == 1 and not out.exists()
    one = load_fleet(fleet).workloads[0].path
    clash = write_fleet(tmp_path / "c.yaml", [{"id": "one", "device": DEVICE, "memory": "1GiB"}], one)
    before = one.read_bytes()
    assert main(["place", str(clash), "-o", str(tmp_path)]) == 2  # one.yaml is the workload itself
    assert "is the workload" in capsys.readouterr().err and one.read_bytes() == before


@pytest.mark.parametrize(("boxes", "said"), [
    ([{"id": "box-1", "queries": ["a0"]}, {"id": "box-2", "queries": ["a0"]}], "the query 'a0' stands twice"),
    ([{"id": "box-1", "queries": ["a0"]}, {"id": "box-1", "queries": []}], "the box 'box-1' stands twice"),
    ([{"id": "box-1"}], "boxes[0].queries (box-1): this key is missing"), (None, "boxes"), (["box-1"], "boxes"),
])  # fmt: skip
def test_what_is_no_placement_is_refused(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], boxes: Any, said: str
) -> None:
    (tmp_path / "was").mkdir()
    (tmp_path / "was" / "placement.json").write_text(json.dumps({"boxes": boxes}))
    assert main(["place", str(fleet), "-o", str(tmp_path / "out"), "--from", str(tmp_path / "was")]) == 2
    told = capsys.readouterr().err
    assert said in told and "placement.json" in told and told.count("\n") == 1 and not (tmp_path / "out").exists()


def test_a_file_of_somebody_elses_is_not_overwritten(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "box-6.yaml").write_text("mine")
    assert main(["place", str(fleet), "-o", str(out)]) == 2
    assert "box-6.yaml: -o: exists already, and is of no earlier placement" in capsys.readouterr().err
    assert [path.read_text() for path in out.iterdir()] == ["mine"]
    assert main(["place", str(fleet), "-o", str(out / "box-6.yaml")]) == 2
    assert "is a file; name a folder" in capsys.readouterr().err


def test_a_workload_that_an_earlier_placement_wrote_is_neither_overwritten_nor_removed(
    fleet: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "placed"
    _place(fleet, out, capsys=capsys)
    one = out / "box-1.yaml"
    boxes = [{"id": "other", "device": DEVICE, "memory": "1GiB"}]
    again = write_fleet(out / "again.yaml", boxes, one)
    before = one.read_bytes()
    assert main(["place", str(again), "-o", str(out)]) == 2
    assert "is the workload" in capsys.readouterr().err and one.read_bytes() == before
    with pytest.raises(InputError, match="is the workload"):
        gemel.place(again, out)
    assert one.read_bytes() == before
