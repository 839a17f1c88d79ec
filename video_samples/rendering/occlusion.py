"""In which order to draw what stands in a scene, so that nearer things cover farther ones."""

from __future__ import annotations

import numpy as np

from video_samples.drawing.backdrop import Sprite
from video_samples.drawing.view import View
from video_samples.movers.actors import Actor

REACH = 6  # how many places a thing may move ahead of its order by depth
LONG_M = 1.5  # half a length from which on the middle of a vehicle says too little about where it is


def ordered(view: View, actors: list[Actor], sprites: list[Sprite]) -> list[Actor | Sprite]:
    """Far to near, so that nearer things cover farther ones; a long vehicle is judged by its sides, not its middle."""
    eye, forward = view.eye, view.axes[2]

    def depth(thing: Actor | Sprite) -> float:
        return float((thing.x - eye[0]) * forward[0] + (thing.y - eye[1]) * forward[1])

    result: list[Actor | Sprite] = []
    for thing in sorted([*actors, *sprites], key=depth, reverse=True):
        at = len(result)
        while at > 0 and at > len(result) - REACH and _behind(thing, result[at - 1], eye):
            at -= 1
        result.insert(at, thing)
    return result


def _behind(a: Actor | Sprite, b: Actor | Sprite, eye: np.ndarray) -> bool:
    """Whether b certainly covers a where they overlap: a lies on b's far side."""
    if isinstance(b, Sprite) or max(b.half_size) < LONG_M:
        if isinstance(a, Actor) and max(a.half_size) >= LONG_M:
            return _side_of(b, a, eye) > 0
        return False
    return _side_of(a, b, eye) < 0


def _side_of(thing: Actor | Sprite, vehicle: Actor, eye: np.ndarray) -> int:
    """-1 if `thing` is beyond the vehicle as seen from the eye, 1 if before it, 0 if neither is sure."""
    c, s = np.cos(vehicle.heading), np.sin(vehicle.heading)
    half = vehicle.half_size

    def local(x: float, y: float) -> tuple[float, float]:
        dx, dy = x - vehicle.x, y - vehicle.y
        return dx * c + dy * s, -dx * s + dy * c

    camera, place = local(float(eye[0]), float(eye[1])), local(thing.x, thing.y)
    verdicts = []
    for axis in (1, 0):
        if abs(camera[axis]) > half[axis]:
            towards = place[axis] * np.sign(camera[axis])
            if towards > half[axis]:
                return 1
            if towards < -half[axis]:
                verdicts.append(-1)
    return -1 if verdicts else 0
