"""The road junction, by day and by night: its ground plan, signal phases and traffic, and what is drawn in it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemel.video_samples.backdrop import GroundMap, House, paint_backdrop
from gemel.video_samples.draw import Light, View
from gemel.video_samples.scene import Phase, Scene, Signals, World
from gemel.video_samples.traffic import Flow, WalkingRoute, arc, make_path

ROAD_FAR, BAY_FAR = 14.0, 17.2  # far kerb of the main road, and of the bus bay
KERB = -1.9  # near kerb; the red cycle lane lies between it and y = 0
BAY = (-31.0, -27.0, -15.0, -10.5)  # x where the bay begins, is full, is full, ends
HALT_X = -22.0
ZEBRA_WEST, ZEBRA_EAST, ZEBRA_SIDE = (-9.6, -6.6), (8.6, 11.6), (-8.4, -5.4)
STOP_E, STOP_W, STOP_B = -10.8, 12.8, -9.6
LANES = {"E1": 1.75, "E2": 5.25, "W2": 8.75, "W1": 12.25}

LAMPS = (
    (-18.8, 17.9),
    (4.3, 17.9),
    (20.8, 15.2),
    (-37.8, 18.2),
    (0.0, 30.0),
    (0.0, 46.0),
    (-12.2, -3.2),
)
LAMPLIGHT = (1.05, 0.78, 0.44)


def paint_ground() -> GroundMap:
    """The plan with carriageways, pavements and markings."""
    g = GroundMap(-64, -14, 36, 92, (96, 96, 100))
    kerb = (168, 166, 160)
    stone = (158, 150, 142)
    white = (226, 226, 220)
    g.rect(-75, ROAD_FAR, 45, 92, stone)
    g.stroke([(-75, ROAD_FAR), (45, ROAD_FAR)], 0.32, kerb)
    bay = [(BAY[0], ROAD_FAR - 0.2), (BAY[1], BAY_FAR), (BAY[2], BAY_FAR), (BAY[3], ROAD_FAR - 0.2)]
    g.poly(bay, (88, 86, 88))
    g.stroke(bay, 0.32, kerb)
    for edge, corner in ((-75.0, -3.5), (45.0, 3.5)):
        g.rect(edge, -16, corner, KERB, stone)
        g.rect(edge, KERB + 0.16, corner, -0.1, (150, 72, 62))
    for x0, x1 in ((-75.0, STOP_E), (STOP_W, 45.0)):
        for y in (3.5, 7.0, 10.5):
            g.stroke([(x0, y), (x1, y)], 0.14, white)
    g.rect(STOP_E - 0.45, KERB + 0.2, STOP_E, 6.8, white)
    g.rect(STOP_W, 7.2, STOP_W + 0.45, ROAD_FAR - 0.3, white)
    for x0, x1 in (ZEBRA_WEST, ZEBRA_EAST):
        for y in np.arange(KERB + 0.4, ROAD_FAR - 0.5, 1.1):
            g.rect(x0, y, x1, y + 0.55, white)
    return g


def start_world(seed: int, night: bool) -> World:
    """Traffic of one clip; where in the signal cycle it begins follows from the seed."""
    rng = np.random.default_rng([seed, 77])
    phases = [
        Phase("main", 18.0 if night else 9.0),
        Phase("side", 4.5),
        Phase("walk", 3.0, clear_s=7.0),
    ]
    signals = Signals(phases, float(rng.uniform(0, 38)))
    straight = {
        name: make_path(
            name,
            (name, name),
            "main",
            [(-75, y), (45, y)] if name[0] == "E" else [(45, y), (-75, y)],
            (STOP_E if name[0] == "E" else STOP_W, y),
            (45, y) if name[0] == "E" else (-75, y),
        )
        for name, y in LANES.items()
    }
    bus = make_path(
        "W1-bus",
        ("W1", "W1"),
        "main",
        [
            (45, 12.25),
            (-8, 12.25),
            (-11.5, 12.6),
            (-15.5, 15.2),
            (-17, 15.75),
            (-25, 15.75),
            (-27.5, 15.2),
            (-32, 12.6),
            (-35, 12.25),
            (-75, 12.25),
        ],
        (STOP_W, 12.25),
        (-10, 12.25),
        (HALT_X, 15.75),
    )
    right = make_path(
        "B-right",
        ("B", "E1"),
        "side",
        [(1.75, -40), (1.75, -3.2), *arc((6.7, -3.2), 4.95, 180, 90)[1:], (45, 1.75)],
        (1.75, STOP_B),
        (1.75, -3),
    )
    left = make_path(
        "B-left",
        ("B", "W2"),
        "side",
        [(1.75, -40), (1.75, 2.2), *arc((-4.8, 2.2), 6.55, 0, 90)[1:], (-75, 8.75)],
        (1.75, STOP_B),
        (1.75, 2),
    )
    into = make_path(
        "E1-right",
        ("E1", "B-out"),
        "main",
        [(-75, 1.75), (-6.2, 1.75), *arc((-6.2, -2.7), 4.45, 90, 0)[1:], (-1.75, -40)],
        (STOP_E, 1.75),
        (-6.5, 1.75),
    )
    cycle = make_path(
        "cycle", ("cycle", "cycle"), "main", [(-75, -1.0), (45, -1.0)], (STOP_E, -1.0), (45, -1.0)
    )
    mixed = {"car": 0.74, "truck": 0.26}
    calm = 3.0 if night else 1.0
    flows = [
        Flow(straight["E1"], {"car": 0.8, "truck": 0.12, "bus": 0.08}, 9.0 * calm),
        Flow(straight["E2"], mixed, 8.5),
        Flow(straight["W1"], mixed, 13.0),
        Flow(straight["W2"], mixed, 8.5),
        Flow(bus, {"bus": 1.0}, 27.0),
        Flow(right, {"car": 1.0}, 17.0),
        Flow(left, {"car": 0.8, "truck": 0.2}, 17.0),
        Flow(into, {"car": 1.0}, 17.0 * calm),
        Flow(cycle, {"bicycle": 1.0}, 11.0 if not night else 24.0),
    ]
    thin = 1.0 if not night else 2.4
    zw, ze, zs = (sum(z) / 2 for z in (ZEBRA_WEST, ZEBRA_EAST, ZEBRA_SIDE))
    routes = [
        WalkingRoute(((-60, 19.6), (40, 19.6)), 13 * thin, spread=0.9),
        WalkingRoute(((-60, -4.2), (-8, -4.2), (-8.6, -15)), 16 * thin),
        WalkingRoute(((40, -4.2), (8, -4.4), (8.0, -15)), 16 * thin),
        WalkingRoute(((-1.5, 76), (-0.5, 22), (-20, 19.8), (-60, 19.8)), 13 * thin),
        WalkingRoute(((2, 80), (1.0, 22), (18, 19.4), (40, 19.4)), 13 * thin),
        WalkingRoute(
            ((-30, -4), (zw, -2.9), (zw, 14.9), (zw, 19), (-60, 19.6)), 13 * thin, wait_at=(1,)
        ),
        WalkingRoute(
            ((30, 19.4), (ze, 15.0), (ze, -3.0), (9, -6), (9, -16)), 13 * thin, wait_at=(1,)
        ),
        WalkingRoute(
            ((0, 60), (-2, 20), (zw, 14.9), (zw, -2.9), (-30, -4.2)), 13 * thin, wait_at=(2,)
        ),
        WalkingRoute(((-16, -5), (-4.6, zs), (4.6, zs), (20, -5)), 12 * thin, wait_at=(1,)),
        WalkingRoute(
            ((-45, 19.8), (-21, 18.1), (-45, 19.6)), 16 * thin, linger={1: (8, 20)}, spread=1.6
        ),
    ]
    return World(
        seed, flows, routes, signals, dwell_s=(6.0, 9.0), warm_up_s=26.0 + float(rng.uniform(0, 12))
    )


VIEW = View(640, 360, (9.0, -23.0, 9.6), -15.0, -13.0, 520.0)
DAY = Light((-0.53, -0.42, 0.74), (0.50, 0.48, 0.42), (0.56, 0.58, 0.62))
NIGHT = Light((0.0, 0.0, 1.0), (0.26, 0.21, 0.15), (0.29, 0.28, 0.31), night=True)

HOUSES = [
    House(-75, 22.5, -31, 36, 11.0, (170, 172, 174)),
    House(-31, 22.5, -19, 36, 13.0, (214, 200, 170)),
    House(-19, 22.5, -8.4, 60, 10.0, (158, 96, 76)),
    House(7.2, 22.5, 18.5, 60, 13.0, (226, 214, 190)),
    House(18.5, 22.5, 44, 36, 10.0, (158, 96, 76)),
    House(-22, 90, 20, 98, 14.0, (208, 200, 186)),
]


@lru_cache(maxsize=2)
def junction(night: bool) -> Scene:
    """The scene by day or by night."""
    light = NIGHT if night else DAY
    ground = paint_ground()
    for x, y in LAMPS:
        ground.pool(x, y - 1.5, 5.0, LAMPLIGHT)
    backdrop = paint_backdrop(VIEW, light, ground, HOUSES, seed=7)
    return Scene(VIEW, light, backdrop, lambda seed: start_world(seed, night))
