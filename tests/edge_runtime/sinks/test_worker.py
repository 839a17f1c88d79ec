"""Sink workers: a failing sink delays no other, and every result is accounted for at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_runtime.sinks.base import ResultMessage, Sink, SinkClosed, SinkConfig
from edge_runtime.sinks.worker import Outbox, OutboxLimits, SinkManager, SinkWorker
from tests.edge_runtime.sinks.messages import SOON, parcel, until


@dataclass(frozen=True)
class Made(SinkConfig):
    """Writes messages with a given function, and keeps those without an error."""

    does: Callable[[Sequence[ResultMessage]], None] = lambda parcels: None
    kept: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return "made"

    @property
    def name(self) -> str:
        return "made"

    def build(self) -> Sink:
        return Doing(self)


class Doing(Sink):
    def __init__(self, config: Made) -> None:
        self.config = config

    def open(self) -> None:
        self.config.opened.append(1)

    def write(self, parcels: Sequence[ResultMessage]) -> None:
        self.config.does(parcels)
        self.config.kept.extend(one.record["frame"] for one in parcels)


def post(*configs: Made, items: int = 10) -> SinkManager:
    made = SinkManager(())
    made._workers = tuple(SinkWorker(config, Outbox(OutboxLimits(items), SOON)) for config in configs)
    made.start()
    return made


def test_worker_of_hanging_sink_blocks_nobody(caplog):
    hangs, well = Made(lambda parcels: threading.Event().wait()), Made()  # type: ignore[arg-type]
    both = post(hangs, well)
    for number in range(100):
        both.offer(parcel(number))
        until(lambda number=number: well.kept[-1:] == [number])
    assert both.close(0.05) == ["made"]
    first, second = both.to_json()
    assert first["delivered"] == 0 and sum(first["undelivered"].values()) == 100 and first["queued"] == 0
    assert first["undelivered"] == {"overflow": 89, "stopped": 11}
    assert (second["delivered"], second["undelivered"]) == (100, {}) and both.complaints == []


def test_worker_retries_errors_and_logs_once(caplog):
    caplog.set_level("INFO", "gemel.run")
    errors: list[Exception] = [KeyError("x"), OSError(28, "No space left on device"), TimeoutError("late"), KeyError()]

    def does(_: Sequence[ResultMessage]) -> None:
        if errors:
            raise errors[0]

    made = Made(does)
    one = post(made)
    one.offer(parcel(1))
    until(lambda: len(made.opened) > 4)
    assert one.to_json()[0]["state"] == "down" and caplog.text.count("failed: ") == 1
    errors.clear()
    until(lambda: one.to_json()[0]["delivered"] == 1)
    assert one.close(10) == [] and "works again; 0 results were lost" in caplog.text


def test_worker_ends_when_its_reader_is_gone():
    def raise_closed(_: Sequence[ResultMessage]) -> None:
        raise SinkClosed("nobody reads it any more")

    one = post(Made(raise_closed))
    assert not one.is_unread
    one.offer(parcel(1))
    until(lambda: one.is_unread)
    one.offer(parcel(2))
    assert one.close(10) == [] and one.to_json()[0]["undelivered"] == {"gone": 2} and one.complaints == []


def test_worker_drains_at_close():
    away = threading.Event()
    away.set()

    def does(_: Sequence[ResultMessage]) -> None:
        if away.is_set():
            raise ConnectionRefusedError("away")

    made = Made(does)
    slow = SinkManager([made])
    slow.start()
    slow.offer(parcel(1))
    until(lambda: slow.to_json()[0]["state"] == "down")
    away.clear()
    assert slow.close(10) == [] and made.kept == [1]
