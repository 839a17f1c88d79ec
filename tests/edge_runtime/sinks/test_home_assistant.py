"""Home Assistant's discovery messages: their keys are those that it documents, and its templates read our messages.

The keys are those of https://www.home-assistant.io/integrations/sensor.mqtt, .../image.mqtt, .../event.mqtt,
.../binary_sensor.mqtt, .../switch.mqtt, .../number.mqtt and .../update.mqtt (of July 2025);
Home Assistant itself checks the messages, and discovers the entities by a real broker, where HOME_ASSISTANT_PYTHON
names the Python of an environment that has the packages `homeassistant` and `paho-mqtt`, which pin versions of their
own (checked with 2025.4.4 on Python 3.13).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import jsonschema
import pytest

from gemel.edge_runtime.sinks.discovery import (
    VALUE_TEMPLATES,
    CameraEntities,
    event_messages,
    query_messages,
    switch_messages,
    update_messages,
)
from tests.edge_runtime.sinks.broker import MOSQUITTO, Broker
from tests.edge_runtime.sinks.test_mqtt import Reader

TEXT = {"type": "string", "minLength": 1}
TOPIC = {"type": "string", "pattern": "^[^+#\\u0000]+$", "maxLength": 65535}
DEVICE_KEYS = (
    "name", "manufacturer", "model", "model_id", "sw_version", "hw_version", "serial_number", "suggested_area",
    "via_device", "configuration_url",
)  # fmt: skip
COMMON: dict[str, Any] = {
    "name": {"type": ["string", "null"]}, "unique_id": TEXT, "icon": TEXT, "object_id": TEXT,
    "enabled_by_default": {"type": "boolean"}, "entity_category": {"enum": ["config", "diagnostic"]},
    "entity_picture": TEXT, "json_attributes_topic": TOPIC, "json_attributes_template": TEXT, "encoding": TEXT,
    "availability_mode": {"enum": ["all", "any", "latest"]}, "qos": {"enum": [0, 1, 2]},
    "availability": {"type": "array", "items": {
        "type": "object", "required": ["topic"], "additionalProperties": False,
        "properties": {
            "topic": TOPIC, "payload_available": TEXT, "payload_not_available": TEXT, "value_template": TEXT,
        },
    }},
    "device": {
        "type": "object", "additionalProperties": False,
        "anyOf": [{"required": ["identifiers"]}, {"required": ["connections"]}],
        "properties": {
            "identifiers": {"type": ["string", "array"], "minItems": 1}, "connections": {"type": "array"},
            **dict.fromkeys(DEVICE_KEYS, TEXT),
        },
    },
    "origin": {
        "type": "object", "required": ["name"], "additionalProperties": False,
        "properties": dict.fromkeys(("name", "sw_version", "support_url"), TEXT),
    },
}  # fmt: skip
SENSOR: dict[str, Any] = {
    "state_topic": TOPIC, "value_template": TEXT, "unit_of_measurement": TEXT, "device_class": TEXT,
    "state_class": {"enum": ["measurement", "total", "total_increasing", "measurement_angle"]},
    "expire_after": {"type": "integer"}, "force_update": {"type": "boolean"}, "last_reset_value_template": TEXT,
    "options": {"type": "array"}, "suggested_display_precision": {"type": "integer"},
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "image_topic": TOPIC, "content_type": TEXT, "image_encoding": {"const": "b64"}, "url_topic": TOPIC,
    "url_template": TEXT,
}  # fmt: skip
SWITCH = {"command_topic": TOPIC, "state_topic": TOPIC, "payload_on": TEXT, "payload_off": TEXT, "optimistic": {}}
NUMBER = {
    "command_topic": TOPIC, "command_template": TEXT, "state_topic": TOPIC, "value_template": TEXT,
    "min": {"type": "number"}, "max": {"type": "number"}, "step": {"type": "number"}, "unit_of_measurement": TEXT,
    "mode": {"enum": ["auto", "box", "slider"]}, "device_class": TEXT,
}  # fmt: skip
UPDATE = {
    "state_topic": TOPIC, "value_template": TEXT, "title": TEXT, "latest_version_topic": TOPIC,
    "latest_version_template": TEXT, "release_summary": TEXT, "release_url": TEXT, "device_class": TEXT,
}  # fmt: skip
EVENTS = {"state_topic": TOPIC, "value_template": TEXT, "event_types": {"type": "array", "minItems": 1}}
OCCUPANCY = {"state_topic": TOPIC, "value_template": TEXT, "device_class": {"enum": ["occupancy", "motion"]}}
SCHEMAS = {
    "switch": {"required": ["command_topic"], "properties": {**COMMON, **SWITCH}},
    "number": {"required": ["command_topic"], "properties": {**COMMON, **NUMBER}},
    "update": {"required": ["state_topic"], "properties": {**COMMON, **UPDATE}},
    "event": {"required": ["state_topic", "event_types"], "properties": {**COMMON, **EVENTS}},
    "binary_sensor": {"required": ["state_topic"], "properties": {**COMMON, **OCCUPANCY}},
    "sensor": {"required": ["state_topic"], "properties": {**COMMON, **SENSOR}},
    "image": {"oneOf": [{"required": ["image_topic"]}, {"required": ["url_topic"]}], "properties": {**COMMON, **IMAGE}},
}
DISCOVERY_TOPIC = re.compile(
    r"homeassistant/(sensor|image|switch|event|binary_sensor|number|update)/[a-zA-Z0-9_-]+/config"
)
ANSWERS: dict[str, tuple[dict[str, Any], str]] = {
    "label": ({"label": "open", "score": 0.9}, "open"),
    "labels": ({"labels": [{"class": "car", "score": 0.9}, {"class": "dog", "score": 0.8}]}, "car, dog"),
    "detections": ({"detections": [{"class": "car", "score": 0.9, "box": [0, 0, 1, 1]}] * 3}, "3"),
    "segments": ({"segments": [{"class": "road", "score": 0.9}]}, "road"),
}
EVENT = {
    "type": "new",
    "open": 2,
    "after": {"id": "f3-1", "label": "Jo's <car> & bike", "track": None, "entered_zones": ["lane"]},
}
CHECK = """
import asyncio, importlib, json, sys, tempfile
from homeassistant.core import HomeAssistant
from homeassistant.helpers import frame

