"""Street furniture: what to draw for a tree, a lamp, a signal, a shelter, a fountain, a gate."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gemel.video_samples.draw import Pen
from gemel.video_samples.objects import Colour

Draw = Callable[[Pen], None]
METAL: Colour = (70, 76, 80)
STONE: Colour = (186, 176, 158)


def tree(x: float, y: float, height: float, seed: int, leaf: Colour = (70, 112, 48)) -> Draw:
    """A broad-leaved tree: a trunk and a crown of some hundred leaf clusters, lighter towards the light."""

    def draw(pen: Pen) -> None:
        rng = np.random.default_rng(seed)
        trunk = pen.light.on((92, 74, 58), (0, -0.8, 0.6))
        crown_z, radius = height * 0.66, height * 0.30
        pen.line((x, y, 0), (x, y, crown_z), 0.26 * height / 7, trunk)
        for _ in range(5):
            a = rng.uniform(0, 2 * np.pi)
            pen.line(
                (x, y, height * 0.38),
                (x + radius * 0.6 * np.cos(a), y + radius * 0.6 * np.sin(a), crown_z),
                0.13,
                trunk,
            )
        direction = rng.standard_normal((900, 3))
        direction /= np.linalg.norm(direction, axis=1, keepdims=True)
        at = direction * (rng.uniform(0.25, 1.0, (900, 1)) ** 0.5) * np.array([radius, radius, radius * 1.08])
        sizes = rng.uniform(0.10, 0.25, len(at)) * height / 7
        if pen.light.night:
            bright = (0.36 - 0.22 * at[:, 2] / radius + rng.normal(0, 0.05, len(at))) * 0.8
        else:
            bright = 0.62 + 0.42 * (at @ np.asarray(pen.light.direction)) / radius + rng.normal(0, 0.09, len(at))
        colours = np.clip(np.asarray(leaf) * bright[:, None] * 1.25, 0, 255)
        far_first = np.argsort(at @ (pen.view.eye - np.array([x, y, crown_z])))
        pen.discs((at + np.array([x, y, crown_z]))[far_first], sizes[far_first], colours[far_first])

    return draw


def street_lamp(x: float, y: float, height: float, arm_x: float, arm_y: float = 0.0) -> Draw:
    """A mast with an arm; its head shines by night."""

    def draw(pen: Pen) -> None:
        grey = pen.light.on((120, 126, 128), (0, -0.8, 0.6))
        pen.line((x, y, 0), (x, y, height), 0.16, grey)
        pen.line((x, y, height), (x + arm_x, y + arm_y, height + 0.25), 0.12, grey)
        head = (255, 236, 190) if pen.light.night else pen.light.on((206, 208, 206))
        tip = (x + arm_x, y + arm_y, height + 0.2)
        pen.line((tip[0] - 0.35 * np.sign(arm_x), tip[1], tip[2]), tip, 0.24, head)

    return draw


BULBS: dict[str, tuple[Colour, Colour, Colour]] = {
    "red": ((255, 46, 36), (60, 44, 10), (14, 50, 28)),
    "amber": ((70, 18, 16), (255, 178, 30), (14, 50, 28)),
    "green": ((70, 18, 16), (60, 44, 10), (40, 255, 140)),
}


def signal(x: float, y: float, state: str, facing: tuple[float, float], height: float = 3.4) -> Draw:
    """A traffic signal whose lenses look towards `facing`; seen from behind it is a dark plate."""

    def draw(pen: Pen) -> None:
        pen.line((x, y, 0), (x, y, height), 0.13, pen.light.on((84, 90, 92), (0, -0.8, 0.6)))
        away = np.array([facing[0], facing[1], 0.0])
        across = np.array([-facing[1], facing[0], 0.0])
        middle = np.array([x, y, height]) + away * 0.18
        plate = [
            middle + across * (0.24 * sx) + np.array([0, 0, 0.55 * sz])
            for sx, sz in ((-1, -1), (1, -1), (1, 1), (-1, 1))
        ]
        pen.poly(plate, (22, 24, 26))
        if float((pen.view.eye - middle) @ away) > 0:
            for colour, dz in zip(BULBS[state], (0.36, 0.0, -0.36)):
                pen.disc(middle + away * 0.06 + np.array([0, 0, dz]), 0.15, colour)

    return draw


def shelter(x0: float, x1: float, y: float) -> Draw:
    """A bus shelter with glass back, roof, seat and a lit poster; it opens towards -y."""

    def draw(pen: Pen) -> None:
        night = pen.light.night
        glass = (150, 176, 184) if not night else (120, 124, 118)
        pen.poly([(x0, y, 0.3), (x1, y, 0.3), (x1, y, 2.3), (x0, y, 2.3)], glass)
        for x in np.linspace(x0, x1, 4):
            pen.line((x, y, 0), (x, y, 2.45), 0.09, pen.light.on(METAL))
        pen.box((x0 + 0.5, y - 0.5, 0.42), (x1 - 1.8, y - 0.1, 0.52), (140, 96, 60))
        poster = (250, 226, 120) if night else (228, 190, 70)
        pen.poly(
            [
                (x1 - 1.3, y - 0.05, 0.5),
                (x1 - 0.1, y - 0.05, 0.5),
                (x1 - 0.1, y - 0.05, 2.2),
                (x1 - 1.3, y - 0.05, 2.2),
            ],
            poster,
        )
        pen.poly(
            [
                (x1 - 1.1, y - 0.06, 0.9),
                (x1 - 0.3, y - 0.06, 0.9),
                (x1 - 0.3, y - 0.06, 1.6),
                (x1 - 1.1, y - 0.06, 1.6),
            ],
            (190, 60, 60),
        )
        pen.box((x0 - 0.3, y - 1.4, 2.42), (x1 + 0.3, y + 0.2, 2.58), (86, 96, 100))

    return draw


def bus_stop_flag(x: float, y: float) -> Draw:
    """The round yellow sign of a bus stop."""

    def draw(pen: Pen) -> None:
        pen.line((x, y, 0), (x, y, 2.8), 0.09, pen.light.on(METAL))
        pen.disc((x, y - 0.02, 2.75), 0.36, (40, 130, 70) if not pen.light.night else (30, 90, 50))
        pen.disc((x, y - 0.04, 2.75), 0.28, (250, 216, 60) if not pen.light.night else (220, 190, 70))

    return draw


def seat(x: float, y: float, along: float = 1.8) -> Draw:
    """A wooden seat along x."""

    def draw(pen: Pen) -> None:
        pen.box((x, y + 0.34, 0.5), (x + along, y + 0.42, 0.9), (140, 94, 56))
        pen.box((x, y, 0.38), (x + along, y + 0.4, 0.46), (160, 108, 66))
        for px in (x + 0.15, x + along - 0.2):
            pen.box((px, y, 0.0), (px + 0.06, y + 0.06, 0.38), METAL)

    return draw


def fountain(x: float, y: float, radius: float) -> Draw:
    """A round basin, a column with a bowl, and jets."""

    def draw(pen: Pen) -> None:
        pen.cylinder(x, y, radius, 0.0, 0.6, STONE)
        angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        inner = radius - 0.3
        pen.poly([(x + inner * np.cos(a), y + inner * np.sin(a), 0.6) for a in angles], (96, 150, 172))
        inner *= 0.72
        pen.poly([(x + inner * np.cos(a), y + inner * np.sin(a), 0.6) for a in angles], (122, 176, 194))
        pen.cylinder(x, y, 0.32, 0.5, 1.9, STONE)
        pen.cylinder(x, y, 1.05, 1.75, 2.0, STONE)
        pen.poly([(x + 0.9 * np.cos(a), y + 0.9 * np.sin(a), 2.0) for a in angles], (140, 190, 206))
        pen.cylinder(x, y, 0.16, 2.0, 2.7, STONE)
        for a in np.linspace(0, 2 * np.pi, 9, endpoint=False):
            t = np.linspace(0, 1, 8)
            reach, rise = radius * 0.62 * t, 2.75 + 1.2 * t - 3.2 * t**2
            for i in range(7):
                pen.line(
                    (x + reach[i] * np.cos(a), y + reach[i] * np.sin(a), rise[i]),
                    (x + reach[i + 1] * np.cos(a), y + reach[i + 1] * np.sin(a), rise[i + 1]),
                    0.07,
                    (226, 238, 244),
                )

    return draw


def gate(x0: float, x1: float, y: float, height: float = 4.6) -> Draw:
    """A stone archway across x0..x1 with pillars one metre thick."""

    def draw(pen: Pen) -> None:
        thick = 0.9
        for x in (x0, x1 - 1.1):
            pen.box((x, y, 0.0), (x + 1.1, y + thick, height), (198, 172, 138))
            pen.box((x - 0.12, y - 0.12, 0.0), (x + 1.22, y + thick + 0.12, 0.5), (176, 152, 122))
        middle, radius = (x0 + x1) / 2, (x1 - x0 - 2.2) / 2
        spring = height - radius * 0.55
        for a, b in zip(np.linspace(np.pi, 0, 13)[:-1], np.linspace(np.pi, 0, 13)[1:]):
            low = [(middle + radius * np.cos(t), y, spring + radius * 0.55 * np.sin(t)) for t in (a, b)]
            pen.poly([*low, (low[1][0], y, height + 0.05), (low[0][0], y, height + 0.05)], (198, 172, 138), (0, -1, 0))
        pen.box((x0 - 0.2, y - 0.1, height), (x1 + 0.2, y + thick + 0.1, height + 0.75), (206, 182, 148))
        pen.box((x0 - 0.35, y - 0.2, height + 0.75), (x1 + 0.35, y + thick + 0.2, height + 0.95), (186, 160, 126))
        pen.poly(
            [
                (middle - 1.3, y - 0.12, height + 0.12),
                (middle + 1.3, y - 0.12, height + 0.12),
                (middle + 1.3, y - 0.12, height + 0.62),
                (middle - 1.3, y - 0.12, height + 0.62),
            ],
            (92, 70, 52),
        )

    return draw


def wall(x0: float, x1: float, y: float, height: float) -> Draw:
    """A low garden wall with an iron fence on it."""

    def draw(pen: Pen) -> None:
        for x in np.arange(x0, x1, 0.35):
            pen.line((x, y, height), (x, y, height + 1.1), 0.05, (40, 46, 44))
        pen.line((x0, y, height + 1.0), (x1, y, height + 1.0), 0.07, (40, 46, 44))
        pen.box((x0, y, 0.0), (x1, y + 0.3, height), (188, 164, 132))

    return draw


def cafe_table(x: float, y: float, colour: Colour) -> Draw:
    """A table, two chairs and a parasol."""

    def draw(pen: Pen) -> None:
        for dx in (-0.8, 0.6):
            pen.box((x + dx, y - 0.2, 0.0), (x + dx + 0.32, y + 0.2, 0.46), (120, 90, 66))
            pen.box(
                (x + dx + (0 if dx < 0 else 0.27), y - 0.2, 0.46),
                (x + dx + (0.05 if dx < 0 else 0.32), y + 0.2, 0.9),
                (120, 90, 66),
            )
        pen.cylinder(x, y, 0.42, 0.68, 0.74, (230, 226, 216))
        pen.line((x, y, 0), (x, y, 2.5), 0.07, (220, 216, 206))
        angles = np.linspace(0, 2 * np.pi, 9)
        order = sorted(range(8), key=lambda i: -np.sin((angles[i] + angles[i + 1]) / 2))
        for i in order:
            a, b = angles[i], angles[i + 1]
            shade = colour if i % 2 == 0 else (240, 236, 226)
            rim = [(x + 1.5 * np.cos(t), y + 1.5 * np.sin(t), 2.15) for t in (a, b)]
            middle = (a + b) / 2
            pen.poly([*rim, (x, y, 2.75)], shade, (0.37 * np.cos(middle), 0.37 * np.sin(middle), 0.93))

    return draw


def planter(x: float, y: float, seed: int) -> Draw:
    """A tub with flowers."""

    def draw(pen: Pen) -> None:
        rng = np.random.default_rng(seed)
        pen.box((x - 0.6, y - 0.4, 0.0), (x + 0.6, y + 0.4, 0.5), (150, 104, 80))
        for _ in range(60):
            colour = ((206, 60, 84), (240, 196, 60), (70, 126, 56), (60, 110, 50))[int(rng.integers(4))]
            px, py, pz = rng.uniform(-0.6, 0.6), rng.uniform(-0.4, 0.4), rng.uniform(0.5, 0.8)
            pen.disc((x + px, y + py, pz), 0.09, pen.light.on(colour))

    return draw


def bollard(x: float, y: float) -> Draw:
    """A short iron post."""

    def draw(pen: Pen) -> None:
        pen.line((x, y, 0), (x, y, 0.85), 0.18, pen.light.on((56, 60, 62), (0, -0.8, 0.6)))
        pen.line((x, y, 0.68), (x, y, 0.76), 0.18, pen.light.on((220, 220, 214), (0, -0.8, 0.6)))

    return draw
