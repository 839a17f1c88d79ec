"""Sink workers and their manager: a failing sink delays no other, and every result is accounted for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from pydantic import PrivateAttr

from gemel.edge_runtime.sinks import worker
from gemel.edge_runtime.sinks.base import BoxState, ResultMessage, Sink, SinkClosed, SinkConfig
from gemel.edge_runtime.sinks.jsonl import JsonLinesConfig
from gemel.edge_runtime.sinks.worker import Outbox, OutboxLimits, SinkManager, SinkWorker
from tests.edge_runtime.sinks.messages import SOON, make_message, read_frames, until


class FakeConfig(SinkConfig):
    """Its sink calls `act` with the messages, and keeps their frame numbers where that raises nothing."""

    kind: str = "fake"
    act: Callable[[Sequence[ResultMessage]], object] = lambda messages: None
    _frames: list[int] = PrivateAttr(default_factory=list)
    _opened: list[int] = PrivateAttr(default_factory=list)

    def build(self) -> Sink:
        return FakeSink(self)


class FakeSink(Sink):
    def __init__(self, config: FakeConfig) -> None:
        self.config = config

    def open(self) -> None:
        self.config._opened.append(1)

    def write(self, messages: Sequence[ResultMessage]) -> None:
        self.config.act(messages)
        self.config._frames.extend(message.record["frame"] for message in messages)


def start_manager(*configs: FakeConfig) -> SinkManager:
    manager = SinkManager(())
    manager._workers = tuple(SinkWorker(config, Outbox(OutboxLimits(10), SOON)) for config in configs)
    manager.start()
    return manager


def test_worker_of_hanging_sink_delays_no_other():
    hanging, healthy = FakeConfig(act=lambda messages: threading.Event().wait()), FakeConfig()
    manager = start_manager(hanging, healthy)
    for number in range(100):
        manager.offer(make_message(number))
        until(lambda number=number: healthy._frames[-1:] == [number])
    assert manager.close(0.05) == ["fake"]
    first, second = manager.to_json()
    assert (first["delivered"], first["queued"]) == (0, 0) and first["undelivered"] == {"overflow": 90, "stopped": 10}
    assert (second["delivered"], second["undelivered"]) == (100, {}) and manager.complaints == []


def test_worker_tells_the_state_once_a_second_and_after_each_opening(monkeypatch):
    config, told, clock = FakeConfig(), list[float](), [0.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    sender = SinkWorker(config, Outbox(OutboxLimits(100), SOON), lambda: told.append(clock[0]) or BoxState())
    sender.start()

    def send(number: int) -> None:
        sender.offer(make_message(number))
        until(lambda: config._frames[-1:] == [number])

    for number in range(50):
        send(number)
    assert told == [0.0], "not with each result"
    clock[0] = worker.HEARTBEAT_S
    send(50)
    assert told == [0.0, worker.HEARTBEAT_S]
    sender.reopen()
    until(lambda: len(config._opened) == 2)
    send(51)
    assert told == [0.0, worker.HEARTBEAT_S, worker.HEARTBEAT_S]
    sender.close()
    assert sender.join(10)


def test_worker_retries_errors_and_logs_once(caplog):
    caplog.set_level("INFO", "gemel.run")
    errors: list[Exception] = [OSError(28, "No space left on device")]

    def act(_: Sequence[ResultMessage]) -> None:
        if errors:
            raise errors[0]

    config = FakeConfig(act=act)
    manager = start_manager(config)
    manager.offer(make_message(1))
    until(lambda: len(config._opened) > 4)
    assert manager.to_json()[0]["state"] == "down" and caplog.text.count("failed: ") == 1
    errors.clear()
    until(lambda: manager.to_json()[0]["delivered"] == 1)
    assert manager.close(10) == [] and "works again; 0 results were lost" in caplog.text


def test_worker_ends_when_its_reader_is_gone():
    def act(_: Sequence[ResultMessage]) -> None:
        raise SinkClosed("its reader is gone")

    manager = start_manager(FakeConfig(act=act))
    assert not manager.is_unread
    manager.offer(make_message(1))
    until(lambda: manager.is_unread)
    manager.offer(make_message(2))
    assert manager.close(10) == [] and manager.to_json()[0]["undelivered"] == {"gone": 2} and manager.complaints == []


def test_worker_drains_at_close_in_spite_of_its_pause():
    away = threading.Event()
    away.set()

    def act(_: Sequence[ResultMessage]) -> None:
        if away.is_set():
            raise ConnectionRefusedError("away")

    config = FakeConfig(act=act)
    manager = SinkManager([config])
    manager.start()
    manager.offer(make_message(1))
    until(lambda: manager.to_json()[0]["state"] == "down")
    away.clear()
    assert manager.close(10) == [] and config._frames == [1]


def test_manager_change_adds_keeps_and_removes_sinks(tmp_path):
    kept, removed, added = (JsonLinesConfig(path=tmp_path / name) for name in ("kept", "removed", "added"))
    manager = SinkManager([kept, removed])
    manager.start()
    manager.offer(make_message(0))
    manager.change([added, kept])
    manager.offer(make_message(1))
    assert manager.settle(30.0) == []
    manager.offer(make_message(2))
    assert manager.close(30.0) == []
    assert [read_frames(tmp_path / name) for name in ("kept", "removed", "added")] == [[0, 1, 2], [0], [1, 2]]
    assert [row["delivered"] for row in manager.to_json()] == [2, 3]
    assert manager.past_json() == [{"name": removed.name, "delivered": 1, "undelivered": {}}]


def test_manager_change_drains_the_old_sink_of_a_file_first(tmp_path):
    path = tmp_path / "r"
    manager = SinkManager([JsonLinesConfig(path=path)])
    for number in range(50):
        manager.offer(make_message(number))
    manager.start()
    for size in (10**6, 10**7, 10**8):
        manager.change([JsonLinesConfig(path=path, max_bytes=size)])
        manager.offer(make_message(size))
        assert manager.settle(30.0) == []
    assert manager.close(30.0) == []
    assert read_frames(path) == [*range(50), 10**6, 10**7, 10**8] and manager.past_json()[0]["delivered"] == 52
