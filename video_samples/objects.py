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

MATTE, HEAD, TAIL, GLOW = 0, 1, 2, 3  # what a face does at night: nothing, shine white, shine red, glow from inside


@dataclass(frozen=True)
class Solid:
    """A rigid body.

    vertices (V, 3) metres, ground contact at z = 0; `faces` index lists; normals and centres (F, 3); colours (F, 3)
    RGB 0..255; lamps (F,) one of MATTE, HEAD, TAIL, GLOW. Later faces lie on
    earlier ones.
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

    def prism(self, profile, half_width: float, colour: Colour, under: bool = False) -> None:
        """A side profile [(x, z), ...] spread over -half_width..half_width; its last edge is the underside."""
        edges = len(profile) if under else len(profile) - 1
        for i in range(edges):
            (xa, za), (xb, zb) = profile[i], profile[(i + 1) % len(profile)]
            self.face(
                [(xa, half_width, za), (xb, half_width, zb), (xb, -half_width, zb), (xa, -half_width, za)], colour
            )
        for side in (-1, 1):
            self.face([(x, side * half_width, z) for x, z in profile], colour)

    def box(self, x0: float, x1: float, half_width: float, z0: float, z1: float, colour: Colour) -> None:
        self.prism([(x0, z0), (x0, z1), (x1, z1), (x1, z0)], half_width, colour)

    def side(self, x0: float, x1: float, z0: float, z1: float, at: float, colour: Colour, lamp: int = MATTE) -> None:
        """The same rectangle on the left and right flank, `at` metres from the middle."""
        for sign in (-1, 1):
            corners = [(x0, z0), (x1, z0), (x1, z1), (x0, z1)]
            self.face([(x, sign * at, z) for x, z in corners], colour, lamp)

    def end(self, y0: float, y1: float, z0: float, z1: float, x: float, colour: Colour, lamp: int = MATTE) -> None:
        """A rectangle across the vehicle at `x`: its front or its back."""
        self.face([(x, y0, z0), (x, y1, z0), (x, y1, z1), (x, y0, z1)], colour, lamp)

    def wheels(self, at_x: tuple[float, ...], radius: float, at: float) -> None:
        angles = np.linspace(0, 2 * np.pi, 14, endpoint=False)
        for x in at_x:
            for sign in (-1, 1):
                for scale, colour in ((1.16, (18, 18, 20)), (1.0, TYRE), (0.56, RIM)):
                    ring = [
                        (x + radius * scale * np.cos(a), sign * (at + 0.01), radius + radius * scale * np.sin(a))
                        for a in angles
                    ]
                    self.face([(px, py, max(pz, 0.0)) for px, py, pz in ring], colour)

    def build(self, length: float, width: float, height: float) -> Solid:
        vertices = np.asarray(self.vertices, np.float64)
        centres = np.stack([vertices[f].mean(axis=0) for f in self.faces])
        normals = []
        for face, centre in zip(self.faces, centres):
            a, b, c = vertices[face[0]], vertices[face[1]], vertices[face[2]]
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


SKIN: tuple[Colour, ...] = ((233, 190, 160), (214, 164, 130), (172, 120, 88), (120, 80, 58), (92, 60, 46))
HAIR: tuple[Colour, ...] = ((36, 28, 24), (70, 46, 30), (120, 84, 48), (196, 160, 96), (150, 146, 142))
TOPS: tuple[Colour, ...] = (
    (196, 40, 44),
    (34, 76, 160),
    (236, 232, 222),
    (40, 44, 50),
    (226, 176, 40),
    (54, 128, 76),
    (134, 62, 136),
    (224, 116, 48),
    (90, 160, 196),
    (150, 120, 92),
    (220, 120, 150),
)
TROUSERS: tuple[Colour, ...] = ((40, 46, 66), (28, 28, 32), (92, 84, 70), (66, 84, 116), (150, 138, 116), (86, 60, 48))
BIKES: tuple[Colour, ...] = ((190, 36, 40), (30, 90, 170), (34, 34, 38), (40, 130, 90), (230, 160, 40))
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
    bag: Colour
    has_bag: bool
    coat: bool
    bike: Colour

    @cached_property
    def palette(self) -> np.ndarray:
        """Colours (13, 3) by role, in the order of the role constants."""
        skin, top, trousers = np.asarray(self.skin), np.asarray(self.top), np.asarray(self.trousers)
        fixed = [(34, 30, 30), np.asarray(self.bag) * 0.8, self.bike, (24, 24, 26), top * 0.9, (60, 60, 64)]
        return np.array([skin, skin * 0.85, self.hair, top, top * 0.86, trousers, trousers * 0.8, *fixed], np.float64)


(SKIN_, NECK_, HAIR_, TOP_, SLEEVE_, LEG_, FAR_LEG_, SHOE_, BAG_, FRAME_, TYRE_, COAT_, METAL_) = range(13)


def random_outfit(rng: np.random.Generator) -> Outfit:
    """An outfit drawn from the palettes above."""

    def pick(palette: tuple[Colour, ...]) -> Colour:
        return palette[int(rng.integers(len(palette)))]

    return Outfit(
        pick(SKIN),
        pick(HAIR),
        pick(TOPS),
        pick(TROUSERS),
        float(rng.uniform(1.58, 1.9)),
        pick(TOPS),
        bool(rng.random() < 0.35),
        bool(rng.random() < 0.25),
        pick(BIKES),
    )


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


def _by(point: np.ndarray, x: float, y: float, z: float) -> np.ndarray:
    return point + np.array([x, y, z])


def posture(outfit: Outfit, kind: str, gone_m: float, standing: bool) -> Figure:
    """The posture of a person or a cyclist who has gone so far; x ahead, y left, z up, ground at z = 0."""
    cycle_m = STRIDE_M if kind == "person" else CRANK_M
    step = -1 if standing else int(gone_m / cycle_m * POSTURES) % POSTURES
    if kind == "person":
        return _walker(step, outfit.has_bag, outfit.coat)
    return _cyclist(step, outfit.has_bag)


@lru_cache(maxsize=256)
def _walker(step: int, bag: bool, coat: bool) -> Figure:
    """A person 1.75 m tall at one of `POSTURES` moments of the stride; -1 stands still."""
    limbs = _Limbs()
    phase, moving = 2 * np.pi * max(step, 0) / POSTURES, step >= 0
    bob = 0.025 * np.cos(2 * phase) if moving else 0.0
    hip_z, neck_z = 0.90 + bob, 1.44 + bob
    for side, offset in ((1, 0.0), (-1, np.pi)):
        swing = 0.42 * np.sin(phase + offset) if moving else 0.0
        lift = 0.10 * max(0.0, np.cos(phase + offset)) if moving else 0.0
        hip, foot = np.array([0, side * 0.09, hip_z]), np.array([swing, side * 0.09, 0.06 + lift])
        knee = (hip + foot) / 2 + np.array([0.05 + 0.8 * lift, 0, 0.02])
        role = LEG_ if side > 0 else FAR_LEG_
        limbs.add(hip, knee, 0.17, role)
        limbs.add(knee, foot, 0.13, role)
        limbs.add(foot, foot + np.array([0.15, 0, -0.02]), 0.09, SHOE_)
    if coat:
        limbs.add((0, 0, hip_z - 0.18), (0, 0, neck_z - 0.2), 0.40, COAT_)
    limbs.add((0, 0, hip_z + 0.02), (0.02, 0, neck_z - 0.14), 0.34, TOP_)
    limbs.add((0, 0.14, neck_z - 0.12), (0, -0.14, neck_z - 0.12), 0.17, TOP_)
    for side, offset in ((1, np.pi), (-1, 0.0)):
        swing = 0.30 * np.sin(phase + offset) if moving else 0.0
        shoulder, hand = np.array([0, side * 0.21, neck_z - 0.09]), np.array([swing + 0.05, side * 0.25, 0.86])
        elbow = (shoulder + hand) / 2 + np.array([-0.05, side * 0.02, 0])
        limbs.add(shoulder, elbow, 0.11, SLEEVE_)
        limbs.add(elbow, hand, 0.09, SLEEVE_)
        limbs.add(hand, hand, 0.10, SKIN_)
    if bag:
        limbs.add((-0.17, 0, 1.02), (-0.17, 0, 1.30), 0.24, BAG_)
    limbs.add((0.02, 0, neck_z), (0.02, 0, neck_z + 0.1), 0.12, NECK_)
    limbs.add((0.03, 0, neck_z + 0.17), (0.03, 0, neck_z + 0.20), 0.21, SKIN_)
    limbs.add((-0.02, 0, neck_z + 0.23), (0.0, 0, neck_z + 0.25), 0.21, HAIR_)
    return limbs.build()


@lru_cache(maxsize=64)
def _cyclist(step: int, bag: bool) -> Figure:
    """A rider on a bicycle at one of `POSTURES` moments of the pedals' turn."""
    limbs = _Limbs()
    crank = 2 * np.pi * max(step, 0) / POSTURES
    angles = np.linspace(0, 2 * np.pi, 15)
    hubs = (np.array([-0.52, 0, 0.34]), np.array([0.56, 0, 0.34]))
    for hub in hubs:
        rim = np.stack([hub[0] + 0.33 * np.cos(angles), np.zeros(15), 0.34 + 0.33 * np.sin(angles)], axis=1)
        for a, b in pairwise(rim):
            limbs.add(a, b, 0.055, TYRE_)
    pedal, seat, head = np.array([-0.04, 0, 0.30]), np.array([-0.20, 0, 0.92]), np.array([0.42, 0, 0.92])
    for a, b in ((hubs[0], pedal), (pedal, seat), (pedal, head), (seat, head), (hubs[0], seat), (head, hubs[1])):
        limbs.add(a, b, 0.06, FRAME_)
    limbs.add(_by(seat, -0.1, 0, 0.05), _by(seat, 0.1, 0, 0.05), 0.09, SHOE_)
    bar = head + np.array([0.02, 0, 0.12])
    limbs.add(_by(bar, 0, 0.26, 0), _by(bar, 0, -0.26, 0), 0.05, METAL_)
    hip = seat + np.array([-0.04, 0, 0.10])
    neck = hip + np.array([0.34, 0, 0.50])
    for side, offset in ((1, 0.0), (-1, np.pi)):
        foot = pedal + np.array([0.17 * np.cos(crank + offset), side * 0.12, 0.17 * np.sin(crank + offset)])
        knee = (hip + foot) / 2 + np.array([0.22, side * 0.03, 0.08])
        role = LEG_ if side > 0 else FAR_LEG_
        limbs.add(_by(hip, 0, side * 0.09, 0), knee, 0.17, role)
        limbs.add(knee, foot, 0.13, role)
        limbs.add(foot, _by(foot, 0.12, 0, 0), 0.09, SHOE_)
    limbs.add(hip, _by(neck, -0.05, 0, -0.06), 0.34, TOP_)
    for side in (1, -1):
        limbs.add(_by(neck, 0, side * 0.16, -0.05), _by(bar, 0, side * 0.22, 0.03), 0.11, SLEEVE_)
    if bag:
        limbs.add(_by(hip, -0.08, 0, 0.22), _by(neck, -0.2, 0, -0.05), 0.26, BAG_)
    limbs.add(_by(neck, 0.08, 0, 0.14), _by(neck, 0.09, 0, 0.18), 0.20, SKIN_)
    limbs.add(_by(neck, 0.05, 0, 0.22), _by(neck, 0.08, 0, 0.23), 0.22, FRAME_)
    return limbs.build()


