"""Home Assistant's discovery over MQTT: messages that make a sensor of each query."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "homeassistant"


def announcements(
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
