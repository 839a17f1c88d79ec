"""Vehicles and cyclists that follow lanes, each other and the signals, and pedestrians that follow waypoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gemel.video_samples.objects import Outfit, SceneObject, Solid, random_outfit, random_vehicle

STEP_S = 0.1
POINT_M = 0.25  # spacing of the points of a path
MIN_GAP_M, HEADWAY_S = 1.8, 1.1
ACCELERATION, BRAKING = 2.2, 3.0  # m/s2, comfortable
HARD_BRAKING = 6.0  # m/s2; who cannot stop at the line with that drives on


@dataclass(frozen=True)
class Path:
    """One way through the junction. `entry` and `leave` name the lanes it shares with other paths.

    Before `fork_m` it runs in its entry lane; `stop_m` is the stop line; `halt_m` a bus stop, where there is one.
    """

    name: str
    entry: str
    leave: str
    phase: str
    points: np.ndarray
    headings: np.ndarray
    stop_m: float
    fork_m: float
    halt_m: float | None = None

    @property
    def length(self) -> float:
        return (len(self.points) - 1) * POINT_M

    def at(self, s: float) -> tuple[float, float, float]:
        """x, y and heading at s metres along."""
        position = min(max(s, 0.0), self.length - 1e-3) / POINT_M
        i = int(position)
        t = position - i
        a = self.points[i]
        b = self.points[i + 1]
        return (
            float(a[0] + (b[0] - a[0]) * t),
            float(a[1] + (b[1] - a[1]) * t),
            float(self.headings[i]),
        )


def make_path(
    name: str, lanes: tuple[str, str], phase: str, corners, stop, fork=None, halt=None
) -> Path:
    """A path through `corners` (rounded by sampling them finely) from one of two lanes to the other.

    Stop, fork and halt are places on it (x, y).
    """
    corners = np.asarray(corners, np.float64)
    lengths = np.concatenate([[0], np.cumsum(np.linalg.norm(np.diff(corners, axis=0), axis=1))])
    s = np.arange(0, lengths[-1], POINT_M)
    points = np.stack([np.interp(s, lengths, corners[:, i]) for i in range(2)], axis=1)
    kernel = np.ones(9) / 9
    padded = np.concatenate(
        [np.repeat(points[:1], 4, axis=0), points, np.repeat(points[-1:], 4, axis=0)]
    )
    points = np.stack([np.convolve(padded[:, i], kernel, mode="valid") for i in range(2)], axis=1)
    step = np.gradient(points, axis=0)

    def along(place) -> float:
        return float(np.argmin(np.linalg.norm(points - np.asarray(place), axis=1))) * POINT_M

    stop_m = along(stop)
    return Path(
        name,
        *lanes,
        phase,
        points,
        np.arctan2(step[:, 1], step[:, 0]),
        stop_m,
        along(fork) if fork is not None else stop_m,
        along(halt) if halt is not None else None,
    )


def arc(centre, radius: float, start_deg: float, end_deg: float) -> list[tuple[float, float]]:
    """Points of a circle's arc."""
    angles = np.radians(np.linspace(start_deg, end_deg, 12))
    return [
        (centre[0] + radius * float(np.cos(a)), centre[1] + radius * float(np.sin(a)))
        for a in angles
    ]


@dataclass
class MovingObject:
    """One vehicle or cyclist on its path."""

    track: int
    kind: str
    look: Solid | Outfit
    path: Path
    s: float
    speed: float
    cruise: float
    half: float
    dwell_s: float = 0.0
    acceleration: float = 0.0

    def actor(self) -> SceneObject:
        x, y, heading = self.path.at(self.s)
        return SceneObject(
            self.track,
            self.kind,
            x,
            y,
            heading,
            self.s,
            self.look,
            self.acceleration < -0.6 or self.speed < 0.2,
        )


@dataclass(frozen=True)
class Flow:
    """Arrivals on a path: kinds with their shares, mean seconds between two arrivals."""

    path: Path
    kinds: dict[str, float]
    every_s: float
    first_s: float = 0.0


