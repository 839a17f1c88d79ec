"""What moves in a scene: rigid bodies (vehicles, cyclists) and people as figures of thick limbs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import pairwise

import numpy as np

Colour = tuple[float, float, float]

GLASS: Colour = (52, 66, 82)
TYRE: Colour = (26, 26, 28)
RIM: Colour = (150, 152, 156)

MATTE, HEAD, TAIL = 0, 1, 2  # what a face does at night: nothing, shine white, shine red


@dataclass(frozen=True)
class Solid:
    """A rigid body.

    vertices (V, 3) metres, ground contact at z = 0; `faces` index lists; normals and centres (F, 3); colours (F, 3)
    RGB 0..255; lamps (F,) one of MATTE, HEAD, TAIL. Later faces lie on earlier ones.
    """

    length: float
    width: float
    height: float
    vertices: np.ndarray
    faces: tuple[np.ndarray, ...]
    normals: np.ndarray
    centres: np.ndarray
    colours: np.ndarray
    lamps: np.ndarray


@dataclass
class SolidBuilder:
    """Collects faces; outward normals come from the corner order or point away from `centre`."""

    centre: tuple[float, float, float]
    vertices: list[tuple[float, float, float]] = field(default_factory=list)
    faces: list[np.ndarray] = field(default_factory=list)
    colours: list[Colour] = field(default_factory=list)
    lamps: list[int] = field(default_factory=list)

    def face(self, corners, colour: Colour, lamp: int = MATTE) -> None:
        start = len(self.vertices)
        self.vertices.extend((float(x), float(y), float(z)) for x, y, z in corners)
        self.faces.append(np.arange(start, len(self.vertices)))
        self.colours.append(colour)
        self.lamps.append(lamp)

    def prism(self, profile, half_width: float, colour: Colour) -> None:
        """A side profile [(x, z), ...] spread over -half_width..half_width; it is open below."""
        for (xa, za), (xb, zb) in pairwise(profile):
            self.face(
                [
                    (xa, half_width, za),
                    (xb, half_width, zb),
                    (xb, -half_width, zb),
                    (xa, -half_width, za),
                ],
                colour,
            )
        for side in (-1, 1):
            self.face([(x, side * half_width, z) for x, z in profile], colour)

    def box(
        self, x0: float, x1: float, half_width: float, z0: float, z1: float, colour: Colour
    ) -> None:
        self.prism([(x0, z0), (x0, z1), (x1, z1), (x1, z0)], half_width, colour)

    def side(self, x0: float, x1: float, z0: float, z1: float, at: float, colour: Colour) -> None:
        """The same rectangle on the left and right flank, `at` metres from the middle."""
        for y in (-at, at):
            self.face([(x0, y, z0), (x1, y, z0), (x1, y, z1), (x0, y, z1)], colour)

    def end(self, half: float, z0: float, z1: float, x: float, colour: Colour) -> None:
        """A rectangle across the vehicle at `x`: its front or its back."""
        self.face([(x, -half, z0), (x, half, z0), (x, half, z1), (x, -half, z1)], colour)

    def lights(self, at: float, z: float, nose: float, rear: float) -> None:
        """Two white lamps at the front and two red ones at the back, `at` metres from the middle."""
        for x, colour, lamp in ((nose, HEADLAMP, HEAD), (rear, TAILLAMP, TAIL)):
            for y in (-at, at):
                corners = [
                    (x, y - 0.2, z - 0.1),
                    (x, y + 0.2, z - 0.1),
                    (x, y + 0.2, z + 0.1),
                    (x, y - 0.2, z + 0.1),
                ]
                self.face(corners, colour, lamp)

    def wheels(self, at_x: tuple[float, ...], radius: float, at: float) -> None:
        angles = np.linspace(0, 2 * np.pi, 14, endpoint=False)
        for x in at_x:
            for sign in (-1, 1):
                for scale, colour in ((1.0, TYRE), (0.56, RIM)):
                    ring = [
                        (
                            x + radius * scale * np.cos(a),
                            sign * (at + 0.01),
                            radius + radius * scale * np.sin(a),
                        )
                        for a in angles
                    ]
                    self.face([(px, py, max(pz, 0.0)) for px, py, pz in ring], colour)

    def build(self, length: float, width: float, height: float) -> Solid:
        vertices = np.asarray(self.vertices, np.float64)
        centres = np.stack([vertices[f].mean(axis=0) for f in self.faces])
        normals = []
        for face, centre in zip(self.faces, centres):
            a = vertices[face[0]]
            b = vertices[face[1]]
            c = vertices[face[2]]
            normal = np.cross(b - a, c - a)
            normal /= max(float(np.linalg.norm(normal)), 1e-9)
            normals.append(normal if normal @ (centre - np.asarray(self.centre)) >= 0 else -normal)
        return Solid(
            length,
            width,
            height,
            vertices,
            tuple(self.faces),
            np.stack(normals),
            centres,
            np.asarray(self.colours, np.float64),
            np.asarray(self.lamps),
        )


SKIN: tuple[Colour, ...] = ((233, 190, 160), (172, 120, 88), (92, 60, 46))
HAIR: tuple[Colour, ...] = ((36, 28, 24), (120, 84, 48), (150, 146, 142))
TOPS: tuple[Colour, ...] = (
    (196, 40, 44), (34, 76, 160), (236, 232, 222), (40, 44, 50), (226, 176, 40), (54, 128, 76), (134, 62, 136),
)  # fmt: skip
TROUSERS: tuple[Colour, ...] = ((40, 46, 66), (92, 84, 70), (150, 138, 116))
STRIDE_M = 1.45  # ground covered in one full cycle of both legs
CRANK_M = 5.6  # ground covered in one turn of the pedals
POSTURES = 24  # moments a cycle is cut into


@dataclass(frozen=True)
class Outfit:
    """What one person looks like; `height` in metres."""

    skin: Colour
    hair: Colour
    top: Colour
    trousers: Colour
    height: float

    @cached_property
    def palette(self) -> np.ndarray:
        """Colours (7, 3) by role, in the order of the role constants."""
        skin = np.asarray(self.skin)
        top = np.asarray(self.top)
        trousers = np.asarray(self.trousers)
        return np.array(
            [skin, self.hair, top, top * 0.86, trousers, trousers * 0.8, (30, 30, 32)], np.float64
        )


(SKIN_, HAIR_, TOP_, SLEEVE_, LEG_, FAR_LEG_, DARK_) = range(7)


def random_outfit(rng: np.random.Generator) -> Outfit:
    """An outfit drawn from the palettes above."""

    def pick(palette: tuple[Colour, ...]) -> Colour:
        return palette[int(rng.integers(len(palette)))]

    return Outfit(pick(SKIN), pick(HAIR), pick(TOPS), pick(TROUSERS), float(rng.uniform(1.58, 1.9)))


@dataclass(frozen=True)
class Figure:
    """A posture as thick lines with round ends: starts and ends (N, 3) and widths (N,) in metres, colour roles (N,)."""

    starts: np.ndarray
    ends: np.ndarray
    widths: np.ndarray
    roles: np.ndarray


class _Limbs:
    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def add(self, start, end, width: float, role: int) -> None:
        self.rows.append((*start, *end, width, role))

    def build(self) -> Figure:
        rows = np.asarray(self.rows, np.float64)
        return Figure(rows[:, :3], rows[:, 3:6], rows[:, 6], rows[:, 7].astype(int))


def posture(kind: str, gone_m: float, standing: bool) -> Figure:
    """The posture of a person or a cyclist who has gone so far; x ahead, y left, z up, ground at z = 0."""
    cycle_m = STRIDE_M if kind == "person" else CRANK_M
    step = -1 if standing else int(gone_m / cycle_m * POSTURES) % POSTURES
    return _walker(step) if kind == "person" else _cyclist(step)


@lru_cache(maxsize=64)
def _walker(step: int) -> Figure:
    """A person 1.75 m tall at one of `POSTURES` moments of the stride; -1 stands still."""
    limbs = _Limbs()
    phase = 2 * np.pi * max(step, 0) / POSTURES
    stride = float(step >= 0)
    for side, offset, role in ((1, 0.0, LEG_), (-1, np.pi, FAR_LEG_)):
        swing, lift = (stride * reach(phase + offset) for reach in (np.sin, np.cos))
        hip = np.array([0, side * 0.09, 0.90])
        foot = np.array([0.42 * swing, side * 0.09, 0.06 + 0.1 * max(lift, 0)])
        knee = (hip + foot) / 2 + np.array([0.05, 0, 0.02])
        limbs.add(hip, knee, 0.17, role)
        limbs.add(knee, foot, 0.13, role)
        limbs.add(foot, foot + np.array([0.15, 0, -0.02]), 0.09, DARK_)
        limbs.add((0, side * 0.21, 1.35), (0.05 - 0.3 * swing, side * 0.25, 0.86), 0.10, SLEEVE_)
    limbs.add((0, 0, 0.92), (0.02, 0, 1.30), 0.34, TOP_)
    limbs.add((0, 0.14, 1.32), (0, -0.14, 1.32), 0.17, TOP_)
    limbs.add((0.03, 0, 1.50), (0.03, 0, 1.64), 0.20, SKIN_)
    limbs.add((-0.02, 0, 1.67), (0.0, 0, 1.69), 0.21, HAIR_)
    return limbs.build()


@lru_cache(maxsize=64)
def _cyclist(step: int) -> Figure:
    """A rider on a bicycle at one of `POSTURES` moments of the pedals' turn."""
    limbs = _Limbs()
    crank = 2 * np.pi * max(step, 0) / POSTURES
    angles = np.linspace(0, 2 * np.pi, 15)
    for hub in (-0.52, 0.56):
        rim = [(hub + 0.33 * np.cos(angle), 0, 0.34 + 0.33 * np.sin(angle)) for angle in angles]
        for start, end in pairwise(rim):
            limbs.add(start, end, 0.055, DARK_)
    pedal = (-0.04, 0, 0.3)
    seat = (-0.2, 0, 0.92)
    head = (0.42, 0, 0.92)
    hip = (-0.24, 0, 1.02)
    for start, end in (
        (pedal, seat),
        (pedal, head),
        (seat, head),
        ((-0.52, 0, 0.34), pedal),
        (head, (0.56, 0, 0.34)),
    ):
        limbs.add(start, end, 0.06, DARK_)
    for side, offset, role in ((1, 0.0, LEG_), (-1, np.pi, FAR_LEG_)):
        foot = np.array(
            [
                pedal[0] + 0.17 * np.cos(crank + offset),
                side * 0.12,
                0.3 + 0.17 * np.sin(crank + offset),
            ]
        )
        knee = (np.asarray(hip) + foot) / 2 + np.array([0.22, side * 0.03, 0.08])
        limbs.add(hip, knee, 0.17, role)
        limbs.add(knee, foot, 0.13, role)
        limbs.add((0.1, side * 0.16, 1.47), (0.44, side * 0.22, 1.07), 0.11, SLEEVE_)
    limbs.add(hip, (0.05, 0, 1.46), 0.34, TOP_)
    limbs.add((0.18, 0, 1.66), (0.19, 0, 1.70), 0.20, SKIN_)
    limbs.add((0.15, 0, 1.74), (0.18, 0, 1.75), 0.22, HAIR_)
    return limbs.build()


