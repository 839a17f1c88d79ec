"""A running box takes over what is right, whole, and nothing of what is wrong; the canary tries new weights first."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from torch import nn

from gemel.edge_runtime.frames.samples import DRIFT_FILE
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.life.reload import canary_queries
from gemel.models.bundle import open_bundle, verify_bundle
from gemel.models.measures.agreement import BELOW, MIN_COMPARED
from tests.edge_runtime.bad_configs import BAD_CONFIGS
from tests.edge_runtime.local_box import LocalBox, frames_of, replace_bundle, wider
from tests.edge_runtime.tiny import FACTORY, LOOPED, query, trained_looking, write_clip, write_config, write_folder

BUNDLE = "tiny.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    write_bundle(tmp_path, "gate", "yard")
    write_config(tmp_path, cameras=LOOPED)
    return tmp_path


def write_bundle(
    folder: Path, *names: str, name: str = BUNDLE, yard: str = "right", documents: bool = False, **keys
) -> Path:
    """A bundle of these queries: the camera of `yard` is given, that of the others is left."""
    models = {one: trained_looking(seed) for seed, one in enumerate(("gate", "yard", "new"), 1) if one in names}
    queries = [query(one, yard if one == "yard" else "left", **(keys if one == "yard" else {})) for one in models]
    return replace_bundle(folder / name, models, *queries, documents=documents)


def is_unique(records: Collection[dict]) -> bool:
    """Whether no (run, query, frame) comes twice."""
    keys = Counter((record["run"], record["query"], record["frame"]) for record in records)
    return bool(keys) and max(keys.values()) == 1


def ledger_rows(summary: dict) -> dict[str, dict]:
    return {row["query"]: row for row in summary["ledger"]}


def test_reload_switches_bundle_between_frames(folder):
    with LocalBox(folder / "box.yaml") as box:
        first = box.more("gate")[0]["bundle"]
        models = {"gate": trained_looking(1), "yard": wider(3), "new": trained_looking(4)}
        queries = [query("gate", "left"), query("yard", "right", model_args={"width": 20}), query("new", "left")]
        replace_bundle(folder / BUNDLE, models, *queries)
        assert box.reload() is None
        second = box.service.summary()["digest"][:12]
        for name in models:
            box.until(lambda name=name: [one for one in box.records(name) if one["bundle"] == second])
        assert box.service.summary()["bytes_moved"]
    records = box.records()
    assert [one["bundle"] for one in records] == sorted((one["bundle"] for one in records), key=[first, second].index)
    assert is_unique(records) and {one["run"] for one in records} == {box.summary["run"]}
    assert box.summary["balanced"] and box.summary["reloads"] == {"applied": 1, "partly": 0, "refused": 0}
    assert not box.summary["fault"] and list(ledger_rows(box.summary)) == ["gate", "yard", "new"]


def test_reload_changes_queries_cameras_and_sinks(folder):
    write_folder(folder / "third", 5)
    sinks = [{"kind": "jsonl", "path": "results.jsonl"}, {"kind": "jsonl", "path": "gone.jsonl"}]
    with LocalBox(write_config(folder, cameras=LOOPED, sinks=sinks)) as box:
        box.more("gate", "yard")
        left = box.service.summary()["cameras"][0]
        write_bundle(folder, "gate", "yard", name="other.safetensors", yard="third", classes=("x", "y", "z"))
        cameras = {"left": LOOPED["left"], "third": {"source": "third", "fps": 9, "loop": True}}
        sinks[1] = {"kind": "jsonl", "path": "fresh.jsonl"}
        write_config(folder, bundle="other.safetensors", cameras=cameras, sinks=sinks)
        assert box.reload() is None
        box.until(lambda: [one for one in box.records(name="fresh.jsonl") if one["camera"] == "third"])
        box.more("gate")
        after = box.service.summary()["cameras"]
    assert [one["id"] for one in after] == ["left", "third"]
    assert after[0]["frames"] > left["frames"] and after[0]["reconnects"] == left["reconnects"], "it stays connected"
    records, moved = box.records(), box.records("yard")
    assert is_unique(records) and box.summary["balanced"]
    assert [one["camera"] for one in moved] == sorted(one["camera"] for one in moved), "first right, then third"
    assert {one["label"] for one in moved if one["camera"] == "third"} <= {"x", "y", "z"}
    gone, fresh = box.records(name="gone.jsonl"), box.records(name="fresh.jsonl")
    assert gone == records[: len(gone)] and fresh == records[len(gone) :], "each result goes to the sinks of its time"
    assert box.summary["sinks_gone"] == [
        {"name": f"jsonl {folder / 'gone.jsonl'}", "delivered": len(gone), "undelivered": {}}
    ]


def test_reload_returning_query_continues_its_ledger(folder):
    with LocalBox(folder / "box.yaml") as box:
        box.more("yard")
        write_bundle(folder, "gate")
        assert box.reload() is None
        gone = ledger_rows(box.service.summary())["yard"]
        assert gone["pending"] == 0 and gone["received"] == gone["processed"] + sum(gone["dropped"].values())
        box.more("gate")
        assert ledger_rows(box.service.summary())["yard"] == gone
        write_bundle(folder, "gate", "yard", yard="left")
        assert box.reload() is None
        box.more("yard")
    assert is_unique(box.records()) and box.summary["balanced"]
    for name, row in ledger_rows(box.summary).items():
        assert row["processed"] == len(box.records(name))


def test_reload_keeps_common_tensors(folder):
    with LocalBox(folder / "box.yaml") as box:
        box.more("gate")
        before = box.service.summary()["bytes_moved"]
        bundle = open_bundle(write_bundle(folder, "gate", "yard", "new"), [FACTORY])
        assert box.reload() is None
        box.more("new", "gate", "yard")
        names = [set(bundle.names_in_order(name)) for name in ("gate", "yard", "new")]
        fresh = sum(map(bundle.nbytes, names[2] - names[1] - names[0]))
        assert box.service.summary()["bytes_moved"] - before == fresh


def test_reload_results_match_their_bundle(folder):
    """Between two architectures of one query, back and forth."""
    bundles = []
    for number, model in enumerate((trained_looking(1), wider(9))):
        keys = {"model_args": {"width": 20}} if number else {}
        path = replace_bundle(folder / f"{number}.safetensors", {"gate": model}, query("gate", "left", **keys))
        bundles.append(open_bundle(path, [FACTORY]))
    with LocalBox(write_config(folder, cameras=LOOPED, bundle="0.safetensors")) as box:
        for turn in range(1, 7):
            write_config(folder, cameras=LOOPED, bundle=f"{turn % 2}.safetensors")
            assert box.reload() is None
            box.more("gate", count=1)
    frames, used = frames_of(folder / "left.mp4"), set()
    for record in box.records():
        bundle = next(one for one in bundles if one.digest[:12] == record["bundle"])
        used.add(bundle)
        asked = bundle.query("gate")
        batch = torch.from_numpy(asked.preprocess(frames[record["frame"] % 12]))
        with torch.inference_mode():
            scores = bundle.build("gate")(batch).softmax(1)[0]
        assert record["score"] == pytest.approx(float(scores.max()), rel=1e-4)
        assert record["label"] == asked.classes[int(scores.argmax())]
    assert used == set(bundles) and box.summary["reloads"]["applied"] == 6
    assert is_unique(box.records()) and box.summary["balanced"]


def test_reload_with_problem_is_refused_in_one_line(folder, caplog):
    good = (folder / "box.yaml").read_text()
    with LocalBox(folder / "box.yaml") as box:
        box.more("gate")
        for number, (name, (spoil, text)) in enumerate(BAD_CONFIGS.items(), 1):
            caplog.clear()
            spoil(folder)
            reason = box.reload()
            assert reason is not None and text in reason and "\n" not in reason, (name, reason)
            lines = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert lines == [f"not reloaded, the box serves on unchanged: {reason}"], name
            summary = box.service.summary()
            assert summary["reloads"] == {"applied": 0, "partly": 0, "refused": number} and summary["refused"] == reason
        assert len({record["bundle"] for record in box.records() + box.more("gate", "yard")}) == 1
        (folder / "box.yaml").write_text(good)
        assert box.reload() is None and box.service.summary()["refused"] is None
        box.more("gate")
    assert box.summary["balanced"] and is_unique(box.records()) and not box.summary["fault"]


def test_reload_resizes_the_arena(folder):
    least = run(folder / "box.yaml", check=True)["least_budget_bytes"]
    with LocalBox(write_config(folder, cameras=LOOPED, budget=least)) as box:
        for budget in ("64MiB", least, "32MiB", least):
            box.more("gate", "yard")
            write_config(folder, cameras=LOOPED, budget=budget)
            before = box.service.summary()["budget_bytes"]
            assert box.reload() is None and box.service.summary()["budget_bytes"] != before
        box.more("gate", "yard")
    assert box.summary["balanced"] and not box.summary["fault"] and is_unique(box.records())
    assert all(row["failed"] == 0 for row in box.summary["ledger"])


def test_reload_serves_mapped_weights_of_another_bundle(folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    write_bundle(folder, "gate", "yard", documents=True)
    cameras = {"left": LOOPED["left"], "right": LOOPED["right"]}
    with LocalBox(write_config(folder, cameras=cameras, engine="auto")) as box:
        box.more("gate", "yard")
        before = box.service._runtime.active.box.store
        write_bundle(folder, "gate", "new", documents=True)
        assert box.reload() is None
        assert box.service.summary()["engines"] == {"gate": "onnx", "new": "onnx"}
        box.more("gate", "new")
        after = box.service._runtime.active.box.store
        assert after.weights is not before.weights
        assert before.weights.resident_bytes(before.extents.values()) == 0
        assert after.weights.resident_bytes(after.extents.values()) > 0
        write_bundle(folder, "gate")
        assert "another kind of engine" in str(box.reload()), "it has no networks"
        box.more("new")
    assert is_unique(box.records()) and box.summary["balanced"] and not box.summary["fault"]


def test_reload_without_changes_does_nothing(folder, caplog):
    caplog.set_level("INFO", "gemel.run")
    with LocalBox(folder / "box.yaml") as box:
        box.more("gate")
        active = box.service._runtime.active
        assert box.reload() is None and box.service._runtime.active is active
        assert "nothing has changed" in caplog.text
        os.utime(folder / BUNDLE)
        assert box.reload() is None and box.service._runtime.active is not active
    assert box.reload() == "the box stops"


def test_hangup_reopens_files_and_reloads(folder):
    with LocalBox(folder / "box.yaml") as box:
        box.more("gate")
        os.replace(folder / "results.jsonl", folder / "rotated.jsonl")
        box.signals.reopening.set()
        box.until(lambda: box.service.summary()["reloads"]["applied"])
        box.until(lambda: box.records("gate"))
    assert is_unique(box.records(name="rotated.jsonl") + box.records()) and box.summary["balanced"]


def test_bundle_changed_in_place_is_reported(folder):
    with LocalBox(folder / "box.yaml") as box:
        box.more("gate")
        data = (folder / BUNDLE).read_bytes()
        (folder / BUNDLE).write_bytes(data)
        assert "was changed in place" in box.service.summary()["bundle_fault"]
        box.more("gate", "yard")
        write_bundle(folder, "gate", "yard", "new")
        assert box.reload() is None and box.service.summary()["bundle_fault"] is None
        box.more("new")


ON_LEFT = (query("gate", "left"), query("yard", "left"))
ENOUGH = MIN_COMPARED + 5


def negate_head(model: nn.Sequential) -> nn.Sequential:
    """A model that never answers as this one does."""
    with torch.no_grad():
        model[-1].weight.neg_()  # type: ignore[operator,union-attr]
        model[-1].bias.neg_()  # type: ignore[operator,union-attr]
    return model


def scale_slightly(model: nn.Sequential) -> nn.Sequential:
    """A model with other weights that answers as this one does."""
    with torch.no_grad():
        model[0].weight.mul_(1.0001)  # type: ignore[operator,union-attr]
    return model


def write_spooling(folder: Path, **keys) -> Path:
    write_bundle(folder, "gate", "yard", yard="left")
    return write_config(folder, **{"cameras": LOOPED, "spool": {"path": "spool", "every_s": 0.01}, **keys})


def reload_changed(box: LocalBox, folder: Path, samples: int = ENOUGH) -> dict[str, str]:
    """What is held back of a bundle in which only `gate` answers otherwise, after so many samples of each query."""
    box.until(lambda: all(len(list(folder.glob(f"spool/samples/*-{one.id}-*.png"))) >= samples for one in ON_LEFT))
    fresh = {"gate": negate_head(trained_looking(1)), "yard": scale_slightly(trained_looking(2))}
    replace_bundle(folder / BUNDLE, fresh, *ON_LEFT)
    assert box.reload() is None
    box.more("gate", "yard")
    return box.service.summary()["held_back"]


def test_canary_holds_back_a_changed_query(folder):
    config = write_spooling(folder)
    old = open_bundle(folder / BUNDLE, [FACTORY])
    with LocalBox(config) as box:
        held_back = reload_changed(box, folder)
        first = Path(box.service.summary()["bundle"])
        new, mixed = open_bundle(folder / BUNDLE, [FACTORY]), open_bundle(first, [FACTORY])
        digits = mixed.digest[:12]
        assert box.records()[-1]["bundle"] == digits
        box.until(lambda: sum(one["bundle"] == digits for one in box.records("gate")) > 2 * ENOUGH)
        assert box.reload() is None and list(box.service.summary()["held_back"]) == ["gate"]
        assert Path(box.service.summary()["bundle"]) != first, "the bundle that serves is not overwritten"
    assert list(held_back) == ["gate"] and "by 0.00, its target is 0.95" in held_back["gate"]
    assert first.parent == folder / "spool" / "samples" and verify_bundle(first, [FACTORY]) == []
    assert mixed.query("gate").tensors == old.query("gate").tensors
    assert mixed.query("yard").tensors == new.query("yard").tensors != old.query("yard").tensors
    assert box.summary["balanced"] and box.summary["reloads"] == {"applied": 0, "partly": 2, "refused": 0}
    with LocalBox(config) as again:
        assert list(again.service.summary()["held_back"]) == ["gate"], "a restart serves no weights that were held back"
        again.more("gate")
        assert again.reload() is None, "too few samples since the restart say nothing"
        assert list(again.service.summary()["held_back"]) == ["gate"]
    replace_bundle(folder / BUNDLE, {"gate": trained_looking(1), "yard": trained_looking(2)}, *ON_LEFT)
    with LocalBox(config) as other:
        assert other.service.summary()["held_back"] == {}, "another bundle begins anew"


@pytest.mark.parametrize(("keys", "samples"), [({"canary": False}, ENOUGH), ({"spool": {"path": "spool"}}, 1)], ids=str)
def test_canary_without_samples_or_off_holds_nothing_back(folder, keys, samples):
    with LocalBox(write_spooling(folder, **keys)) as box:
        assert reload_changed(box, folder, samples) == {}
        assert Path(box.service.summary()["bundle"]) == folder / BUNDLE


def test_canary_skips_drifted_queries(folder):
    row = {"frames": 50, "ratio": 0.5, "target": 0.95, "verdict": BELOW, "reverted": True}
    config = write_spooling(folder)
    digits = open_bundle(folder / BUNDLE).digest[:12]
    with LocalBox(config) as box:
        report = {"format": 1, "checked_at": 1.7e9, "bundle": digits, "queries": [{"id": "gate", **row}]}
        (folder / "spool" / DRIFT_FILE).write_text(json.dumps(report))
        assert reload_changed(box, folder) == {}


@pytest.mark.parametrize(("changes", "is_tried"), [
    ({}, True), ({"camera": "right"}, False), ({"classes": ("x", "y", "z")}, False), ({"roi": (0, 0, 9, 9)}, False),
    ({"sla_ms": 5.0}, True),
], ids=str)  # fmt: skip
def test_canary_skips_queries_with_another_question(tmp_path, changes, is_tried):
    replace_bundle(tmp_path / "old", {"gate": trained_looking(1)}, query("gate", "left"))
    models = {"gate": trained_looking(2), "new": trained_looking(3)}
    replace_bundle(tmp_path / "new", models, query("gate", **{"camera": "left", **changes}), query("new", "left"))
    old, new = (open_bundle(tmp_path / name, [FACTORY]) for name in ("old", "new"))
    assert [one.id for one in canary_queries(old, new, set())] == (["gate"] if is_tried else [])
    assert canary_queries(old, new, {"gate"}) == [] and canary_queries(old, old, set()) == []
