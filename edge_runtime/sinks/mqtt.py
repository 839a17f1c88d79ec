"""The sink `mqtt`: each result is a message to a broker, with Home Assistant's discovery on request."""

from __future__ import annotations

import json
import logging
import math
import re
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr, model_validator

from gemel.edge_runtime.frames.drawing import draw_message
from gemel.edge_runtime.sinks.base import (
    CAMERA,
    QUERY,
    BoxState,
    DeliveryError,
    ResultMessage,
    Sink,
    SinkConfig,
    Undelivered,
    client_context,
    host_name,
)
from gemel.edge_runtime.sinks.discovery import (
    AWAY,
    STREAMING,
    CameraEntities,
    Messages,
    event_messages,
    query_messages,
    switch_messages,
    update_messages,
)

if TYPE_CHECKING:
    from typing_extensions import Self

KEEP_ALIVE_S = 30
TLS_PORT = 8883
CONNECT_TIMEOUT_S, ACKNOWLEDGE_TIMEOUT_S, FAREWELL_TIMEOUT_S = 5.0, 10.0, 1.0
POLL_INTERVAL_S = 0.1
"""Interval at which a wait for an acknowledgement checks the connection."""
MIN_LOSSES = 2
"""Connections that end after pictures, without an acknowledgement between: then that size is left out."""
MAX_HEAD_BYTES = 16
"""Of a message beside its topic and payload."""
UNSUPPORTED_VERSION, NO_RETAIN, NO_SUCH_QOS = 132, 154, 155
"""Reasons of MQTT 5 with which a broker refuses a connection, the last two for its last will."""
ONLINE, OFFLINE = b"online", b"offline"
ON, OFF = b"ON", b"OFF"
ORDERS = {ON: b'{"on": true}', OFF: b'{"on": false}'}
"""Words that stand for an order; any other is JSON itself."""
QUERY_STATES = ("/state", "/settings", "/open")
"""Ends of topics below that of a query or event."""
TOPIC = "gemel/{box}/{camera}/{query}"
log = logging.getLogger("gemel.run")
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
    """Each result is a message to an MQTT broker, which may give orders to the box.

    `topic` takes a message for each result, with `{box}`, `{camera}` and `{query}` filled in; with `snapshot` the
    JPEG goes to TOPIC/snapshot, and with `discovery` Home Assistant gets entities for each query and event. TOPIC/set
    takes ON, OFF and JSON (`edge_runtime.life.switches`).

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

    @property
    def update_topic(self) -> str:
        """The topic of the retained state of updates."""
        return f"{self._root}/{self.box}/update"

    def camera_topic(self, camera: str) -> str:
        """The topic of a camera's retained `streaming` and `away`."""
        return f"{self._root}/{self.box}/{camera}/status"

    def camera_switch_topic(self, camera: str) -> str:
        """The topic that takes ON and OFF for all queries of a camera."""
        return f"{self._root}/{self.box}/{camera}/set"

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
        if self.tls is not None:
            changes["tls"] = self.tls.resolve(root)
            if "port" not in self.model_fields_set:
                changes["port"] = TLS_PORT
        resolved = self.model_copy(update=changes)
        resolved._box = box or host_name()
        return resolved

    def topic_problem(self, cameras: Mapping[str, str]) -> tuple[str, str] | None:
        reserved = {self.status_topic, self.update_topic, *map(self.camera_topic, cameras.values())}
        reserved |= {self.camera_switch_topic(camera) for camera in cameras.values()}
        owners: dict[str, str] = {}
        for query, camera in cameras.items():
            topic = self.result_topic(camera, query)
            if topic in reserved:
                return f"query '{query}' has the topic of a status or switch, {topic}", "begin with another level"
            if self.discovery and topic in owners:
                problem = f"queries '{owners[topic]}' and '{query}' have one topic, {topic}"
                return problem, "separate {camera} and {query} by slashes in it, or leave discovery out"
            owners[topic] = query
        return None

    def build(self) -> Mqtt:
        return Mqtt(self)


