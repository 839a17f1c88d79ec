"""The sink `mqtt`: each result is a message to a broker, with Home Assistant's discovery on request."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from edge_runtime.drawing import draw_message
from edge_runtime.sinks.base import (
    BoxState,
    DeliveryError,
    ResultMessage,
    Sink,
    SinkConfig,
    Undelivered,
    client_context,
    host_name,
)

if TYPE_CHECKING:
    from typing_extensions import Self

KEEP_ALIVE_S = 30
TLS_PORT = 8883
CONNECT_TIMEOUT_S, ACKNOWLEDGE_TIMEOUT_S, FAREWELL_TIMEOUT_S = 5.0, 10.0, 1.0
POLL_INTERVAL_S = 0.1
"""Interval at which a wait for an acknowledgement checks the connection."""
ONLINE, OFFLINE = b"online", b"offline"
STREAMING, AWAY = b"streaming", b"away"
DISCOVERY_PREFIX = "homeassistant"
DIGEST_DIGITS = 8
TOPIC, NAMED_TOPIC = "gemel/{camera}/{query}", "gemel/{box}/{camera}/{query}"
"""Default topics, of a box without and with a name in its config."""
VALUE_TEMPLATES = {
    "label": "{{ value_json.label }}",
    "labels": "{{ value_json.labels | map(attribute='class') | join(', ') }}",
    "detections": "{{ value_json.detections | count }}",
    "segments": "{{ value_json.segments | map(attribute='class') | join(', ') }}",
}
"""By the key of an answer, the state of Home Assistant's sensor; vectors and tensors are none."""
PLACES = re.compile(r"\{(box|camera|query)\}")


def _check_topic(text: str) -> str:
    if re.search(r"[{}+#]", PLACES.sub("", text)) or text.startswith("$") or not text.isprintable():
        raise ValueError("is no topic to publish to: only {box}, {camera} and {query} in braces, no + or #, no $ first")
    return text


class MqttTls(BaseModel):
    """TLS to the broker: `ca` in place of the system's authorities, `cert` and `key` of this box where it asks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    @model_validator(mode="after")
    def _check_pair(self) -> MqttTls:
        if (self.cert is None) != (self.key is None):
            raise ValueError("a `cert` needs its `key`, and a `key` its `cert`")
        return self

    def resolve(self, root: Path) -> MqttTls:
        """The same with absolute paths."""
        paths = {name: None if path is None else root / path for name, path in self}
        return self.model_copy(update=paths)

    def context(self) -> ssl.SSLContext:
        """The context; InputError for files that cannot be used."""
        return client_context(self.ca, self.cert, self.key)


class MqttConfig(SinkConfig):
    """`topic` takes a message for each result, with `{box}`, `{camera}` and `{query}` filled in; with `snapshot` the
    JPEG goes to TOPIC/snapshot, and with `discovery` Home Assistant gets a sensor for each query.

    With `retain` the broker keeps the newest result of each query. `client_id` is made new at each start where left
    out. With `tls` the port is 8883 where left out.
    """

    kind: Literal["mqtt"] = "mqtt"
    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)] = 1883
    topic: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_check_topic)] = TOPIC
    qos: Annotated[int, Field(ge=0, le=2)] = 1
    snapshot: bool = False
    discovery: bool = False
    username: str | None = None
    password: str | None = Field(default=None, repr=False)
    client_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")] | None = None
    retain: bool = False
    tls: MqttTls | None = None
    _box: str = PrivateAttr(default_factory=host_name)

    @model_validator(mode="after")
    def _check_password_has_user(self) -> MqttConfig:
        if self.password is not None and self.username is None:
            raise ValueError("a password needs a `username`")
        return self

    @property
    def secret_file(self) -> Path | None:
        return None if self.tls is None else self.tls.key

    @property
    def wants_images(self) -> bool:
        return self.snapshot

    @property
    def name(self) -> str:
        return f"mqtt {self.host}:{self.port}"

    @property
    def box(self) -> str:
        """The box's name."""
        return self._box

    @property
    def status_topic(self) -> str:
        """The topic of the box's retained `online` and `offline`."""
        return f"{self._root}/{self.box}/status"

    def camera_topic(self, camera: str) -> str:
        """The topic of a camera's retained `streaming` and `away`."""
        return f"{self._root}/{camera}/{self.box}/status"

    def result_topic(self, camera: str, query: str) -> str:
        """The topic of a query's results."""
        return self.topic.format(box=self.box, camera=camera, query=query)

    def event_topic(self, camera: str, query: str, event: str) -> str:
        """The topic of the starts and ends of a query's events of one name."""
        return f"{self.result_topic(camera, query)}/events/{event}"

    @property
    def _root(self) -> str:
        """The constant levels with which all topics begin."""
        return self.topic.partition("{")[0].rpartition("/")[0] or "gemel"

    def check(self) -> None:
        if self.tls is not None:
            self.tls.context()

    def resolve(self, root: Path, box: str | None) -> Self:
        changes: dict[str, Any] = {}
        if box is not None and "topic" not in self.model_fields_set:
            changes["topic"] = NAMED_TOPIC
        if self.tls is not None:
            changes["tls"] = self.tls.resolve(root)
            if "port" not in self.model_fields_set:
                changes["port"] = TLS_PORT
        resolved = self.model_copy(update=changes)
        resolved._box = box or host_name()
        return resolved

    def topic_problem(self, cameras: Mapping[str, str]) -> tuple[str, str] | None:
        status_topics = {self.status_topic, *map(self.camera_topic, cameras.values())}
        owners: dict[str, str] = {}
        for query, camera in cameras.items():
            topic = self.result_topic(camera, query)
            if topic in status_topics:
                return f"query '{query}' has the topic of a status, {topic}", "begin with another level"
            if self.discovery and topic in owners:
                problem = f"queries '{owners[topic]}' and '{query}' have one topic, {topic}"
                return problem, "separate {camera} and {query} by slashes in it, or leave discovery out"
            owners[topic] = query
        return None

    def build(self) -> Mqtt:
        return Mqtt(self)