TRIM: Colour = (38, 38, 42)
HEADLAMP: Colour = (236, 238, 228)
TAILLAMP: Colour = (150, 18, 20)
PLATE: Colour = (225, 222, 200)

CAR_PAINTS: tuple[Colour, ...] = (
    (196, 30, 34),
    (28, 84, 176),
    (236, 236, 234),
    (206, 208, 212),
    (150, 154, 160),
    (40, 42, 46),
    (226, 190, 40),
    (36, 120, 84),
    (120, 40, 60),
    (80, 130, 186),
    (222, 120, 40),
)
CARGO: tuple[tuple[Colour, Colour, Colour], ...] = (  # cab, cargo box, stripe
    ((230, 230, 228), (238, 238, 236), (40, 110, 190)),
    ((30, 84, 150), (226, 228, 230), (30, 84, 150)),
    ((220, 140, 30), (240, 236, 226), (220, 140, 30)),
    ((60, 120, 70), (208, 214, 204), (60, 120, 70)),
)
BUS_PAINTS: tuple[tuple[Colour, Colour], ...] = (((206, 36, 40), (240, 236, 228)), ((214, 44, 38), (250, 220, 120)))


def _shade(colour: Colour, factor: float) -> Colour:
    return (colour[0] * factor, colour[1] * factor, colour[2] * factor)