class _OldBrokerError(Exception):
    """A broker that does not speak MQTT 5."""


def _knows_no_version_5(reason: Any) -> bool:
    """Whether a broker refuses the version, or hangs up at it."""
    return reason.packetType != PacketTypes.CONNACK or reason.value == UNSUPPORTED_VERSION


class Mqtt(Sink):
    """Publishes, and waits until the broker has acknowledged all (with QoS 0: until all has been sent).

    A failed connection is discarded whole, so that nothing waits in paho's own queue; unacknowledged messages are sent
    again over the next one, and may arrive twice. Pictures follow the results of a batch. What is larger than the
    broker takes is left out: MQTT 5 says the limit; else pictures at which the connection ended `MIN_LOSSES` times.
    """

    batch = 16
    _protocol = MQTTProtocolVersion.MQTTv5

    def __init__(self, config: MqttConfig) -> None:
        self.config = config
        self._client: Client | None = None
        self._is_announced = False
        self._discovered: dict[str, dict[str, bytes]] = {}
        self._reported: dict[str, bytes] = {}
        self._open: dict[str, bytes] = {}
        self._switches: dict[str, tuple[str, str]] = {}
        self._max_bytes = math.inf
        self._max_qos, self._retains = 2, True
        self._max_picture = math.inf
        self._doubtful, self._losses = 0, 0  # the largest picture since the last acknowledgement; connections it ended
        self._left_out = set[str]()
        self._id = config.client_id or f"gemel-{secrets.token_hex(6)}"

    def open(self) -> None:
        self.connect()
        status = self._publish(self.config.status_topic, ONLINE, 1, retain=True)
        self._is_announced = True
        for announcement in self._discovered.values():
            self._announce(announcement)
        self._await_acknowledgement([status])

    def connect(self) -> None:
        """Connect without publishing; OSError or DeliveryError where the broker does not accept this box.

        A broker that knows no MQTT 5 gets MQTT 3.1.1.
        """
        self._judge_picture()
        try:
            self._connect()
        except _OldBrokerError:
            self._protocol = MQTTProtocolVersion.MQTTv311
            self._connect()

    def _lower(self, refusal: int) -> bool:
        """Ask less of a broker that refuses a connection so; whether that is less than before."""
        before = self._max_qos, self._retains
        if refusal == NO_RETAIN:
            self._retains = False
        elif refusal == NO_SUCH_QOS:
            self._max_qos = 0
        if before == (self._max_qos, self._retains):
            return False
        text = "QoS above 0" if refusal == NO_SUCH_QOS else "retained messages: who subscribes later sees no state"
        log.warning("sink %s: the broker knows no %s", self.config.name, text)
        return True

    def _connect(self) -> None:
        self.close()
        config, answered, refusals = self.config, threading.Event(), []

        def take_answer(_client: Client, _data: Any, _flags: Any, reason: Any, properties: Any) -> None:
            if reason.is_failure:
                refusals.append(reason)
            else:
                self._max_qos = min(self._max_qos, getattr(properties, "MaximumQoS", 2))
            self._max_bytes = getattr(properties, "MaximumPacketSize", math.inf)
            answered.set()

        client = Client(
            CallbackAPIVersion.VERSION2, client_id=self._id, reconnect_on_failure=False, protocol=self._protocol
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        if config.tls is not None:
            client.tls_set_context(config.tls.context())
        if config.username is not None:
            client.username_pw_set(config.username, config.password)
        client.will_set(config.status_topic, OFFLINE, qos=min(1, self._max_qos), retain=self._retains)
        client.on_connect = client.on_disconnect = take_answer
        client.on_message = self._take_command
        self._client, self._is_announced = client, False
        self._reported.clear()
        self._switches = {}
        client.connect(config.host, config.port, KEEP_ALIVE_S)
        client.loop_start()
        if not answered.wait(CONNECT_TIMEOUT_S):
            raise DeliveryError(Undelivered.TIMEOUT, "the broker does not answer")
        if refusals and self._protocol is MQTTProtocolVersion.MQTTv5 and _knows_no_version_5(refusals[0]):
            raise _OldBrokerError
        if refusals and self._lower(refusals[0].value):
            return self._connect()
        if refusals:
            raise DeliveryError(Undelivered.REFUSED, f"the broker refuses: {refusals[0]}")

    def write(self, messages: Sequence[ResultMessage]) -> None:
        sent: list[MQTTMessageInfo | None] = []
        pictures: list[tuple[str, bytes]] = []
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
                self._open[f"{topic}/open"] = str(record["open"]).encode()
                self._report(f"{topic}/open", self._open[f"{topic}/open"])
            elif self.config.discovery and topic not in self._discovered:
                self._discovered[topic] = dict(query_messages(self._entities(record["camera"]), topic, message.record))
                self._announce(self._discovered[topic])
            picture = draw_message(message) if self.config.snapshot else None
            if picture is not None:
                pictures.append((f"{topic}/snapshot", picture))
            sent.append(self._publish(topic, text, self.config.qos, self.config.retain))
        self._await_acknowledgement(sent)
        for topic, picture in pictures:
            self._publish_picture(topic, picture)

    def _publish_picture(self, topic: str, picture: bytes) -> None:
        """Publish a picture, unless the broker would end the connection for it."""
        if len(picture) > self._max_picture:
            self._note_left_out(topic, len(picture), self._max_picture)
            return
        if self._publish(topic, picture, 0) is not None:
            self._doubtful = max(self._doubtful, len(picture))

    def _judge_picture(self) -> None:
        """Where connections end after pictures and before any acknowledgement, leave pictures of that size out."""
        if not self._doubtful:
            return
        self._losses += 1
        if self._losses >= MIN_LOSSES:
            self._max_picture, self._losses = self._doubtful - 1, 0
        self._doubtful = 0

    def _note_left_out(self, topic: str, nbytes: int, most: float) -> None:
        if topic not in self._left_out:
            self._left_out.add(topic)
            text = f"{nbytes} bytes, of which the broker takes {most:.0f}"
            log.warning("sink %s: what is too large for %s is left out: %s", self.config.name, topic, text)

    def report_state(self, state: BoxState) -> None:
        """Publish what has changed of cameras and switches, announce switches and events, and remove those of removed
        queries and events."""
        config = self.config
        streams = {config.camera_topic(camera): STREAMING if on else AWAY for camera, on in state.streams.items()}
        gone = [topic for topic, payload in self._reported.items() if payload == STREAMING and topic not in streams]
        streams |= dict.fromkeys(gone, AWAY)
        for topic, payload in streams.items():
            self._report(topic, payload)
        self._subscribe(state)
        topics = set[str]()
        if state.update is not None:
            topic = config.update_topic
            topics.add(topic)
            self._report(topic, json.dumps(state.update).encode())
            if config.discovery and topic not in self._discovered:
                self._discovered[topic] = dict(update_messages(config.box, config.status_topic, topic))
                self._announce(self._discovered[topic])
        for query, camera in state.cameras.items():
            topic = config.result_topic(camera, query)
            held = state.settings.get(query, {})
            self._report(f"{topic}/state", ON if held.get("on", True) else OFF)
            self._report(f"{topic}/settings", json.dumps(held).encode())
            topics |= {topic, f"{topic}/set"}
            self._discover(f"{topic}/set", switch_messages, camera, topic, query, held)
            for name, kind in state.events.get(query, {}).items():
                event_topic = config.event_topic(camera, query, name)
                topics.add(event_topic)
                self._report(f"{event_topic}/open", self._open.setdefault(f"{event_topic}/open", b"0"))
                self._discover(event_topic, event_messages, camera, event_topic, query, name, kind)
        described = {f"{topic}{ending}" for topic in topics for ending in QUERY_STATES}
        for topic in self._reported.keys() - described:
            if topic.endswith(QUERY_STATES):
                self._publish(topic, b"", 1, retain=True)
                del self._reported[topic]
        for topic in self._discovered.keys() - topics:
            self._announce(dict.fromkeys(self._discovered.pop(topic), b""))

    def _report(self, topic: str, payload: bytes) -> None:
        """Publish a retained state where it has changed."""
        if self._reported.get(topic) != payload:
            self._publish(topic, payload, 1, retain=True)
            self._reported[topic] = payload

    def _discover(self, key: str, describe: Callable[..., Messages], camera: str, *given: Any) -> None:
        """Announce the entities of a topic, once."""
        if self.config.discovery and key not in self._discovered:
            self._discovered[key] = dict(describe(self._entities(camera), *given))
            self._announce(self._discovered[key])

    def _entities(self, camera: str) -> CameraEntities:
        config = self.config
        return CameraEntities(
            config.box, camera, config.status_topic, config.camera_topic(camera), config.snapshot
        )  # fmt: skip

    def _subscribe(self, state: BoxState) -> None:
        """Take commands for these cameras and queries."""
        switches = {
            **{self.config.camera_switch_topic(camera): (CAMERA, camera) for camera in state.cameras.values()},
            **{
                f"{self.config.result_topic(camera, query)}/set": (QUERY, query)
                for query, camera in state.cameras.items()
            },
        }
        assert self._client is not None
        new = [(topic, 1) for topic in switches.keys() - self._switches.keys()]
        gone = list(self._switches.keys() - switches.keys())
        self._switches = switches
        if new:
            self._client.subscribe(new)
        if gone:
            self._client.unsubscribe(gone)

    def _take_command(self, _client: Client, _data: Any, message: Any) -> None:
        """A message to a `set` topic; a retained one is old."""
        target = self._switches.get(message.topic)
        if target is None or message.retain:
            return
        order = bytes(message.payload)
        self.switch(*target, ORDERS.get(order, order), f"mqtt {self.config.host}")

    def heartbeat(self) -> None:
        if self._client is None or not self._client.is_connected():
            raise DeliveryError(Undelivered.UNREACHABLE, "the connection is lost")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if self._is_announced and client.is_connected():
            # After an orderly disconnect the broker would not publish the last will.
            farewell = client.publish(self.config.status_topic, OFFLINE, min(1, self._max_qos), self._retains)
            farewell.wait_for_publish(FAREWELL_TIMEOUT_S)
        client.disconnect()
        client.loop_stop()

    def _announce(self, messages: Mapping[str, bytes]) -> None:
        for topic, payload in messages.items():
            self._publish(topic, payload, 1, retain=True)

    def _publish(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> MQTTMessageInfo | None:
        """Publish, unless it is larger than the broker takes: None."""
        assert self._client is not None
        if len(payload) + len(topic.encode()) + MAX_HEAD_BYTES > self._max_bytes:
            self._note_left_out(topic, len(payload), self._max_bytes)
            return None
        sent = self._client.publish(topic, payload, min(qos, self._max_qos), retain and self._retains)
        if sent.rc != MQTT_ERR_SUCCESS:
            raise DeliveryError(Undelivered.UNREACHABLE, "the connection is lost")
        return sent

    def _await_acknowledgement(self, sent: Sequence[MQTTMessageInfo | None]) -> None:
        deadline = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
        for number, info in enumerate(sent):
            while info is not None and not info.is_published():
                try:
                    self.heartbeat()
                    if time.monotonic() >= deadline:
                        raise DeliveryError(Undelivered.TIMEOUT, "no acknowledgement")
                except DeliveryError as error:
                    error.delivered = number
                    raise
                info.wait_for_publish(POLL_INTERVAL_S)
        if sent and self.config.qos and self._doubtful:  # the connection has survived these pictures
            self._doubtful = self._losses = 0
