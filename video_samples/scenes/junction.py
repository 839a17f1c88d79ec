"""The road junction, by day and by night: a main road with a bus stop, a side road towards the camera, three zebras."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from video_samples.drawing import props
from video_samples.drawing.backdrop import House, Sprite, make_sprite, paint_backdrop
from video_samples.drawing.pen import Light
from video_samples.drawing.textures import FacadeStyle
from video_samples.drawing.view import View
from video_samples.scenes.junction_plan import LAMP_HEIGHT, LAMPS, NEAR_LAMPS, TREES, cast_shadows, paint_ground
from video_samples.scenes.junction_traffic import start_world
from video_samples.scenes.scene import Scene

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
    behind += [sprite(8.6, 18.2, props.bench(8.6, 18.2)), sprite(15.2, 17.4, props.planter(15.2, 17.4, 3))]
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