def _lerp(a: tuple[float, float], b: tuple[float, float], t: float) -> tuple[float, float]:
    return (a[0] + (b[0] - a[0]) * t, a[1] + (b[1] - a[1]) * t)


@cache  # the paints are few, and a body takes longer to build than a frame to draw
def car(paint: Colour, estate: bool = False, taxi: bool = False) -> Solid:
    """A saloon, or an estate car with a long roof; 4.4 m."""
    b = SolidBuilder((0, 0, 0.75))
    half, rear = 0.9, -2.2
    b.prism(
        [(rear, 0.28), (rear - 0.02, 0.78), (rear + 0.15, 0.98), (1.0, 0.95), (1.98, 0.80), (2.2, 0.58), (2.2, 0.28)],
        half,
        paint,
    )
    b.side(rear, 2.2, 0.26, 0.40, half + 0.005, TRIM)
    b.wheels((-1.38, 1.38), 0.33, half)
    b.side(-0.42, -0.38, 0.42, 0.93, half + 0.006, _shade(paint, 0.55))
    b.side(0.62, 0.66, 0.42, 0.93, half + 0.006, _shade(paint, 0.55))
    for sign in (-1, 1):
        b.end(sign * 0.40, sign * 0.89, 0.55, 0.79, 2.204, _shade(paint, 0.6))
        b.end(sign * 0.45, sign * 0.86, 0.58, 0.76, 2.205, HEADLAMP, HEAD)
        b.end(sign * 0.50, sign * 0.88, 0.66, 0.86, rear - 0.025, TAILLAMP, TAIL)
    b.end(-0.42, 0.42, 0.40, 0.56, 2.205, (30, 30, 34))
    b.end(-0.26, 0.26, 0.46, 0.60, rear - 0.026, PLATE)
    b.end(-0.85, 0.85, 0.28, 0.40, rear - 0.024, TRIM)
    base, top = (
        ((-2.05, 0.97), (0.98, 0.95)),
        ((-1.80, 1.50), (0.18, 1.52)) if estate else ((-1.22, 1.48), (0.18, 1.50)),
    )
    low, high = half * 0.96, half * 0.74
    rb, fb, rt, ft = base[0], base[1], top[0], top[1]
    quads = {
        "left": [(rb, low), (fb, low), (ft, high), (rt, high)],
        "right": [(rb, -low), (fb, -low), (ft, -high), (rt, -high)],
        "front": [(fb, low), (fb, -low), (ft, -high), (ft, high)],
        "back": [(rb, low), (rb, -low), (rt, -high), (rt, high)],
        "roof": [(rt, high), (ft, high), (ft, -high), (rt, -high)],
    }
    for name, corners in quads.items():
        points = np.array([(p[0], y, p[1]) for p, y in corners])
        b.face(points, paint)
        if name == "roof":
            continue
        middle = points.mean(axis=0)
        inset = 0.80 if name in ("front", "back") else 0.84
        pane = middle + (points - middle) * np.array([inset, inset, 0.74])
        lift = np.array(
            [
                0.02 if name == "front" else -0.02 if name == "back" else 0,
                0.02 if name == "left" else -0.02 if name == "right" else 0,
                0.01,
            ]
        )
        b.face(pane + lift, GLASS)
        if name in ("left", "right"):
            post = [_lerp((pane[0][0], pane[0][2]), (pane[1][0], pane[1][2]), t) for t in (0.52, 0.57)]
            post += [_lerp((pane[3][0], pane[3][2]), (pane[2][0], pane[2][2]), t) for t in (0.53, 0.48)]
            y = float(pane[:, 1].mean())
            b.face(
                [
                    (post[0][0], pane[0][1] + lift[1], post[0][1]),
                    (post[1][0], pane[1][1] + lift[1], post[1][1]),
                    (post[2][0], pane[2][1] + lift[1], post[2][1]),
                    (post[3][0], y + lift[1], post[3][1]),
                ],
                paint,
            )
    if taxi:
        b.box(-0.72, -0.38, 0.28, 1.50, 1.68, (250, 250, 235))
        b.lamps[-5:] = [GLOW] * 5
    return b.build(4.4, 1.8, 1.5)


