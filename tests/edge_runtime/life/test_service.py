"""The service around a box: signals, its memory, the ledger's file, and the box as HTTP shows it."""

from __future__ import annotations

import gc
import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gemel.edge_runtime.engines.torch_engine import TorchEngine
from gemel.edge_runtime.life import executor, service
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.life.service import SAME_SIGNAL_S, LedgerFile, catch_signals
from tests.edge_runtime.local_box import LocalBox
from tests.edge_runtime.tiny import LOOPED, write_box, write_config

TIMEOUT_S = 60.0


def test_signals_close_together_count_once() -> None:
    now = [100.0]
    with catch_signals(stopping := threading.Event(), lambda: now[0]) as signals:
        signals.is_serving = True
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping.is_set() and signals.reasons == ["SIGTERM"]
        now[0] += 2 * SAME_SIGNAL_S
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signals.reasons == ["SIGTERM", "SIGINT"]


def test_ledger_file_keeps_the_previous_run(tmp_path: Path) -> None:
    for number in ("one", "two", "three"):
        file = LedgerFile(tmp_path)
        for fault in (None, "a step hangs"):
            file.write({"run": number, "fault": fault})
            assert file.join(TIMEOUT_S) and file.problem is None
    written = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert written == {
        "ledger.json": {"run": "three", "fault": "a step hangs"},
        "ledger.json.1": {"run": "two", "fault": "a step hangs"},
    }


def test_ledger_file_reports_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = LedgerFile(tmp_path / "absent")
    for _ in range(2):
        file.write({})
        assert file.join(TIMEOUT_S)
    assert file.problem is not None and len(caplog.records) == 1


def test_service_returns_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_box(tmp_path)
    stop, frozen = threading.Event(), []

    def count_frozen() -> bool:
        frozen.append(gc.get_freeze_count())
        if len(frozen) > 1:
            stop.set()
        return True

    monkeypatch.setattr(service, "TIDY_INTERVAL_S", 0.0)
    monkeypatch.setattr(service, "LEDGER_INTERVAL_S", 0.0)
    monkeypatch.setattr(service, "trim_heap", count_frozen)
    run(write_config(tmp_path, cameras=LOOPED, spool="spool"), stop=stop, seconds=TIMEOUT_S)
    assert frozen[0] > gc.get_freeze_count() == 0, "the objects of a box are frozen until it ends"


def test_service_scans_all_objects_after_a_reload_once_no_frame_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_box(tmp_path)
    with LocalBox(write_config(tmp_path, cameras=LOOPED)) as box:
        box.until(lambda: box.service._inference.started is not None)
        monkeypatch.setattr(service, "TIDY_INTERVAL_S", 0.0)
        monkeypatch.setattr(service, "MAX_TIDY_INTERVAL_S", 3600.0)
        tidied: list[bool] = []
        is_busy = [True]
        monkeypatch.setattr(box.service, "_is_busy", lambda: tidied.append(False) or is_busy[0])
        monkeypatch.setattr(box.service, "_return_free_memory", lambda: tidied.append(True))
        box.service._is_frozen = False
        box.until(lambda: len(tidied) > 3)
        assert True not in tidied[1:], "a frame waits or runs"
        is_busy[0] = False
        box.until(lambda: True in tidied[1:])
        is_busy[0] = True
        monkeypatch.setattr(service, "MAX_TIDY_INTERVAL_S", 0.0)
        count = tidied.count(True)
        box.until(lambda: tidied.count(True) > count)


def test_hanging_step_ends_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_box(tmp_path)
    freed = threading.Event()
    monkeypatch.setattr(executor, "MIN_HANG_S", 0.3)
    monkeypatch.setattr(TorchEngine, "run", lambda *given: freed.wait(TIMEOUT_S))
    monkeypatch.setattr(executor.Executor, "warm_up", lambda *given: None)
    try:
        summary = run(write_config(tmp_path, cameras=LOOPED, spool="spool"), seconds=TIMEOUT_S)
    finally:
        freed.set()
    assert "has not ended for" in summary["fault"] and summary["hanging"] == ["the inference"]
    assert summary["balanced"] and json.loads((tmp_path / "spool" / "ledger.json").read_text()) == summary


def test_service_serves_while_its_address_is_in_use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_box(tmp_path)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        config = write_config(tmp_path, http={"bind": "127.0.0.1:{1}".format(*other.getsockname())})
        assert run(config)["fault"] is None and "HTTP tries again, the box serves" in caplog.text
        warnings = run(config, check=True)["warnings"]
        assert any("is not available" in warning for warning in warnings)
    assert (tmp_path / "results.jsonl").exists()


def send_request(port: int, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def wait_for_ok(port: int, path: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while send_request(port, path)[0] != 200:
        assert time.monotonic() < deadline, path
        time.sleep(0.05)


def check_balance(metrics: str) -> None:
    """AssertionError where a query's frame counts do not add up."""
    samples = [
        (sample.name.removeprefix("gemel_frames_").removesuffix("_total"), sample.labels["query"], sample.value)
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name.startswith("gemel_frames_")
    ]
    for query in ("gate", "yard", "road"):
        rows = [(name, value) for name, other, value in samples if other == query]
        settled = sum(value for name, value in rows if name in ("processed", "dropped", "failed", "pending"))
        assert sum(value for name, value in rows if name == "received") == settled


def test_running_box_status_balances(tmp_path: Path) -> None:
    write_box(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    stop, summaries = threading.Event(), []
    config = write_config(tmp_path, cameras=LOOPED, http={"bind": f"127.0.0.1:{port}"})
    thread = threading.Thread(target=lambda: summaries.append(run(config, stop=stop)))
    thread.start()
    try:
        for path in ("/readyz", "/healthz", "/api/cameras/left/frame.jpg"):
            wait_for_ok(port, path)
        for _ in range(20):
            check_balance(send_request(port, "/metrics")[1].decode())
        status = json.loads(send_request(port, "/api/status")[1])
    finally:
        stop.set()
        thread.join(TIMEOUT_S)
    assert [one["id"] for one in status["queries"]] == ["gate", "yard", "road"]
    assert all(one["ledger"]["processed"] > 0 and one["resident"] for one in status["queries"])
    gate, yard, road = (one["bytes"] - one["own_bytes"] for one in status["queries"])
    assert gate == yard > 0 and road == 0, "gate and yard share a tensor"
    assert {one["state"] for one in status["cameras"]} == {"streaming"} and status["sinks"][0]["state"] == "up"
    record = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])
    assert record["run"] == status["run"] == summaries[0]["run"] and record["bundle"] == status["bundle"]
    assert summaries[0]["hanging"] == [] and send_request(port, "/healthz")[0] == 0


def test_long_start_is_extended_at_the_service_manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "EXTEND_INTERVAL_S", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.settimeout(TIMEOUT_S)
        manager.bind(str(tmp_path / "notify"))
        with service.extend_start(service.Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify")})):
            for _ in range(2):
                assert b"EXTEND_TIMEOUT_USEC=60000000" in manager.recv(1000)
