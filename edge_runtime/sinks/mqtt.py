"""Home Assistant's discovery over MQTT: messages that make a sensor of each query.

The sink `mqtt`: each result a message to a broker.
"""

from __future__ import annotations

import json
import re
import secrets
import string
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client
from paho.mqtt.enums import CallbackAPIVersion
from pydantic import AfterValidator, Field, model_validator

from edge_runtime.drawing import draw_snapshot
from edge_runtime.sinks.base import (
    INVALID,
    REFUSED,
    TIMEOUT,
    UNREACHABLE,
    DeliveryError,
    ResultMessage,
    Sink,
    SinkConfig,
    SinkKeys,
)

PREFIX = "homeassistant"


def discovery_messages(
    topic: str, status_topic: str, record: Mapping[str, Any], snapshot: bool
) -> Iterator[tuple[str, bytes]]:
    """(topic, payload) of the messages to keep for the query of a record: a sensor, with `snapshot` a picture too.

    A sensor's state is the label, or how many were detected; its attributes are the whole record. What makes it unique
    is its topic, so that a box that starts again finds it as it was.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", topic)
    value = "{{ value_json.label }}" if "label" in record else "{{ value_json.detections | count }}"
    common = {
        "availability_topic": status_topic,
        "device": {"identifiers": [f"gemel_{record['camera']}"], "name": str(record["camera"]), "model": "gemel"},
    }
    sensor = {
        "name": str(record["query"]), "unique_id": f"gemel_{name}", "state_topic": topic, "value_template": value,
        "json_attributes_topic": topic, **common,
    }  # fmt: skip
    yield f"{PREFIX}/sensor/gemel_{name}/config", json.dumps(sensor).encode()
    if snapshot:
        picture = {
            "name": f"{record['query']} snapshot", "unique_id": f"gemel_{name}_snapshot",
            "image_topic": f"{topic}/snapshot", "content_type": "image/jpeg", **common,
        }  # fmt: skip
        yield f"{PREFIX}/image/gemel_{name}/config", json.dumps(picture).encode()


KEEP_ALIVE_S = 30
CONNECT_S, ACKNOWLEDGE_S, FAREWELL_S = 5.0, 10.0, 1.0
ONLINE, OFFLINE = b"online", b"offline"
FIELDS = ("camera", "query")


def _topic(text: str) -> str:
    try:
        given = [part[1:] for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise ValueError("has a brace too many or too few") from error
    if any(name not in FIELDS or spec or conversion for name, spec, conversion in given):
        raise ValueError("may hold {camera} and {query}, nothing else in braces")
    if re.search(r"[+#\0]", text) or text.startswith("$") or not text.isprintable():
        raise ValueError("is no topic to publish to: + # and $ have meanings of their own")
    return text


class MqttKeys(SinkKeys):
    """`topic` takes a message for each result, with `{camera}` and `{query}` filled in; with `snapshot` the JPEG goes
    to TOPIC/snapshot, and with `discovery` Home Assistant is told of a sensor for each query.
    """

    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)] = 1883
    topic: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_topic)] = "gemel/{camera}/{query}"
    qos: Annotated[int, Field(ge=0, le=2)] = 1
    draw_snapshot: bool = False
    discovery: bool = False
    username: str | None = None
    password: str | None = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _password_has_a_user(self) -> MqttKeys:
        if self.password is not None and self.username is None:
            raise ValueError("a password needs a `username`")
        return self

    def settled(self, root: Path) -> MqttConfig:
        return MqttConfig(**self.model_dump(exclude={"kind"}))


@dataclass(frozen=True, slots=True)
class MqttConfig(SinkConfig):
    """The keys as they are."""

    host: str
    port: int = 1883
    topic: str = "gemel/{camera}/{query}"
    qos: int = 1
    draw_snapshot: bool = False
    discovery: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def kind(self) -> str:
        return "mqtt"

    @property
    def wants_images(self) -> bool:
        return self.snapshot

    @property
    def name(self) -> str:
        return f"mqtt {self.host}:{self.port}"

    @property
    def status_topic(self) -> str:
        """Where `online` and `offline` are kept: beside what the topics begin with."""
        return f"{self.topic.partition('{')[0].strip('/') or 'gemel'}/status"

    def topic_of(self, record: Any) -> str:
        """The topic of a record; what has a meaning in topics is replaced in names."""
        return self.topic.format(**{name: re.sub(r"[+#/\0]", "_", str(record[name])) for name in FIELDS})

    def made(self) -> Mqtt:
        return Mqtt(self)

    @property
    def reach_s(self) -> float:
        return 2 * CONNECT_S + FAREWELL_S

    def reach(self) -> str | None:
        sink = Mqtt(self)
        try:
            sink.greet()
        except (OSError, ValueError, DeliveryError) as error:
            return f"the broker does not take this box: {error}"
        finally:
            sink.close()
        return None


class Mqtt(Sink):
    """Publishes, and waits until the broker has acknowledged all (with QoS 0: until all has been sent).

    A connection that fails is given up whole, so that nothing waits in paho's own queue, which keeps the oldest: what
    was not acknowledged is sent again over the next one, and may then come twice.
    """

    batch = 16

    def __init__(self, config: MqttConfig) -> None:
        self._config = config
        self._changed = threading.Condition()
        self._client: Client | None = None
        self._online = False
        self._connected: str | None = None
        self._lost: str | None = None
        self._acknowledged: set[int] = set()
        self._announced: set[str] = set()
        self._id = f"gemel-{secrets.token_hex(6)}"

    def open(self) -> None:
        self.greet()
        status = [self._send(self._config.status_topic, ONLINE, 1, retain=True)]
        self._online = True
        self._flush(status)

    def greet(self) -> None:
        """Connect, and no more; OSError or NotTaken where the broker does not take this box."""
        self.close()
        config = self._config
        client = Client(CallbackAPIVersion.VERSION2, client_id=self._id, reconnect_on_failure=False)
        client.connect_timeout = CONNECT_S
        if config.username is not None:
            client.username_pw_set(config.username, config.password)
        client.will_set(config.status_topic, OFFLINE, qos=1, retain=True)
        client.on_connect, client.on_disconnect = self._on_connect, self._on_disconnect
        client.on_publish = self._on_publish
        self._connected = self._lost = None
        self._online = False
        self._acknowledged.clear()
        self._announced.clear()
        self._client = client
        client.connect(config.host, config.port, KEEP_ALIVE_S)
        client.loop_start()
        self._wait(lambda: self._connected is not None, CONNECT_S, "no answer to our greeting")

    def write(self, parcels: Sequence[ResultMessage]) -> None:
        sent: list[int] = []
        for done, parcel in enumerate(parcels):
            try:
                text = parcel.text().encode()
            except ValueError as error:
                self._flush(sent)
                raise DeliveryError(INVALID, str(error), done, for_good=True) from error
            topic = self._config.topic_of(parcel.record)
            if self._config.discovery:
                self._announce(topic, parcel)
            picture = draw_snapshot(parcel) if self._config.snapshot else None
            if picture is not None:
                self._send(f"{topic}/snapshot", picture, 0)
            sent.append(self._send(topic, text, self._config.qos))
        self._flush(sent)

    def tend(self) -> None:
        if self._lost is not None:
            raise DeliveryError(UNREACHABLE, self._lost)

    def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if self._lost is None and self._online:
            # A farewell in order: the broker would not tell of our last will.
            client.publish(self._config.status_topic, OFFLINE, qos=1, retain=True).wait_for_publish(FAREWELL_S)
        client.disconnect()
        client.loop_stop()

    def _announce(self, topic: str, parcel: ResultMessage) -> None:
        if topic in self._announced:
            return
        config = self._config
        for where, what in discovery_messages(topic, config.status_topic, parcel.record, config.snapshot):
            self._send(where, what, 1, retain=True)
        self._announced.add(topic)

    def _send(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> int:
        assert self._client is not None
        sent = self._client.publish(topic, payload, qos, retain)
        if sent.rc != MQTT_ERR_SUCCESS:
            raise DeliveryError(UNREACHABLE, self._lost or "the connection is lost")
        return sent.mid

    def _flush(self, sent: Sequence[int]) -> None:
        """Wait until these messages are acknowledged."""
        try:
            self._wait(lambda: self._acknowledged.issuperset(sent), ACKNOWLEDGE_S, "no acknowledgement")
        except DeliveryError as error:
            with self._changed:
                missing = [number for number, one in enumerate(sent) if one not in self._acknowledged]
            error.delivered = missing[0] if missing else len(sent)
            raise
        with self._changed:
            self._acknowledged.clear()

    def _wait(self, done: Any, most_s: float, otherwise: str) -> None:
        ends = time.monotonic() + most_s
        with self._changed:
            self._changed.wait_for(lambda: done() or self._lost is not None, max(0.0, ends - time.monotonic()))
            if done():
                return
            if self._lost is not None:
                raise DeliveryError(REFUSED if self._connected is None else UNREACHABLE, self._lost)
        raise DeliveryError(TIMEOUT, otherwise)

    def _on_connect(self, client: Client, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        if client is self._client:
            with self._changed:
                if reason.is_failure:
                    self._lost = f"the broker refuses: {reason}"
                else:
                    self._connected = str(reason)
                self._changed.notify_all()

    def _on_disconnect(self, client: Client, data: Any, flags: Any, reason: Any, properties: Any) -> None:
        if client is self._client:
            with self._changed:
                self._lost = self._lost or f"the connection is lost: {reason}"
                self._changed.notify_all()

    def _on_publish(self, client: Client, data: Any, mid: int, reason: Any, properties: Any) -> None:
        if client is self._client:
            with self._changed:
                self._acknowledged.add(mid)
                self._changed.notify_all()
