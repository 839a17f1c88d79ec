"""One frame: actors over the backdrop in the order of occlusion, their shadows, and the truth about them."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from video_samples.actors import Actor
from video_samples.backdrop import Sprite
from video_samples.night import add_lamps
from video_samples.pen import LampSeen, Pen
from video_samples.scene import Scene, World
from video_samples.sensor import Sensor
from video_samples.solids import Solid
from video_samples.view import OVERSAMPLING

MIN_VISIBLE, MIN_SIDE_PX = 0.40, 8.0  # objects more hidden or smaller than that are not part of the truth
STANDING_ID = 255


@dataclass(frozen=True)
class Truth:
    """One object of a frame: `box` is x0, y0, x1, y1 in frame pixels, `visible` the fraction of it that shows.

    `ground` is where it stands, in metres of the scene.
    """

    track: int
    kind: str
    box: tuple[float, float, float, float]
    visible: float
    ground: tuple[float, float]

    @property
    def counts(self) -> bool:
        """Whether it shows well enough to be part of the published truth."""
        width, height = self.box[2] - self.box[0], self.box[3] - self.box[1]
        return self.visible >= MIN_VISIBLE and min(width, height) >= MIN_SIDE_PX


class Renderer:
    """Draws the frames of one clip of a scene."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.scene = scene
        self.world: World = scene.start_world(seed)
        self.sensor = Sensor(scene, seed)
        view = scene.view
        self._canvas = np.empty_like(scene.backdrop.lit)
        self._shadow = np.empty(self._canvas.shape[:2], np.uint8)
        self._ids = np.empty((view.canvas_size[1] // OVERSAMPLING, view.canvas_size[0] // OVERSAMPLING), np.uint8)

    def frame(self) -> tuple[np.ndarray, list[Truth]]:
        """The present moment: RGB uint8 (H, W, 3) and what is in it."""
        scene, view = self.scene, self.scene.view
        canvas = self._canvas
        actors = [actor for actor in self.world.actors() if self._near(actor)]
        np.copyto(canvas, scene.backdrop.lit)
        self._cast_shadows(actors)
        pen = Pen(view, scene.light, canvas)
        self._ids[:] = 0
        drawn: dict[int, tuple[Actor, np.ndarray]] = {}
        lamps: list[tuple[int, LampSeen]] = []
        for thing in _ordered(scene, actors, self._standing()):
            if isinstance(thing, Sprite):
                thing.stamp(canvas)
                self._mark_sprite(thing)
                continue
            if isinstance(thing.look, Solid):
                pixels, seen = pen.solid(thing.look, thing.body, thing.heading, thing.braking)
            else:
                pixels, seen = pen.figure(thing.look, thing.figure, thing.body), []
            if len(pixels) and thing.track % 254 + 1 not in drawn:
                hull = cv2.convexHull(pixels.astype(np.float32))[:, 0]
                ident = thing.track % 254 + 1
                cv2.fillConvexPoly(self._ids, np.round(hull * 8 / OVERSAMPLING).astype(np.int32), ident, 8, 3)
                drawn[ident] = (thing, hull)
                lamps += [(ident, lamp) for lamp in seen]
        shift = self.sensor.shake()
        x, y = shift
        window = canvas[y : y + view.height * OVERSAMPLING, x : x + view.width * OVERSAMPLING]
        frame = cv2.resize(window, (view.width, view.height), interpolation=cv2.INTER_AREA)
        if scene.light.night:
            frame = add_lamps(frame, scene, [lamp for ident, lamp in lamps if self._shows(ident, lamp)], shift)
        return self.sensor.develop(frame), self._truths(drawn, shift)

    def _near(self, actor: Actor) -> bool:
        """Whether any of it can be in the picture."""
        view = self.scene.view
        (at,), (depth,) = view.project(np.array([[actor.x, actor.y, 1.0]]))
        reach = (max(actor.half_size) + 2.0) * view.pixels_per_metre(float(depth))
        return depth > 0 and -reach < at[0] < view.canvas_size[0] + reach

    def _standing(self) -> list[Sprite]:
        signals = self.world.signals
        if signals is None:
            return list(self.scene.standing)
        chosen = [sprite for (name, state), sprite in self.scene.signals.items()
                  if state == signals.state(name.rstrip("0123456789"), self.world.now)]
        return [*self.scene.standing, *chosen]

    def _cast_shadows(self, actors: list[Actor]) -> None:
        light, view = self.scene.light, self.scene.view
        self._shadow[:] = 0
        push = np.zeros(2) if light.night else np.asarray(light.direction[:2]) / light.direction[2]
        for actor in actors:
            points = actor.body
            ground = np.zeros_like(points)
            ground[:, :2] = points[:, :2] - points[:, 2:] * push
            pixels, depth = view.project(ground)
            if depth.min() > 1.0:
                hull = cv2.convexHull(pixels.astype(np.float32))
                cv2.fillConvexPoly(self._shadow, np.round(hull * 8).astype(np.int32), 255, 8, 3)
        cv2.copyTo(self.scene.backdrop.shaded, self._shadow, self._canvas)

    def _mark_sprite(self, sprite: Sprite) -> None:
        small = sprite.mask[::OVERSAMPLING, ::OVERSAMPLING]
        top, left = sprite.top // OVERSAMPLING, sprite.left // OVERSAMPLING
        window = self._ids[top : top + small.shape[0], left : left + small.shape[1]]
        window[small[: window.shape[0], : window.shape[1]] > 0] = STANDING_ID

    def _shows(self, ident: int, lamp: LampSeen) -> bool:
        x, y = int(lamp.pixel[0] / OVERSAMPLING), int(lamp.pixel[1] / OVERSAMPLING)
        inside = 0 <= y < self._ids.shape[0] and 0 <= x < self._ids.shape[1]
        return not inside or int(self._ids[y, x]) == ident

    def _truths(self, drawn: dict[int, tuple[Actor, np.ndarray]], shift: tuple[int, int]) -> list[Truth]:
        view = self.scene.view
        x, y = (round(s / OVERSAMPLING) for s in shift)
        window = np.ascontiguousarray(self._ids[y : y + view.height, x : x + view.width])
        counts = cv2.calcHist([window], [0], None, [256], [0, 256]).ravel()
        truths = []
        for ident, (actor, hull) in drawn.items():
            area = float(cv2.contourArea(hull)) / OVERSAMPLING**2
            visible = min(1.0, float(counts[ident]) / max(area, 1.0))
            corners = view.to_frame(np.stack([hull.min(axis=0), hull.max(axis=0)]), shift)
            (x0, y0), (x1, y1) = np.clip(corners, 0, (view.width, view.height)).tolist()
            box = (round(x0, 1), round(y0, 1), round(x1, 1), round(y1, 1))
            truths.append(Truth(actor.track, actor.kind, box, round(visible, 3), (round(actor.x, 2), round(actor.y, 2))))
        return truths


def _ordered(scene: Scene, actors: list[Actor], sprites: list[Sprite]) -> list[Actor | Sprite]:
    """Far to near, so that nearer things cover farther ones; a long vehicle is judged by its sides, not its middle."""
    eye, forward = scene.view.eye, scene.view.axes[2]

    def depth(thing: Actor | Sprite) -> float:
        return float((thing.x - eye[0]) * forward[0] + (thing.y - eye[1]) * forward[1])

    ordered: list[Actor | Sprite] = []
    for thing in sorted([*actors, *sprites], key=depth, reverse=True):
        at = len(ordered)
        while at > 0 and at > len(ordered) - 6 and _behind(thing, ordered[at - 1], eye):
            at -= 1
        ordered.insert(at, thing)
    return ordered


def _behind(a: Actor | Sprite, b: Actor | Sprite, eye: np.ndarray) -> bool:
    """Whether a is certainly hidden by b where they overlap: it lies beyond a side of b that faces away from the camera."""
    if isinstance(b, Sprite) or max(b.half_size) < 1.5:
        if isinstance(a, Actor) and max(a.half_size) >= 1.5:
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
