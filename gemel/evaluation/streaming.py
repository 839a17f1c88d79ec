"""Streaming accuracy: what a query knew at each moment, not what its model would have said given time.

Li, Wang and Ramanan 2020 ("Towards Streaming Perception", sAP): at each labelled frame's time the newest
finished result is scored, however old. Here each query's test units (clips or tracks) are played back to
back, in an order and with a phase drawn from a seed; the schedule decides on a virtual clock which frames are
looked at and when that ends. Pure functions over plain values: the answers were predicted once, offline.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

DEFAULT_INTERVAL_S = 1.0
CLOCK_SLACK_S = 1e-6


class Outcome(Protocol):
    """What became of one delivered frame (`edge_runtime.rehearsal.simulator.FrameOutcome`)."""

    @property
    def query(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def captured_at(self) -> float: ...
    @property
    def finished_at(self) -> float | None: ...


@dataclass(frozen=True)
class Footage:
    """When a query's labelled test frames were taken: each frame's unit, and seconds into it."""

    units: tuple[str, ...]
    times_s: tuple[float, ...]
    fps: float | None


@dataclass(frozen=True)
class Stream:
    """A query's labelled frames on the stream's clock.

    Per labelled moment, in order of time: `at_s` seconds, `frames` the index in the test split, `plays` which
    playing of a unit it belongs to. `delivered` are the moments (positions in `at_s`) whose frames the camera
    hands over.
    """

    at_s: tuple[float, ...]
    frames: tuple[int, ...]
    plays: tuple[int, ...]
    delivered: tuple[int, ...]

    def arrivals(self) -> tuple[float, ...]:
        """Capture times of the delivered frames, in seconds."""
        return tuple(self.at_s[moment] for moment in self.delivered)


def thinned(times_s: Sequence[float], fps: float | None) -> list[int]:
    """Positions of the frames a camera at `fps` delivers: the first at or after each tick of its clock."""
    if fps is None:
        return list(range(len(times_s)))
    kept, ticks = [], 0.0
    for position, time_s in enumerate(times_s):
        elapsed = (time_s - times_s[0]) * fps
        if elapsed >= ticks - CLOCK_SLACK_S * fps:
            kept.append(position)
            ticks = int(elapsed + CLOCK_SLACK_S * fps) + 1.0
    return kept


def units_of(footage: Footage) -> list[list[int]]:
    """The frames of each unit (indices into the split), each unit in order of time."""
    found: dict[str, list[int]] = {}
    for index, unit in enumerate(footage.units):
        found.setdefault(unit, []).append(index)
    return [sorted(frames, key=lambda frame: footage.times_s[frame]) for frames in found.values()]


def frame_interval_s(footage: Footage) -> float:
    """The usual time between two labelled frames of a unit (median), in seconds."""
    times = footage.times_s
    gaps = [times[b] - times[a] for unit in units_of(footage) for a, b in pairwise(unit)]
    gaps = [gap for gap in gaps if gap > 0]
    if gaps:
        return median(gaps)
    return 1 / footage.fps if footage.fps else DEFAULT_INTERVAL_S


def length_s(footage: Footage) -> float:
    """Seconds that one playing of all units takes."""
    interval, times = frame_interval_s(footage), footage.times_s
    return sum(times[unit[-1]] - times[unit[0]] + interval for unit in units_of(footage))


def lay_stream(footage: Footage, rng: random.Random, until_s: float) -> Stream:
    """Play the units back to back, each round in a newly shuffled order, from a drawn phase until `until_s`.

    Every unit is played at least once; a unit that has begun is played to its end.
    """
    units, interval = units_of(footage), frame_interval_s(footage)
    clock, play = rng.uniform(0, interval), 0
    at_s: list[float] = []
    frames: list[int] = []
    plays: list[int] = []
    delivered: list[int] = []
    while units and (play < len(units) or clock < until_s):
        if play % len(units) == 0:
            order = rng.sample(range(len(units)), len(units))
        unit = units[order[play % len(units)]]
        times = [footage.times_s[frame] for frame in unit]
        delivered += [len(at_s) + kept for kept in thinned(times, footage.fps)]
        at_s += [clock + time_s - times[0] for time_s in times]
        frames += unit
        plays += [play] * len(unit)
        clock += times[-1] - times[0] + interval
        play += 1
    return Stream(tuple(at_s), tuple(frames), tuple(plays), tuple(delivered))


def lay_streams(footage: Mapping[str, Footage], seed: int) -> dict[str, Stream]:
    """The streams of all queries for one seed; all go on until the longest has played once."""
    until_s = max((length_s(one) for one in footage.values()), default=0.0)
    return {query: lay_stream(one, random.Random(f"{seed}/{query}"), until_s) for query, one in footage.items()}


def shown(stream: Stream, outcomes: Sequence[Outcome]) -> list[int | None]:
    """For each labelled moment the frame (index in the split) whose answer stands; None while none is.

    `outcomes` are those of this query; `index` counts its delivered frames. A result of an earlier playing of
    a unit says nothing about this one.
    """
    finished = [
        (outcome.finished_at, stream.delivered[outcome.index])
        for outcome in outcomes
        if outcome.finished_at is not None
    ]
    finished.sort()
    standing: list[int | None] = []
    newest: int | None = None
    upto = 0
    for moment, now in enumerate(stream.at_s):
        while upto < len(finished) and finished[upto][0] <= now:
            newest = finished[upto][1] if newest is None else max(newest, finished[upto][1])
            upto += 1
        fresh = newest is not None and stream.plays[newest] == stream.plays[moment]
        standing.append(stream.frames[newest] if newest is not None and fresh else None)
    return standing
