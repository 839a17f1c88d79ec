"""People who walk along waypoints, stop at kerbs and linger."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from video_samples.movers.actors import Actor
from video_samples.movers.figures import Outfit, random_outfit
from video_samples.movers.traffic import STEP_S

Point = tuple[float, float]

CROSSING_HASTE = 1.5  # how much faster people walk on a zebra


@dataclass(frozen=True)
class Route:
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
    route: Route
    speed: float
    x: float
    y: float
    heading: float
    target: int = 1
    gone_m: float = 0.0
    pause_s: float = 0.0
    standing: bool = False

    def actor(self) -> Actor:
        return Actor(
            self.track, self.kind, self.x, self.y, self.heading, self.gone_m, self.look, standing=self.standing
        )


@dataclass
class Crowd:
    """All walkers of a scene."""

    routes: Sequence[Route]
    green: Callable[[str, float], bool]
    rng: np.random.Generator
    new_track: Callable[[], int]
    walkers: list[Walker] = field(default_factory=list)
    next_arrival: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.next_arrival = [float(self.rng.exponential(route.every_s)) * 0.6 for route in self.routes]

    def step(self, now: float) -> None:
        """Moves everybody on by STEP_S."""
        for i, route in enumerate(self.routes):
            if now >= self.next_arrival[i]:
                self.next_arrival[i] = now + route.every_s * (0.3 + float(self.rng.exponential(0.7)))
                self._arrive(route)
        for walker in self.walkers:
            self._advance(walker, now)
        self.walkers = [w for w in self.walkers if w.target < len(w.points)]

    def actors(self) -> list[Actor]:
        return [walker.actor() for walker in self.walkers]

    def _arrive(self, route: Route) -> None:
        offset = self.rng.uniform(-route.spread, route.spread, 2)
        points = [
            (x + float(offset[0] + self.rng.normal(0, 0.15)), y + float(offset[1] + self.rng.normal(0, 0.15)))
            for x, y in route.points
        ]
        if self.rng.random() < 0.5 and not route.wait_at and not route.linger:
            points.reverse()
        heading = float(np.arctan2(points[1][1] - points[0][1], points[1][0] - points[0][0]))
        speed = float(self.rng.uniform(1.15, 1.65)) if route.kind == "person" else float(self.rng.uniform(2.8, 4.2))
        self.walkers.append(
            Walker(self.new_track(), route.kind, random_outfit(self.rng), points, route, speed, *points[0], heading)
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
        dx, dy = goal[0] - walker.x, goal[1] - walker.y
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