@dataclass
class Traffic:
    """All movers of a scene; `green(phase, seconds)` says whether a phase may go."""

    flows: list[Flow]
    green: Callable[[str, float], bool]
    rng: np.random.Generator
    new_track: Callable[[], int]
    movers: list[MovingObject] = field(default_factory=list)
    next_arrival: list[float] = field(default_factory=list)
    dwell_s: tuple[float, float] = (7.0, 12.0)

    def __post_init__(self) -> None:
        self.next_arrival = [
            flow.first_s + self.rng.exponential(flow.every_s) * 0.5 for flow in self.flows
        ]

    def step(self, now: float) -> None:
        """Moves everything on by STEP_S."""
        for i, flow in enumerate(self.flows):
            if now >= self.next_arrival[i] and self._room(flow.path):
                self._arrive(flow)
                self.next_arrival[i] = now + flow.every_s * (0.45 + self.rng.exponential(0.55))
        entering: dict[str, list[MovingObject]] = {}
        leaving: dict[str, list[MovingObject]] = {}
        for mover in self.movers:
            if mover.s < mover.path.fork_m + mover.half + 2:
                entering.setdefault(mover.path.entry, []).append(mover)
            if mover.s > mover.path.stop_m:
                leaving.setdefault(mover.path.leave, []).append(mover)
        for mover in self.movers:
            gap, speed = _ahead(
                mover, entering.get(mover.path.entry, []), leaving.get(mover.path.leave, [])
            )
            mover.acceleration = self._acceleration(mover, now, gap, speed)
        for mover in self.movers:
            mover.speed = max(0.0, mover.speed + mover.acceleration * STEP_S)
            mover.s += mover.speed * STEP_S
            halt = mover.path.halt_m
            if (
                halt is not None
                and mover.dwell_s > 0
                and mover.s > halt - 1.2
                and mover.speed < 0.4
            ):
                mover.dwell_s -= STEP_S
        self.movers = [m for m in self.movers if m.s < m.path.length - 1]

    def actors(self) -> list[SceneObject]:
        return [mover.actor() for mover in self.movers]

    def _room(self, path: Path) -> bool:
        return all(m.s - m.half > 14 for m in self.movers if m.path.entry == path.entry)

    def _arrive(self, flow: Flow) -> None:
        kinds = list(flow.kinds)
        kind = kinds[
            int(
                self.rng.choice(
                    len(kinds), p=np.array(list(flow.kinds.values())) / sum(flow.kinds.values())
                )
            )
        ]
        track = self.new_track()
        if kind == "bicycle":
            look = random_outfit(self.rng)
            cruise = float(self.rng.uniform(3.8, 5.5))
            half = 0.9
        else:
            look = random_vehicle(kind, self.rng)
            cruise = float(self.rng.uniform(8.5, 11.5)) * (1.0 if kind == "car" else 0.82)
            half = look.length / 2
        dwell = float(self.rng.uniform(*self.dwell_s)) if flow.path.halt_m is not None else 0.0
        self.movers.append(
            MovingObject(track, kind, look, flow.path, 0.0, cruise * 0.8, cruise, half, dwell)
        )

    def _acceleration(
        self, mover: MovingObject, now: float, gap: float, speed_ahead: float
    ) -> float:
        """The intelligent driver model (Treiber et al. 2000); a red signal or a bus stop counts as a standing car."""
        line = mover.path.stop_m - mover.s - mover.half
        can_stop = line > -0.5 and line > mover.speed**2 / (2 * HARD_BRAKING)
        if can_stop and line - 0.4 < gap and not self.green(mover.path.phase, now):
            gap = line - 0.4 + MIN_GAP_M
            speed_ahead = 0.0
        if mover.path.halt_m is not None and mover.dwell_s > 0:
            halt = mover.path.halt_m - mover.s
            if halt + MIN_GAP_M < gap:
                gap = halt + MIN_GAP_M
                speed_ahead = 0.0
        turning = (
            mover.path.entry != mover.path.leave
            and mover.path.stop_m - 12 < mover.s < mover.path.fork_m + 14
        )
        cruise = mover.cruise * (0.5 if turning else 1.0)
        gap = max(gap, 0.1)
        closing = mover.speed - speed_ahead
        desired_gap = MIN_GAP_M + max(
            0.0,
            mover.speed * HEADWAY_S + mover.speed * closing / (2 * (ACCELERATION * BRAKING) ** 0.5),
        )
        acceleration = ACCELERATION * (1 - (mover.speed / cruise) ** 4 - (desired_gap / gap) ** 2)
        return max(-7.0, min(ACCELERATION, acceleration))


def _ahead(
    mover: MovingObject, entering: list[MovingObject], leaving: list[MovingObject]
) -> tuple[float, float]:
    """Gap in metres to the next mover on the same lane, and its speed."""
    gap = 1e3
    speed = mover.cruise
    for other in entering:
        between = other.s - mover.s - mover.half - other.half
        if other.s > mover.s and between < gap:
            gap = between
            speed = other.speed
    if mover.s > mover.path.stop_m - 1:
        remaining_m = mover.path.length - mover.s
        for other in leaving:
            distance = remaining_m - (other.path.length - other.s)
            if distance > 0 and distance - mover.half - other.half < gap:
                gap = distance - mover.half - other.half
                speed = other.speed
    return gap, speed


