"""MQTT, to a real broker that is frozen, ended and started again."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from paho.mqtt.client import Client
from paho.mqtt.enums import CallbackAPIVersion

from edge_runtime.sinks import mqtt
from edge_runtime.sinks.mqtt import MqttConfig
from tests.edge_runtime.sinks.broker import MOSQUITTO, Broker
from tests.edge_runtime.sinks.messages import make_message, running_worker, until

pytestmark = pytest.mark.skipif(MOSQUITTO is None, reason="the broker mosquitto is not installed")


class Reader:
    """Subscribes to all topics of a broker."""

    def __init__(self, port: int) -> None:
        self.got: list[tuple[str, bytes]] = []
        self._subscribed = threading.Event()
        self._client = Client(CallbackAPIVersion.VERSION2)
        self._client.on_message = lambda client, data, message: self.got.append((message.topic, bytes(message.payload)))
        self._client.on_subscribe = lambda *_: self._subscribed.set()
        self._client.connect("127.0.0.1", port)
        self._client.loop_start()
        self._client.subscribe("#", qos=1)
        assert self._subscribed.wait(10)

    def of(self, topic: str) -> list[Any]:
        return [payload for name, payload in list(self.got) if name == topic]

    def frames(self, topic: str = "gemel/left/gate") -> list[int]:
        return [json.loads(payload)["frame"] for payload in self.of(topic)]

    def close(self) -> None:
        self._client.disconnect()
        self._client.loop_stop()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker(tmp_path)
    yield broker
    broker.end()


@pytest.fixture
def reader(broker: Broker) -> Iterator[Reader]:
    reader = Reader(broker.port)
    yield reader
    reader.close()


def test_mqtt_publishes_results_snapshots_and_discovery(broker, reader):
    config = MqttConfig(host="127.0.0.1", port=broker.port, snapshot=True, discovery=True)
    with running_worker(config) as worker:
        for number in range(40):
            worker.offer(make_message(number, image=number == 39))
        until(lambda: worker.to_json()["delivered"] == 40)
        until(lambda: len(reader.frames()) == 40 and reader.of("gemel/left/gate/snapshot"))
        assert reader.frames() == list(range(40))
        assert json.loads(reader.of("gemel/left/gate")[0]) == make_message(0).record
        picture = cv2.imdecode(np.frombuffer(reader.of("gemel/left/gate/snapshot")[0], np.uint8), cv2.IMREAD_COLOR)
        assert picture is not None and picture.shape == (48, 64, 3)
        (sensor,) = map(json.loads, reader.of("homeassistant/sensor/gemel_gemel_left_gate/config"))
        assert (sensor["state_topic"], sensor["availability_topic"]) == ("gemel/left/gate", "gemel/status")
        assert reader.of("gemel/status") == [b"online"]
    until(lambda: reader.of("gemel/status") == [b"online", b"offline"])


def test_mqtt_resends_after_broker_restart(broker, caplog):
    with running_worker(MqttConfig(host="127.0.0.1", port=broker.port), items=5) as worker:
        worker.offer(make_message(0))
        until(lambda: worker.to_json()["delivered"] == 1)
        broker.end()
        until(lambda: worker.to_json()["state"] == "down")
        for number in range(1, 21):
            worker.offer(make_message(number))
        assert worker.to_json()["undelivered"] == {"unreachable": 15}
        broker.start()
        until(lambda: worker.to_json()["state"] == "up" and worker.to_json()["queued"] == 0)
        assert worker.to_json()["delivered"] == 6
    assert caplog.text.count("failed: ") == 1


def test_mqtt_resends_unacknowledged_messages(broker, monkeypatch):
    monkeypatch.setattr(mqtt, "ACKNOWLEDGE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(mqtt, "CONNECT_TIMEOUT_S", 0.3)
    with running_worker(MqttConfig(host="127.0.0.1", port=broker.port)) as worker:
        worker.offer(make_message(0))
        until(lambda: worker.to_json()["delivered"] == 1)
        broker.process.send_signal(signal.SIGSTOP)
        worker.offer(make_message(1))
        until(lambda: worker.to_json()["state"] == "down")
        broker.process.send_signal(signal.SIGCONT)
        until(lambda: worker.to_json()["delivered"] == 2)
    assert not worker.to_json()["undelivered"]


def test_mqtt_last_will_reports_offline(broker, reader):
    sink = mqtt.Mqtt(MqttConfig(host="127.0.0.1", port=broker.port))
    sink.open()
    until(lambda: reader.of("gemel/status") == [b"online"])
    assert sink._client is not None
    sink._client.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    until(lambda: reader.of("gemel/status") == [b"online", b"offline"])
    sink.close()


def test_mqtt_check_publishes_nothing(broker, reader, tmp_path):
    config = MqttConfig(host="127.0.0.1", port=broker.port)
    assert config.check_reachable() is None and reader.got == []
    broker.end()
    assert "does not answer" in (config.check_reachable() or "")
    (tmp_path / "closed").mkdir()
    closed = Broker(tmp_path / "closed", "allow_anonymous false")
    try:
        refused = MqttConfig(host="127.0.0.1", port=closed.port, username="me", password="s3cret")
        problem = refused.check_reachable() or ""
        assert "refuses" in problem and "s3cret" not in f"{refused!r}{problem}"
    finally:
        closed.end()
