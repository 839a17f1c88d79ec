"""What happens, out of what is seen: the events of one query, each with a start and an end, without clock or thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from edge_runtime.events.rules import EventKind, EventRule, Hysteresis

BETTER = 1.1
"""A snapshot is replaced by one that is better by this factor."""


class EndReason(str, Enum):
    """Why an event ended."""

    __str__ = str.__str__

    LEFT = "left"
    LOST = "lost"
    OVER = "over"
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
    """One object in one frame: its track, class, score, box in pixels, the zones that it is in, and how well the frame
    shows it (`quality`)."""

    track: int | None
    label: str
    score: float
    box: tuple[float, ...] = ()
    zones: tuple[str, ...] = ()
    quality: float = 0.0
    area: float = 0.0


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
    return Sighting(track, detection["class"], detection["score"], (x0, y0, x1, y1), tuple(zones), quality, area)


@dataclass(frozen=True, slots=True, eq=False)
class Notice:
    """The start or the end of an event (`is_end`): the rule, the event before and now, its best picture, and how many
    events of the rule are `open` then."""

    rule: EventRule
    is_end: bool
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    open: int
    image: Any = None


@dataclass(slots=True, eq=False)
class OpenEvent:
    """An event that goes on; `state` is what messages say of it, `quality` that of its snapshot."""

    rule: EventRule
    state: dict[str, Any]
    quality: float = 0.0
    image: Any = None

    def see(self, moment: Moment, sighting: Sighting) -> None:
        """Take over what is newest, and the snapshot where it is better; one with a picture is not replaced by one
        without."""
        state = self.state
        state["frame_time"], state["score"] = moment.unix, sighting.score
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
    """A track in the zone of a rule: since when (Unix seconds and the schedule's clock), when last, its event."""

    latch: Latch
    since: float = 0.0
    since_at: float = 0.0
    last: float = 0.0
    event: OpenEvent | None = None
    candidate: OpenEvent | None = None
    """The event of an object that may leave, for the kind `leave`."""

    def is_due(self, rule: EventRule, moment: Moment) -> bool:
        """Whether an event of the rule begins."""
        return self.latch.is_on and rule.kind is not EventKind.LEAVE and moment.at - self.since_at >= rule.seconds


@dataclass(slots=True, eq=False)
class Track:
    """An object over frames: its scores by class, when it was last seen, and its presences by the rule's name."""

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
    """The events of one query by its rules.

    `observe` takes what a frame shows, in order of time; `hold` says that a later frame shows the same. An object not
    seen for `lost_s` is gone. `head` are the keys with which every event begins, `new_id` makes its id.
    """

    def __init__(
        self, rules: Sequence[EventRule], lost_s: float, head: Mapping[str, Any], new_id: Callable[[], str]
    ) -> None:
        self.tracks: dict[int, Track] = {}
        self._rules, self._lost_s, self._head, self._new_id = tuple(rules), lost_s, dict(head), new_id
        self._of_tracks = [rule for rule in rules if rule.kind in _WITH_TRACKS]
        self._latches = {rule.name: Latch(rule.frames) for rule in rules if rule.kind is EventKind.COUNT}
        self._labels = {
            rule.name: deque[str](maxlen=rule.frames.window) for rule in rules if rule.kind is EventKind.LABEL_CHANGES
        }
        self._label: dict[str, str] = {}
        self._counted: dict[str, tuple[float, float]] = {}
        self._open: dict[tuple[str, int | None], OpenEvent] = {}
        self._seen: tuple[Sighting, ...] = ()

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
        own = [*self._open.values(), *(presence.candidate for presence in presences)]
        return len({id(event.image) for event in own if event is not None and event.image is not None})

    def observe(self, moment: Moment, sightings: Iterable[Sighting]) -> list[Notice]:
        """What began or ended with this frame."""
        self._seen = tuple(sightings)
        return list(self._advance(moment, self._seen))

    def hold(self, moment: Moment) -> list[Notice]:
        """What began or ended where this frame shows what the last one showed."""
        return list(self._advance(moment, self._seen))

    def end_all(self, reason: EndReason) -> list[Notice]:
        """End every event when it was seen last, and forget the tracks."""
        notices = [self._close(key, reason, event.state["frame_time"]) for key, event in list(self._open.items())]
        self.tracks.clear()
        self._label.clear()
        self._seen = ()
        for rule in self._rules:
            if rule.name in self._latches:
                self._latches[rule.name] = Latch(rule.frames)
            if rule.name in self._labels:
                self._labels[rule.name].clear()
        return notices

    def _advance(self, moment: Moment, sightings: Sequence[Sighting]) -> Iterator[Notice]:
        for sighting in sightings:
            if sighting.track is not None:
                track = self.tracks.setdefault(sighting.track, Track())
                track.vote(sighting.label, sighting.score)
                track.last_at = moment.at
                for rule in self._of_tracks:
                    yield from self._follow(rule, sighting, track, moment)
        for number, track in list(self.tracks.items()):
            if moment.at - track.last_at > self._lost_s:
                del self.tracks[number]
                for rule in self._of_tracks:
                    if (presence := track.presences.get(rule.name)) is not None and presence.latch.is_on:
                        yield from self._depart(rule, number, presence, EndReason.LOST)
        for rule in self._rules:
            if rule.kind is EventKind.COUNT:
                yield from self._count(rule, sightings, moment)
            elif rule.kind is EventKind.LABEL_CHANGES and sightings:
                yield from self._compare_label(rule, sightings[0], moment)

    def _follow(self, rule: EventRule, sighting: Sighting, track: Track, moment: Moment) -> Iterator[Notice]:
        """A track of a rule that follows objects in one frame."""
        number = sighting.track
        is_in = (rule.zone is None or rule.zone in sighting.zones) and (not rule.classes or track.label in rule.classes)
        presence = track.presences.get(rule.name)
        if presence is None:
            if not is_in:
                return
            presence = track.presences[rule.name] = Presence(Latch(rule.frames), moment.unix, moment.at)
        if is_in:
            presence.last = moment.unix
            if rule.kind is EventKind.LEAVE:
                presence.candidate = presence.candidate or self._make(rule, sighting, track.label, presence.since)
                presence.candidate.see(moment, sighting)
        has_changed = presence.latch.add(is_in)
        event = self._open.get((rule.name, number))
        if event is not None:
            event.state["label"] = track.label
            event.see(moment, sighting)
        if has_changed and not presence.latch.is_on:
            yield from self._depart(rule, number, presence, EndReason.LEFT)
            del track.presences[rule.name]
        elif presence.latch.is_idle:
            del track.presences[rule.name]
        elif event is None and presence.is_due(rule, moment):
            made = self._make(rule, sighting, track.label, presence.since)
            yield self._begin(rule, number, made, moment, sighting)

    def _depart(self, rule: EventRule, number: int | None, presence: Presence, reason: EndReason) -> Iterator[Notice]:
        """A track is no longer in the zone of a rule."""
        if rule.kind is EventKind.LEAVE and presence.candidate is not None:
            event = presence.candidate
            event.state["start_time"] = event.state["frame_time"] = presence.last
            self._open[rule.name, number] = event
            yield self._notice(event, False, event.state)
        if (rule.name, number) in self._open:
            yield self._close((rule.name, number), reason, presence.last)

    def _count(self, rule: EventRule, sightings: Sequence[Sighting], moment: Moment) -> Iterator[Notice]:
        found = [
            one
            for one in sightings
            if (rule.zone is None or rule.zone in one.zones) and (not rule.classes or one.label in rule.classes)
        ]
        holds, latch, key = len(found) >= rule.at_least, self._latches[rule.name], (rule.name, None)
        first, last = self._counted.get(rule.name, (moment.unix, moment.unix))
        if holds:
            self._counted[rule.name] = (moment.unix if latch.is_idle else first), moment.unix
        has_changed = latch.add(holds)
        best = max(found, key=lambda one: one.quality, default=None)
        event = self._open.get(key)
        if event is not None:
            event.state["count"], event.state["frame_time"] = len(found), moment.unix
            if len(found) > event.state["top_count"] and best is not None:
                event.state["top_count"], event.quality = len(found), 0.0
                event.see(moment, best)
        if has_changed and latch.is_on and best is not None:
            made = self._make(rule, best, best.label, self._counted[rule.name][0])
            made.state["track"] = None
            made.state |= {"count": len(found), "top_count": len(found)}
            yield self._begin(rule, None, made, moment, best)
        elif has_changed and key in self._open:
            yield self._close(key, EndReason.OVER, last)

    def _compare_label(self, rule: EventRule, sighting: Sighting, moment: Moment) -> Iterator[Notice]:
        window, key = self._labels[rule.name], (rule.name, None)
        window.append(sighting.label)
        before = self._label.get(rule.name)
        event = self._open.get(key)
        if event is not None:
            event.state["frame_time"] = moment.unix
            if sighting.label == event.state["label"]:
                event.see(moment, sighting)
        if sighting.label == before or window.count(sighting.label) < rule.frames.count:
            return
        self._label[rule.name] = sighting.label
        if event is not None:
            yield self._close(key, EndReason.OVER, moment.unix)
        if before is not None and (not rule.classes or sighting.label in rule.classes):
            made = self._make(rule, sighting, sighting.label, moment.unix)
            made.state["previous_label"] = before
            yield self._begin(rule, None, made, moment, sighting)

    def _make(self, rule: EventRule, sighting: Sighting, label: str, since: float) -> OpenEvent:
        state = {
            "id": self._new_id(), **self._head, "event": rule.name, "kind": str(rule.kind), "zone": rule.zone,
            "track": sighting.track, "label": label, "score": sighting.score, "top_score": sighting.score,
            "box": None, "area": None, "start_time": since, "end_time": None, "end_reason": None, "frame_time": since,
            "current_zones": [], "entered_zones": [], "snapshot": None, "has_snapshot": False, "has_clip": False,
        }  # fmt: skip
        return OpenEvent(rule, state)

    def _begin(
        self, rule: EventRule, number: int | None, event: OpenEvent, moment: Moment, sighting: Sighting
    ) -> Notice:
        event.see(moment, sighting)
        self._open[rule.name, number] = event
        return self._notice(event, False, event.state)

    def _close(self, key: tuple[str, int | None], reason: EndReason, unix: float) -> Notice:
        event = self._open.pop(key)
        before = _copy(event.state)
        event.state["end_time"] = max(unix, event.state["start_time"])
        event.state["end_reason"] = str(reason)
        return self._notice(event, True, before)

    def _notice(self, event: OpenEvent, is_end: bool, before: Mapping[str, Any]) -> Notice:
        event.state["has_snapshot"] = event.image is not None
        open_count = self.open_count(event.rule.name)
        return Notice(event.rule, is_end, _copy(before), _copy(event.state), open_count, event.image)


_WITH_TRACKS = (EventKind.ENTER, EventKind.LEAVE, EventKind.DWELL)


def _copy(state: Mapping[str, Any]) -> dict[str, Any]:
    return {**state, "entered_zones": list(state["entered_zones"])}