class Mqtt(Sink):
    """Publishes, and waits until the broker has acknowledged all (with QoS 0: until all has been sent).

    A failed connection is discarded whole, so that nothing waits in paho's own queue; unacknowledged messages are sent
    again over the next one, and may arrive twice.
    """

    batch = 16

    def __init__(self, config: MqttConfig) -> None:
        self.config = config
        self._client: Client | None = None
        self._is_announced = False
        self._discovered: dict[str, dict[str, bytes]] = {}
        self._reported: dict[str, bool] = {}
        self._id = config.client_id or f"gemel-{secrets.token_hex(6)}"

    def open(self) -> None:
        self.connect()
        status = self._publish(self.config.status_topic, ONLINE, 1, retain=True)
        self._is_announced = True
        for announcement in self._discovered.values():
            self._announce(announcement)
        self._await_acknowledgement([status])

    def connect(self) -> None:
        """Connect without publishing; OSError or DeliveryError where the broker does not accept this box."""
        self.close()
        config, answered, refusals = self.config, threading.Event(), []

        def take_answer(_client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
            if reason.is_failure:
                refusals.append(reason)
            answered.set()

        client = Client(CallbackAPIVersion.VERSION2, client_id=self._id, reconnect_on_failure=False)
        client.connect_timeout = CONNECT_TIMEOUT_S
        if config.tls is not None:
            client.tls_set_context(config.tls.context())
        if config.username is not None:
            client.username_pw_set(config.username, config.password)
        client.will_set(config.status_topic, OFFLINE, qos=1, retain=True)
        client.on_connect = client.on_disconnect = take_answer
        self._client, self._is_announced = client, False
        self._reported.clear()
        client.connect(config.host, config.port, KEEP_ALIVE_S)
        client.loop_start()
        if not answered.wait(CONNECT_TIMEOUT_S):
            raise DeliveryError(Undelivered.TIMEOUT, "the broker does not answer")
        if refusals:
            raise DeliveryError(Undelivered.REFUSED, f"the broker refuses: {refusals[0]}")

    def write(self, messages: Sequence[ResultMessage]) -> None:
        sent: list[MQTTMessageInfo] = []
        for message in messages:
            try:
                text = message.to_text().encode()
            except DeliveryError as error:
                self._await_acknowledgement(sent)
                error.delivered = len(sent)
                raise
            record = message.record
            topic = self.config.result_topic(record["camera"], record["query"])
            if "event" in record:
                topic = self.config.event_topic(record["camera"], record["query"], record["event"])
            elif self.config.discovery and topic not in self._discovered:
                self._discovered[topic] = dict(discovery_messages(self.config, topic, message.record))
                self._announce(self._discovered[topic])
            picture = draw_message(message) if self.config.snapshot else None
            if picture is not None:
                self._publish(f"{topic}/snapshot", picture, 0)
            sent.append(self._publish(topic, text, self.config.qos, self.config.retain))
        self._await_acknowledgement(sent)

    def report_state(self, state: BoxState) -> None:
        """Publish the status of the cameras where it has changed, announce the sensors of events, and remove those of
        removed queries and events."""
        gone = dict.fromkeys(self._reported.keys() - state.streams.keys(), False)
        for camera, streams in {**state.streams, **gone}.items():
            if self._reported.get(camera) is not streams:
                self._publish(self.config.camera_topic(camera), STREAMING if streams else AWAY, 1, retain=True)
                self._reported[camera] = streams
        topics = {self.config.result_topic(camera, query) for query, camera in state.cameras.items()}
        for query, names in state.events.items():
            for name in names:
                topic = self.config.event_topic(state.cameras[query], query, name)
                topics.add(topic)
                if self.config.discovery and topic not in self._discovered:
                    messages = event_discovery_messages(self.config, topic, state.cameras[query], query, name)
                    self._discovered[topic] = dict(messages)
                    self._announce(self._discovered[topic])
        for topic in self._discovered.keys() - topics:
            self._announce(dict.fromkeys(self._discovered.pop(topic), b""))

    def heartbeat(self) -> None:
        if self._client is None or not self._client.is_connected():
            raise DeliveryError(Undelivered.UNREACHABLE, "the connection is lost")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if self._is_announced and client.is_connected():
            # After an orderly disconnect the broker would not publish the last will.
            client.publish(self.config.status_topic, OFFLINE, qos=1, retain=True).wait_for_publish(FAREWELL_TIMEOUT_S)
        client.disconnect()
        client.loop_stop()

    def _announce(self, messages: Mapping[str, bytes]) -> None:
        for topic, payload in messages.items():
            self._publish(topic, payload, 1, retain=True)

    def _publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> MQTTMessageInfo:
        assert self._client is not None
        sent = self._client.publish(topic, payload, qos, retain)
        if sent.rc != MQTT_ERR_SUCCESS:
            raise DeliveryError(Undelivered.UNREACHABLE, "the connection is lost")
        return sent

    def _await_acknowledgement(self, sent: Sequence[MQTTMessageInfo]) -> None:
        deadline = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
        for number, info in enumerate(sent):
            while not info.is_published():
                try:
                    self.heartbeat()
                    if time.monotonic() >= deadline:
                        raise DeliveryError(Undelivered.TIMEOUT, "no acknowledgement")
                except DeliveryError as error:
                    error.delivered = number
                    raise
                info.wait_for_publish(POLL_INTERVAL_S)


def discovery_messages(config: MqttConfig, topic: str, record: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """(topic, payload) of the retained Home Assistant messages for the query of a record, whose results have `topic`.

    A sensor's state is the label, the number of detections or the classes of segments; its attributes are the record.
    It is available while both the box and the camera are. Its id is that of its box and topic, so that it survives
    restarts; the digest keeps ids apart whose names differ in punctuation only.
    """
    camera, query = record["camera"], record["query"]
    name = _entity_id(config.box, camera, query, unique=f"{config.box} {topic}")
    value = next((template for key, template in VALUE_TEMPLATES.items() if key in record), None)
    if value is None:
        return
    common = _common_keys(config, camera)
    sensor = {
        "name": query, "unique_id": name, "state_topic": topic, "value_template": value,
        "json_attributes_topic": topic, **common,
    }  # fmt: skip
    yield f"{DISCOVERY_PREFIX}/sensor/{name}/config", json.dumps(sensor).encode()
    if config.snapshot:
        yield _picture_message(config, topic, query, name, common)


def event_discovery_messages(
    config: MqttConfig, topic: str, camera: str, query: str, event: str
) -> Iterator[tuple[str, bytes]]:
    """(topic, payload) of the retained Home Assistant messages for a query's events of one name.

    The sensor's state is the number of events that go on; its attributes are the newest one.
    """
    name = _entity_id(config.box, camera, query, event, unique=f"{config.box} {topic}")
    common = _common_keys(config, camera)
    sensor = {
        "name": f"{query} {event}", "unique_id": name, "state_topic": topic, "value_template": "{{ value_json.open }}",
        "state_class": "measurement", "json_attributes_topic": topic,
        "json_attributes_template": "{{ value_json.after | tojson }}", **common,
    }  # fmt: skip
    yield f"{DISCOVERY_PREFIX}/sensor/{name}/config", json.dumps(sensor).encode()
    if config.snapshot:
        yield _picture_message(config, topic, f"{query} {event}", name, common)


def _picture_message(
    config: MqttConfig, topic: str, title: str, name: str, common: Mapping[str, Any]
) -> tuple[str, bytes]:
    picture = {
        "name": f"{title} snapshot", "unique_id": f"{name}_snapshot",
        "image_topic": f"{topic}/snapshot", "content_type": "image/jpeg", **common,
    }  # fmt: skip
    return f"{DISCOVERY_PREFIX}/image/{name}/config", json.dumps(picture).encode()


def _common_keys(config: MqttConfig, camera: str) -> dict[str, Any]:
    """What all sensors of a camera have in common: when they are available, and their device."""
    return {
        "availability": [
            {"topic": config.status_topic},
            {
                "topic": config.camera_topic(camera),
                "payload_available": STREAMING.decode(), "payload_not_available": AWAY.decode(),
            },
        ],
        "availability_mode": "all",
        "device": {
            "identifiers": [_entity_id(config.box, camera, unique=f"{config.box} {camera}")],
            "name": f"{config.box} {camera}", "manufacturer": "Gemel", "model": f"camera {camera} of box {config.box}",
        },
    }  # fmt: skip


def _entity_id(*names: str, unique: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", "_".join(("gemel", *names)))
    return f"{readable}_{hashlib.sha256(unique.encode()).hexdigest()[:DIGEST_DIGITS]}"
