"""What a person sets while a box runs, by MQTT or HTTP, in place of the config: on or off, rate, scores, zones."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, Strict, StrictBool, ValidationError

from gemel.edge_runtime.events.rules import MAX_ZONES, Fraction, QueryRules, ZonePolygon, check_rules
from gemel.edge_runtime.life.box import DEFAULT_FPS
from gemel.edge_runtime.life.config import BoxConfig
from gemel.edge_runtime.sinks.base import CAMERA, QUERY
from gemel.models.bundle import BundleQuery
from gemel.models.errors import InputError, one_line
from gemel.models.files.io import MAX_CAMERAS, MAX_CLASSES, MAX_QUERIES, Fps, Name, open_atomic, read_bounded

SWITCHES_FILE = "switches.json"
MAX_FILE_BYTES, MAX_ORDER_BYTES = 1 << 24, 4096
ORDER = "the order"
"""In errors, what is wrong."""

log = logging.getLogger("gemel.run")
Score = Annotated[Fraction, Strict()]


class CameraSwitch(BaseModel):
    """What a person has set of a camera, for all of its queries; None: as the config says. Frames a second, at most."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    on: StrictBool = True
    fps: Annotated[Fps, Strict()] | None = None


class QuerySwitch(CameraSwitch):
    """What a person has set of a query: also the least score, or scores by class, and zones in fractions by name."""

    min_score: Score | Annotated[dict[str, Score], Field(max_length=MAX_CLASSES)] | None = None
    zones: Annotated[dict[Name, ZonePolygon], Field(max_length=MAX_ZONES)] | None = None


MODELS: Mapping[str, type[CameraSwitch]] = {CAMERA: CameraSwitch, QUERY: QuerySwitch}


