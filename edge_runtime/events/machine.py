"""What happens, out of what is seen: the events of one query, each with a start and an end, without clock or thread."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gemel.edge_runtime.events.paths import LEFT, RIGHT, TrackPath, see_point
from gemel.edge_runtime.events.rules import EventKind, EventRule, Hysteresis

BETTER = 1.1
"""A snapshot is replaced by one that is better by this factor."""


class EndReason(str, Enum):
    """Why an event ended."""

    __str__ = str.__str__

    LEFT = "left"
    LOST = "lost"
    MOVED = "moved"
    TURNED = "turned"
    OVER = "over"
    SPARSE = "few-frames"
    CAMERA_AWAY = "camera-away"
    NO_RESULTS = "no-results"
    OFF = "off"
    RELOAD = "reload"
    STOPPED = "stopped"


class Latch:
    """A condition with hysteresis; `is_on` changes once the last frames say so often enough."""

    def __init__(self, frames: Hysteresis) -> None:
        self._frames = frames
        self._seen: deque[bool] = deque(maxlen=frames.window)
        self.is_on = False

    def add(self, holds: bool) -> bool:
        """One more frame; whether `is_on` changed."""
        self._seen.append(holds)
        changes = self._seen.count(not self.is_on) >= self._frames.count
        if changes:
            self.is_on = not self.is_on
        return changes

    @property
    def is_idle(self) -> bool:
        """Off, and not seen lately."""
        return not self.is_on and True not in self._seen


@dataclass(frozen=True, slots=True)
class Moment:
    """A frame: its number, when it was captured (seconds of the schedule's clock and Unix), and its picture's size."""

    frame: int
    at: float
    unix: float
    size: tuple[int, int] = (1, 1)
    image: Any = None


@dataclass(frozen=True, slots=True)
class Sighting:
    """One object in one frame: its track, class, score, box in pixels, the zones that it is in, how well the frame
    shows it (`quality`), and the frame's (width, height)."""

    track: int | None
    label: str
    score: float
    box: tuple[float, ...] = ()
    zones: tuple[str, ...] = ()
    quality: float = 0.0
    area: float = 0.0
    size: tuple[int, int] = (1, 1)


def see_object(
    track: int | None, detection: Mapping[str, Any], zones: Sequence[str], size: tuple[int, int]
) -> Sighting:
    """The sighting of a detection of a result in a frame of this (width, height).

    Its quality is score x side of its box relative to the frame, halved where the frame's edge cuts it off.
    """
    x0, y0, x1, y1 = detection["box"]
    area = max(0.0, x1 - x0) * max(0.0, y1 - y0)
    is_cut = x0 <= 1 or y0 <= 1 or x1 >= size[0] - 1 or y1 >= size[1] - 1
    quality = detection["score"] * (area / (size[0] * size[1])) ** 0.5 * (0.5 if is_cut else 1.0)
    return Sighting(track, detection["class"], detection["score"], (x0, y0, x1, y1), tuple(zones), quality, area, size)


@dataclass(frozen=True, slots=True, eq=False)
class Notice:
    """The start or the end of an event (`is_end`): the rule, the event before and now, its best picture, and how many
    events of the rule are `open` then; it began at `since_at` of the schedule's clock."""

    rule: EventRule
    is_end: bool
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    open: int
    image: Any = None
    since_at: float = 0.0


@dataclass(slots=True, eq=False)
class OpenEvent:
    """An event that goes on; `state` is what messages say of it, `quality` that of its snapshot.

    It goes from `since_at` to `last_at`, seconds of the schedule's clock, in which `since_count` to `last_count` frames
    of the query were answered.
    """

    rule: EventRule
    state: dict[str, Any]
    since_at: float
    last_at: float
    since_count: int
    last_count: int
    quality: float = 0.0
    image: Any = None

    def pass_time(self, moment: Moment, count: int) -> None:
        """It goes on in this frame, the query's `count`-th."""
        self.last_at, self.last_count = moment.at, count
        self.state["frame_time"] = moment.unix

    def finish(self, reason: EndReason, fps: float) -> None:
        """End it when it was seen last, by the clock that never jumps."""
        state = self.state
        state["duration_s"] = round(max(0.0, self.last_at - self.since_at), 3)
        state["end_time"] = state["start_time"] + state["duration_s"]
        state["end_reason"] = str(reason)
        self.count_frames(fps)

    def count_frames(self, fps: float) -> None:
        """State how many frames of the query were answered, of those that its rate asks for."""
        seen = self.last_count - self.since_count + 1
        expected = 1 + round((self.last_at - self.since_at) * fps)
        self.state["frames"] = {"seen": seen, "expected": max(seen, expected)}

    def see(self, sighting: Sighting, moment: Moment) -> None:
        """Take over what is newest, and the snapshot where it is better; one with a picture is not replaced by one
        without."""
        state = self.state
        state["score"] = sighting.score
        state["top_score"] = max(state["top_score"], sighting.score)
        if sighting.box:
            state["box"], state["area"] = list(sighting.box), round(sighting.area)
        state["current_zones"] = list(sighting.zones)
        entered = state["entered_zones"]
        entered.extend(zone for zone in sighting.zones if zone not in entered)
        if sighting.quality > BETTER * self.quality and (moment.image is not None or self.image is None):
            self.quality, self.image = sighting.quality, moment.image
            state["snapshot"] = {
                "frame": moment.frame, "frame_time": moment.unix, "box": list(sighting.box), "score": sighting.score,
                "label": sighting.label,
            }  # fmt: skip


@dataclass(slots=True, eq=False)
class Presence:
    """A track in the zone of a rule: since when and until when (seconds, and the query's frames), and for the kinds
    `leave` and `lost` the event that may begin."""

    latch: Latch
    since_at: float
    since_count: int
    last_at: float
    last_count: int
    candidate: OpenEvent | None = None


@dataclass(slots=True, eq=False)
class Track:
    """An object over frames: its path, its scores by class, when it was last seen, and its presences by the rule's
    name."""

    path: TrackPath = field(default_factory=TrackPath)
    votes: dict[str, float] = field(default_factory=dict)
    last_at: float = 0.0
    presences: dict[str, Presence] = field(default_factory=dict)
    label: str = ""
    """The class with the highest sum of scores."""

    def vote(self, label: str, score: float) -> None:
        """One more sight of it."""
        self.votes[label] = self.votes.get(label, 0.0) + score
        if self.votes[label] >= self.votes.get(self.label, 0.0):
            self.label = label


class EventMachine:
    """The events of one query by its rules, at `fps` frames a second.

    `observe` takes what a frame shows, in order of time; `hold` says that a later frame shows the same. An object not
    seen for `lost_s` is gone. `head` are the keys with which every event begins, `new_id` makes its id.
    """

    def __init__(
        self, rules: Sequence[EventRule], lost_s: float, fps: float, head: Mapping[str, Any], new_id: Callable[[], str]
    ) -> None:
        self.tracks: dict[int, Track] = {}
        self.crossed: dict[str, Counter[str]] = {
            rule.name: Counter({LEFT: 0, RIGHT: 0}) for rule in rules if rule.kind is EventKind.CROSS
        }
        """By rule the objects that crossed its line, each way."""
        self._rules, self._lost_s, self._fps = tuple(rules), lost_s, fps
        self._head, self._new_id = dict(head), new_id
        self._of_tracks = [rule for rule in rules if rule.needs_tracks]
        self._latches = {rule.name: Latch(rule.frames) for rule in rules if rule.kind is EventKind.COUNT}
        self._labels = {
            rule.name: deque[str](maxlen=rule.frames.window) for rule in rules if rule.kind is EventKind.LABEL_CHANGES
        }
        self._label: dict[str, str] = {}
        self._counted: dict[str, Presence] = {}
        self._open: dict[tuple[str, int | None], OpenEvent] = {}
        self._seen: tuple[Sighting, ...] = ()
        self._count = 0

    @property
    def open_events(self) -> list[Mapping[str, Any]]:
        """The events that go on."""
        return [event.state for event in self._open.values()]

    def open_count(self, rule: str) -> int:
        """The events of a rule that go on."""
        return sum(name == rule for name, _ in self._open)

    @property
    def pictures(self) -> int:
        """The frames that events keep as their snapshots."""
        presences = [presence for track in self.tracks.values() for presence in track.presences.values()]
        events = [*self._open.values(), *(presence.candidate for presence in presences)]
        return len({id(event.image) for event in events if event is not None and event.image is not None})

    def observe(self, moment: Moment, sightings: Iterable[Sighting]) -> list[Notice]:
        """What began or ended with this frame."""
        self._seen = tuple(sightings)
        return list(self._advance(moment))

    def hold(self, moment: Moment) -> list[Notice]:
        """What began or ended where this frame shows what the last one showed."""
        return list(self._advance(moment))

    def end_tracks(self, reason: EndReason) -> list[Notice]:
        """End the events that follow objects, and forget the tracks."""
        names = {rule.name for rule in self._of_tracks}
        notices = [self._close(key, reason) for key in list(self._open) if key[0] in names]
        self.tracks.clear()
        return notices

    def end_all(self, reason: EndReason) -> list[Notice]:
        """End every event when it was seen last, and forget the tracks."""
        notices = [self._close(key, reason) for key in list(self._open)]
        self.tracks.clear()
        self._label.clear()
        self._counted.clear()
        self._seen = ()
        for rule in self._rules:
            if rule.name in self._latches:
                self._latches[rule.name] = Latch(rule.frames)
            if rule.name in self._labels:
                self._labels[rule.name].clear()
        return notices

    def _advance(self, moment: Moment) -> Iterator[Notice]:
        self._count += 1
        for sighting in self._seen:
            if sighting.track is not None:
                yield from self._see_track(sighting.track, sighting, moment)
        for number, track in list(self.tracks.items()):
            if moment.at - track.last_at > self._lost_s:
                del self.tracks[number]
                yield from self._lose(number, track, moment)
        for rule in self._rules:
            if rule.kind is EventKind.COUNT:
                yield from self._count_objects(rule, moment)
            elif rule.kind is EventKind.LABEL_CHANGES and self._seen:
                yield from self._compare_label(rule, self._seen[0], moment)

    def _see_track(self, number: int, sighting: Sighting, moment: Moment) -> Iterator[Notice]:
        track = self.tracks.setdefault(number, Track())
        track.vote(sighting.label, sighting.score)
        track.last_at = moment.at
        track.path.add(see_point(moment.at, sighting.box, sighting.size))
        for rule in self._of_tracks:
            if rule.kind is EventKind.CROSS:
                yield from self._watch_line(rule, sighting, track, moment)
            else:
                yield from self._follow(rule, sighting, track, moment)

    def _lose(self, number: int, track: Track, moment: Moment) -> Iterator[Notice]:
        """An object is no longer seen: it went out where its path leads out of the frame or the zone."""
        for rule in self._of_tracks:
            presence = track.presences.get(rule.name)
            if presence is not None and presence.latch.is_on:
                reason = EndReason.LEFT if track.path.leads_out(rule.polygon) else EndReason.LOST
                yield from self._depart(rule, number, presence, reason, moment)

    def _watch_line(self, rule: EventRule, sighting: Sighting, track: Track, moment: Moment) -> Iterator[Notice]:
        way = track.path.cross(rule.name, rule.segment)
        is_wanted = rule.direction in (None, way) and (rule.zone is None or rule.zone in sighting.zones)
        if way is None or not is_wanted or (rule.classes and track.label not in rule.classes):
            return
        self.crossed[rule.name][way] += 1
        event = self._make(rule, sighting, track.label, moment)
        event.state |= {"line": rule.line, "direction": way, "crossed": dict(self.crossed[rule.name])}
        yield self._begin(rule, sighting.track, event, moment, sighting)
        yield self._close((rule.name, sighting.track), EndReason.OVER)

    def _follow(self, rule: EventRule, sighting: Sighting, track: Track, moment: Moment) -> Iterator[Notice]:
        """A track of a rule about the objects in a zone, in one frame."""
        number = sighting.track
        is_in_zone = rule.zone is None or rule.zone in sighting.zones
        holds = is_in_zone and (not rule.classes or track.label in rule.classes)
        if rule.kind is EventKind.HEADING:
            holds = holds and track.path.heads_towards(rule.towards)
        presence = track.presences.get(rule.name)
        if presence is None:
            if not holds:
                return
            presence = Presence(Latch(rule.frames), moment.at, self._count, moment.at, self._count)
            track.presences[rule.name] = presence
        if holds:
            presence.last_at, presence.last_count = moment.at, self._count
            if rule.kind in _AT_THE_END:
                presence.candidate = presence.candidate or self._make(rule, sighting, track.label, moment)
                presence.candidate.see(sighting, moment)
        has_changed = presence.latch.add(holds)
        event = self._open.get((rule.name, number))
        if event is not None:
            event.state["label"] = track.label
            if holds:
                event.pass_time(moment, self._count)
            event.see(sighting, moment)
        if has_changed and not presence.latch.is_on:
            reason = EndReason.TURNED if is_in_zone and rule.kind is EventKind.HEADING else EndReason.LEFT
            yield from self._depart(rule, number, presence, reason, moment)
            del track.presences[rule.name]
        elif presence.latch.is_idle:
            del track.presences[rule.name]
        elif event is not None and rule.kind is EventKind.STILL and track.path.still_at > event.since_at:
            yield self._close((rule.name, number), EndReason.MOVED)
        elif event is None and presence.latch.is_on and rule.kind not in _AT_THE_END:
            since_at = presence.since_at
            if rule.kind is EventKind.STILL:
                since_at = max(since_at, track.path.still_at)
            if moment.at - since_at >= rule.seconds:
                begun = self._make(rule, sighting, track.label, moment, since_at, presence.since_count)
                yield self._begin(rule, number, begun, moment, sighting)

    def _depart(
        self, rule: EventRule, number: int | None, presence: Presence, reason: EndReason, moment: Moment
    ) -> Iterator[Notice]:
        """A track is no longer in the zone of a rule."""
        event = presence.candidate
        if event is not None and reason is _AT_THE_END.get(rule.kind):
            event.since_at, event.since_count = presence.last_at, presence.last_count
            event.last_at, event.last_count = presence.last_at, presence.last_count
            event.state["start_time"] = moment.unix - (moment.at - presence.last_at)
            self._open[rule.name, number] = event
            yield self._notice(event, False, event.state)
        if (rule.name, number) in self._open:
            yield self._close((rule.name, number), reason)

    def _count_objects(self, rule: EventRule, moment: Moment) -> Iterator[Notice]:
        labels = Counter[str]()
        best: Sighting | None = None
        for sighting in self._seen:
            track = None if sighting.track is None else self.tracks.get(sighting.track)
            label = sighting.label if track is None else track.label
            is_in_zone = rule.zone is None or rule.zone in sighting.zones
            if is_in_zone and (not rule.classes or label in rule.classes):
                labels[label] += 1
                best = sighting if best is None or sighting.quality > best.quality else best
        total, latch, key = labels.total(), self._latches[rule.name], (rule.name, None)
        holds = total >= rule.at_least
        presence = self._counted.get(rule.name)
        if holds and (presence is None or latch.is_idle):
            presence = Presence(latch, moment.at, self._count, moment.at, self._count)
            self._counted[rule.name] = presence
        if holds and presence is not None:
            presence.last_at, presence.last_count = moment.at, self._count
        has_changed = latch.add(holds)
        event = self._open.get(key)
        if event is not None:
            event.state["count"], event.state["counts"] = total, dict(labels)
            if holds:
                event.pass_time(moment, self._count)
            if total > event.state["top_count"] and best is not None:
                event.state["top_count"], event.quality = total, 0.0
                event.see(best, moment)
        if has_changed and latch.is_on and best is not None and presence is not None:
            begun = self._make(rule, best, best.label, moment, presence.since_at, presence.since_count)
            begun.state |= {"track": None, "count": total, "counts": dict(labels), "top_count": total}
            yield self._begin(rule, None, begun, moment, best)
        elif has_changed and key in self._open:
            yield self._close(key, EndReason.OVER)

    def _compare_label(self, rule: EventRule, sighting: Sighting, moment: Moment) -> Iterator[Notice]:
        window, key = self._labels[rule.name], (rule.name, None)
        window.append(sighting.label)
        before = self._label.get(rule.name)
        event = self._open.get(key)
        if event is not None:
            event.pass_time(moment, self._count)
            if sighting.label == event.state["label"]:
                event.see(sighting, moment)
        if sighting.label == before or window.count(sighting.label) < rule.frames.count:
            return
        self._label[rule.name] = sighting.label
        if event is not None:
            yield self._close(key, EndReason.OVER)
        if before is not None and (not rule.classes or sighting.label in rule.classes):
            begun = self._make(rule, sighting, sighting.label, moment)
            begun.state["previous_label"] = before
            yield self._begin(rule, None, begun, moment, sighting)

    def _make(
        self,
        rule: EventRule,
        sighting: Sighting,
        label: str,
        moment: Moment,
        since_at: float | None = None,
        since_count: int | None = None,
    ) -> OpenEvent:
        since_at = moment.at if since_at is None else since_at
        since_count = self._count if since_count is None else since_count
        start = moment.unix - (moment.at - since_at)
        state = {
            "id": self._new_id(), **self._head, "event": rule.name, "kind": str(rule.kind), "zone": rule.zone,
            "track": sighting.track, "label": label, "score": sighting.score, "top_score": sighting.score,
            "box": None, "area": None, "start_time": start, "end_time": None, "end_reason": None, "duration_s": None,
            "frame_time": start, "frames": None, "current_zones": [], "entered_zones": [], "snapshot": None,
            "has_snapshot": False
        }  # fmt: skip
        return OpenEvent(rule, state, since_at, moment.at, since_count, self._count)

    def _begin(
        self, rule: EventRule, number: int | None, event: OpenEvent, moment: Moment, sighting: Sighting
    ) -> Notice:
        event.pass_time(moment, self._count)
        event.see(sighting, moment)
        self._open[rule.name, number] = event
        return self._notice(event, False, event.state)

    def _close(self, key: tuple[str, int | None], reason: EndReason) -> Notice:
        event = self._open.pop(key)
        before = _copy(event.state)
        event.finish(reason, self._fps)
        return self._notice(event, True, before)

    def _notice(self, event: OpenEvent, is_end: bool, before: Mapping[str, Any]) -> Notice:
        event.state["has_snapshot"] = event.image is not None
        event.count_frames(self._fps)
        open_count = self.open_count(event.rule.name)
        return Notice(event.rule, is_end, _copy(before), _copy(event.state), open_count, event.image, event.since_at)


_AT_THE_END = {EventKind.LEAVE: EndReason.LEFT, EventKind.LOST: EndReason.LOST}
"""By kind that begins as an object departs, the reason for which it must."""


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "entered_zones": list(state["entered_zones"])}
