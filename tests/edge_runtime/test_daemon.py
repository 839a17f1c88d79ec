"""The box as a whole: with room for one query at a time it answers as the unswapped models do."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from edge_runtime import results as publishing
from edge_runtime.daemon import run
from edge_runtime.engines.torch_engine import TorchEngine
from edge_runtime.samples import read_sample
from models.bundle import open_bundle
from models.bundle.signing import sign_bundle
from models.errors import BundleError, InputError, exact_text
from models.io import locked_folder
from models.predictions import ClassPrediction
from models.tasks import task_of
from tests.edge_runtime.capture.faulty_cameras import FaultyCamera, HttpCamera, RtspCamera
from tests.edge_runtime.tiny import FACTORY, query, tiny_bundle, trained_looking, write_clip, write_config, write_folder

RECORD = {"run", "query", "camera", "frame", "captured_at", "finished_at", "age_ms", "late", "bundle", "label", "score"}


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """A folder with a bundle, a clip of 12 frames and a folder of 10, one second each."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("box")
    tiny_bundle(folder / "tiny.safetensors")
    write_clip(folder / "left.mp4", 12)
    write_folder(folder / "right", 10)
    return folder


def decode_image(path: Path) -> np.ndarray:
    image = cv2.imread(str(path))
    assert image is not None
    return image


def frames_of(source: Path):
    if source.is_dir():
        return [decode_image(path)[..., ::-1].copy() for path in sorted(source.iterdir())]
    capture, frames = cv2.VideoCapture(str(source)), []
    while (read := capture.read())[0]:
        frames.append(cv2.cvtColor(read[1], cv2.COLOR_BGR2RGB))
    return frames


def least_budget(box: Path) -> int:
    return run(write_config(box), check=True)["least_budget_bytes"]


def test_box_swapping_answers_like_the_plain_models(box, caplog):
    caplog.set_level(logging.INFO, "gemel.run")
    (box / "spool").mkdir()
    budget = least_budget(box)
    summary = run(write_config(box, budget=budget, spool="spool", sinks=[{"kind": "jsonl", "path": "one.jsonl"}]))
    bundle = tiny_bundle(box / "again.safetensors")
    sources = {"left": frames_of(box / "left.mp4"), "right": frames_of(box / "right")}
    records = [json.loads(line) for line in (box / "one.jsonl").read_text().splitlines()]
    for record in records:
        assert set(record) == RECORD and record["bundle"] == bundle.digest[:12]
        assert record["age_ms"] == pytest.approx(1000 * (record["finished_at"] - record["captured_at"]), abs=0.01)
        asked = bundle.query(record["query"])
        frame = sources[asked.camera][record["frame"]]
        if asked.roi is not None:
            x0, y0, x1, y1 = map(int, asked.roi)
            frame = frame[y0:y1, x0:x1]
        with torch.inference_mode():
            batch = asked.preprocess.normalise(torch.stack([asked.preprocess.resize(frame)]))
            outputs = bundle.build(asked.id)(batch)
        answer = task_of("classification").predictions(torch.nn.Identity(), outputs, [(1, 1)], asked.classes)[0]
        assert isinstance(answer, ClassPrediction)
        assert (record["label"], record["score"]) == (answer.label, answer.score)
    assert summary["balanced"] and summary["stopped_by"] == "cameras ended" and not summary["fits"]
    assert summary["max_used_bytes"] <= budget < summary["weights_bytes"] + summary["workspace_bytes"]
    assert summary["swaps"] >= 3 and summary["bytes_moved"] > 0 and summary["warm_up"]["bytes_moved"] > 0
    received = {"gate": 12, "yard": 10, "road": 6}
    for account in summary["ledger"]:
        assert account["received"] == received[account["query"]] and account["processed"] >= 1
        assert account["processed"] == sum(record["query"] == account["query"] for record in records)
        assert account["failed"] == account["pending"] == 0
    assert json.loads((box / "spool" / "ledger.json").read_text()) == json.loads(json.dumps(summary))
    assert '"balanced": true' in caplog.text


