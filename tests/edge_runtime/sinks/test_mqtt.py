"""MQTT, to a real broker that is frozen, ended and started again."""

from __future__ import annotations

import contextlib
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
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion

from gemel.edge_runtime.sinks import mqtt
from gemel.edge_runtime.sinks.base import BoxState, host_name
from gemel.edge_runtime.sinks.mqtt import Mqtt, MqttConfig
from gemel.models.errors import InputError
from tests.certificates import write_certificate
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

    def publish(self, topic: str, payload: bytes, retain: bool = False) -> None:
        self._client.publish(topic, payload, 1, retain).wait_for_publish(10)

    def of(self, topic: str) -> list[Any]:
        return [payload for name, payload in list(self.got) if name == topic]

    def frames(self, topic: str = "gemel/north/left/gate") -> list[int]:
        return [json.loads(payload)["frame"] for payload in self.of(topic)]

    def entities(self) -> dict[str, Any]:
        """What Home Assistant knows: the newest message of each discovery topic, where it is not empty."""
        newest = {topic: payload for topic, payload in list(self.got) if topic.startswith("homeassistant/")}
        return {topic: json.loads(payload) for topic, payload in newest.items() if payload}

    def is_available(self, entity: dict[str, Any]) -> bool:
        """Home Assistant's rule: with the mode `all` each topic must have said that it is available."""
        assert entity["availability_mode"] == "all"
        return all(
            self.of(one["topic"])[-1:] == [one.get("payload_available", "online").encode()]
            for one in entity["availability"]
        )

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


def box_config(port: int, box: str | None = "north", **keys: Any) -> MqttConfig:
    """A sink of a box with this name."""
    return MqttConfig(host="127.0.0.1", port=port, **keys).resolve(Path(), box)


def test_mqtt_publishes_results_and_snapshots(broker, reader):
    config = box_config(broker.port, snapshot=True)
    with running_worker(config) as worker:
        for number in range(40):
            worker.offer(make_message(number, image=number == 39))
        until(lambda: worker.to_json()["delivered"] == 40)
        until(lambda: len(reader.frames()) == 40 and reader.of("gemel/north/left/gate/snapshot"))
        assert reader.frames() == list(range(40))
        assert json.loads(reader.of("gemel/north/left/gate")[0]) == make_message(0).record
        picture = cv2.imdecode(
            np.frombuffer(reader.of("gemel/north/left/gate/snapshot")[0], np.uint8), cv2.IMREAD_COLOR
        )
        assert picture is not None and picture.shape == (48, 64, 3)
        assert reader.of(config.status_topic) == [b"online"]
    until(lambda: reader.of(config.status_topic) == [b"online", b"offline"])


@pytest.mark.parametrize("is_old", [False, True], ids=["MQTT 5", "MQTT 3.1.1"])
def test_mqtt_leaves_out_pictures_that_the_broker_refuses(tmp_path, caplog, monkeypatch, is_old: bool):
    if is_old:
        monkeypatch.setattr(Mqtt, "_protocol", MQTTProtocolVersion.MQTTv311)
    broker = Broker(tmp_path, "max_packet_size 900")
    reader = Reader(broker.port)
    try:
        with running_worker(box_config(broker.port, snapshot=True)) as worker:
            for number in range(30):
                worker.offer(make_message(number, image=True))
                until(lambda number=number: number in reader.frames())
            until(lambda: worker.to_json()["delivered"] == 30)
        assert sorted(set(reader.frames())) == list(range(30))
        assert not reader.of("gemel/north/left/gate/snapshot")
        lines = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
        assert len(lines) == 1 and "gemel/north/left/gate/snapshot is left out: " in lines[0]
    finally:
        reader.close()
        broker.end()


@pytest.mark.parametrize("keys, missing", [("retain_available false", "retained"), ("max_qos 0", "QoS")])
def test_mqtt_asks_no_more_than_the_broker_knows(tmp_path, caplog, keys: str, missing: str):
    broker = Broker(tmp_path, keys)
    reader = Reader(broker.port)
    try:
        with running_worker(box_config(broker.port, qos=2, retain=True)) as worker:
            for number in range(3):
                worker.offer(make_message(number))
            until(lambda: reader.frames() == [0, 1, 2] and worker.to_json()["delivered"] == 3)
        lines = [one.getMessage() for one in caplog.records if "the broker knows no" in one.getMessage()]
        assert len(lines) == 1 and missing in lines[0]
    finally:
        reader.close()
        broker.end()


