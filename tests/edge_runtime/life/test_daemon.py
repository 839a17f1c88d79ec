"""The box as a whole: with memory for one query at a time it answers as the unswapped models do."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.frames import results
from gemel.edge_runtime.frames.samples import read_sample
from gemel.edge_runtime.life.config import load_config
from gemel.edge_runtime.life.daemon import find_late_path, find_open_access, run
from gemel.edge_runtime.life.executor import WARM_UP_RUNS
from gemel.models import zoo
from gemel.models.bundle import Bundle, open_bundle
from gemel.models.bundle.signing import sign_bundle
from gemel.models.errors import BundleError, InputError, exact_text
from gemel.models.files.io import locked_folder
from gemel.models.files.pictures import read_picture
from gemel.models.predictions import ClassPrediction
from gemel.models.tasks import task_of
from tests.edge_runtime.capture.faulty_cameras import HttpCamera, RtspCamera
from tests.edge_runtime.local_box import frames_of, replace_bundle
from tests.edge_runtime.sinks.messages import until
from tests.edge_runtime.tiny import (
    FACTORY,
    LOOPED,
    query,
    tiny_bundle,
    trained_looking,
    write_box,
    write_clip,
    write_config,
)

RECORD = {"run", "query", "camera", "frame", "captured_at", "finished_at", "age_ms", "late", "bundle", "label", "score"}
ONE_CAMERA = {"left": {"source": "left.mp4"}}


@pytest.fixture(scope="module")
def box(tmp_path_factory) -> Path:
    return write_box(tmp_path_factory.mktemp("box"))


def write_beside(folder: Path, box: Path, **keys) -> Path:
    """A config in another folder with the cameras of the box."""
    cameras = {"left": {"source": str(box / "left.mp4")}, "right": {"source": str(box / "right")}}
    return write_config(folder, cameras=cameras, **keys)


def file_sink(name: str) -> list[dict]:
    return [{"kind": "jsonl", "path": name}]


def read_results(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def least_budget(box: Path) -> int:
    return run(write_config(box), check=True)["least_budget_bytes"]


def predict(bundle: Bundle, query_id: str, frame: np.ndarray) -> ClassPrediction:
    """The prediction of the plain model for a frame."""
    asked = bundle.query(query_id)
    if asked.roi is not None:
        x0, y0, x1, y1 = map(int, asked.roi)
        frame = frame[y0:y1, x0:x1]
    with torch.inference_mode():
        outputs = bundle.build(query_id)(torch.from_numpy(asked.preprocess(frame)))
    prediction = task_of("classification").predictions(None, outputs.numpy(), [(1, 1)], asked.classes)[0]
    assert isinstance(prediction, ClassPrediction)
    return prediction


def test_box_swapping_answers_like_the_plain_models(box, caplog):
    caplog.set_level(logging.INFO, "gemel.run")
    budget = least_budget(box)
    summary = run(write_config(box, budget=budget, spool="spool", sinks=file_sink("one.jsonl")))
    bundle, records = open_bundle(box / "tiny.safetensors", [FACTORY]), read_results(box / "one.jsonl")
    pictures = [read_picture(path) for path in sorted((box / "right").iterdir())]
    sources = {"left": frames_of(box / "left.mp4"), "right": pictures}
    for record in records:
        assert set(record) == RECORD and record["bundle"] == bundle.digest[:12]
        assert record["age_ms"] == pytest.approx(1000 * (record["finished_at"] - record["captured_at"]), abs=0.01)
        frame = sources[bundle.query(record["query"]).camera][record["frame"]]
        expected = predict(bundle, record["query"], frame)
        assert record["label"] == expected.label and record["score"] == pytest.approx(expected.score, abs=1e-4)
    assert summary["balanced"] and summary["stopped_by"] == "cameras ended" and not summary["fits"]
    assert summary["max_used_bytes"] <= budget < summary["weights_bytes"] + summary["workspace_bytes"]
    assert summary["swaps"] >= 3 and summary["bytes_moved"] > 0 and summary["warm_up"]["bytes_moved"] > 0
    received = {"gate": 12, "yard": 10, "road": 6}
    for row in summary["ledger"]:
        assert row["received"] == received[row["query"]] and row["processed"] >= 1
        assert row["processed"] == sum(record["query"] == row["query"] for record in records)
        assert row["failed"] == row["pending"] == 0
    assert json.loads((box / "spool" / "ledger.json").read_text()) == json.loads(json.dumps(summary))
    assert '"balanced": true' in caplog.text


def test_box_samples_match_inputs_and_answers(box):
    summary = run(write_config(box, spool={"path": "fresh", "every_s": 0.01}, sinks=file_sink("s")))
    records = {(row["query"], row["frame"]): row for row in read_results(box / "s")}
    samples = [read_sample(path) for path in sorted((box / "fresh" / "samples").iterdir())]
    assert summary["spool"]["samples"] == len(samples)
    assert {one.head.query for one in samples} == {"gate", "yard", "road"}
    bundle = open_bundle(box / "tiny.safetensors", [FACTORY])
    for sample in samples:
        head, asked = sample.head, bundle.query(sample.head.query)
        record = records[head.query, head.frame]
        assert (head.label, head.score, head.bundle) == (record["label"], record["score"], record["bundle"])
        with torch.inference_mode():
            scores = bundle.build(asked.id)(torch.from_numpy(asked.preprocess(sample.picture))).softmax(1)[0]
        assert (asked.classes[int(scores.argmax())], pytest.approx(float(scores.max()), abs=1e-4)) == (
            head.label,
            head.score,
        )


def test_box_resizes_in_the_thread_that_runs(box, monkeypatch):
    seen, plain, before = set(), TorchEngine.run, cv2.getNumThreads()
    monkeypatch.setattr(TorchEngine, "run", lambda *given: seen.add(cv2.getNumThreads()) or plain(*given))
    cv2.setNumThreads(2)
    try:
        run(write_config(box))
        assert seen == {1} and cv2.getNumThreads() == 2
    finally:
        cv2.setNumThreads(before)


def test_box_with_failing_spool_serves(box):
    (box / "blocked").mkdir()
    (box / "blocked" / "samples").write_text("in the way")
    summary = run(write_config(box, spool={"path": "blocked", "every_s": 0.01}, sinks=file_sink("all")))
    assert summary["spool"]["samples"] == 0 and summary["spool"]["unsampled"].keys() == {"unwritable"}
    assert summary["stopped_by"] == "cameras ended" and summary["balanced"] and summary["unwritten"] == []
    processed = sum(row["processed"] for row in summary["ledger"])
    assert len(read_results(box / "all")) == processed > 0 and not sum(row["failed"] for row in summary["ledger"])


def test_box_with_all_resident_moves_nothing(box, capsys):
    summary = run(write_config(box, sinks=None))
    assert summary["fits"] and (summary["bytes_moved"], summary["swaps"], summary["compactions"]) == (0, 0, 0)
    entries = open_bundle(box / "tiny.safetensors", [FACTORY]).header.entries.values()
    assert summary["warm_up"] == {"bytes_moved": sum(one.nbytes for one in entries if not one.is_pad), "swaps": 3}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(row["processed"] for row in summary["ledger"])
    assert all(set(json.loads(line)) == RECORD for line in lines)


def test_check_reports_and_writes_nothing(box):
    config = write_config(box, sinks=file_sink("never.jsonl"), http={"bind": "127.0.0.1:0"})
    before = sorted(box.iterdir())
    checked = run(config, check=True)
    assert checked["ok"] and checked["fits"] and checked["device"] == "cpu" and not checked["warnings"]
    assert checked["http"] == {"host": "127.0.0.1", "port": 0, "token": False}
    assert before == sorted(box.iterdir())


def test_box_refuses_too_small_budget(box):
    least = least_budget(box)
    path, text = write_config(box, budget=least - 1), re.escape(exact_text(least))
    with pytest.raises(InputError, match=rf"^{path}: budget: query '\w+' alone needs {text}, .*at least {text}"):
        run(path)
    assert run(write_config(box, budget=least), check=True)["ok"]


def test_box_and_bundle_have_the_same_cameras(box):
    with pytest.raises(InputError, match="needs a camera 'right'"):
        run(write_config(box, cameras=ONE_CAMERA), check=True)
    cameras = {"left": {"source": "left.mp4"}, "right": {"source": "right"}, "spare": {"source": "absent"}}
    checked = run(write_config(box, cameras=cameras), check=True)
    assert checked["warnings"] == ["camera spare is not opened: no query of the bundle uses it"]


def test_box_reports_region_outside_frame(box, tmp_path, caplog):
    cv2.imwrite(str(tmp_path / "0.png"), np.zeros((4, 4, 3), np.uint8))
    path = write_config(box, cameras={"left": {"source": "left.mp4"}, "right": {"source": str(tmp_path)}})
    assert run(path, check=True)["ok"] and "'yard' looks at" in caplog.text
    summary = run(path)
    assert "'yard' looks at [4.0, 2.0, 40.0, 30.0], outside frames of 4x4 pixels" in summary["cameras"][1]["error"]
    processed = {row["query"]: row["processed"] for row in summary["ledger"]}
    assert processed["gate"] and processed["road"] and not processed["yard"] and summary["balanced"]


@pytest.mark.parametrize("fault", ["silent", "missing"])
def test_box_starts_without_some_cameras(box, fault, caplog):
    with RtspCamera() as camera:
        camera.silent = True
        source = camera.url if fault == "silent" else "absent.mp4"
        cameras = {"left": {"source": "left.mp4"}, "right": {"source": source, "loop": True, "timeout_s": 0.5}}
        start = time.monotonic()
        summary = run(write_config(box, cameras=cameras, sinks=file_sink("away.jsonl")), seconds=2.0)
        assert time.monotonic() - start < 25
    left, right = summary["cameras"]
    assert (left["state"], left["error"], left["frames"]) == ("ended", None, 12)
    assert right["error"] and right["frames"] == 0 and right["frame_age_s"] is None
    gate, yard, _ = summary["ledger"]
    assert gate["received"] == 12 and yard["received"] == 0 and summary["balanced"]
    assert caplog.text.count("camera right is away") == 1 and "secret" not in caplog.text + json.dumps(summary)


def test_check_warns_of_silent_cameras(box, caplog):
    with RtspCamera() as one, HttpCamera() as two:
        begun: list[float] = []
        cameras = {name: {"source": camera.url, "timeout_s": 3} for name, camera in (("left", one), ("right", two))}
        with pytest.MonkeyPatch.context() as patch:
            for camera in (one, two):  # silent after the connection
                patch.setattr(
                    camera, "_handshake", lambda _, over=camera._over: begun.append(time.monotonic()) or not over.wait()
                )
            checked = run(write_config(box, cameras=cameras), check=True)
        assert max(begun) - min(begun) < 3, "cameras are probed at the same time"
        assert checked["ok"] and [camera["answers"] for camera in checked["cameras"]] == [False, False]
        assert caplog.text.count("gives no frame") == len(checked["warnings"]) == 2
        assert "secret" not in caplog.text + json.dumps(checked)
        checked = run(write_config(box, cameras=cameras | {"right": {"source": "right"}}), check=True)
        left, right = checked["cameras"]
        assert left == {"id": "left", "answers": True, "width": 64, "height": 48} and right["answers"]


def test_check_warns_of_unreachable_sinks(box, caplog):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sinks = [
        {"kind": "mqtt", "host": "127.0.0.1", "port": port, "username": "me", "password": "s3cret"},
        {"kind": "webhook", "url": f"http://me:s3cret@127.0.0.1:{port}/hook"},
    ]
    checked = run(write_config(box, sinks=sinks), check=True)
    assert [f"127.0.0.1:{port}: " in warning for warning in checked["warnings"]] == [True, True]
    assert all(warning in caplog.text for warning in checked["warnings"])
    assert [sink["answers"] for sink in checked["sinks"]] == [False, False] and checked["ok"]
    assert "s3cret" not in caplog.text + json.dumps(checked)


def damage(source: Path, target: Path, places: list[int]) -> None:
    """A copy with one bit flipped at each of the places."""
    data = bytearray(source.read_bytes())
    for place in places:
        data[place] ^= 1
    target.write_bytes(data)


def begins(bundle: Bundle, query_id: str) -> set[int]:
    """Where in the file the tensors of a query begin."""
    return {bundle.header.data_start + bundle.header.entries[name].begin for name in bundle.names_in_order(query_id)}


def test_box_refuses_damaged_bundle(box, tmp_path):
    damage(box / "tiny.safetensors", tmp_path / "tiny.safetensors", [200])
    with pytest.raises(BundleError, match="is damaged"):
        run(write_beside(tmp_path, box))
    with pytest.raises(BundleError, match="not in the zoo"):
        run(write_config(box, factories=None))
    with pytest.raises(InputError, match="cannot be read"):
        run(write_config(box, bundle="absent.safetensors"))
    bundle = tiny_bundle(tmp_path / "sound.safetensors")
    everywhere = set.union(*(begins(bundle, one.id) for one in bundle.queries))
    damage(bundle.path, tmp_path / "tiny.safetensors", sorted(everywhere))
    with pytest.raises(BundleError, match="every query has damaged tensors"):
        run(write_beside(tmp_path, box))


def test_box_disables_query_with_damaged_tensors(box, tmp_path, caplog):
    bundle = tiny_bundle(tmp_path / "sound.safetensors")
    own = begins(bundle, "yard") - begins(bundle, "gate") - begins(bundle, "road")
    damage(bundle.path, tmp_path / "tiny.safetensors", [min(own)])
    checked = run(write_beside(tmp_path, box), check=True)
    assert list(checked["damaged"]) == ["yard"] and "content hash" in checked["damaged"]["yard"]
    summary = run(write_beside(tmp_path, box))
    gate, yard, road = summary["ledger"]
    assert summary["balanced"] and yard["failed"] == yard["received"] == 10
    assert gate["processed"] and road["processed"] and not gate["failed"] + road["failed"]
    assert "content hash" in summary["queries"][1]["last_failure"] and "query yard is disabled" in caplog.text


def test_box_with_public_key_needs_signature(box, tmp_path):
    bundle, key = tmp_path / "signed.safetensors", Ed25519PrivateKey.generate()
    bundle.write_bytes((box / "tiny.safetensors").read_bytes())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (tmp_path / "box-key.pub").write_bytes(public)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    (tmp_path / "box-key").write_bytes(private)
    config = write_config(box, bundle=str(bundle), public_key=str(tmp_path / "box-key.pub"))
    with pytest.raises(BundleError, match="is not signed"):
        run(config, check=True)
    sign_bundle(bundle, tmp_path / "box-key")
    assert run(config, check=True)["ok"]


@pytest.mark.parametrize(("keys", "text"), [
    ({"sinks": file_sink("no/where.jsonl")}, r"sinks\[0\]\.path: .* there is no directory"),
    ({"spool": "no/where"}, "spool: .* there is no directory"),
    ({"trace": "tiny.safetensors"}, "trace: .* is the bundle"),
], ids=str)  # fmt: skip
def test_box_refuses_impossible_outputs(box, keys, text):
    with pytest.raises(InputError, match=text):
        run(write_config(box, **keys))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_the_box_and_are_restored(box, number, monkeypatch):
    before = signal.getsignal(number)
    plain, runs = TorchEngine.predictions, []

    def interrupt(engine, outputs, frames):
        runs.append(engine)
        if len(runs) == 12:
            os.kill(os.getpid(), number)
        return plain(engine, outputs, frames)

    monkeypatch.setattr(TorchEngine, "predictions", interrupt)
    summary = run(write_config(box, cameras=LOOPED, sinks=file_sink("signal.jsonl")))
    assert summary["balanced"] and summary["stopped_by"] == number.name
    assert signal.getsignal(number) is before


def test_box_counts_failing_query_and_serves_others(box, monkeypatch, caplog):
    plain, runs = TorchEngine.predictions, []

    def fail(engine, outputs, frames):
        """Called for runs of one query and of several."""
        runs.append(engine.query.id)
        if engine.query.id == "gate" and runs.count("gate") > WARM_UP_RUNS:
            raise RuntimeError("broken")
        return plain(engine, outputs, frames)

    monkeypatch.setattr(TorchEngine, "predictions", fail)
    summary = run(write_config(box, sinks=file_sink("fail.jsonl")))
    gate, yard, _ = summary["ledger"]
    assert summary["balanced"] and gate["failed"] > 0 and gate["processed"] == 0 and yard["processed"] > 0
    assert summary["queries"][0]["last_failure"] == "RuntimeError: broken"
    assert caplog.text.count("query gate failed") == 1


@pytest.mark.parametrize("late", ["drop", "publish"])
def test_late_results_are_published_on_request(box, monkeypatch, late):
    plain = results.result_record
    monkeypatch.setattr(
        results, "result_record", lambda asked, *more: plain(asked, *more) | {"late": asked.id == "gate"}
    )
    summary = run(write_config(box, late=late, sinks=file_sink(f"late-{late}.jsonl")))
    gate, yard, _ = summary["ledger"]
    assert summary["balanced"] and gate["late"] == gate["processed"] > 0 and yard["late"] == 0
    published = read_results(box / f"late-{late}.jsonl")
    assert sum(one["late"] for one in published) == (0 if late == "drop" else gate["late"])
    assert sum(one["query"] == "yard" for one in published) == yard["processed"] > 0


def test_box_drops_frames_that_cannot_be_in_time(box, tmp_path, caplog, monkeypatch):
    replace_bundle(tmp_path / "tiny.safetensors", {"gate": trained_looking(1)}, query("gate", "left", sla_ms=1.0))
    plain = TorchEngine.run
    monkeypatch.setattr(TorchEngine, "run", lambda engine, images: time.sleep(0.02) or plain(engine, images))
    summary = run(write_config(tmp_path, cameras={"left": {"source": str(box / "left.mp4")}}))
    assert summary["ledger"][0]["dropped"] == {"deadline": 12} and summary["balanced"]
    assert "its frames will be dropped" in caplog.text


def test_second_box_on_one_spool_is_refused(box):
    config = write_config(box, spool="one", sinks=file_sink("second.jsonl"))
    (box / "one").mkdir()
    with locked_folder(box / "one"):
        with pytest.raises(InputError, match=r"one: is being written by another process"):
            run(config)
        assert not (box / "one" / "ledger.json").exists()
    assert run(config)["balanced"] and (box / "one" / "ledger.json").is_file()


@pytest.fixture(scope="module")
def large_box(tmp_path_factory) -> Path:
    """A folder with a clip of 12 frames and a bundle of `big`, 45 MB, and a tiny `gate`."""
    folder = tmp_path_factory.mktemp("box")
    write_clip(folder / "left.mp4", 12)
    torch.manual_seed(0)
    models = {"big": zoo.build("resnet18", ("a", "b", "c"), {}, 32).eval(), "gate": trained_looking(1)}
    preprocess = zoo.zoo_preprocess("resnet18", 32)
    big = query("big", "left", model="resnet18", input_size=32, fps=6.0, preprocess=preprocess)
    replace_bundle(folder / "tiny.safetensors", models, big, query("gate", "left"))
    return folder


def test_overflow_keeps_budget_and_answers(large_box):
    keys = {"budget": "15MB", "overflow": True, "engine": "auto", "sinks": file_sink("overflow.jsonl")}
    config = write_config(large_box, cameras=ONE_CAMERA, **keys)
    checked = run(config, check=True)
    assert list(checked["overflow_bytes"]) == ["big"] and not checked["fits"]
    assert 30e6 < checked["overflow_bytes"]["big"] < 40e6 < checked["least_budget_bytes"]
    summary = run(config)
    assert summary["balanced"] and summary["engines"]["big"] == "torch" and summary["max_used_bytes"] <= 15_000_000
    records = read_results(large_box / "overflow.jsonl")
    big = [record for record in records if record["query"] == "big"]
    assert big and {record["query"] for record in records} == {"big", "gate"}
    runs, rest = divmod(summary["bytes_overflowed"], checked["overflow_bytes"]["big"])
    assert not rest and 1 <= runs <= len(big)
    bundle, frames = open_bundle(large_box / "tiny.safetensors", [FACTORY]), frames_of(large_box / "left.mp4")
    for record in big:
        expected = predict(bundle, "big", frames[record["frame"]])
        assert (record["label"], record["score"]) == (expected.label, pytest.approx(expected.score, rel=1e-5))


def test_overflow_refusals_name_the_option_and_bytes(large_box):
    needs = (
        r"query 'big' alone needs (4\d.* MiB \(.* bytes\)), .* of it for its workspace, "
        r"the budget is 14.3 MiB \(15,000,000 bytes\); give at least \1, or set `overflow: true`"
    )
    with pytest.raises(InputError, match=needs):
        run(write_config(large_box, cameras=ONE_CAMERA, budget="15MB"))
    with pytest.raises(InputError, match=r"alone needs \d.* bytes\), .* even with an overflow") as refused:
        run(write_config(large_box, cameras=ONE_CAMERA, budget="2MB", overflow=True))
    text = str(refused.value).rpartition("at least ")[2]
    least = int(text.rpartition("(")[2].removesuffix(" bytes)").replace(",", ""))
    assert run(write_config(large_box, cameras=ONE_CAMERA, budget=least, overflow=True), check=True)["ok"]
    with pytest.raises(InputError, match=f"give at least {re.escape(text)}"):
        run(write_config(large_box, cameras=ONE_CAMERA, budget=least - 1, overflow=True), check=True)


def test_box_waits_for_a_disk_that_is_mounted_late(tmp_path, caplog):
    write_box(tmp_path)
    (disk := tmp_path / "disk").mkdir()
    config = write_config(tmp_path, bundle="disk/tiny.safetensors", sinks=[{"kind": "jsonl", "path": "disk/r.jsonl"}])
    with pytest.raises(InputError, match="disk"):
        run(config, check=True)
    done: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: done.append(run(config, seconds=60.0)))
    thread.start()
    until(lambda: "waiting for" in caplog.text)
    (disk_later := tmp_path / "later").mkdir()
    shutil.move(tmp_path / "tiny.safetensors", disk_later)
    disk_later.rename(disk)
    thread.join(60)
    assert done and done[0]["fault"] is None and (disk / "r.jsonl").exists()
    assert caplog.text.count("waiting for") == 1


def test_late_path_is_in_an_empty_folder_alone(tmp_path):
    (empty := tmp_path / "empty").mkdir()
    config = tmp_path / "box.yaml"
    config.write_text("")
    paths = {empty / "b": empty, empty / "no" / "b": empty, tmp_path / "no" / "b": None, tmp_path / "b": None}
    for path, late in paths.items():
        assert find_late_path(InputError(path, "cannot be read"), config) == late
        assert find_late_path(InputError(config, f"{path}: there is no directory", key="sinks"), config) == late
    assert find_late_path(InputError(empty / "box.yaml", "cannot be read"), empty / "box.yaml") is None


def test_check_names_secrets_that_others_can_read(tmp_path):
    write_box(tmp_path)
    (tmp_path / "token").write_text("a-token-of-the-tests")
    config = write_config(tmp_path, http={"bind": "127.0.0.1:0", "token_file": "token"})
    (tmp_path / "token").chmod(0o644)
    assert any("token can be read by every user" in line for line in run(config, check=True)["warnings"])
    (tmp_path / "token").chmod(0o600)
    assert not any("can be read" in line for line in run(config, check=True)["warnings"])


@pytest.mark.parametrize(
    ("url", "warned"), [("http://u.example/b", True), ("http://127.0.0.1/b", False), ("https://u.example/b", False)]
)
def test_check_names_an_update_token_sent_unencrypted(tmp_path, url, warned):
    updates = {"url": url, "public_key": "key.pub", "token": "secret-of-the-box"}
    config = load_config(write_config(tmp_path, updates=updates, spool="spool"))
    (warning,) = list(find_open_access(config)) or [""]
    assert ("`token` is sent unencrypted" in warning) is warned and "secret-of-the-box" not in warning
