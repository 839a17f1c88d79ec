"""Cameras and queries that a person has switched off, by MQTT or HTTP, in place of the config."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from gemel.edge_runtime.sinks.base import CAMERA, QUERY
from gemel.models.errors import InputError
from gemel.models.io import MAX_CAMERAS, MAX_QUERIES, Name, open_atomic, read_json, validate

SWITCHES_FILE = "switches.json"
MAX_FILE_BYTES = 1 << 20

log = logging.getLogger("gemel.run")


class SwitchedOff(BaseModel):
    """What the file holds: the names of what is off."""

    model_config = ConfigDict(extra="forbid")

    cameras: Annotated[list[Name], Field(max_length=MAX_CAMERAS)] = []
    queries: Annotated[list[Name], Field(max_length=MAX_QUERIES)] = []


class Switches:
    """What is off, kept over restarts in a file of the `folder`, where there is one. Thread-safe.

    A damaged file is left as it is, and everything is on until the next switch.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / SWITCHES_FILE
        self._lock = threading.Lock()
        self._off: dict[str, set[str]] = {CAMERA: set(), QUERY: set()}
        if self._path is not None and self._path.exists():
            try:
                found = validate(self._path, read_json(self._path, "remove it", MAX_FILE_BYTES), SwitchedOff)
                self._off = {CAMERA: set(found.cameras), QUERY: set(found.queries)}
            except InputError as error:
                log.warning("%s; every camera and query is on", error)

    def switch(self, kind: str, name: str, is_on: bool, by: str) -> None:
        """Switch a camera or query; the log says who did. OSError where it is switched, and cannot be kept."""
        with self._lock:
            off = self._off[kind]
            if (name not in off) is is_on:
                return
            off.symmetric_difference_update({name})
            log.info("%s %s: switched %s by %s", kind, name, "on" if is_on else "off", by)
            if self._path is not None:
                given = {"cameras": sorted(self._off[CAMERA]), "queries": sorted(self._off[QUERY])}
                with open_atomic(self._path, overwrite=True) as file:
                    file.write(json.dumps(given).encode())

    def list_paused(self, cameras: Mapping[str, str]) -> frozenset[str]:
        """Of these queries, each with its camera, those that are off."""
        with self._lock:
            return frozenset(
                query for query, camera in cameras.items() if query in self._off[QUERY] or camera in self._off[CAMERA]
            )
