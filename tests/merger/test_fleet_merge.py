"""`gemel merge FLEET`: equal queries are merged once, a fleet is resumed, faults of one box keep none of the others."""

from __future__ import annotations

import json
import pickle
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from gemel.cli import main
from gemel.fleet_merge import FleetMerge, group_alike, is_fleet, load_merge_fleet, merge_fleet, run_tasks
from gemel.merger import Resources
from gemel.merger.looks import LookFile
from gemel.merger.prices import Spending
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.errors import InputError
from gemel.models.stages import silent
from gemel.models.workload import Workload
from tests.merger.options import QUICK

Document = dict[str, Any]


def write_fleet(workload: Workload, *documents: Document) -> Path:
    """A fleet file of these workloads, written beside the tiny one."""
    folder = workload.path.parent
    for document in documents:
        (folder / f"{document['name']}.yaml").write_text(yaml.safe_dump(document))
    path = folder / "fleet.yaml"
    names = [f"{document['name']}.yaml" for document in documents]
    path.write_text(yaml.safe_dump({"name": "sites", "workloads": names}))
    return path


def site(workload: Workload, name: str, queries: int = 3, **keys: Any) -> Document:
    """The tiny workload with another name, and with these keys of its queries."""
    document = yaml.safe_load(workload.path.read_text())
    return {**document, "name": name, "queries": [{**query, **keys} for query in document["queries"][:queries]]}


def merge_sites(path: Path, out: Path, resume: bool = False, method: str = "top-down", **keys: Any) -> FleetMerge:
    return merge_fleet(path, out, method, resume, 0, silent, replace(QUICK, **keys))


def alike_and_others(workload: Workload) -> Path:
    """Twenty sites, eight of which ask the same."""
    alike = [site(workload, f"alike{number}") for number in range(8)]
    others = [site(workload, f"other{number}", 2, sla_ms=100 + number) for number in range(12)]
    return write_fleet(workload, *others[:6], *alike, *others[6:])


def test_group_alike_merges_each_alike_once(workload: Workload) -> None:
    _, workloads = load_merge_fleet(alike_and_others(workload))
    groups = group_alike(workloads)
    assert sorted(map(len, groups)) == [1] * 12 + [8]
    assert {one.name for group in groups if len(group) > 1 for one in group} == {f"alike{n}" for n in range(8)}


def test_group_alike_tells_apart_other_data_targets_and_weights(workload: Workload) -> None:
    one, two = site(workload, "one"), site(workload, "two")
    two["queries"][1]["weights"] = "weights/q2.safetensors"
    fleet = write_fleet(workload, one, two, site(workload, "three", data="data/q0"), site(workload, "four", sla_ms=7))
    assert [len(group) for group in group_alike(load_merge_fleet(fleet)[1])] == [1, 1, 1, 1]


@pytest.mark.exhaustive
def test_merge_fleet_of_twenty_merges_thirteen(workload: Workload, tmp_path: Path) -> None:
    found = merge_sites(alike_and_others(workload), tmp_path / "out", method="none").to_json()
    assert found["merges"] == 13 and len(found["boxes"]) == 20
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 20