@cache
def bus(paint: Colour, band: Colour) -> Solid:
    """A city bus with a window band, doors and a lit destination sign; 10.8 m."""
    b = SolidBuilder((0, 0, 1.6))
    half, rear, nose = 1.27, -5.4, 5.4
    b.box(rear, nose, half, 0.32, 3.1, paint)
    b.box(-3.6, -0.6, 0.85, 3.1, 3.32, (196, 198, 200))
    b.box(1.4, 3.2, 0.8, 3.1, 3.28, (186, 188, 192))
    b.side(rear, nose, 0.30, 0.55, half + 0.004, TRIM)
    b.side(rear, nose, 2.62, 3.0, half + 0.004, band)
    b.side(rear + 0.25, nose - 0.15, 1.42, 2.52, half + 0.006, GLASS, GLOW)
    for x in np.arange(rear + 1.7, nose - 0.8, 1.55):
        b.side(x, x + 0.12, 1.42, 2.52, half + 0.012, (34, 38, 44))
    b.wheels((-3.2, 3.1), 0.5, half)
    for x in (4.15, -0.4):  # doors, on the right flank only
        b.face(
            [
                (x, -half - 0.02, 0.45),
                (x + 1.1, -half - 0.02, 0.45),
                (x + 1.1, -half - 0.02, 2.5),
                (x, -half - 0.02, 2.5),
            ],
            (66, 82, 98),
            GLOW,
        )
        b.face(
            [
                (x + 0.5, -half - 0.03, 0.45),
                (x + 0.6, -half - 0.03, 0.45),
                (x + 0.6, -half - 0.03, 2.5),
                (x + 0.5, -half - 0.03, 2.5),
            ],
            (30, 32, 36),
        )
    b.end(-1.12, 1.12, 1.2, 2.5, nose + 0.01, GLASS, GLOW)
    b.end(-0.95, 0.95, 2.62, 2.98, nose + 0.012, (252, 176, 40), GLOW)
    b.end(-1.1, 1.1, 1.5, 2.5, rear - 0.01, GLASS, GLOW)
    b.end(-1.27, 1.27, 0.32, 0.6, nose + 0.012, TRIM)
    for sign in (-1, 1):
        b.end(sign * 0.72, sign * 1.15, 0.68, 0.95, nose + 0.014, HEADLAMP, HEAD)
        b.end(sign * 0.90, sign * 1.20, 0.80, 1.25, rear - 0.014, TAILLAMP, TAIL)
    return b.build(10.8, 2.54, 3.2)


