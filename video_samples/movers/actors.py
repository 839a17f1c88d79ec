"""What moves: vehicles, cyclists and people, at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from video_samples.movers.figures import Figure, Outfit, posture
from video_samples.movers.solids import Solid

CLASSES = ("car", "bus", "truck", "bicycle", "person")
VEHICLES = ("car", "bus", "truck")


@dataclass(frozen=True, eq=False)
class Actor:
    """One object at one moment: ground position in metres, heading in radians from x towards y, distance gone."""

    track: int
    kind: str
    x: float
    y: float
    heading: float
    gone_m: float
    look: Solid | Outfit
    braking: bool = False
    standing: bool = False

    @property
    def half_size(self) -> tuple[float, float]:
        """Half the length and half the width of the footprint, metres."""
        if isinstance(self.look, Solid):
            return self.look.length / 2, self.look.width / 2
        return (0.85, 0.25) if self.kind == "bicycle" else (0.25, 0.25)

    @cached_property
    def figure(self) -> Figure:
        """The posture of a person or a cyclist."""
        assert isinstance(self.look, Outfit)
        return posture(self.look, self.kind, self.gone_m, self.standing)

    @cached_property
    def body(self) -> np.ndarray:
        """Points in world axes whose hull is the body: a vehicle's vertices, or the starts, then ends, of limbs."""
        if isinstance(self.look, Solid):
            own = self.look.vertices
        else:
            own = np.concatenate([self.figure.starts, self.figure.ends]) * (self.look.height / 1.75)
        c, s = np.cos(self.heading), np.sin(self.heading)
        return np.stack(
            [self.x + own[:, 0] * c - own[:, 1] * s, self.y + own[:, 0] * s + own[:, 1] * c, own[:, 2]], axis=1
        )