HEADLAMP: Colour = (236, 238, 228)
TAILLAMP: Colour = (150, 18, 20)

CAR_PAINTS: tuple[Colour, ...] = (
    (196, 30, 34), (28, 84, 176), (236, 236, 234), (150, 154, 160), (40, 42, 46), (226, 190, 40), (36, 120, 84),
)  # fmt: skip
CARGO: tuple[tuple[Colour, Colour], ...] = (  # cab, cargo box
    ((230, 230, 228), (238, 238, 236)), ((30, 84, 150), (226, 228, 230)), ((220, 140, 30), (240, 236, 226)),
)  # fmt: skip
BUS_PAINTS: tuple[tuple[Colour, Colour], ...] = (
    ((206, 36, 40), (240, 236, 228)),
    ((214, 44, 38), (250, 220, 120)),
)


@cache  # the paints are few, and a body takes longer to build than a frame to draw
def car(paint: Colour, estate: bool = False) -> Solid:
    """A saloon, or an estate car with a long roof; 4.4 m."""
    b = SolidBuilder((0, 0, 0.75))
    rear = -2.2
    roof = -1.8 if estate else -1.22
    b.prism(
        [(rear, 0.28), (rear, 0.9), (1.0, 0.95), (1.98, 0.80), (2.2, 0.58), (2.2, 0.28)], 0.9, paint
    )
    b.wheels((-1.38, 1.38), 0.33, 0.9)
    b.prism([(-2.05, 0.92), (roof, 1.5), (0.18, 1.5), (0.98, 0.92)], 0.78, GLASS)
    b.box(roof, 0.18, 0.79, 1.42, 1.52, paint)
    b.lights(0.6, 0.66, 2.21, rear - 0.01)
    return b.build(4.4, 1.8, 1.5)


