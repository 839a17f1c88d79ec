"""Home Assistant's MQTT discovery: the entities of a box's cameras, queries and events.

https://www.home-assistant.io/integrations/mqtt
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gemel.edge_runtime.events.rules import EventKind
from gemel.models.process import installed_version

STREAMING, AWAY = b"streaming", b"away"
PREFIX = "homeassistant"
DIGEST_DIGITS = 8
VALUE_TEMPLATES = {
    "label": "{{ value_json.label[:255] }}",
    "labels": "{{ (value_json.labels | map(attribute='class') | join(', '))[:255] }}",
    "detections": "{{ value_json.detections | count }}",
    "segments": "{{ (value_json.segments | map(attribute='class') | join(', '))[:255] }}",
}
"""By the key of an answer, the state of Home Assistant's sensor; vectors and tensors are none.

Home Assistant refuses a state of more than 255 characters; all of it is in the attributes.
"""
NUMBERS: Mapping[str, Mapping[str, Any]] = {
    "fps": {"min": 0.1, "max": 100, "step": 0.1, "unit_of_measurement": "fps"},
    "min_score": {"min": 0, "max": 1, "step": 0.01},
}
"""Settings that Home Assistant shows as numbers, with their limits."""
LASTING = (EventKind.ENTER, EventKind.DWELL, EventKind.STILL, EventKind.HEADING, EventKind.COUNT)
"""Kinds of events that say that something is there."""
Messages = Iterator[tuple[str, bytes]]
"""(topic, payload) of retained messages."""
ORIGIN = {"name": "Gemel", **({"sw_version": installed_version()} if installed_version() else {})}


@dataclass(frozen=True, slots=True)
class CameraEntities:
    """A camera as Home Assistant's device: available while box and camera are, with a picture where there is one.

    Ids are made of the box and the topic, so that they survive restarts.
    """

    box: str
    camera: str
    status_topic: str
    camera_topic: str
    has_picture: bool

    def message(self, kind: str, title: str, name: str, **keys: Any) -> tuple[str, bytes]:
        """The message of one entity of this kind, with its own keys."""
        entity = {"name": title, "unique_id": name, **keys, **self._common_keys()}
        return f"{PREFIX}/{kind}/{name}/config", json.dumps(entity).encode()

    def entity_id(self, *names: str, topic: str) -> str:
        """A readable id; the digest keeps ids apart whose names differ in punctuation only."""
        return _entity_id(self.box, self.camera, *names, unique=f"{self.box} {topic}")

    def pictures(self, topic: str, title: str, name: str) -> Messages:
        """The entity of the newest picture of a topic, if it has any."""
        if self.has_picture:
            keys = {"image_topic": f"{topic}/snapshot", "content_type": "image/jpeg"}
            _, payload = self.message("image", f"{title} snapshot", f"{name}_snapshot", **keys)
            yield f"{PREFIX}/image/{name}/config", payload

    def _common_keys(self) -> dict[str, Any]:
        camera = {
            "topic": self.camera_topic,
            "payload_available": STREAMING.decode(), "payload_not_available": AWAY.decode(),
        }  # fmt: skip
        keys = _describe_device(f"{self.box} {self.camera}", f"camera {self.camera} of box {self.box}")
        return {"availability": [{"topic": self.status_topic}, camera], "availability_mode": "all", **keys}


def query_messages(entities: CameraEntities, topic: str, record: Mapping[str, Any]) -> Messages:
    """The messages for the query of a record, whose results have `topic`: a sensor whose state is the label, the number
    of detections or the classes of segments, and whose attributes are the record."""
    query = record["query"]
    value = next((template for key, template in VALUE_TEMPLATES.items() if key in record), None)
    if value is None:
        return
    name = entities.entity_id(query, topic=topic)
    keys = {"state_topic": topic, "value_template": value, "json_attributes_topic": topic}
    yield entities.message("sensor", query, name, **keys)
    yield from entities.pictures(topic, query, name)


def event_messages(entities: CameraEntities, topic: str, query: str, event: str, kind: str) -> Messages:
    """The messages for a query's events of one name: an event whose attributes are the newest one; whether any goes on,
    for kinds that last; and two counts for a line."""
    title, name = f"{query} {event}", entities.entity_id(query, event, topic=topic)
    keys: dict[str, Any] = {
        "state_topic": topic, "event_types": ["new", "end"],
        "value_template": "{{ dict(value_json.after, event_type=value_json.type) | tojson }}",
    }  # fmt: skip
    yield entities.message("event", title, name, **keys)
    if kind in LASTING:
        template = "{{ 'ON' if value | int > 0 else 'OFF' }}"
        keys = {"state_topic": f"{topic}/open", "value_template": template, "device_class": "occupancy"}
        yield entities.message("binary_sensor", title, f"{name}_open", **keys)
    if kind == EventKind.CROSS:
        for way in ("left", "right"):
            keys = {
                "state_topic": topic, "value_template": f"{{{{ value_json.after.crossed.{way} }}}}",
                "state_class": "total_increasing",
            }  # fmt: skip
            yield entities.message("sensor", f"{title} to the {way}", f"{name}_{way}", **keys)
    yield from entities.pictures(topic, title, name)


def switch_messages(entities: CameraEntities, topic: str, query: str, held: Mapping[str, Any]) -> Messages:
    """The messages for the switch of a query whose results have `topic`, and for the numbers of what holds for it."""
    name = entities.entity_id(query, "switch", topic=f"{topic}/set")
    yield entities.message("switch", f"{query} on", name, command_topic=f"{topic}/set", state_topic=f"{topic}/state")
    for key, limits in NUMBERS.items():
        if key in held:
            keys = {
                "command_topic": f"{topic}/set", "command_template": f'{{"{key}": {{{{ value }}}}}}',
                "state_topic": f"{topic}/settings", "mode": "box", "entity_category": "config", **limits,
                "value_template": f"{{{{ value_json.{key} if value_json.{key} is number else none }}}}",
            }  # fmt: skip
            yield entities.message("number", f"{query} {key}", f"{name}_{key}", **keys)


def update_messages(box: str, status_topic: str, topic: str) -> Messages:
    """The messages for the updates of a box, whose state has `topic`: an update, and a sensor that says more."""
    name = _entity_id(box, "update", unique=topic)
    common = {
        "availability": [{"topic": status_topic}], "state_topic": topic, "entity_category": "diagnostic",
        **_describe_device(box, "box"),
    }  # fmt: skip
    newest = (
        "{{ {'installed_version': value_json.installed, 'latest_version': value_json.offered or value_json.installed,"
        " 'release_summary': (value_json.why or value_json.trouble or value_json.state)[:255]} | tojson }}"
    )
    keys = {"name": "bundle", "unique_id": name, "value_template": newest, "title": "Gemel bundle", **common}
    yield f"{PREFIX}/update/{name}/config", json.dumps(keys).encode()
    state = {"value_template": "{{ value_json.state }}", "json_attributes_topic": topic}
    keys = {"name": "updates", "unique_id": f"{name}_state", **state, **common}
    yield f"{PREFIX}/sensor/{name}_state/config", json.dumps(keys).encode()


def _describe_device(name: str, model: str) -> dict[str, Any]:
    device = {"identifiers": [_entity_id(*name.split(" "), unique=name)], "name": name, "manufacturer": "Gemel"}
    return {"device": {**device, "model": model}, "origin": ORIGIN}


def _entity_id(*names: str, unique: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", "_".join(("gemel", *names)))
    return f"{readable}_{hashlib.sha256(unique.encode()).hexdigest()[:DIGEST_DIGITS]}"