def test_merge_fleet_writes_a_bundle_for_each_and_is_resumed(
    workload: Workload, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("currency: eur\nkinds: {here: {price: 360}}\n")
    fleet = write_fleet(workload, *(site(workload, name) for name in ("north", "south")), site(workload, "gate", 2))
    out, spending = tmp_path / "out", Spending.parse(prices)
    assert is_fleet(fleet) and not is_fleet(workload.path)
    found = merge_sites(fleet, out, spending=spending)
    rows = {row["id"]: row for row in found.to_json()["boxes"]}
    assert list(rows) == ["north", "south", "gate"] and found.to_json()["merges"] == 2
    assert [row["merged_as"] for row in rows.values()] == ["north", "north", "gate"]
    bundles = {name: open_bundle(out / f"{name}.safetensors") for name in rows}
    assert {name: bundle.manifest.workload for name, bundle in bundles.items()} == {name: name for name in rows}
    assert all(verify_bundle(bundle.path) == [] for bundle in bundles.values())
    assert bundles["north"].queries == bundles["south"].queries != bundles["gate"].queries
    folder = workload.path.parent
    models = [[look.model for look in LookFile(folder / f"{name}.yaml").looks] for name in ("north", "south")]
    assert models[0] == models[1] != []
    money = sum(rows[name]["cost"]["money"] for name in ("north", "gate"))
    assert found.to_json()["money"] == pytest.approx(money)
    text = found.to_text()
    assert f"FLOPs, {money:.3f} eur" in text and len(re.findall(r"^(?:north|south) +north .* met$", text, re.M)) == 2
    with pytest.raises(InputError, match=r"north\.safetensors: exists already"):
        merge_sites(fleet, out)
    (out / "south.safetensors").unlink()
    (out / "gate.merge.json").unlink()
    (out / "gate.safetensors").unlink()
    before = (out / "north.safetensors").stat().st_mtime_ns
    again = merge_sites(fleet, out, resume=True, spending=spending).to_json()
    assert (out / "north.safetensors").stat().st_mtime_ns == before and (out / "south.safetensors").is_file()
    assert again["boxes"][0] == rows["north"] and again["boxes"][2]["bytes_after"] == rows["gate"]["bytes_after"]
    with pytest.raises(InputError, match=r"north\.merge\.json: belongs to another merge"):
        merge_sites(fleet, out, resume=True, method="none")
    assert main(["merge", str(fleet), "-o", str(out), "--method", "none"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_merge_fleet_with_a_box_that_fails_merges_the_others(workload: Workload, tmp_path: Path) -> None:
    fleet = write_fleet(workload, site(workload, "bad", data="data/gone"), site(workload, "good", 2))
    found = merge_sites(fleet, tmp_path / "out", method="none")
    bad, good = found.to_json()["boxes"]
    assert "data/gone" in bad["error"] and "error" not in good and not found.met
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["good.safetensors"]
    assert "data/gone" in found.to_text() and "2 boxes, 2 merges" in found.to_text()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.yaml", "b.yaml", "a.yaml"], r"workloads\[2\]: 'a\.yaml' is named twice; name each workload once"),
        (["a.yaml", "./a.yaml"], r"workloads\[1\]: '\./a\.yaml' is named twice"),
        (["a.yaml", "gone.yaml"], r"workloads\[1\]: there is no file 'gone\.yaml'; correct its path"),
        (["a.yaml", "same.yaml"], r"workloads\[1\]: 'same\.yaml' is called 'a', as a\.yaml is"),
        ([], r"workloads: is empty"),
    ],
)
def test_fleet_file_that_is_wrong_is_refused_in_one_line(
    workload: Workload, tmp_path: Path, names: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = write_fleet(workload, site(workload, "a"), site(workload, "b"))
    (fleet.parent / "same.yaml").write_text((fleet.parent / "a.yaml").read_text())
    fleet.write_text(yaml.safe_dump({"name": "sites", "workloads": names}))
    with pytest.raises(InputError, match=message):
        merge_sites(fleet, tmp_path / "out")
    assert main(["merge", str(fleet), "-o", str(tmp_path / "out")]) == 2
    assert str(fleet) in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_run_tasks_without_a_cluster_is_one_line() -> None:
    pytest.importorskip("ray")
    with pytest.raises(InputError, match=r"--ray: no cluster at '127\.0\.0\.1:1'"):
        list(run_tasks("127.0.0.1:1", []))


class LostNode(Exception):
    """What stands for ray.exceptions.RayError."""


def fake_ray(lost: int) -> ModuleType:
    """Ray's few functions in this process: tasks travel pickled and end in reverse order; one loses its node."""
    ray, tasks = ModuleType("ray"), list[bytes]()
    exceptions = ModuleType("ray.exceptions")
    vars(exceptions).update(RayError=LostNode)

    def start(call: Any) -> int:
        tasks.append(pickle.dumps(call))
        return len(tasks) - 1

    def finish(index: int) -> Any:
        if index == lost:
            raise LostNode("the node died")
        return pickle.loads(tasks[index])()

    vars(ray).update(
        exceptions=exceptions, init=lambda *_, **__: None, shutdown=lambda: None, cluster_resources=dict, get=finish,
        remote=lambda **_: lambda function: SimpleNamespace(remote=start),
        wait=lambda running: ([max(running)], running[:-1]),
    )  # fmt: skip
    return ray


def test_merge_fleet_as_tasks_gives_what_one_process_gives(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("north", "south", "gate", "far")
    sites = [site(workload, name, 3 - (name in ("gate", "far")), sla_ms=90 + (name == "far")) for name in names]
    fleet, ray = write_fleet(workload, *sites), fake_ray(lost=2)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", vars(ray)["exceptions"])
    here = merge_sites(fleet, tmp_path / "here", method="none")
    there = merge_sites(fleet, tmp_path / "there", method="none", resources=Resources(1, "local"))
    assert [report.get("error") for report in there.reports] == [None, None, "LostNode: the node died"]
    for name in ("north", "south", "gate"):
        bundles = [(tmp_path / folder / f"{name}.safetensors").read_bytes() for folder in ("here", "there")]
        assert bundles[0] == bundles[1]
    again = merge_sites(fleet, tmp_path / "there", method="none", resume=True)
    assert [one["bytes_after"] for one in again.reports] == [one["bytes_after"] for one in here.reports]


@pytest.mark.exhaustive
def test_merge_fleet_on_ray_gives_what_one_process_gives(workload: Workload, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    fleet = write_fleet(workload, site(workload, "north"), site(workload, "south"), site(workload, "gate", 2))
    here = merge_sites(fleet, tmp_path / "here", method="none")
    there = merge_sites(fleet, tmp_path / "there", method="none", resources=Resources(1, "local"))
    assert there.to_json()["merges"] == 2
    for name in ("north", "south", "gate"):
        bundles = [(tmp_path / folder / f"{name}.safetensors").read_bytes() for folder in ("here", "there")]
        assert bundles[0] == bundles[1]
    assert [one["bytes_after"] for one in here.reports] == [one["bytes_after"] for one in there.reports]
    assert json.loads((tmp_path / "there" / "north.merge.json").read_text())["report"] == there.reports[0]
