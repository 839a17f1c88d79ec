"""What moves: vehicles, cyclists and people, at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from video_samples import solids
from video_samples.figures import Colour, Figure, Outfit, posture
from video_samples.solids import Solid

CLASSES = ("car", "bus", "truck", "bicycle", "person")
VEHICLES = ("car", "bus", "truck")

CAR_PAINTS: tuple[Colour, ...] = (
    (196, 30, 34), (28, 84, 176), (236, 236, 234), (206, 208, 212), (150, 154, 160), (40, 42, 46),
    (226, 190, 40), (36, 120, 84), (120, 40, 60), (80, 130, 186), (222, 120, 40),
)  # fmt: skip
CARGO: tuple[tuple[Colour, Colour, Colour], ...] = (  # cab, cargo box, stripe
    ((230, 230, 228), (238, 238, 236), (40, 110, 190)),
    ((30, 84, 150), (226, 228, 230), (30, 84, 150)),
    ((220, 140, 30), (240, 236, 226), (220, 140, 30)),
    ((60, 120, 70), (208, 214, 204), (60, 120, 70)),
)
BUS_PAINTS: tuple[tuple[Colour, Colour], ...] = (((206, 36, 40), (240, 236, 228)), ((214, 44, 38), (250, 220, 120)))


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
        """Points in world axes whose hull is the body: a vehicle's vertices, or the starts and then the ends of limbs."""
        if isinstance(self.look, Solid):
            own = self.look.vertices
        else:
            own = np.concatenate([self.figure.starts, self.figure.ends]) * (self.look.height / 1.75)
        c, s = np.cos(self.heading), np.sin(self.heading)
        return np.stack([self.x + own[:, 0] * c - own[:, 1] * s, self.y + own[:, 0] * s + own[:, 1] * c, own[:, 2]], axis=1)


def _pick(rng: np.random.Generator, options: tuple):
    return options[int(rng.integers(len(options)))]


def random_vehicle(kind: str, rng: np.random.Generator) -> Solid:
    """A car, bus or truck in one of its paints."""
    if kind == "bus":
        return solids.bus(*_pick(rng, BUS_PAINTS))
    if kind == "truck":
        return solids.truck(*_pick(rng, CARGO))
    return solids.car(_pick(rng, CAR_PAINTS), estate=bool(rng.random() < 0.4), taxi=bool(rng.random() < 0.08))