def test_box_samples_match_inputs_and_answers(box):
    summary = run(write_config(box, spool={"path": "fresh", "every_s": 0.01}, sinks=[{"kind": "jsonl", "path": "s"}]))
    results = {(row["query"], row["frame"]): row for row in map(json.loads, (box / "s").read_text().splitlines())}
    samples = [read_sample(path) for path in sorted((box / "fresh" / "samples").iterdir())]
    assert summary["spool"]["samples"] == len(samples) and {one.head.query for one in samples} == {
        "gate",
        "yard",
        "road",
    }
    bundle = open_bundle(box / "tiny.safetensors", [FACTORY])
    for sample in samples:
        head, asked = sample.head, bundle.query(sample.head.query)
        result = results[head.query, head.frame]
        assert (head.label, head.score, head.bundle) == (result["label"], result["score"], result["bundle"])
        with torch.inference_mode():
            outputs = bundle.build(asked.id)(asked.preprocess(sample.picture))
        answer = task_of("classification").predictions(torch.nn.Identity(), outputs, [(1, 1)], asked.classes)[0]
        assert isinstance(answer, ClassPrediction) and (answer.label, answer.score) == (head.label, head.score)


def test_box_with_failing_spool_serves(box):
    (box / "blocked").mkdir()
    (box / "blocked" / "samples").write_text("in the way")
    spool = {"path": "blocked", "every_s": 0.01}
    summary = run(write_config(box, spool=spool, sinks=[{"kind": "jsonl", "path": "all"}]))
    assert summary["spool"]["samples"] == 0 and summary["spool"]["unsampled"].keys() == {"unwritable"}
    assert summary["stopped_by"] == "cameras ended" and summary["balanced"] and summary["unwritten"] == []
    processed = sum(account["processed"] for account in summary["ledger"])
    assert len((box / "all").read_text().splitlines()) == processed > 0
    assert all(account["failed"] == 0 for account in summary["ledger"])


def test_box_with_all_resident_moves_nothing(box, capsys):
    summary = run(write_config(box, sinks=None))
    assert summary["fits"] and (summary["bytes_moved"], summary["swaps"], summary["compactions"]) == (0, 0, 0)
    weights = sum(
        entry.nbytes for entry in tiny_bundle(box / "w.safetensors").header.entries.values() if not entry.is_pad
    )
    assert summary["warm_up"] == {"bytes_moved": weights, "swaps": 3}
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(account["processed"] for account in summary["ledger"])
    assert all(set(json.loads(line)) == RECORD for line in lines)


def test_check_reports_and_writes_nothing(box):
    before = sorted(box.iterdir())
    summary = run(write_config(box, sinks=[{"kind": "jsonl", "path": "never.jsonl"}]), check=True)
    assert summary["ok"] and summary["fits"] and summary["device"] == "cpu"
    assert set(before) | {box / "box.yaml"} == set(box.iterdir())


def test_box_refuses_too_small_budget(box):
    least = least_budget(box)
    path = write_config(box, budget=least - 1)
    said = re.escape(exact_text(least))
    with pytest.raises(InputError, match=rf"^{path}: budget: query '\w+' alone needs {said}, .*at least {said}"):
        run(path)
    assert run(write_config(box, budget=least), check=True)["ok"]


def test_box_refuses_query_without_camera(box):
    with pytest.raises(InputError, match="needs a camera 'right'"):
        run(write_config(box, cameras={"left": {"source": "left.mp4"}}), check=True)


def test_box_reports_region_outside_frame(box, tmp_path, caplog):
    small = tmp_path / "small"
    small.mkdir()
    cv2.imwrite(str(small / "0.png"), decode_image(box / "right" / "000.png")[:4, :4])
    path = write_config(box, cameras={"left": {"source": "left.mp4"}, "right": {"source": str(small)}})
    assert run(path, check=True)["ok"] and "'yard' looks at" in caplog.text
    summary = run(path)
    assert "'yard' looks at [4.0, 2.0, 40.0, 30.0], outside frames of 4x4 pixels" in summary["cameras"][1]["error"]
    processed = {account["query"]: account["processed"] for account in summary["ledger"]}
    assert processed["gate"] and processed["road"] and not processed["yard"] and summary["balanced"]


def stall(camera: FaultyCamera) -> None:
    camera.silent = True


def babbling(camera: FaultyCamera) -> None:
    camera.garbage = True


