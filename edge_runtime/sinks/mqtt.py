"""The sink `mqtt`: each result is a message to a broker, with Home Assistant's discovery on request."""

from __future__ import annotations

import json
import re
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from paho.mqtt.client import MQTT_ERR_SUCCESS, Client, MQTTMessageInfo
from paho.mqtt.enums import CallbackAPIVersion
from pydantic import AfterValidator, Field, model_validator

from edge_runtime.drawing import draw_message
from edge_runtime.sinks.base import DeliveryError, ResultMessage, Sink, SinkConfig, Undelivered

KEEP_ALIVE_S = 30
CONNECT_TIMEOUT_S, ACKNOWLEDGE_TIMEOUT_S, FAREWELL_TIMEOUT_S = 5.0, 10.0, 1.0
POLL_INTERVAL_S = 0.1
"""Interval at which a wait for an acknowledgement checks the connection."""
ONLINE, OFFLINE = b"online", b"offline"
DISCOVERY_PREFIX = "homeassistant"


def _check_topic(text: str) -> str:
    rest = text.replace("{camera}", "").replace("{query}", "")
    if re.search(r"[{}+#]", rest) or text.startswith("$") or not text.isprintable():
        raise ValueError("is no topic to publish to: only {camera} and {query} in braces, no + or #, no $ first")
    return text


class MqttConfig(SinkConfig):
    """`topic` takes a message for each result, with `{camera}` and `{query}` filled in; with `snapshot` the JPEG goes
    to TOPIC/snapshot, and with `discovery` Home Assistant gets a sensor for each query.
    """

    kind: Literal["mqtt"] = "mqtt"
    host: Annotated[str, Field(min_length=1, max_length=255)]
    port: Annotated[int, Field(ge=1, le=65535)] = 1883
    topic: Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_check_topic)] = "gemel/{camera}/{query}"
    qos: Annotated[int, Field(ge=0, le=2)] = 1
    snapshot: bool = False
    discovery: bool = False
    username: str | None = None
    password: str | None = Field(default=None, repr=False)

    @model_validator(mode="after")
    def _check_password_has_user(self) -> MqttConfig:
        if self.password is not None and self.username is None:
            raise ValueError("a password needs a `username`")
        return self

    @property
    def wants_images(self) -> bool:
        return self.snapshot

    @property
    def name(self) -> str:
        return f"mqtt {self.host}:{self.port}"

    @property
    def status_topic(self) -> str:
        """The topic of the retained `online` and `offline`: beside the constant beginning of the topics."""
        return f"{self.topic.partition('{')[0].strip('/') or 'gemel'}/status"

    def topic_of(self, record: Mapping[str, Any]) -> str:
        """The topic of a record; reserved characters in names become underscores."""
        camera, query = (re.sub(r"[+#/\0]", "_", str(record[key])) for key in ("camera", "query"))
        return self.topic.format(camera=camera, query=query)

    def build(self) -> Mqtt:
        return Mqtt(self)


class Mqtt(Sink):
    """Publishes, and waits until the broker has acknowledged all (with QoS 0: until all has been sent).

    A failed connection is discarded whole, so that nothing waits in paho's own queue; unacknowledged messages are sent
    again over the next one, and may arrive twice.
    """

    batch = 16

    def __init__(self, config: MqttConfig) -> None:
        self._config = config
        self._client: Client | None = None
        self._is_announced = False
        self._discovered: set[str] = set()
        self._id = f"gemel-{secrets.token_hex(6)}"

    def open(self) -> None:
        self.connect()
        status = self._publish(self._config.status_topic, ONLINE, 1, retain=True)
        self._is_announced = True
        self._await_acknowledgement([status])

    def connect(self) -> None:
        """Connect without publishing; OSError or DeliveryError where the broker does not accept this box."""
        self.close()
        config, answered, refusals = self._config, threading.Event(), []

        def take_answer(_client: Client, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
            if reason.is_failure:
                refusals.append(reason)
            answered.set()

        client = Client(CallbackAPIVersion.VERSION2, client_id=self._id, reconnect_on_failure=False)
        client.connect_timeout = CONNECT_TIMEOUT_S
        if config.username is not None:
            client.username_pw_set(config.username, config.password)
        client.will_set(config.status_topic, OFFLINE, qos=1, retain=True)
        client.on_connect = client.on_disconnect = take_answer
        self._client, self._is_announced = client, False
        self._discovered.clear()
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
            topic = self._config.topic_of(message.record)
            if self._config.discovery and topic not in self._discovered:
                for where, payload in discovery_messages(self._config, topic, message.record):
                    self._publish(where, payload, 1, retain=True)
                self._discovered.add(topic)
            picture = draw_message(message) if self._config.snapshot else None
            if picture is not None:
                self._publish(f"{topic}/snapshot", picture, 0)
            sent.append(self._publish(topic, text, self._config.qos))
        self._await_acknowledgement(sent)

    def heartbeat(self) -> None:
        if self._client is None or not self._client.is_connected():
            raise DeliveryError(Undelivered.UNREACHABLE, "the connection is lost")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is None:
            return
        if self._is_announced and client.is_connected():
            # After an orderly disconnect the broker would not publish the last will.
            client.publish(self._config.status_topic, OFFLINE, qos=1, retain=True).wait_for_publish(FAREWELL_TIMEOUT_S)
        client.disconnect()
        client.loop_stop()

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
    """(topic, payload) of the retained Home Assistant messages for the query of a record.

    A sensor's state is the label, or the number of detections; its attributes are the whole record. Its unique id comes
    from its topic, so that it survives restarts of the box.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", topic)
    value = "{{ value_json.label }}" if "label" in record else "{{ value_json.detections | count }}"
    common = {
        "availability_topic": config.status_topic,
        "device": {"identifiers": [f"gemel_{record['camera']}"], "name": str(record["camera"]), "model": "gemel"},
    }
    sensor = {
        "name": str(record["query"]), "unique_id": f"gemel_{name}", "state_topic": topic, "value_template": value,
        "json_attributes_topic": topic, **common,
    }  # fmt: skip
    yield f"{DISCOVERY_PREFIX}/sensor/gemel_{name}/config", json.dumps(sensor).encode()
    if config.snapshot:
        picture = {
            "name": f"{record['query']} snapshot", "unique_id": f"gemel_{name}_snapshot",
            "image_topic": f"{topic}/snapshot", "content_type": "image/jpeg", **common,
        }  # fmt: skip
        yield f"{DISCOVERY_PREFIX}/image/gemel_{name}/config", json.dumps(picture).encode()