@cache
def bus(paint: Colour, band: Colour) -> Solid:
    """A city bus with a window band; 10.8 m."""
    b = SolidBuilder((0, 0, 1.6))
    half = 1.27
    rear = -5.4
    nose = 5.4
    b.box(rear, nose, half, 0.32, 3.1, paint)
    b.side(rear, nose, 2.62, 3.0, half + 0.004, band)
    b.side(rear + 0.25, nose - 0.15, 1.42, 2.52, half + 0.006, GLASS)
    b.wheels((-3.2, 3.1), 0.5, half)
    b.end(1.12, 1.2, 2.5, nose + 0.01, GLASS)
    b.end(1.1, 1.5, 2.5, rear - 0.01, GLASS)
    b.lights(0.9, 0.8, nose + 0.014, rear - 0.014)
    return b.build(10.8, 2.54, 3.2)


@cache
def truck(cab: Colour, cargo: Colour) -> Solid:
    """A box truck: a cab and a taller cargo box; 8 m."""
    b = SolidBuilder((0, 0, 1.4))
    half = 1.2
    rear = -4.0
    nose = 4.0
    b.wheels((-2.5, -1.5, 2.9), 0.46, half)
    b.box(rear, 1.8, half, 0.6, 3.35, cargo)
    b.prism([(2.0, 0.5), (2.0, 2.55), (3.35, 2.6), (nose, 1.55), (nose, 0.5)], half * 0.97, cab)
    b.side(2.45, 3.3, 1.55, 2.3, half * 0.97 + 0.01, GLASS)
    b.lights(0.88, 0.73, nose + 0.012, rear - 0.014)
    return b.build(8.0, 2.4, 3.35)