@pytest.mark.parametrize(
    "away", [FaultyCamera.refuse, stall, babbling, None], ids=("refused", "silent", "garbage", "missing")
)
def test_box_starts_without_some_cameras(box, away, caplog):
    with RtspCamera() as camera:
        source = camera.url if away else "absent.mp4"
        if away:
            away(camera)
        cameras = {"left": {"source": "left.mp4"}, "right": {"source": source, "loop": True, "timeout_s": 0.5}}
        started = time.monotonic()
        summary = run(write_config(box, cameras=cameras, sinks=[{"kind": "jsonl", "path": "away.jsonl"}]), seconds=2.0)
        assert time.monotonic() - started < 25, "and not 30 s"
    left, right = summary["cameras"]
    assert (left["state"], left["error"], left["frames"]) == ("ended", None, 12)
    assert right["error"] and right["frames"] == 0 and right["frame_age_s"] is None
    gate, yard, _ = summary["ledger"]
    assert gate["received"] == 12 and yard["received"] == 0 and summary["balanced"]
    assert caplog.text.count("camera right is away") == 1 and "secret" not in caplog.text + json.dumps(summary)


def test_check_warns_of_silent_cameras(box, caplog):
    with RtspCamera() as one, HttpCamera() as two:
        one.silent = two.silent = True
        cameras = {name: {"source": camera.url, "timeout_s": 5} for name, camera in (("left", one), ("right", two))}
        started = time.monotonic()
        checked = run(write_config(box, cameras=cameras), check=True)
        assert 5 <= time.monotonic() - started < 10, "not one after the other"
        assert checked["ok"] and [camera["answers"] for camera in checked["cameras"]] == [False, False]
        assert caplog.text.count("does not answer") == len(
            checked["warnings"]
        ) == 2 and "secret" not in caplog.text + json.dumps(checked)
        one.silent = False
        checked = run(write_config(box, cameras=cameras | {"right": {"source": "right"}}), check=True)
        left, right = checked["cameras"]
        assert left == {"id": "left", "answers": True, "width": 64, "height": 48} and right["answers"]


def test_box_refuses_damaged_bundle(box, tmp_path):
    cameras = {"left": {"source": str(box / "left.mp4")}, "right": {"source": str(box / "right")}}
    damage(box / "tiny.safetensors", tmp_path / "tiny.safetensors", [200])
    with pytest.raises(BundleError, match="is damaged"):
        run(write_config(tmp_path, cameras=cameras))
    with pytest.raises(BundleError, match="not in the zoo"):
        run(write_config(box, factories=None))
    with pytest.raises(InputError, match="cannot be read"):
        run(write_config(box, bundle="absent.safetensors"))


def damage(source: Path, target: Path, places: list[int]) -> None:
    """A copy with one bit flipped at each of the places."""
    data = bytearray(source.read_bytes())
    for at in places:
        data[at] ^= 1
    target.write_bytes(data)


def begins(bundle, query_id: str) -> set[int]:
    """Where in the file the tensors of a query begin."""
    return {bundle.header.data_start + bundle.header.entries[name].begin for name in bundle.names_in_order(query_id)}


def test_box_disables_query_with_damaged_tensors(box, tmp_path, caplog):
    cameras = {"left": {"source": str(box / "left.mp4")}, "right": {"source": str(box / "right")}}
    bundle = tiny_bundle(tmp_path / "sound.safetensors")
    mine = begins(bundle, "yard") - begins(bundle, "gate") - begins(bundle, "road")
    damage(bundle.path, tmp_path / "tiny.safetensors", [min(mine)])
    checked = run(write_config(tmp_path, cameras=cameras), check=True)
    assert list(checked["damaged"]) == ["yard"] and "content hash" in checked["damaged"]["yard"]
    summary = run(write_config(tmp_path, cameras=cameras))
    gate, yard, road = summary["ledger"]
    assert summary["balanced"] and yard["failed"] == yard["received"] == 10
    assert gate["processed"] and road["processed"] and not gate["failed"] + road["failed"]
    assert "content hash" in summary["queries"][1]["last_failure"] and "query yard is disabled" in caplog.text


def test_box_refuses_fully_damaged_bundle(box, tmp_path):
    cameras = {"left": {"source": str(box / "left.mp4")}, "right": {"source": str(box / "right")}}
    bundle = tiny_bundle(tmp_path / "sound.safetensors")
    everywhere = set.union(*(begins(bundle, query.id) for query in bundle.queries))
    damage(bundle.path, tmp_path / "tiny.safetensors", sorted(everywhere))
    with pytest.raises(BundleError, match="every query has damaged tensors"):
        run(write_config(tmp_path, cameras=cameras))


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