QUERIES = [("side", "gate_cars"), ("side_gate", "cars"), ("lot.2", "cars2"), ("lot_2", "cars2b"), ("lot-2", "cars-2")]


def test_mqtt_discovery_of_similar_names_and_two_boxes_is_distinct(broker, reader):
    configs = [box_config(broker.port, box, snapshot=True, discovery=True) for box in ("north", "south.1", "south_1")]
    state = BoxState({camera: True for camera, _ in QUERIES}, {query: camera for camera, query in QUERIES})
    with contextlib.ExitStack() as stack:
        for config in configs:
            assert config.topic_problem(state.cameras) is None
            worker = stack.enter_context(running_worker(config, state=lambda: state))
            for camera, query in QUERIES:
                worker.offer(make_message(1, camera=camera, query=query))
            until(lambda worker=worker: worker.to_json()["delivered"] == len(QUERIES))
        count = len(configs) * len(QUERIES)
        until(lambda: len(reader.entities()) == 3 * count)
    entities = reader.entities()
    sensors = [entity for topic, entity in entities.items() if topic.startswith("homeassistant/sensor/")]
    assert len({entity["unique_id"] for entity in entities.values()}) == 3 * count
    assert len({sensor["state_topic"] for sensor in sensors}) == count
    assert len({str(sensor["device"]["identifiers"]) for sensor in sensors}) == count, "a device for each camera"
    assert len({str(sensor["availability"]) for sensor in sensors}) == count
    for sensor in sensors:
        box, camera, query = sensor["state_topic"].removeprefix("gemel/").split("/")
        assert (sensor["name"], sensor["device"]["name"]) == (query, f"{box} {camera}")
        status = sensor["availability"][0]["topic"]
        until(lambda status=status: reader.of(status) == [b"online", b"offline"])


def test_mqtt_camera_away_makes_only_its_sensors_unavailable(broker, reader):
    streams = {"left": True, "back": True}
    config = box_config(broker.port, discovery=True)
    with running_worker(config, state=lambda: BoxState(dict(streams), {"gate": "left", "bins": "back"})) as worker:
        worker.offer(make_message(1))
        worker.offer(make_message(2, camera="back", query="bins"))
        until(lambda: len(reader.entities()) == 4)
        sensors = {sensor["name"]: sensor for sensor in reader.entities().values()}
        until(lambda: reader.is_available(sensors["gate"]) and reader.is_available(sensors["bins"]))
        streams["left"] = False
        until(lambda: not reader.is_available(sensors["gate"]))
        assert reader.is_available(sensors["bins"])
        del streams["back"]
        until(lambda: not reader.is_available(sensors["bins"]))


def test_mqtt_broker_without_memory_gets_sensors_and_states_again(broker, reader):
    streams = {"left": True}
    config = box_config(broker.port, discovery=True)
    with running_worker(config, state=lambda: BoxState(dict(streams), {"gate": "left"})) as worker:
        worker.offer(make_message(1))
        until(lambda: len(reader.entities()) == 2)
        broker.end()
        until(lambda: worker.to_json()["state"] == "down")
        streams["left"] = False
        broker.start()
        with contextlib.closing(Reader(broker.port)) as later:
            until(lambda: later.entities() == reader.entities() and later.of(config.camera_topic("left")))
            assert later.of(config.camera_topic("left")) == [b"away"]
            streams["left"] = True
            until(lambda: all(map(later.is_available, later.entities().values())))


def test_mqtt_removed_query_leaves_home_assistant(broker, reader):
    cameras = {"gate": "left", "bins": "left"}
    with running_worker(box_config(broker.port, discovery=True), state=lambda: BoxState({}, dict(cameras))) as worker:
        for query in cameras:
            worker.offer(make_message(1, query=query))
        until(lambda: len(reader.entities()) == 4)
        del cameras["bins"]
        until(lambda: len(reader.entities()) == 2)
        until(lambda: reader.of("gemel/north/left/bins/state") == [b"ON", b""])
    assert {entity["name"] for entity in reader.entities().values()} == {"gate", "gate on"}


