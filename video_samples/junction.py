"""The road junction, by day and by night: its ground plan, signal phases and traffic, and what is drawn in it."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from gemel.video_samples import props
from gemel.video_samples.backdrop import (
    ASPHALT,
    GRASS,
    PAINT,
    PAVING,
    SETTS,
    FacadeStyle,
    GroundMap,
    House,
    Sprite,
    make_sprite,
    paint_backdrop,
)
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

TREES = (
    (-38.0, 20.6, 8.0),
    (-12.0, 20.4, 7.4),
    (11.5, 19.6, 7.6),
    (20.0, 19.8, 7.0),
    (-6.2, 34.0, 7.5),
    (4.8, 34.0, 7.5),
    (-6.2, 48.0, 7.5),
    (4.8, 48.0, 7.5),
    (-6.4, 64.0, 8.0),
    (5.0, 64.0, 8.0),
)
LAMPS = (
    (-17.0, 17.9, -1.8),
    (2.5, 17.9, 1.8),
    (19.0, 15.2, 1.8),
    (-36.0, 18.2, -1.8),
    (-1.2, 30.0, 1.2),
    (-1.2, 46.0, 1.2),
)
NEAR_LAMPS = ((-14.0, -3.2, 1.8),)
LAMP_HEIGHT = 6.6


def paint_ground() -> GroundMap:
    """The plan with carriageways, pavements, markings and repairs."""
    g = GroundMap(-64, -14, 36, 92, (96, 96, 100), ASPHALT)
    kerb, stone, white = (168, 166, 160), (158, 150, 142), (226, 226, 220)
    g.rect(-75, ROAD_FAR, 45, 92, stone, PAVING)
    g.tiles(-75, ROAD_FAR, 45, 24, 0.9, (142, 136, 128))
    g.rect(-5.0, 24, 3.6, 92, (176, 156, 134), SETTS)
    g.tiles(-5.0, 24, 3.6, 92, 0.7, (150, 132, 112))
    for x0, x1 in ((-7.6, -5.0), (3.6, 6.2)):
        g.rect(x0, 27, x1, 80, (92, 130, 62), GRASS)
    g.stroke([(-75, ROAD_FAR), (45, ROAD_FAR)], 0.32, kerb, PAVING)
    bay = [(BAY[0], ROAD_FAR - 0.2), (BAY[1], BAY_FAR), (BAY[2], BAY_FAR), (BAY[3], ROAD_FAR - 0.2)]
    g.poly(bay, (88, 86, 88), ASPHALT)
    g.stroke(bay, 0.32, kerb, PAVING)
    g.dashes((BAY[0], ROAD_FAR - 0.1), (BAY[3], ROAD_FAR - 0.1), 1.0, 1.0, 0.16, (232, 200, 60))
    g.stroke(
        [(BAY[1] + 0.6, 15.0), (BAY[2] - 0.6, 15.0), (BAY[2] - 0.6, 16.7), (BAY[1] + 0.6, 16.7), (BAY[1] + 0.6, 15.0)],
        0.12,
        (232, 200, 60),
        PAINT,
    )
    for side, corner in ((-1, -3.5), (1, 3.5)):  # near pavements with rounded corners
        r, edge = 4.0, 45.0 if side > 0 else -75.0
        curve = arc((corner + side * r, KERB - r), r, 90, 180) if side > 0 else arc((corner - r, KERB - r), r, 90, 0)
        block = [(edge, KERB), *curve, (corner, -16), (edge, -16)]
        g.poly(block, stone, PAVING)
        g.stroke([(edge, KERB), *curve, (corner, -16)], 0.32, kerb, PAVING)
    g.tiles(-64, -14, 36, KERB - 0.4, 0.9, (140, 133, 125))
    g.rect(-75, KERB + 0.16, -5.5, -0.1, (150, 72, 62), ASPHALT)
    g.rect(6.0, KERB + 0.16, 45, -0.1, (150, 72, 62), ASPHALT)
    g.dashes((-5.5, KERB + 0.2), (6.0, KERB + 0.2), 0.7, 0.7, 0.12, white)
    g.dashes((-5.5, -0.1), (6.0, -0.1), 0.7, 0.7, 0.12, white)
    for x0, x1 in ((-75.0, -5.5), (6.0, 45.0)):
        g.stroke([(x0, -0.1), (x1, -0.1)], 0.14, white, PAINT)
    for x0, x1 in ((-75.0, STOP_E), (STOP_W, 45.0)):
        for y in (6.86, 7.14):
            g.stroke([(x0, y), (x1, y)], 0.12, white, PAINT)
        for y in (3.5, 10.5):
            g.dashes((x0, y), (x1, y), 2.4, 3.0, 0.14, white)
        for lane in LANES.values():
            for track in (-0.8, 0.8):
                g.stroke([(x0, lane + track), (x1, lane + track)], 0.5, (90, 90, 94), ASPHALT)
    g.stroke([(0, STOP_B), (0, -16)], 0.14, white, PAINT)
    g.rect(STOP_E - 0.45, KERB + 0.2, STOP_E, 6.8, white, PAINT)
    g.rect(STOP_W, 7.2, STOP_W + 0.45, ROAD_FAR - 0.3, white, PAINT)
    g.rect(0.2, STOP_B - 0.45, 3.3, STOP_B, white, PAINT)
    for x0, x1 in (ZEBRA_WEST, ZEBRA_EAST):
        for y in np.arange(KERB + 0.4, ROAD_FAR - 0.5, 1.1):
            g.rect(x0, y, x1, y + 0.55, white, PAINT)
    for x in np.arange(-3.2, 3.2, 1.1):
        g.rect(x, ZEBRA_SIDE[0], x + 0.55, ZEBRA_SIDE[1], white, PAINT)
    for y, turn in ((1.75, -1), (5.25, 0)):
        _arrow(g, -16.5, y, turn, white)
        _arrow(g, -30.0, y, turn, white)
    for x, y in ((-2.5, 4.0), (5.0, 9.0), (-24.0, 9.5), (16.0, 4.4)):  # manholes and repairs
        g.disc(x, y, 0.42, (62, 62, 64), ASPHALT)
        g.disc(x, y, 0.34, (78, 78, 80), ASPHALT)
    g.rect(14.5, 8.0, 19.5, 9.6, (78, 78, 82), ASPHALT)
    g.rect(-21.0, 2.2, -18.6, 5.8, (80, 80, 83), ASPHALT)
    return g


def _arrow(g: GroundMap, x: float, y: float, turn: int, colour) -> None:
    g.stroke([(x, y), (x + 2.2, y)], 0.18, colour, PAINT)
    g.poly([(x + 2.0, y - 0.42), (x + 3.2, y), (x + 2.0, y + 0.42)], colour, PAINT)
    if turn:
        g.stroke([(x + 0.6, y), (x + 1.3, y + turn * 0.9)], 0.18, colour, PAINT)


def cast_shadows(g: GroundMap, sun: tuple[float, float, float]) -> None:
    """Puts the shadows of trees, lamps and the shelter on the plan; `sun` points towards the sun."""
    d = np.asarray(sun)
    push = -d[:2] / d[2]
    angles = np.linspace(0, 2 * np.pi, 30, endpoint=False)
    for x, y, height in TREES:
        cx, cy, r = x + push[0] * height * 0.66, y + push[1] * height * 0.66, height * 0.30
        wobble = 1 + 0.12 * np.sin(angles * 5 + x)
        g.shadow(np.stack([cx + r * 1.1 * wobble * np.cos(angles), cy + r * 1.1 * wobble * np.sin(angles)], axis=1))
        g.shadow([(x - 0.15, y), (x + 0.15, y), (cx + 0.15, cy), (cx - 0.15, cy)])
    for x, y, _ in (*LAMPS, *NEAR_LAMPS):
        tip = (x + push[0] * LAMP_HEIGHT, y + push[1] * LAMP_HEIGHT)
        g.shadow([(x - 0.07, y), (x + 0.07, y), (tip[0] + 0.07, tip[1]), (tip[0] - 0.07, tip[1])])
    g.shadow(
        [
            (-24, 18.6),
            (-18, 18.6),
            (-18 + push[0] * 2.5, 18.6 + push[1] * 2.5),
            (-24 + push[0] * 2.5, 18.6 + push[1] * 2.5),
        ]
    )


def start_world(seed: int, night: bool) -> World:
    """Traffic of one clip; where in the signal cycle it begins follows from the seed."""
    rng = np.random.default_rng([seed, 77])
    phases = [Phase("main", 18.0 if night else 9.0), Phase("side", 4.5), Phase("walk", 3.0, clear_s=7.0)]
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
    cycle = make_path("cycle", ("cycle", "cycle"), "main", [(-75, -1.0), (45, -1.0)], (STOP_E, -1.0), (45, -1.0))
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
        WalkingRoute(((-30, -4), (zw, -2.9), (zw, 14.9), (zw, 19), (-60, 19.6)), 13 * thin, wait_at=(1,)),
        WalkingRoute(((30, 19.4), (ze, 15.0), (ze, -3.0), (9, -6), (9, -16)), 13 * thin, wait_at=(1,)),
        WalkingRoute(((0, 60), (-2, 20), (zw, 14.9), (zw, -2.9), (-30, -4.2)), 13 * thin, wait_at=(2,)),
        WalkingRoute(((-16, -5), (-4.6, zs), (4.6, zs), (20, -5)), 12 * thin, wait_at=(1,)),
        WalkingRoute(((-45, 19.8), (-21, 18.1), (-45, 19.6)), 16 * thin, linger={1: (8, 20)}, spread=1.6),
    ]
    return World(seed, flows, routes, signals, dwell_s=(6.0, 9.0), warm_up_s=26.0 + float(rng.uniform(0, 12)))


VIEW = View(640, 360, (9.0, -23.0, 9.6), -15.0, -13.0, 520.0)
DAY = Light((-0.53, -0.42, 0.74), (0.50, 0.48, 0.42), (0.56, 0.58, 0.62))
NIGHT = Light((0.0, 0.0, 1.0), (0.26, 0.21, 0.15), (0.29, 0.28, 0.31), night=True)

SIGNAL_POSTS = {  # signal name -> posts (x, y, facing)
    "main": ((-10.2, -2.5, (-1.0, 0.0)), (7.9, -2.5, (-1.0, 0.0)), (12.4, 14.7, (1.0, 0.0)), (-6.0, 14.7, (1.0, 0.0))),
    "side": ((4.2, -9.2, (0.0, -1.0)), (4.6, 14.9, (0.0, -1.0))),
}


def _houses() -> list[House]:
    brick, cream, grey = (158, 96, 76), (214, 200, 170), (170, 172, 174)
    return [
        House(-75, 22.5, -49, 36, FacadeStyle(grey, 3, lit=0.4)),
        House(-49, 22.5, -31, 36, FacadeStyle(brick, 2, brick=True), roof=3.0),
        House(-31, 22.5, -19, 36, FacadeStyle(cream, 3, bay=2.4), roof=2.4),
        House(-19, 22.5, -8.4, 36, FacadeStyle((186, 124, 92), 2, brick=True), roof=3.0),
        House(7.2, 22.5, 18.5, 36, FacadeStyle((226, 214, 190), 3, bay=2.3), roof=2.6),
        House(18.5, 22.5, 44, 36, FacadeStyle(brick, 2, brick=True), roof=3.0),
        House(-22, 38, -8.6, 60, FacadeStyle((196, 186, 170), 2, shops=False), roof=3.0),
        House(7.4, 38, 20, 60, FacadeStyle((180, 150, 130), 2, shops=False), roof=3.0),
        House(-22, 62, -8.8, 82, FacadeStyle((206, 180, 150), 2, shops=False), roof=3.0),
        House(7.6, 62, 20, 82, FacadeStyle((170, 120, 100), 3, shops=False, brick=True), roof=3.0),
        House(-9, 90, 9, 98, FacadeStyle((208, 200, 186), 3, shops=False, lit=0.6), roof=4.0),
        House(-3.2, 92, 1.2, 98, FacadeStyle((200, 190, 174), 7, shops=False, lit=0.3), roof=9.0),
    ]


@lru_cache(maxsize=2)
def junction(night: bool) -> Scene:
    """The scene by day or by night."""
    light = NIGHT if night else DAY
    ground = paint_ground()
    cast_shadows(ground, DAY.direction)
    for x, y, arm in (*LAMPS, *NEAR_LAMPS):
        ground.pool(x + arm, y - 1.5, 5.0, (1.05, 0.78, 0.44))
    for x in np.arange(-46, 40, 7.0):
        if not -8 < x < 7:
            ground.pool(x, 20.5, 2.6, (0.62, 0.46, 0.26))
    ground.pool(9.0, -8.0, 9.0, (0.36, 0.30, 0.2))

    def sprite(x: float, y: float, draw) -> Sprite:
        return make_sprite(VIEW, light, x, y, draw)

    behind = [sprite(x, y, props.tree(x, y, h, seed=i)) for i, (x, y, h) in enumerate(TREES)]
    behind += [sprite(-21, 18.8, props.shelter(-24, -18, 18.8)), sprite(-16.4, 17.8, props.bus_stop_flag(-16.4, 17.8))]
    behind += [sprite(8.6, 18.2, props.seat(8.6, 18.2)), sprite(15.2, 17.4, props.planter(15.2, 17.4, 3))]
    behind += [sprite(x, 24.5, props.bollard(x, 24.5)) for x in (-4.2, -2.2, -0.2, 1.8)]
    behind.sort(key=lambda s: -np.hypot(s.x - VIEW.eye[0], s.y - VIEW.eye[1]))
    standing = [sprite(x, y, props.street_lamp(x, y, LAMP_HEIGHT, arm, -1.2)) for x, y, arm in (*LAMPS, *NEAR_LAMPS)]
    signals = {}
    for name, posts in SIGNAL_POSTS.items():
        for state in ("red", "amber", "green"):
            for i, (x, y, facing) in enumerate(posts):
                signals[(f"{name}{i}", state)] = sprite(x, y, props.signal(x, y, state, facing))
    backdrop = paint_backdrop(VIEW, light, ground, _houses(), behind, seed=7)
    lamps = tuple((x + arm, y - 1.2, LAMP_HEIGHT + 0.1) for x, y, arm in (*LAMPS, *NEAR_LAMPS))
    return Scene(
        "junction-night" if night else "junction-day",
        "JUNCTION",
        VIEW,
        light,
        backdrop,
        tuple(standing),
        signals,
        lamps,
        lambda seed: start_world(seed, night),
    )