@pytest.mark.parametrize("check", [True, False])
def test_box_refuses_unwritable_sink(box, check):
    with pytest.raises(InputError, match=r"sinks\[0\]\.path: .* there is no directory"):
        run(write_config(box, sinks=[{"kind": "jsonl", "path": "no/where.jsonl"}]), check=check)


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


LOOPING = {"left": {"source": "left.mp4", "loop": True}, "right": {"source": "right", "fps": 12, "loop": True}}


def test_box_stops_on_request_with_ledger(box):
    stop = threading.Event()
    threading.Timer(3, stop.set).start()
    summary = run(write_config(box, cameras=LOOPING, sinks=[{"kind": "jsonl", "path": "stop.jsonl"}]), stop=stop)
    assert summary["balanced"] and summary["stopped_by"] == "asked to stop"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_stop_the_box_and_are_restored(box, number, monkeypatch):
    before = signal.getsignal(number)
    outputs, answered = TorchEngine.run, []

    def interrupt(engine, frames):
        answered.append(engine)
        if len(answered) == 12:
            os.kill(os.getpid(), number)
        return outputs(engine, frames)

    monkeypatch.setattr(TorchEngine, "run", interrupt)
    summary = run(write_config(box, cameras=LOOPING, sinks=[{"kind": "jsonl", "path": "signal.jsonl"}]))
    assert summary["balanced"] and summary["stopped_by"] == number.name
    assert signal.getsignal(number) is before


def test_box_counts_failing_query_and_serves_others(box, monkeypatch, caplog):
    outputs, runs = TorchEngine.run, []

    def fail(engine, frames):
        runs.append(engine.query.id)
        if engine.query.id == "gate" and runs.count("gate") > 3:
            raise RuntimeError("broken")
        return outputs(engine, frames)

    monkeypatch.setattr(TorchEngine, "run", fail)
    summary = run(write_config(box, sinks=[{"kind": "jsonl", "path": "fail.jsonl"}]))
    gate, yard, _ = summary["ledger"]
    assert summary["balanced"] and gate["failed"] > 0 and gate["processed"] == 0 and yard["processed"] > 0
    assert summary["queries"][0]["last_failure"] == "RuntimeError: broken"
    assert caplog.text.count("query gate failed") == 1


@pytest.mark.parametrize("late", [None, "drop", "publish"])
def test_late_results_are_published_on_request(box, monkeypatch, late):
    plain = publishing.result_record
    monkeypatch.setattr(
        publishing, "result_record", lambda asked, *more: plain(asked, *more) | {"late": asked.id == "gate"}
    )
    results = box / f"late-{late}.jsonl"
    summary = run(write_config(box, late=late, sinks=[{"kind": "jsonl", "path": results.name}]))
    gate, yard, _ = summary["ledger"]
    assert summary["balanced"] and gate["late"] == gate["processed"] > 0 and yard["late"] == 0
    published = [json.loads(line) for line in results.read_text().splitlines()]
    assert sum(one["late"] for one in published) == (0 if late == "drop" else gate["late"])
    assert sum(one["query"] == "yard" for one in published) == yard["processed"] > 0


def test_box_drops_hopeless_frames(box, tmp_path, caplog, monkeypatch):
    from models.bundle import Made, write_bundle

    write_bundle(
        tmp_path / "tiny.safetensors",
        {"gate": trained_looking(1)},
        [query("gate", "left", sla_ms=1.0)],
        Made("tiny", "none", 0),
    )
    slowed = TorchEngine.run
    monkeypatch.setattr(TorchEngine, "run", lambda engine, images: time.sleep(0.02) or slowed(engine, images))
    summary = run(write_config(tmp_path, cameras={"left": {"source": str(box / "left.mp4")}}))
    assert summary["ledger"][0]["dropped"] == {"deadline": 12} and summary["balanced"]
    assert "its frames will be dropped" in caplog.text


def test_second_box_on_one_spool_is_refused(box: Path) -> None:
    config = write_config(box, spool="kept")
    (box / "kept").mkdir()
    with locked_folder(box / "kept"):
        with pytest.raises(InputError, match=r"kept: is being written by another process"):
            run(config)
        assert not (box / "kept" / "ledger.json").exists()
    assert run(config)["balanced"] and (box / "kept" / "ledger.json").is_file()