def test_mqtt_events_have_a_topic_a_sensor_and_their_snapshot(broker, reader):
    events = {"gate": {"enter": "enter", "queue": "count"}}
    config = box_config(broker.port, discovery=True, snapshot=True)
    snapshot = {"frame": 1, "frame_time": 1.0, "box": [5, 5, 20, 20], "score": 0.9, "label": "car"}
    after = {"id": "r-1", "label": "car", "snapshot": snapshot}
    with running_worker(config, state=lambda: BoxState({}, {"gate": "left"}, dict(events))) as worker:
        until(lambda: len(reader.entities()) == 7)  # before the first event
        until(lambda: reader.of("gemel/north/left/gate/events/enter/open") == [b"0"])
        worker.offer(make_message(1, image=True, event="enter", type="new", open=1, before=after, after=after))
        until(lambda: reader.of("gemel/north/left/gate/events/enter/snapshot"))
        until(lambda: reader.of("gemel/north/left/gate/events/enter"))
        (text,) = reader.of("gemel/north/left/gate/events/enter")
        assert json.loads(text)["open"] == 1 and reader.of("gemel/north/left/gate") == []
        (picture,) = reader.of("gemel/north/left/gate/events/enter/snapshot")
        drawn = cv2.imdecode(np.frombuffer(picture, np.uint8), cv2.IMREAD_COLOR)
        assert drawn is not None and drawn.shape == (48, 64, 3) and drawn.std() > 5
        assert reader.of("gemel/north/left/gate/events/enter/open") == [b"0", b"1"]
        events["gate"] = {"enter": "enter"}
        until(lambda: len(reader.entities()) == 4)
    kinds = {topic.split("/")[1]: entity for topic, entity in reader.entities().items()}
    assert kinds["event"]["state_topic"] == "gemel/north/left/gate/events/enter"
    assert kinds["binary_sensor"]["state_topic"] == "gemel/north/left/gate/events/enter/open"


def test_mqtt_switches_queries_and_cameras_and_says_what_holds(broker, reader):
    orders: list[tuple[str, str, bytes]] = []
    settings: dict[str, dict[str, Any]] = {"gate": {"on": True, "fps": 5.0, "min_score": 0.0}}

    def take(kind: str, name: str, order: bytes, by: str) -> None:
        assert by == "mqtt 127.0.0.1"
        orders.append((kind, name, order))
        if order.startswith(b"{") and name == "gate":
            settings["gate"] = {**settings["gate"], **json.loads(order)}

    config = box_config(broker.port, discovery=True)
    reader.publish("gemel/north/left/gate/set", b"OFF", retain=True)
    state = lambda: BoxState({"left": True}, {"gate": "left"}, settings=settings)  # noqa: E731
    with running_worker(config, state=state, switch=take):
        until(lambda: reader.of("gemel/north/left/gate/state") == [b"ON"])
        reader.publish("gemel/north/left/gate/set", b"OFF")
        until(lambda: reader.of("gemel/north/left/gate/state") == [b"ON", b"OFF"])
        reader.publish("gemel/north/left/gate/set", b'{"fps": 2.5}')
        until(lambda: json.loads(reader.of("gemel/north/left/gate/settings")[-1])["fps"] == 2.5)
        reader.publish("gemel/north/left/set", b"ON")
        until(lambda: len(orders) == 3)
    assert orders == [
        ("query", "gate", b'{"on": false}'),
        ("query", "gate", b'{"fps": 2.5}'),
        ("camera", "left", b'{"on": true}'),
    ], "a retained order is old"
    numbers = [one for topic, one in reader.entities().items() if topic.startswith("homeassistant/number/")]
    assert {one["command_template"] for one in numbers} == {'{"fps": {{ value }}}', '{"min_score": {{ value }}}'}
    (switch,) = [entity for topic, entity in reader.entities().items() if topic.startswith("homeassistant/switch/")]
    assert switch["command_topic"] == "gemel/north/left/gate/set"
    assert switch["state_topic"] == "gemel/north/left/gate/state"


def test_mqtt_says_where_an_update_is(broker, reader):
    update: dict[str, Any] = {"installed": "aaa", "offered": None, "state": "current", "why": None, "trouble": None}
    state = lambda: BoxState(update=update)  # noqa: E731
    with running_worker(box_config(broker.port, discovery=True), state=state):
        until(lambda: reader.of("gemel/north/update"))
        until(lambda: len(reader.entities()) == 2)
        update = {**update, "offered": "bbb", "state": "refused", "why": "it is cut"}
        until(lambda: json.loads(reader.of("gemel/north/update")[-1])["why"] == "it is cut")
    kinds = {topic.split("/")[1]: entity for topic, entity in reader.entities().items()}
    assert kinds["update"]["state_topic"] == kinds["sensor"]["state_topic"] == "gemel/north/update"
    assert kinds["update"]["device"]["name"] == "north" and "command_topic" not in kinds["update"]


