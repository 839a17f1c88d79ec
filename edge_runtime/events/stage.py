"""The events of a box: between the results of its queries and its sinks, and before the frames of its cameras."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gemel.edge_runtime.events.clips import ClipRecorder
from gemel.edge_runtime.events.machine import EndReason, EventMachine, Moment, Notice, Sighting, see_object
from gemel.edge_runtime.events.motion import MotionGate
from gemel.edge_runtime.events.rules import QueryRules
from gemel.edge_runtime.events.tracking import DEFAULT_TRACKING, MIN_TRACKING_FPS, ObjectTracker, unite_boxes
from gemel.edge_runtime.events.zones import Polygon, foot_point, is_inside
from gemel.edge_runtime.frames.drawing import draw_thumbnail
from gemel.edge_runtime.frames.queues import STILL, Frame
from gemel.edge_runtime.sinks.base import ResultMessage
from gemel.models.bundle import BundleQuery

OFF = "off"
"""Why a frame does not reach a query whose hours do not include it, or that is switched off; it is not counted."""
ZonedBox = tuple[Mapping[str, Any], list[str]]
"""A detection of a result and the zones that it is in."""
MAX_EVENTS = 200
"""Events kept for `/api/events`, those that go on included."""
MAX_PICTURES = 8
"""Frames that the open events of one query keep as snapshots: 50 MB at 1920x1080."""
RATE_FRAMES, RATE_MARGIN = 10, 1.25
"""The rate is that of so many frames; it is enough again once it is above the least by this factor."""
NO_RESULTS_S, NO_RESULTS_FRAMES = 10.0, 3
"""Events of a query without results for so long, and for so many frames at its rate, end."""


@dataclass(frozen=True, slots=True)
class QueryState:
    """What status shows of a query: whether its hours include now (None without hours), whether its frames are gated,
    tracks, open events, crossings of lines by rule and way, and why tracking pauses, if it does."""

    scheduled: bool | None = None
    is_gated: bool = False
    tracks: int = 0
    open_events: int = 0
    crossed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    tracking_trouble: str | None = None


log = logging.getLogger("gemel.run")


class FrameRate:
    """The frames a second that come, and whether they are too few to follow objects."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=RATE_FRAMES)
        self.is_low = False

    def add(self, at: float) -> bool:
        """One more frame; whether `is_low` changed."""
        self._times.append(at)
        before = self.is_low
        if len(self._times) == RATE_FRAMES:
            self.is_low = self.per_second < MIN_TRACKING_FPS * (RATE_MARGIN if before else 1.0)
        return self.is_low is not before

    @property
    def per_second(self) -> float:
        """The mean rate of the newest frames."""
        elapsed_s = self._times[-1] - self._times[0] if self._times else 0.0
        return (len(self._times) - 1) / elapsed_s if elapsed_s > 0 else 0.0

    def clear(self) -> None:
        """Forget the frames, not the verdict."""
        self._times.clear()


