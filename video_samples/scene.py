"""A scene: what stands still, what light falls on it, and the world of movers that a seed brings to life."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from gemel.video_samples.backdrop import Backdrop
from gemel.video_samples.draw import Light, View
from gemel.video_samples.objects import SceneObject
from gemel.video_samples.traffic import STEP_S, Crowd, Flow, Traffic, WalkingRoute

AMBER_S = 1.6
WARM_UP_S = (
    26.0  # the world runs this long before the first frame, so that the picture is already busy
)


@dataclass(frozen=True)
class Scene:
    """One camera's place."""

    view: View
    light: Light
    backdrop: Backdrop
    start_world: Callable[[int], World] = field(repr=False)


@dataclass(frozen=True)
class Phase:
    """One stretch of the signal cycle: what is green, for how long, and how long all is red after it."""

    name: str
    seconds: float
    clear_s: float = 3.0


class Signals:
    """A fixed cycle of phases."""

    def __init__(self, phases: Sequence[Phase], offset_s: float) -> None:
        self.phases = phases
        self.offset_s = offset_s
        self.cycle_s = sum(phase.seconds + phase.clear_s for phase in phases)

    def state(self, name: str, now: float) -> str:
        """red, amber or green of a phase at that time."""
        at = (now + self.offset_s) % self.cycle_s
        for phase in self.phases:
            if phase.name == name:
                if at < phase.seconds:
                    return "green"
                if at < phase.seconds + AMBER_S:
                    return "amber"
            at -= phase.seconds + phase.clear_s
            if at < 0:
                break
        return "red"

    def green(self, name: str, now: float) -> bool:
        """Whether the phase may go."""
        return self.state(name, now) == "green"


class World:
    """Traffic and people of one clip, advanced in steps of `STEP_S`."""

    def __init__(
        self,
        seed: int,
        flows: Sequence[Flow],
        routes: Sequence[WalkingRoute],
        signals: Signals | None,
        dwell_s: tuple[float, float] = (7.0, 12.0),
        warm_up_s: float = WARM_UP_S,
    ) -> None:
        rng = np.random.default_rng(seed)
        tracks = count(1)

        def always(name: str, now: float) -> bool:
            return True

        green = signals.green if signals is not None else always
        self.signals = signals
        self.now = 0.0
        self.traffic = Traffic(list(flows), green, rng, lambda: next(tracks), dwell_s=dwell_s)
        self.crowd = Crowd(list(routes), green, rng, lambda: next(tracks))
        for _ in range(round(warm_up_s / STEP_S)):
            self.step()

    def step(self) -> None:
        self.now += STEP_S
        self.traffic.step(self.now)
        self.crowd.step(self.now)

    def actors(self) -> list[SceneObject]:
        return self.traffic.actors() + self.crowd.actors()
