"""Light by night: glow of lamps, beams on the road, and their streaks on wet asphalt."""

from __future__ import annotations

import cv2
import numpy as np

from video_samples.drawing.pen import LampSeen
from video_samples.movers.solids import HEAD
from video_samples.scenes.scene import Scene

GLOW_SCALE = 2  # the light layer has this many frame pixels per pixel: light is soft
BEAM_COLOUR = (78.0, 72.0, 54.0)
BEAM_STEPS = ((12.0, 2.6, 0.34), (8.5, 1.9, 0.6), (5.0, 1.3, 1.0))  # reach and half width in metres, strength


def add_lamps(
    frame: np.ndarray,
    scene: Scene,
    lamps: list[LampSeen],
    noses: list[tuple[float, float, float]],
    shift: tuple[int, int],
) -> np.ndarray:
    """The frame with light added: vehicle lamps that show, beams before vehicles, street lamps.

    `noses` are x, y and heading of every vehicle's front.
    """
    view = scene.view
    size = (view.width // GLOW_SCALE, view.height // GLOW_SCALE)
    beams, streaks, glow = (np.zeros((size[1], size[0], 3), np.uint8) for _ in range(3))

    def pixel(points) -> tuple[np.ndarray, np.ndarray]:
        at, depth = view.project(np.asarray(points, np.float64))
        return view.to_frame(at, shift) / GLOW_SCALE, depth

    for reach, half, strength in BEAM_STEPS:
        for x, y, heading in noses:
            c, s = np.cos(heading), np.sin(heading)
            wedge = ((0.2, 0.7), (reach, half), (reach, -half), (0.2, -0.7))
            at, depth = pixel([(x + c * ahead - s * aside, y + s * ahead + c * aside, 0.0) for ahead, aside in wedge])
            if depth.min() > 2:
                cv2.fillConvexPoly(beams, np.round(at).astype(np.int32), tuple(v * strength for v in BEAM_COLOUR))
    for lamp in lamps:
        head = lamp.kind == HEAD
        colour = (255, 244, 214) if head else (230, 26, 18)
        (ends, _), scale = (
            pixel(
                [
                    (lamp.position[0], lamp.position[1], 0.0),
                    (lamp.position[0], lamp.position[1], -lamp.position[2] * (3.4 if head else 2.2)),
                ]
            ),
            30.0 / lamp.depth,
        )
        a, b = np.round(ends).astype(int)
        faint = tuple(v * (0.75 if head else 0.6) for v in colour)
        cv2.line(streaks, (int(a[0]), int(a[1])), (int(b[0]), int(b[1])), faint, max(1, round(2.4 * scale)))
        at = np.round(view.to_frame(np.asarray(lamp.pixel), shift) / GLOW_SCALE).astype(int)
        cv2.circle(glow, (int(at[0]), int(at[1])), max(1, round((3.4 if head else 2.4) * scale)), colour, -1)
    for lamp in scene.lamps:
        at, depth = pixel([lamp])
        if depth[0] > 1:
            radius = max(1, round(70 / depth[0]))
            cv2.circle(glow, tuple(int(v) for v in np.round(at[0])), radius, (255, 214, 140), -1)
    light = cv2.add(cv2.GaussianBlur(beams, (15, 9), 0), cv2.GaussianBlur(streaks, (3, 13), 0))
    light = cv2.addWeighted(light, 1.0, cv2.GaussianBlur(glow, (9, 9), 0), 0.75, 0)
    wide = cv2.blur(cv2.blur(glow, (31, 31)), (31, 31))
    light = cv2.addWeighted(light, 1.0, wide, 1.4, 0)
    return cv2.add(frame, cv2.resize(light, (view.width, view.height), interpolation=cv2.INTER_LINEAR))