async def check():
    if hasattr(frame, "async_setup"):  # from 2025 on
        frame.async_setup(HomeAssistant(tempfile.gettempdir()))
    for kind, message in json.load(sys.stdin):
        schema = importlib.import_module(f"homeassistant.components.mqtt.{kind}").DISCOVERY_SCHEMA
        lost = set(message) - set(schema(dict(message)))
        assert not lost, f"{kind}: unknown keys {lost}"
    print("checked", flush=True)

asyncio.run(check())
"""


def publish_discovery() -> list[tuple[str, bytes]]:
    """Every discovery topic, with its message, of a box with all kinds of answers, an event and a line."""
    entities = CameraEntities("north gate", "left", "gemel/n/status", "gemel/n/left/status", True)
    topic = "gemel/north gate/left/cars/events/"
    found = [
        event_messages(entities, f"{topic}enter", "cars", "enter", "enter"),
        event_messages(entities, f"{topic}kerb", "cars", "kerb", "cross"),
        switch_messages(entities, "gemel/north gate/left/cars", "cars", {"on": True, "fps": 5.0, "min_score": 0.0}),
        update_messages("north gate", "gemel/n/status", "gemel/n/update"),
        *(
            query_messages(entities, f"gemel/north gate/left/{name}", {"camera": "left", "query": name, **answer})
            for name, (answer, _) in ANSWERS.items()
        ),
    ]
    return [one for messages in found for one in messages]


def make_messages() -> list[tuple[str, dict[str, Any]]]:
    """The kind and the message of every discovery topic."""
    made = []
    for topic, payload in publish_discovery():
        kind = DISCOVERY_TOPIC.fullmatch(topic)
        assert kind is not None, topic
        made.append((kind[1], json.loads(payload)))
    return made


def render(template: str, message: dict[str, Any]) -> str:
    return jinja2.Environment().from_string(template).render(value_json=json.loads(json.dumps(message)))


def test_discovery_messages_have_the_documented_keys() -> None:
    messages = make_messages()
    for kind, message in messages:
        jsonschema.validate(message, {"type": "object", "additionalProperties": False, **SCHEMAS[kind]})
        assert message["origin"]["name"] == "Gemel"
    kinds = Counter(kind for kind, _ in messages)
    assert kinds == {
        "event": 2,
        "binary_sensor": 1,
        "switch": 1,
        "number": 2,
        "sensor": len(ANSWERS) + 3,
        "update": 1,
        "image": len(ANSWERS) + 2,
    }
    assert len({message["unique_id"] for _, message in messages}) == len(messages)


def test_discovery_states_of_long_answers_are_cut_to_what_home_assistant_takes() -> None:
    names = [{"class": f"a rather long name of a class {number}"} for number in range(40)]
    answers = {"label": "x" * 300, "labels": names, "segments": names, "detections": names * 30}
    assert answers.keys() == VALUE_TEMPLATES.keys()
    states = {key: render(VALUE_TEMPLATES[key], {key: answer}) for key, answer in answers.items()}
    assert {key: len(state) for key, state in states.items()} == {
        "label": 255, "labels": 255, "segments": 255, "detections": 4,
    }  # fmt: skip
    assert states["labels"].startswith("a rather long name of a class 0, a rather long name of a class 1, ")


def test_discovery_templates_read_results_and_events() -> None:
    messages = {(kind, message["name"]): message for kind, message in make_messages()}
    for name, (answer, state) in ANSWERS.items():
        assert render(messages["sensor", name]["value_template"], {"query": name, **answer}) == state
    enter = json.loads(render(messages["event", "cars enter"]["value_template"], EVENT))
    assert enter == {**EVENT["after"], "event_type": "new"}
    assert enter["event_type"] in messages["event", "cars enter"]["event_types"]
    template = jinja2.Environment().from_string(messages["binary_sensor", "cars enter"]["value_template"])
    assert [template.render(value=value) for value in ("0", "2")] == ["OFF", "ON"]
    number = messages["number", "cars min_score"]
    assert render(number["value_template"], {"min_score": 0.5}) == "0.5"
    assert render(number["value_template"], {"min_score": {"car": 0.5}}) == "None"
    assert json.loads(jinja2.Environment().from_string(number["command_template"]).render(value=0.4)) == {
        "min_score": 0.4
    }
    update = {"installed": "aaa", "offered": None, "state": "refused", "why": None, "trouble": "x" * 300}
    assert json.loads(render(messages["update", "bundle"]["value_template"], update)) == {
        "installed_version": "aaa", "latest_version": "aaa", "release_summary": "x" * 255,
    }  # fmt: skip
    assert render(messages["sensor", "updates"]["value_template"], update) == "refused"
    crossing = {"type": "new", "after": {"crossed": {"left": 3, "right": 5}}}
    assert render(messages["sensor", "cars kerb to the right"]["value_template"], crossing) == "5"


@pytest.fixture
def home_assistant() -> str:
    """The Python that has the package."""
    python = os.environ.get("HOME_ASSISTANT_PYTHON")
    if python is None:
        pytest.skip("HOME_ASSISTANT_PYTHON names no environment with the package homeassistant")
    return python


def test_discovery_messages_pass_the_schemas_of_home_assistant(home_assistant: str) -> None:
    checked = subprocess.run(
        [home_assistant, "-c", CHECK], input=json.dumps(make_messages()), capture_output=True, text=True, check=False
    )
    assert checked.stdout.strip() == "checked", checked.stderr


@pytest.mark.exhaustive
@pytest.mark.skipif(MOSQUITTO is None, reason="the broker mosquitto is not installed")
def test_home_assistant_discovers_shows_and_switches_all_entities(home_assistant: str, tmp_path: Path) -> None:
    topic = "gemel/north gate/left/cars"
    states: dict[str, Any] = {
        "gemel/n/status": "online", "gemel/n/left/status": "streaming", f"{topic}/state": "ON",
        f"{topic}/settings": {"fps": 5.0, "min_score": 0.0}, f"{topic}/events/enter": EVENT,
        f"{topic}/events/enter/open": "2",
        f"{topic}/events/kerb": {"type": "new", "after": {"crossed": {"left": 3, "right": 5}}},
        "gemel/n/update": {"installed": "aaa", "offered": "bbb", "state": "on trial", "why": None, "trouble": None},
        **{f"gemel/north gate/left/{name}": answer for name, (answer, _) in ANSWERS.items()},
    }  # fmt: skip
    broker, messages = Broker(tmp_path), publish_discovery()
    reader = Reader(broker.port)
    try:
        for name, payload in messages:
            reader.publish(name, payload, retain=True)
        script, out, err = Path(__file__).with_name("home_assistant.py"), tmp_path / "out", tmp_path / "err"
        with open(out, "w") as shown, open(err, "w") as told:
            line = [home_assistant, str(script), str(broker.port), str(len(messages))]
            process = subprocess.Popen(line, stdout=shown, stderr=told, env={"PATH": os.environ["PATH"]})
        while process.poll() is None:  # events are no states: those from before are not shown
            for name, state in states.items():
                reader.publish(name, (state if isinstance(state, str) else json.dumps(state)).encode())
            time.sleep(0.5)
    finally:
        reader.close()
        broker.end()
    shown, told = out.read_text(), err.read_text()
    assert shown, told
    found: dict[str, list[tuple[str, str, dict[str, Any]]]] = {}
    for name, (state, about) in json.loads(shown).items():
        found.setdefault(name.partition(".")[0], []).append(
            (about["friendly_name"].removeprefix("north gate left "), state, about)
        )
    assert sum(map(len, found.values())) == len(messages), told
    sensors = {name: state for name, state, _ in found["sensor"]}
    assert sensors == {
        **{name: state for name, (_, state) in ANSWERS.items()}, "cars kerb to the left": "3",
        "cars kerb to the right": "5", "north gate updates": "on trial",
    }  # fmt: skip
    ((_, occupied, about),) = found["binary_sensor"]
    assert occupied == "on" and about["device_class"] == "occupancy"
    assert {name: about["event_type"] for name, _, about in found["event"]} == {"cars enter": "new", "cars kerb": "new"}
    ((_, state, about),) = found["update"]
    assert (state, about["installed_version"], about["latest_version"]) == ("on", "aaa", "bbb")
    assert all(state != "unavailable" for kind in found.values() for _, state, _ in kind)
    assert reader.of(f"{topic}/set") == [b"OFF", b'{"fps": 0.5}', b'{"min_score": 0.5}']