def _pick(rng: np.random.Generator, options: tuple):
    return options[int(rng.integers(len(options)))]


def random_vehicle(kind: str, rng: np.random.Generator) -> Solid:
    """A car, bus or truck in one of its paints."""
    if kind == "bus":
        return bus(*_pick(rng, BUS_PAINTS))
    if kind == "truck":
        return truck(*_pick(rng, CARGO))
    return car(_pick(rng, CAR_PAINTS), estate=bool(rng.random() < 0.4))


CLASSES = ("car", "bus", "truck", "bicycle", "person")
VEHICLES = ("car", "bus", "truck")


@dataclass(frozen=True, eq=False)
class SceneObject:
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
        return posture(self.kind, self.gone_m, self.standing)

    @cached_property
    def body(self) -> np.ndarray:
        """Points in world axes whose hull is the body: a vehicle's vertices, or the starts, then ends, of limbs."""
        if isinstance(self.look, Solid):
            points = self.look.vertices
        else:
            points = np.concatenate([self.figure.starts, self.figure.ends]) * (
                self.look.height / 1.75
            )
        c = np.cos(self.heading)
        s = np.sin(self.heading)
        return np.stack(
            [
                self.x + points[:, 0] * c - points[:, 1] * s,
                self.y + points[:, 0] * s + points[:, 1] * c,
                points[:, 2],
            ],
            axis=1,
        )