class SwitchFile(BaseModel):
    """What is set, by name; what is as the config says is left out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cameras: Annotated[dict[Name, CameraSwitch], Field(max_length=MAX_CAMERAS)] = {}
    queries: Annotated[dict[Name, QuerySwitch], Field(max_length=MAX_QUERIES)] = {}

    def find(self, kind: str, name: str) -> CameraSwitch:
        """What is set of a CAMERA or QUERY."""
        found = self.cameras.get(name) if kind == CAMERA else self.queries.get(name)
        return found or MODELS[kind]()

    def change(self, kind: str, name: str, value: CameraSwitch) -> SwitchFile:
        """The same with another value for one name."""
        key = "cameras" if kind == CAMERA else "queries"
        values = {**getattr(self, key), name: value}
        if value == MODELS[kind]():
            del values[name]
        return self.model_copy(update={key: values})


def parse_order(kind: str, text: bytes) -> dict[str, Any]:
    """The keys of an order, JSON of some keys of `MODELS[kind]`; InputError, in one line, for anything else.

    None puts a key back to what the config says.
    """
    if len(text) > MAX_ORDER_BYTES:
        raise InputError(ORDER, f"has more than {MAX_ORDER_BYTES:,} bytes", "give fewer points")
    try:
        given = MODELS[kind].model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(MODELS[kind].model_fields)
        raise InputError(
            ORDER, f"{first['msg'].removeprefix('Value error, ')}; give some of {known}", 'such as {"on": false}',
            ".".join(map(str, first["loc"])),
        ) from error  # fmt: skip
    if not given.model_fields_set:
        raise InputError(ORDER, "says nothing", f"give some of {', '.join(MODELS[kind].model_fields)}")
    return {key: getattr(given, key) for key in given.model_fields_set}


@dataclass(frozen=True)
class AdjustedRules:
    """The rules and the frames a second of each query, as the config and what is set say together; and those that a
    query takes of its camera, None for all."""

    rules: Mapping[str, QueryRules]
    rates: Mapping[str, float]
    requests: Mapping[str, float | None]


def adjust_rules(config: BoxConfig, queries: Mapping[str, BundleQuery], switches: SwitchFile) -> AdjustedRules:
    """What the box does; InputError where what is set does not fit the config and the queries."""
    rules, rates, requests = dict(config.rules), dict[str, float](), dict[str, float | None]()
    for name, query in queries.items():
        camera, own = config.cameras[query.camera], switches.queries.get(name, QuerySwitch())
        shared = switches.find(CAMERA, query.camera)
        for kind, which, fps in ((CAMERA, camera.id, shared.fps), (QUERY, name, own.fps)):
            if fps is not None and camera.is_push:
                raise InputError(f"{kind} {which}", "each frame that is pushed is answered", "leave it out", "fps")
            if fps is not None and camera.fps and fps > camera.fps:
                problem = f"camera {camera.id} gives {camera.fps:g} frames a second"
                raise InputError(f"{kind} {which}", problem, "give no more, or raise `fps` in the config", "fps")
        asked: list[float] = [fps for fps in (own.fps or query.fps, shared.fps) if fps]
        requests[name] = min(asked, default=None)
        rates[name] = min(asked + ([camera.fps] if camera.fps else []), default=DEFAULT_FPS)
        if own.min_score is not None or own.zones is not None:
            rules[name] = _adjust_query(name, rules.get(name, QueryRules()), own)
    push_cameras = {name for name, camera in config.cameras.items() if camera.is_push}
    check_rules(config.path, rules, queries.values(), push_cameras, rates)
    return AdjustedRules(rules, rates, requests)


def _adjust_query(name: str, rules: QueryRules, own: QuerySwitch) -> QueryRules:
    if own.min_score is not None:
        scores = own.min_score if isinstance(own.min_score, dict) else {"": own.min_score}
        rules = replace(rules, filter=replace(rules.filter, min_score=scores))
    if own.zones is not None:
        if unknown := sorted(own.zones.keys() - rules.zones.keys()):
            problem = f"the config has no zone '{unknown[0]}' for it"
            raise InputError(f"query {name}", problem, f"it has {', '.join(rules.zones) or 'none'}", "zones")
        zones = {**rules.zones, **own.zones}
        events = tuple(
            event if event.zone is None else replace(event, polygon=zones[event.zone]) for event in rules.events
        )
        rules = replace(rules, zones=zones, events=events)
    return rules


class Switches:
    """What is set, kept over restarts in a file of the `folder`, where there is one. Thread-safe.

    A damaged file is left as it is, and all is as the config says until the next order.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / SWITCHES_FILE
        self._lock = threading.Lock()
        self.values = SwitchFile()
        if self._path is not None and self._path.exists():
            try:
                self.values = SwitchFile.model_validate_json(read_bounded(self._path, MAX_FILE_BYTES, "remove it"))
            except (InputError, ValidationError) as error:
                text = one_line(error)[:200]
                log.warning("%s: %s; all is as the config says, until the next order", self._path, text)

    def order(
        self, kind: str, name: str, keys: Mapping[str, Any], by: str, check: Callable[[SwitchFile], object]
    ) -> CameraSwitch:
        """Set some keys of a camera or query, and return what is set of it; the log says who set what.

        `check` gets what all would be, and raises InputError where that does not fit; then nothing changes.
        """
        with self._lock:
            before = self.values.find(kind, name)
            after = before.model_copy(update=keys)
            if after == before:
                return after
            values = self.values.change(kind, name, after)
            check(values)
            self.values = values
            for key in sorted(keys):
                was, now = (json.dumps(one.model_dump(mode="json")[key]) for one in (before, after))
                if was != now:
                    log.info(f"{kind} %s: %s from %s to %s by %s", name, key, was, now, by)
            self._keep()
            return after

    def _keep(self) -> None:
        if self._path is None:
            return
        try:
            with open_atomic(self._path, overwrite=True) as file:
                file.write(self.values.model_dump_json(exclude_defaults=True).encode())
        except InputError as error:
            log.warning("%s; what is set holds until the box ends", one_line(error))

    def list_paused(self, cameras: Mapping[str, str]) -> frozenset[str]:
        """Of these queries, each with its camera, those that are off."""
        values = self.values
        return frozenset(
            query
            for query, camera in cameras.items()
            if not (values.find(QUERY, query).on and values.find(CAMERA, camera).on)
        )

    def adjust(self, config: BoxConfig, queries: Mapping[str, BundleQuery]) -> AdjustedRules:
        """`adjust_rules` by what is set; what does not fit the config any more is left out, with a line of the log."""
        values = self.values
        with contextlib.suppress(InputError):
            return adjust_rules(config, queries, values)
        fitting = SwitchFile()
        for kind, part in ((CAMERA, values.cameras), (QUERY, values.queries)):
            for name, value in part.items():
                tried = fitting.change(kind, name, value)
                try:
                    adjust_rules(config, queries, tried)
                    fitting = tried
                except InputError as error:
                    log.warning(f"{kind} %s: what was set for it is left out: %s", name, one_line(error))
        return adjust_rules(config, queries, fitting)