@pytest.mark.parametrize(
    ("topic", "discovery", "problem"),
    [
        (None, True, "query 'status' has the topic of a status or switch, gemel/north/left/status"),
        ("site/{query}", True, ""),
        ("site/{camera}", False, ""),
        ("site/{camera}", True, "queries 'gate' and 'bins' have one topic, site/left"),
        ("site/all", True, "queries 'gate' and 'bins' have one topic, site/all"),
        ("{camera}-{query}", True, "queries 'bins' and 'east-bins' have one topic, back-east-bins"),
        ("gemel/{box}/{query}", False, "query 'status' has the topic of a status or switch, gemel/north/status"),
    ],
)
def test_mqtt_topic_shared_by_queries_is_refused(topic, discovery, problem):
    keys = {} if topic is None else {"topic": topic}
    cameras = {"gate": "left", "bins": "back-east", "east-bins": "back", "status": "left"}
    if "-" not in (topic or ""):
        cameras = {"gate": "left", "bins": "left", "status": "left"}
    found = box_config(1, discovery=discovery, **keys).topic_problem(cameras)
    assert problem == (found or ("",))[0]


def test_mqtt_default_topic_has_the_name_that_a_box_is_given():
    named, unnamed = box_config(1), box_config(1, None)
    assert named.result_topic("left", "gate") == "gemel/north/left/gate"
    assert named.camera_topic("left") == "gemel/north/left/status" and named.status_topic == "gemel/north/status"
    assert unnamed.result_topic("left", "gate") == f"gemel/{host_name()}/left/gate"
    assert box_config(1, topic="/a/b-{camera}/{box}").status_topic == "/a/north/status"


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
    until(lambda: reader.of(sink.config.status_topic) == [b"online"])
    assert sink._client is not None
    sink._client.socket().shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]
    until(lambda: reader.of(sink.config.status_topic) == [b"online", b"offline"])
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


def test_mqtt_over_tls_with_its_own_certificate_id_and_retained_results(tmp_path):
    cert, key = write_certificate(tmp_path, "broker")
    own, own_key = write_certificate(tmp_path, "own")
    tls = [f"cafile {own}", f"certfile {cert}", f"keyfile {key}", "require_certificate true",
           "use_identity_as_username false", f"log_dest file {tmp_path}/broker.log", "log_type all"]  # fmt: skip
    broker = Broker(tmp_path, *tls)
    try:
        keys = {"host": "127.0.0.1", "port": broker.port, "client_id": "north-gate", "retain": True}
        files = {"ca": "broker.pem", "cert": "own.pem", "key": "own.key"}
        config = MqttConfig.model_validate({"tls": files, **keys}).resolve(tmp_path, None)
        config.check()
        with running_worker(config) as worker:
            worker.offer(make_message(1))
            until(lambda: worker.to_json()["delivered"] == 1)
        until(lambda: "as north-gate" in (tmp_path / "broker.log").read_text())
        newest: list[bytes] = []
        client = Client(CallbackAPIVersion.VERSION2)
        client.tls_set(str(cert), str(own), str(own_key))
        client.on_connect = lambda *_: (client.subscribe(config.result_topic("left", "gate")), None)[1]
        client.on_message = lambda client, data, message: newest.append(bytes(message.payload))
        client.connect("127.0.0.1", broker.port)
        client.loop_start()
        until(lambda: newest)
        client.disconnect()
        client.loop_stop()
        assert json.loads(newest[0])["frame"] == 1, "a retained result comes to later readers"
        for other in ({}, {"ca": "own.pem", "cert": "own.pem", "key": "own.key"}, {"ca": "broker.pem"}):
            assert (
                MqttConfig.model_validate({"tls": other, **keys}).resolve(tmp_path, None).check_reachable() is not None
            )
    finally:
        broker.end()


def test_mqtt_tls_files_that_do_not_fit_are_input_errors(tmp_path):
    write_certificate(tmp_path, "a")
    write_certificate(tmp_path, "b")
    config = MqttConfig.model_validate({"host": "h", "tls": {"ca": "a.pem", "cert": "a.pem", "key": "b.key"}}).resolve(
        tmp_path, None
    )
    assert config.port == 8883
    with pytest.raises(InputError, match="does not belong to its key"):
        config.check()
    with pytest.raises(ValueError, match="needs its `key`"):
        MqttConfig.model_validate({"host": "h", "tls": {"cert": "a.pem"}})
