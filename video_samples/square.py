"""The square with people: a path through a park, paving around it, and walkers in the afternoon sun."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemel.video_samples.backdrop import GroundMap, House, paint_backdrop
from gemel.video_samples.draw import Light, View
from gemel.video_samples.scene import Scene, World
from gemel.video_samples.traffic import WalkingRoute

VIEW = View(640, 360, (-2.0, -13.0, 6.4), 6.0, -12.0, 520.0)
SUN = Light((0.62, -0.38, 0.68), (0.58, 0.52, 0.42), (0.50, 0.53, 0.60))

GATE = (6.6, 12.0, 12.0)  # x0, x1 and y of the way into the park
FOUNTAIN = (-3.2, 9.0)  # people walk around it
PARK_Y = GATE[2] + 0.4
HOUSES = [
    House(-34, -6, -14.6, 21, 11.0, (222, 190, 128)),
    House(-34, 27, 0.6, 40, 13.0, (196, 120, 88)),
    House(-2, 64, 44, 70, 14.0, (190, 190, 186)),
]


@lru_cache(maxsize=1)
def square() -> Scene:
    """The scene."""
    ground = GroundMap(-34, -12, 42, 70, (188, 178, 160))
    for x in (-8.2, 3.9):
        ground.stroke([(x, -12), (x, 40)], 0.5, (156, 134, 114))
    ground.stroke([(-34, -2.6), (42, -2.6)], 0.5, (156, 134, 114))
    ground.rect(1.0, PARK_Y, 42, 70, (104, 146, 70))
    ground.rect(GATE[0] + 1.0, PARK_Y, GATE[1] - 1.0, 48, (206, 188, 150))
    x, y = FOUNTAIN
    ground.rect(x - 2, y - 2, x + 2, y + 2, (96, 150, 172))
    return Scene(VIEW, SUN, paint_backdrop(VIEW, SUN, ground, HOUSES, seed=11), _world)


def _world(seed: int) -> World:
    """Walkers of one clip."""
    rng = np.random.default_rng([seed, 78])
    gx = (GATE[0] + GATE[1]) / 2
    gy = GATE[2]
    out = (gx + 0.3, gy + 5.0)
    far = (gx + 0.2, gy + 22.0)
    gate_every = float(rng.uniform(45.0, 65.0))
    around = [
        (FOUNTAIN[0] + 3.4 * np.cos(a), FOUNTAIN[1] + 3.4 * np.sin(a))
        for a in np.radians((200, 250, 300, 340))
    ]
    routes = [
        WalkingRoute(((-30, -3.4), (30, -3.0)), 8.0),
        WalkingRoute(((-30, 0.5), (-2, 1.6), (32, 1.0)), 10.0),
        WalkingRoute(((-9.4, -8), (-8.9, 8), (-8.8, 23.5), (-32, 24.0)), 9.0),
        WalkingRoute(((6, -10), (2.0, 4), (-0.6, 15.6), (-6, 24)), 10.0),
        WalkingRoute(((-30, 23.6), (-10, 24.4), (0.0, 22.5), (-1.0, 17), (3, 4), (26, -1)), 11.0),
        WalkingRoute(((-12, -9), *around, (8, -9)), 15.0, linger={2: (4, 12), 3: (2, 8)}),
        WalkingRoute(
            ((16, -6), (10.4, 4), (gx, gy - 3), (gx, gy + 0.4), out, far),
            gate_every,
            linger={2: (0, 5)},
            spread=0.5,
        ),
        WalkingRoute(
            (far, out, (gx, gy + 0.4), (gx, gy - 2.5), (2, 0), (-12, -9)),
            gate_every,
            linger={3: (0, 4)},
            spread=0.5,
        ),
        WalkingRoute(
            ((24, -1), (gx - 0.6, gy - 2.2), (gx + 0.8, gy - 2.4), (2, -9)),
            60.0,
            linger={1: (4, 11)},
            spread=1.1,
        ),
        WalkingRoute(((18, 8), (30, 9.5)), 30.0),
        WalkingRoute(((-30, -1.4), (30, -0.8)), 17.0, kind="bicycle", spread=0.8),
        WalkingRoute(((8, -12), (4.6, 6), (-3, 20), (-31, 24.6)), 30.0, kind="bicycle"),
        WalkingRoute(((24, 32), (gx, 31), (gx - 0.8, 46)), 14.0),
    ]
    return World(seed, [], routes, None, warm_up_s=40.0)
