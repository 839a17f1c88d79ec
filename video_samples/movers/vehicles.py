"""Cars, buses and trucks, and the paints they come in."""

from __future__ import annotations

from functools import cache

import numpy as np

from video_samples.movers.figures import Colour
from video_samples.movers.solids import GLASS, GLOW, HEAD, TAIL, Solid, SolidBuilder

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