@cache
def truck(cab: Colour, cargo: Colour, stripe: Colour) -> Solid:
    """A box truck: a cab and a taller cargo box; 8 m."""
    b = SolidBuilder((0, 0, 1.4))
    half, rear, nose = 1.2, -4.0, 4.0
    b.box(rear, nose - 0.2, half * 0.9, 0.5, 0.85, (44, 44, 48))
    b.wheels((-2.5, -1.5, 2.9), 0.46, half)
    b.box(rear, 1.8, half, 0.85, 3.35, cargo)
    b.side(rear + 0.3, 1.5, 1.7, 2.3, half + 0.008, stripe)
    b.side(rear, 1.8, 0.85, 0.98, half + 0.006, (70, 70, 74))
    b.end(-0.04, 0.04, 0.9, 3.3, rear - 0.01, (90, 90, 94))
    b.prism([(2.0, 0.5), (2.0, 2.55), (3.35, 2.6), (nose, 1.55), (nose, 0.5)], half * 0.97, cab)
    b.side(2.45, 3.3, 1.55, 2.3, half * 0.97 + 0.01, GLASS)
    pane = half * 0.88
    b.face([(3.42, pane, 2.48), (3.95, pane, 1.66), (3.95, -pane, 1.66), (3.42, -pane, 2.48)], GLASS)
    b.end(-0.9, 0.9, 0.85, 1.2, nose + 0.01, (34, 34, 38))
    for sign in (-1, 1):
        b.end(sign * 0.68, sign * 1.08, 0.62, 0.84, nose + 0.012, HEADLAMP, HEAD)
        b.end(sign * 0.82, sign * 1.15, 0.62, 0.86, rear - 0.014, TAILLAMP, TAIL)
    b.wheels((2.9,), 0.46, half)
    return b.build(8.0, 2.4, 3.35)


def _pick(rng: np.random.Generator, options: tuple):
    return options[int(rng.integers(len(options)))]


def random_vehicle(kind: str, rng: np.random.Generator) -> Solid:
    """A car, bus or truck in one of its paints."""
    if kind == "bus":
        return bus(*_pick(rng, BUS_PAINTS))
    if kind == "truck":
        return truck(*_pick(rng, CARGO))
    return car(_pick(rng, CAR_PAINTS), estate=bool(rng.random() < 0.4), taxi=bool(rng.random() < 0.08))


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