class QueryEvents:
    """The filter, tracker, gate and events of one query. Called under the lock of its stage."""

    def __init__(self, query: BundleQuery, rules: QueryRules, machine: EventMachine, fps: float) -> None:
        self.query, self.rules, self.machine = query, rules, machine
        self.gate = MotionGate(query.region, [rules.zones[zone] for zone in rules.filter.exclude])
        self.newest: Moment | None = None
        certain = max(query.least_score, query.threshold or 0.0)
        self.tracker = ObjectTracker(fps, certain) if rules.tracking else None
        self.fps, self._still_s, self._rate = fps, 0.0, FrameRate()
        self._has_zones = bool(rules.zones)

    def apply(
        self, moment: Moment, record: Mapping[str, Any], weak: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[Mapping[str, Any], list[Notice]]:
        """The record with what passes the filter, each with its track and zones, and what began or ended.

        `weak` detections, and those that the filter leaves out for their score, continue tracks and their events.
        """
        self.newest = moment
        if "detections" not in record:
            label = record.get("label")
            seen = [] if label is None else [Sighting(None, label, record["score"], quality=record["score"])]
            return record, self.machine.observe(moment, seen)
        size, rules = moment.size, self.rules
        zoned = [(one, self._zones_of(one, size)) for one in record["detections"]]
        passed = [(one, zones) for one, zones in zoned if rules.filter.passes(one, zones, size)]
        notices = self._watch_rate(moment)
        tracker = None if self._rate.is_low else self.tracker
        faint = self._find_faint(zoned, passed, weak, size) if tracker is not None else []
        if rules.one_box:
            both = [[one for one, _ in part] for part in (passed, faint)]
            best = {id(one) for one in unite_boxes(both[0], DEFAULT_TRACKING.same_object_iou, both[1])}
            passed, faint = ([(one, zones) for one, zones in part if id(one) in best] for part in (passed, faint))
        numbers: Sequence[int | None] = [None] * len(passed)
        if tracker is not None:
            both = [[one for one, _ in part] for part in (passed, faint)]
            numbers = tracker.update(both[0], moment.at - self._still_s, both[1])
        sightings = [
            see_object(number, one, zones, size)
            for (one, zones), number in zip(faint, numbers[len(passed) :], strict=True)
            if number is not None
        ]
        detections = []
        for (one, zones), number in zip(passed, numbers, strict=False):
            sightings.append(see_object(number, one, zones, size))
            more = {} if number is None else {"track": number}
            detections.append({**one, **more, **({"zones": zones} if self._has_zones else {})})
        notices += self.machine.observe(moment, sightings)
        return {**record, "detections": detections}, notices

    def _find_faint(
        self, zoned: Sequence[ZonedBox], passed: Sequence[ZonedBox], weak: Sequence[Mapping[str, Any]],
        size: tuple[int, int],
    ) -> list[ZonedBox]:  # fmt: skip
        """Of detections all that would pass the filter but for their score."""
        known, rule = {id(one) for one, _ in passed}, replace(self.rules.filter, min_score={})
        rest = [(one, zones) for one, zones in zoned if id(one) not in known]
        rest += [(one, self._zones_of(one, size)) for one in weak]
        return [(one, zones) for one, zones in rest if rule.passes(one, zones, size)]

    def follows(self, rules: QueryRules) -> bool:
        """Whether tracks and events can go on by these rules: but for the least scores they are the same."""
        before = replace(self.rules.filter, min_score=rules.filter.min_score)
        return replace(self.rules, filter=before) == rules

    @property
    def tracking_trouble(self) -> str | None:
        """Why objects are not followed at present, if they are to be."""
        if self.tracker is None or not self._rate.is_low:
            return None
        return f"tracking needs {MIN_TRACKING_FPS:g} frames a second, {self._rate.per_second:.1f} come"

    def hold(self, moment: Moment) -> list[Notice]:
        """A frame that shows what the last one showed; the tracker's time stands still."""
        before = self.newest
        if before is None or moment.at <= before.at:
            return []
        self._still_s += moment.at - before.at
        self.newest = Moment(before.frame, moment.at, moment.unix, before.size)
        return self._watch_rate(self.newest) + self.machine.hold(self.newest)

    def end(self, reason: EndReason) -> list[Notice]:
        """End all that goes on."""
        self.newest = None
        self._rate.clear()
        if self.tracker is not None:
            self.tracker.reset()
        return self.machine.end_all(reason)

    def _watch_rate(self, moment: Moment) -> list[Notice]:
        """End what follows objects where frames have become too few for it."""
        if self.tracker is None or not self._rate.add(moment.at):
            return []
        if not self._rate.is_low:
            log.info("query %s: enough frames come to follow objects again", self.query.id)
            return []
        log.warning("query %s: %s; its tracks and their events end", self.query.id, self.tracking_trouble)
        self.tracker.reset()
        return self.machine.end_tracks(EndReason.SPARSE)

    def _zones_of(self, detection: Mapping[str, Any], size: tuple[int, int]) -> list[str]:
        if not self._has_zones:
            return []
        x, y = foot_point(detection["box"], size)
        return [name for name, polygon in self.rules.zones.items() if is_inside(polygon, x, y)]


class EventStage:
    """All queries that have rules; thread-safe. `send` takes the messages of events, `recorder` keeps clips of them.

    Cameras call `admit` with every frame, the thread that runs queries calls `apply` with every result, and `check`
    between two frames.
    """

    def __init__(self, run: str, send: Callable[[ResultMessage], None], recorder: ClipRecorder | None = None) -> None:
        self._recorder, self._with_clip = recorder, set[str]()
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events begun, by query and rule."""
        self.paused = frozenset[str]()
        """Queries that a person has switched off."""
        self._run, self._send = run, send
        self._queries: dict[str, QueryEvents] = {}
        self._ids = itertools.count(1)
        self._recent: OrderedDict[str, Mapping[str, Any]] = OrderedDict()
        self._thumbnails: dict[str, bytes] = {}
        self._wants_pictures = False
        self._lock = threading.Lock()

    def change(
        self,
        queries: Mapping[str, BundleQuery],
        rules: Mapping[str, QueryRules],
        rates: Mapping[str, float],
        wants_pictures: bool = False,
    ) -> None:
        """Serve these queries, each with its frames a second; those that ask the same by the same rules, but for least
        scores, keep tracks and events, others end theirs."""
        with self._lock:
            before, self._queries = self._queries, {}
            self._wants_pictures = wants_pictures
            for name, own in rules.items():
                kept, query, fps = before.get(name), queries[name], rates[name]
                if kept is not None and kept.fps == fps and kept.follows(own) and _asks_same(kept.query, query):
                    self._queries[name] = before.pop(name)
                    kept.rules = own
                else:
                    head = {"run": self._run, "camera": query.camera, "query": name}
                    events = [rule.at_rate(fps) for rule in own.events]
                    machine = EventMachine(events, DEFAULT_TRACKING.lost_after_s(fps), fps, head, self._new_id)
                    self._queries[name] = QueryEvents(query, own, machine, fps)
            for one in before.values():
                self._end(one, EndReason.RELOAD)

    def is_on(self, query: str, unix: float) -> bool:
        """Whether a query is neither switched off nor outside of its hours at this time in Unix seconds."""
        own = self._queries.get(query)
        schedule = None if own is None else own.rules.schedule
        return query not in self.paused and (schedule is None or schedule.is_on(unix))

    def admit(self, query: str, frame: Frame) -> str | None:
        """Why a frame is not to be run: OFF, or STILL where nothing moves; None where it is."""
        own = self._queries.get(query)
        if not self.is_on(query, frame.captured_unix):
            with self._lock:
                if own is not None and own.newest is not None:
                    self._end(own, EndReason.OFF)
            return OFF
        if own is None:
            return None
        if not own.rules.motion_gating or frame.image is None:
            return None
        if not own.gate.is_still(frame.index, frame.captured_at, frame.image):
            return None
        with self._lock:
            self._publish(own, own.hold(Moment(frame.index, frame.captured_at, frame.captured_unix)))
        return STILL

    def apply(self, message: ResultMessage) -> ResultMessage:
        """A result as sinks get it; its events are sent first."""
        own = self._queries.get(message.record["query"])
        if own is None:
            return message
        record, image = message.record, message.image
        if own.rules.motion_gating:
            own.gate.confirm(record["frame"])
        size = (1, 1) if image is None else (image.shape[1], image.shape[0])
        with self._lock:
            has_room = self._wants_pictures and own.machine.pictures < MAX_PICTURES
            moment = Moment(
                record["frame"], message.captured_at, record["captured_at"], size, image if has_room else None
            )
            record, notices = own.apply(moment, record, message.weak)
            self._publish(own, notices)
        return ResultMessage(record, image)

    def check(self, away: Collection[str], now: float) -> None:
        """End the events of queries whose camera is away, or that have had no result for long."""
        for own in self._queries.values():
            newest = own.newest
            if newest is None:
                continue
            is_away = own.query.camera in away
            if is_away or now - newest.at > max(NO_RESULTS_S, NO_RESULTS_FRAMES / own.fps):
                with self._lock:
                    self._end(own, EndReason.CAMERA_AWAY if is_away else EndReason.NO_RESULTS)

    def end(self) -> None:
        """End all events: the box stops."""
        with self._lock:
            for own in self._queries.values():
                self._end(own, EndReason.STOPPED)

    def events(self, count: int = MAX_EVENTS) -> list[Mapping[str, Any]]:
        """The newest events, newest first."""
        with self._lock:
            return [dict(state) for state in itertools.islice(reversed(self._recent.values()), count)]

    def thumbnail(self, event: str) -> bytes | None:
        """The snapshot of one of the newest events, a small JPEG; None without one."""
        with self._lock:
            return self._thumbnails.get(event)

    def event_counts(self) -> dict[str, dict[str, int]]:
        """The events that have begun, by query and name."""
        with self._lock:
            return {
                query: {rule.name: self.counts[query, rule.name] for rule in own.rules.events}
                for query, own in self._queries.items()
                if own.rules.events
            }

    def states(self) -> Mapping[str, QueryState]:
        """What status shows, by query."""
        now, found = time.time(), defaultdict[str, QueryState](QueryState)
        with self._lock:
            for name, own in self._queries.items():
                scheduled = None if own.rules.schedule is None else own.rules.schedule.is_on(now)
                tracks, events = len(own.machine.tracks), len(own.machine.open_events)
                crossed = {rule: dict(ways) for rule, ways in own.machine.crossed.items()}
                found[name] = QueryState(
                    scheduled, own.rules.motion_gating, tracks, events, crossed, own.tracking_trouble
                )
        return found

    def places(self, camera: str) -> list[tuple[str, Polygon]]:
        """The zones and lines of a camera's queries, by name, each once."""
        found = {
            (name, polygon): None
            for own in self._queries.values()
            if own.query.camera == camera
            for name, polygon in (*own.rules.zones.items(), *own.rules.lines.items())
        }
        return list(found)

    def _new_id(self) -> str:
        return f"{self._run}-{next(self._ids)}"

    def _end(self, own: QueryEvents, reason: EndReason) -> None:
        self._publish(own, own.end(reason))

    def _publish(self, own: QueryEvents, notices: Sequence[Notice]) -> None:
        for notice in notices:
            name, event, camera = notice.rule.name, notice.after["id"], own.query.camera
            if not notice.is_end:
                self.counts[own.query.id, name] += 1
                if self._recorder is not None and self._recorder.begin(camera, event, notice.since_at):
                    self._with_clip.add(event)
            has_clip = event in self._with_clip
            clip = {"has_clip": has_clip, "clip": f"/api/events/{event}/clip.mp4" if has_clip else None}
            before, after = {**notice.before, **clip}, {**notice.after, **clip}
            self._recent[event] = after
            while len(self._recent) > MAX_EVENTS:
                oldest, _ = self._recent.popitem(last=False)
                self._thumbnails.pop(oldest, None)
                self._with_clip.discard(oldest)
            record = {
                "type": "end" if notice.is_end else "new", "run": self._run, "query": own.query.id, "camera": camera,
                "event": name, "open": notice.open, "before": before, "after": after,
            }  # fmt: skip
            message = ResultMessage(record, notice.image)
            if notice.image is not None:
                self._thumbnails[event] = draw_thumbnail(notice.image, record)
            if notice.is_end and self._recorder is not None:
                self._recorder.end(event)
                self._recorder.keep_snapshot(message)
            self._send(message)


def _asks_same(before: BundleQuery, after: BundleQuery) -> bool:
    return all(
        getattr(before, key) == getattr(after, key)
        for key in ("camera", "task", "classes", "roi", "frame_size", "min_score", "threshold")
    )
