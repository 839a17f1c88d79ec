"""The kinds of sinks by name; the file of one is imported when a config asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.delivery.base import SinkConfig, SinkKeys
from models.errors import InputError
from models.io import validate

SINKS: dict[str, tuple[str, str]] = {
    "jsonl": ("edge_runtime.delivery.jsonl", "JsonLinesKeys"),
    "mqtt": ("edge_runtime.delivery.mqtt", "MqttKeys"),
    "webhook": ("edge_runtime.delivery.webhook", "WebhookKeys"),
}
"""Kind -> module, and the class of its keys."""


def sinks_of(path: Path, given: Sequence[Mapping[str, Any]], root: Path) -> tuple[SinkConfig, ...]:
    """The sinks of the config at `path`, file names relative to `root`; InputError for an unknown kind or key."""
    return tuple(_keys_of(path, one, f"sinks[{index}]").settled(root) for index, one in enumerate(given))


def _keys_of(path: Path, given: Mapping[str, Any], key: str) -> SinkKeys:
    kind = given.get("kind")
    if kind is None:
        raise InputError(path, "this key is missing", f"use {', '.join(SINKS)}", f"{key}.kind")
    if not isinstance(kind, str) or kind not in SINKS:
        raise InputError(path, f"unknown kind '{str(kind)[:40]}'", f"use {', '.join(SINKS)}", f"{key}.kind")
    module, keys = SINKS[kind]
    return validate(path, given, getattr(importlib.import_module(module), keys), key)
