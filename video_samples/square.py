"""The square with people: a fountain, a gate to a park, a café, and walkers in the afternoon sun."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemel.video_samples import props
from gemel.video_samples.backdrop import (
    GRASS,
    PAVING,
    SETTS,
    FacadeStyle,
    GroundMap,
    House,
    make_sprite,
    paint_backdrop,
)
from gemel.video_samples.draw import Light, View
from gemel.video_samples.scene import Scene, World
from gemel.video_samples.traffic import WalkingRoute

VIEW = View(640, 360, (-2.0, -13.0, 6.4), 6.0, -12.0, 520.0)
SUN = Light((0.62, -0.38, 0.68), (0.58, 0.52, 0.42), (0.50, 0.53, 0.60))

GATE = (6.6, 12.0, 12.0)  # x0, x1 and y of the arch
FOUNTAIN = (-3.2, 9.0, 2.3)
TABLES = (
    (-9.6, 2.0, (186, 48, 44)),
    (-11.8, 5.0, (40, 96, 140)),
    (-11.4, 9.4, (186, 48, 44)),
    (-12.4, 13.2, (40, 96, 140)),
)
TREES = (
    (2.6, 16.5, 6.4),
    (15.6, 16.8, 7.2),
    (20.0, 22.0, 8.0),
    (5.6, 24.0, 7.4),
    (12.2, 25.0, 8.0),
    (9.0, 33.0, 8.4),
    (16.5, 31.0, 8.0),
    (2.0, 30.0, 8.0),
    (24.0, 30.0, 8.6),
    (6.0, 40.0, 9.0),
    (13.6, 42.0, 9.0),
    (20.0, 40.0, 9.0),
)
PARK_Y = GATE[2] + 0.4


def _ground() -> GroundMap:
    g = GroundMap(-34, -12, 42, 70, (188, 178, 160), PAVING)
    g.tiles(-34, -12, 42, 40, 1.2, (168, 158, 142))
    fx, fy, _ = FOUNTAIN
    for radius, colour in (
        (6.4, (150, 126, 106)),
        (6.0, (202, 192, 172)),
        (4.4, (150, 126, 106)),
        (4.0, (196, 184, 164)),
    ):
        g.disc(fx, fy, radius, colour, SETTS)
    for angle in np.linspace(0, 2 * np.pi, 16, endpoint=False):
        ends = [(fx + r * np.cos(angle), fy + r * np.sin(angle)) for r in (4.4, 6.0)]
        g.stroke(ends, 0.25, (150, 126, 106), SETTS)
    for x in (-8.2, 3.9):
        g.stroke([(x, -12), (x, 40)], 0.5, (156, 134, 114), SETTS)
    g.stroke([(-34, -2.6), (42, -2.6)], 0.5, (156, 134, 114), SETTS)
    g.rect(1.0, PARK_Y, 42, 70, (104, 146, 70), GRASS)
    g.poly([(7.6, PARK_Y), (11.0, PARK_Y), (11.6, 30), (10.6, 48), (7.4, 48), (8.2, 30)], (206, 188, 150), SETTS)
    g.poly([(10.4, 27), (26, 31), (26, 33.4), (10.2, 30)], (206, 188, 150), SETTS)
    g.rect(-34, 21.5, 0.6, 26.5, (176, 166, 152), PAVING)
    return g


def _houses() -> list[House]:
    return [
        House(-34, -6, -14.6, 8, FacadeStyle((222, 190, 128), 2, bay=2.4), roof=0),
        House(-34, 8, -14.6, 21, FacadeStyle((204, 132, 108), 3, bay=2.3), roof=0),
        House(-34, 27, -20, 40, FacadeStyle((230, 222, 200), 3), roof=3.0),
        House(-20, 27, -10, 40, FacadeStyle((196, 120, 88), 3, brick=True, bay=2.2), roof=3.4),
        House(-10, 27, 0.6, 40, FacadeStyle((216, 206, 176), 2, bay=2.4), roof=3.4),
        House(-2, 64, 44, 70, FacadeStyle((190, 190, 186), 3, shops=False), roof=3.4),
    ]


def _shadows(g: GroundMap) -> None:
    d = np.asarray(SUN.direction)
    push = -d[:2] / d[2]
    angles = np.linspace(0, 2 * np.pi, 30, endpoint=False)

    def blob(x: float, y: float, z: float, radius: float) -> None:
        wobble = 1 + 0.10 * np.sin(angles * 5 + x)
        centre = (x + push[0] * z, y + push[1] * z)
        g.shadow(
            np.stack(
                [centre[0] + radius * wobble * np.cos(angles), centre[1] + radius * wobble * np.sin(angles)], axis=1
            )
        )

    def slab(x0: float, x1: float, y: float, height: float) -> None:
        g.shadow(
            [
                (x0, y),
                (x1, y),
                (x1 + push[0] * height, y + push[1] * height),
                (x0 + push[0] * height, y + push[1] * height),
            ]
        )

    for x, y, height in TREES:
        blob(x, y, height * 0.66, height * 0.32)
    for x, y, _ in TABLES:
        blob(x, y, 2.2, 1.4)
    fx, fy, fr = FOUNTAIN
    blob(fx, fy, 0.6, fr)
    for z in (1.0, 1.9):
        blob(fx, fy, z, 0.8)
    slab(GATE[0], GATE[0] + 1.1, GATE[2], 5.2)
    slab(GATE[1] - 1.1, GATE[1], GATE[2], 5.2)
    top = [
        (x + push[0] * z, GATE[2] + push[1] * z)
        for x, z in ((GATE[0], 4.4), (GATE[1], 4.4), (GATE[1], 5.5), (GATE[0], 5.5))
    ]
    g.shadow(top)
    slab(1.0, GATE[0], GATE[2], 1.0)
    slab(GATE[1], 42, GATE[2], 1.0)


@lru_cache(maxsize=1)
def square() -> Scene:
    """The scene."""
    ground = _ground()
    _shadows(ground)

    def sprite(x: float, y: float, draw):
        return make_sprite(VIEW, SUN, x, y, draw)

    behind = [
        sprite(x, y, props.tree(x, y, h, seed=20 + i, leaf=((86, 124, 50), (112, 130, 48), (64, 110, 60))[i % 3]))
        for i, (x, y, h) in enumerate(TREES)
        if y > PARK_Y + 8
    ]
    behind.sort(key=lambda s: -s.y)
    standing = [sprite(x, y, props.tree(x, y, h, seed=20 + i)) for i, (x, y, h) in enumerate(TREES) if y <= PARK_Y + 8]
    x0, x1, gy = GATE
    standing += [sprite((x0 + x1) / 2, gy + 0.2, props.gate(x0, x1, gy))]
    standing += [sprite(a, gy + 0.1, props.wall(a, b, gy + 0.1, 0.9)) for a, b in ((1.0, x0), (x1, 24.0))]
    standing += [sprite(FOUNTAIN[0], FOUNTAIN[1], props.fountain(*FOUNTAIN))]
    standing += [sprite(x, y, props.cafe_table(x, y, colour)) for x, y, colour in TABLES]
    standing += [sprite(x, y, props.seat(x, y)) for x, y in ((-0.2, 14.8), (-6.8, 15.2), (4.6, 3.0))]
    standing += [
        sprite(x, y, props.planter(x, y, i)) for i, (x, y) in enumerate(((5.2, 10.6), (13.6, 10.6), (-8.2, 16.5)))
    ]
    standing += [
        sprite(x, y, props.street_lamp(x, y, 4.6, arm))
        for x, y, arm in ((3.9, 6.4, 0.7), (-8.2, 11.0, 0.7), (14.0, 3.0, -0.7))
    ]
    backdrop = paint_backdrop(VIEW, SUN, ground, _houses(), behind, seed=11)
    return Scene("square", "SQUARE", VIEW, SUN, backdrop, tuple(standing), {}, (), _world)


def _world(seed: int) -> World:
    """Walkers of one clip."""
    rng = np.random.default_rng([seed, 78])
    gx, gy = (GATE[0] + GATE[1]) / 2, GATE[2]
    out, far = (gx + 0.3, gy + 5.0), (gx + 0.2, gy + 22.0)
    gate_every = float(rng.uniform(45.0, 65.0))
    around = [(FOUNTAIN[0] + 3.4 * np.cos(a), FOUNTAIN[1] + 3.4 * np.sin(a)) for a in np.radians((200, 250, 300, 340))]
    routes = [
        WalkingRoute(((-30, -3.4), (30, -3.0)), 8.0),
        WalkingRoute(((-30, 0.5), (-2, 1.6), (32, 1.0)), 10.0),
        WalkingRoute(((-9.4, -8), (-8.9, 8), (-8.8, 23.5), (-32, 24.0)), 9.0),
        WalkingRoute(((6, -10), (2.0, 4), (-0.6, 15.6), (-6, 24)), 10.0),
        WalkingRoute(((-30, 23.6), (-10, 24.4), (0.0, 22.5), (-1.0, 17), (3, 4), (26, -1)), 11.0),
        WalkingRoute(((-12, -9), *around, (8, -9)), 15.0, linger={2: (4, 12), 3: (2, 8)}),
        WalkingRoute(
            ((16, -6), (10.4, 4), (gx, gy - 3), (gx, gy + 0.4), out, far), gate_every, linger={2: (0, 5)}, spread=0.5
        ),
        WalkingRoute(
            (far, out, (gx, gy + 0.4), (gx, gy - 2.5), (2, 0), (-12, -9)), gate_every, linger={3: (0, 4)}, spread=0.5
        ),
        WalkingRoute(
            ((24, -1), (gx - 0.6, gy - 2.2), (gx + 0.8, gy - 2.4), (2, -9)), 60.0, linger={1: (4, 11)}, spread=1.1
        ),
        WalkingRoute(((18, 8), (30, 9.5)), 30.0),
        WalkingRoute(((-30, -1.4), (30, -0.8)), 17.0, kind="bicycle", spread=0.8),
        WalkingRoute(((8, -12), (4.6, 6), (-3, 20), (-31, 24.6)), 30.0, kind="bicycle"),
        WalkingRoute(((24, 32), (gx, 31), (gx - 0.8, 46)), 14.0),
    ]
    return World(seed, [], routes, None, warm_up_s=40.0)