Point = tuple[float, float]

CROSSING_HASTE = 1.5  # how much faster people walk on a zebra


@dataclass(frozen=True)
class WalkingRoute:
    """Waypoints, and what happens at them: `wait_at` indices wait for `phase`; `linger` {index: (min, max) seconds}."""

    points: tuple[Point, ...]
    every_s: float
    wait_at: tuple[int, ...] = ()
    phase: str = "walk"
    linger: dict[int, tuple[float, float]] = field(default_factory=dict, hash=False)
    spread: float = 0.7
    kind: str = "person"


@dataclass
class Walker:
    """One person on the way."""

    track: int
    kind: str
    look: Outfit
    points: list[Point]
    route: WalkingRoute
    speed: float
    x: float
    y: float
    heading: float
    target: int = 1
    gone_m: float = 0.0
    pause_s: float = 0.0
    standing: bool = False

    def actor(self) -> SceneObject:
        return SceneObject(
            self.track,
            self.kind,
            self.x,
            self.y,
            self.heading,
            self.gone_m,
            self.look,
            standing=self.standing,
        )


@dataclass
class Crowd:
    """All walkers of a scene."""

    routes: Sequence[WalkingRoute]
    green: Callable[[str, float], bool]
    rng: np.random.Generator
    new_track: Callable[[], int]
    walkers: list[Walker] = field(default_factory=list)
    next_arrival: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_arrival = [
            float(self.rng.exponential(route.every_s)) * 0.6 for route in self.routes
        ]

    def step(self, now: float) -> None:
        """Moves everybody on by STEP_S."""
        for i, route in enumerate(self.routes):
            if now >= self.next_arrival[i]:
                self.next_arrival[i] = now + route.every_s * (
                    0.3 + float(self.rng.exponential(0.7))
                )
                self._arrive(route)
        for walker in self.walkers:
            self._advance(walker, now)
        self.walkers = [w for w in self.walkers if w.target < len(w.points)]

    def actors(self) -> list[SceneObject]:
        return [walker.actor() for walker in self.walkers]

    def _arrive(self, route: WalkingRoute) -> None:
        offset = self.rng.uniform(-route.spread, route.spread, 2)
        points = [
            (
                x + float(offset[0] + self.rng.normal(0, 0.15)),
                y + float(offset[1] + self.rng.normal(0, 0.15)),
            )
            for x, y in route.points
        ]
        if self.rng.random() < 0.5 and not route.wait_at and not route.linger:
            points.reverse()
        heading = float(np.arctan2(points[1][1] - points[0][1], points[1][0] - points[0][0]))
        speed = (
            float(self.rng.uniform(1.15, 1.65))
            if route.kind == "person"
            else float(self.rng.uniform(2.8, 4.2))
        )
        self.walkers.append(
            Walker(
                self.new_track(),
                route.kind,
                random_outfit(self.rng),
                points,
                route,
                speed,
                *points[0],
                heading,
            )
        )

    def _advance(self, walker: Walker, now: float) -> None:
        walker.standing = False
        if walker.pause_s > 0:
            walker.pause_s -= STEP_S
            walker.standing = True
            return
        if walker.target - 1 in walker.route.wait_at and not self.green(walker.route.phase, now):
            at = walker.points[walker.target - 1]
            if math.hypot(walker.x - at[0], walker.y - at[1]) < 0.5:
                walker.standing = True
                return
        goal = walker.points[walker.target]
        dx = goal[0] - walker.x
        dy = goal[1] - walker.y
        distance = math.hypot(dx, dy)
        turn = (math.atan2(dy, dx) - walker.heading + math.pi) % (2 * math.pi) - math.pi
        walker.heading += max(-0.35, min(0.35, turn))
        crossing = walker.target - 1 in walker.route.wait_at
        stride = min(walker.speed * (CROSSING_HASTE if crossing else 1.0) * STEP_S, distance)
        walker.x += dx / max(distance, 1e-6) * stride
        walker.y += dy / max(distance, 1e-6) * stride
        walker.gone_m += stride
        if distance <= stride + 1e-9:
            span = walker.route.linger.get(walker.target)
            if span is not None:
                walker.pause_s = float(self.rng.uniform(*span))
            walker.target += 1
