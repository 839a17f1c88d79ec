"""The junction on the ground: where lanes, stop lines, zebras, trees and lamps are, and how it is painted."""

from __future__ import annotations

import numpy as np

from video_samples.drawing.textures import ASPHALT, GRASS, PAINT, PAVING, SETTS, GroundMap
from video_samples.movers.traffic import arc

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
