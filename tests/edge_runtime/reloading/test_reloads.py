"""A running box takes up what is right, whole, and nothing of what is wrong."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
import torch

from edge_runtime.daemon import run
from models.bundle import open_bundle
from tests.edge_runtime.reloading.running import Running, frames_of, wider, write
from tests.edge_runtime.reloading.wrong import CAMERAS, WRONG
from tests.edge_runtime.tiny import FACTORY, query, trained_looking, write_clip, write_config, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    models = {"gate": trained_looking(1), "yard": trained_looking(2)}
    write(tmp_path / "tiny.safetensors", models, query("gate", "left"), query("yard", "right"))
    write_config(tmp_path, cameras=CAMERAS)
    return tmp_path


def no_key_twice(records) -> bool:
    keys = Counter((record["run"], record["query"], record["frame"]) for record in records)
    return bool(keys) and max(keys.values()) == 1


def test_reload_switches_bundle_between_frames(folder):
    with Running(folder / "box.yaml") as box:
        first = box.more("gate")[0]["bundle"]
        models = {"gate": trained_looking(1), "yard": wider(3), "new": trained_looking(4)}
        queries = [query("gate", "left"), query("yard", "right", model_args={"width": 20}), query("new", "left")]
        write(folder / "tiny.safetensors", models, *queries)
        assert box.reload() is None
        second = box.serving.summary()["digest"][:12]
        assert second != first
        for name in ("gate", "yard", "new"):
            box.until(lambda name=name: [one for one in box.of(name) if one["bundle"] == second])
        moved = box.serving.summary()["bytes_moved"]
    records = box.records()
    assert [one["bundle"] for one in records] == sorted((one["bundle"] for one in records), key=[first, second].index)
    assert no_key_twice(records) and {one["run"] for one in records} == {box.summary["run"]}
    assert box.summary["balanced"] and box.summary["reloads"] == {"applied": 1, "refused": 0}
    assert not box.summary["fault"] and [row["query"] for row in box.summary["ledger"]] == ["gate", "yard", "new"]
    assert moved


def test_reload_changes_queries_cameras_and_sinks(folder):
    write_folder(folder / "third", 5)
    sinks = [{"kind": "jsonl", "path": "results.jsonl"}, {"kind": "jsonl", "path": "gone.jsonl"}]
    with Running(write_config(folder, cameras=CAMERAS, sinks=sinks)) as box:
        for name in ("gate", "yard"):
            box.more(name)
        left, _ = before = box.serving.summary()["cameras"]
        queries = [query("gate", "left"), query("yard", "third", classes=("x", "y", "z"))]
        write(folder / "other.safetensors", {"gate": trained_looking(1), "yard": trained_looking(2)}, *queries)
        cameras = {"left": CAMERAS["left"], "third": {"source": "third", "fps": 9, "loop": True}}
        write_config(folder, bundle="other.safetensors", cameras=cameras,
                     sinks=[sinks[0], {"kind": "jsonl", "path": "fresh.jsonl"}])  # fmt: skip
        assert box.reload() is None
        box.until(lambda: [one for one in box.records("fresh.jsonl") if one["camera"] == "third"])
        box.more("gate")
        after = box.serving.summary()["cameras"]
    assert [one["id"] for one in after] == ["left", "third"] and len(before) == 2
    assert after[0]["frames"] > left["frames"] and after[0]["reconnects"] == left["reconnects"], "it never left"
    records = box.records()
    assert no_key_twice(records) and box.summary["balanced"]
    moved = [record for record in records if record["query"] == "yard"]
    assert [one["camera"] for one in moved] == sorted(one["camera"] for one in moved), "first right, then third"
    assert {one["label"] for one in moved if one["camera"] == "third"} <= {"x", "y", "z"}
    gone, fresh = box.records("gone.jsonl"), box.records("fresh.jsonl")
    assert gone == records[: len(gone)] and fresh == records[len(gone) :], "each result once, to whoever was there"
    assert box.summary["sinks_gone"] == [
        {"name": f"jsonl {folder / 'gone.jsonl'}", "delivered": len(gone), "undelivered": {}}
    ]


def test_reload_returning_query_continues_its_ledger(folder):
    both = {"gate": trained_looking(1), "yard": trained_looking(2)}
    with Running(folder / "box.yaml") as box:
        box.more("yard")
        write(folder / "tiny.safetensors", {"gate": both["gate"]}, query("gate", "left"))
        assert box.reload() is None
        gone = {row["query"]: row for row in box.serving.summary()["ledger"]}["yard"]
        assert gone["pending"] == 0 and gone["received"] == gone["processed"] + sum(gone["dropped"].values())
        box.more("gate")
        assert {row["query"]: row for row in box.serving.summary()["ledger"]}["yard"] == gone
        write(folder / "tiny.safetensors", both, query("gate", "left"), query("yard", "left"))
        assert box.reload() is None
        box.more("yard")
    assert no_key_twice(box.records()) and box.summary["balanced"]
    ledger = {row["query"]: row for row in box.summary["ledger"]}
    assert ledger["yard"]["processed"] == len(box.of("yard")) and ledger["gate"]["processed"] == len(box.of("gate"))


def test_reload_keeps_common_tensors(folder):
    with Running(folder / "box.yaml") as box:
        box.more("gate")
        before = box.serving.summary()
        models = {"gate": trained_looking(1), "yard": trained_looking(2), "new": trained_looking(5)}
        queries = [query("gate", "left"), query("yard", "right"), query("new", "left")]
        bundle = open_bundle(write(folder / "tiny.safetensors", models, *queries), [FACTORY])
        assert box.reload() is None
        for name in ("new", "gate", "yard"):
            box.more(name)
        names = [set(bundle.names_in_order(name)) for name in ("gate", "yard", "new")]
        fresh = sum(map(bundle.nbytes, names[2] - names[1] - names[0]))
        assert box.serving.summary()["bytes_moved"] - before["bytes_moved"] == fresh


def test_reload_results_match_their_bundle(folder):
    """Between two architectures of one query, back and forth, with memory for one query at a time."""
    bundles = []
    for number, model in enumerate((trained_looking(1), wider(9))):
        keys = {"model_args": {"width": 20}} if number else {}
        path = write(folder / f"{number}.safetensors", {"gate": model}, query("gate", "left", **keys))
        bundles.append(open_bundle(path, [FACTORY]))
    config = {"cameras": CAMERAS, "sinks": [{"kind": "jsonl", "path": "results.jsonl"}]}
    with Running(write_config(folder, bundle="0.safetensors", **config)) as box:
        for turn in range(1, 7):
            write_config(folder, bundle=f"{turn % 2}.safetensors", **config)
            assert box.reload() is None
            box.more("gate", 1)
    frames = frames_of(folder / "left.mp4")
    digests = [bundle.digest[:12] for bundle in bundles]
    seen = set()
    for record in box.records():
        which = digests.index(record["bundle"])
        seen.add(which)
        asked = bundles[which].query("gate")
        batch = asked.preprocess.normalise(torch.stack([asked.preprocess.resize(frames[record["frame"] % 12])]))
        with torch.inference_mode():
            scores = bundles[which].build("gate")(batch).softmax(1)[0]
        assert record["score"] == pytest.approx(float(scores.max()), rel=1e-4)
        assert record["label"] == asked.classes[int(scores.argmax())]
    assert seen == {0, 1} and box.summary["reloads"]["applied"] == 6 and box.summary["balanced"]
    assert no_key_twice(box.records())


def test_reload_with_problem_is_refused_in_one_line(folder, caplog):
    good = (folder / "box.yaml").read_text()
    with Running(folder / "box.yaml") as box:
        box.more("gate")
        for number, (name, (spoil, said)) in enumerate(WRONG.items(), 1):
            caplog.clear()
            spoil(folder)
            reason = box.reload()
            assert reason is not None and said in reason and "\n" not in reason, (name, reason)
            told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
            assert told == [f"not reloaded, the box serves on unchanged: {reason}"], name
            summary = box.serving.summary()
            assert summary["reloads"] == {"applied": 0, "refused": number} and summary["refused"] == reason
        bundle = box.of("gate")[0]["bundle"]
        assert {record["bundle"] for record in box.more("gate") + box.more("yard")} == {bundle}
        (folder / "box.yaml").write_text(good)
        assert box.reload() is None and box.serving.summary()["refused"] is None
        box.more("gate")
    assert box.summary["balanced"] and no_key_twice(box.records()) and not box.summary["fault"]


def test_reload_resizes_the_arena(folder):
    least = run(folder / "box.yaml", check=True)["least_budget_bytes"]
    with Running(write_config(folder, cameras=CAMERAS, budget=least)) as box:
        for budget in ("64MiB", least, "32MiB", least):
            for name in ("gate", "yard"):
                box.more(name)
            write_config(folder, cameras=CAMERAS, budget=budget)
            before = box.serving.summary()
            assert box.reload() is None
            after = box.serving.summary()
            assert after["budget_bytes"] != before["budget_bytes"]
        for name in ("gate", "yard"):
            box.more(name)
    assert box.summary["balanced"] and not box.summary["fault"] and no_key_twice(box.records())
    assert all(row["failed"] == 0 for row in box.summary["ledger"])


def test_reload_without_changes_does_nothing(folder, caplog):
    caplog.set_level("INFO", "gemel.run")
    with Running(folder / "box.yaml") as box:
        box.more("gate")
        work = box.serving._runtime.active
        assert box.reload() is None and box.serving._runtime.active is work
        assert "nothing has changed" in caplog.text
        os.utime(folder / "tiny.safetensors")
        assert box.reload() is None and box.serving._runtime.active is not work


def test_reload_during_stop_is_answered(folder):
    with Running(folder / "box.yaml") as box:
        box.more("gate")
    assert box.reload() == "the box stops"
