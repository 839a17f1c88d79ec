"""One frame: actors over the backdrop in the order of occlusion, their shadows, and the truth about them."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from video_samples.drawing.backdrop import Sprite
from video_samples.drawing.pen import LampSeen, Pen
from video_samples.drawing.view import NEAR_M, OVERSAMPLING
from video_samples.movers.actors import Actor
from video_samples.movers.solids import Solid
from video_samples.rendering.night import add_lamps
from video_samples.rendering.occlusion import ordered
from video_samples.rendering.sensor import Sensor
from video_samples.scenes.scene import Scene, World

MIN_VISIBLE, MIN_SIDE_PX = 0.40, 8.0  # objects more hidden or smaller than that are not part of the truth
STANDING_ID = 255  # what sprites leave in the map of who is seen where
FARTHEST_M = 75.0  # a person beyond that is a few pixels


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
        np.copyto(canvas, scene.backdrop.lit)
        bodies = self._place(self.world.actors())
        cv2.copyTo(scene.backdrop.shaded, self._shadow, canvas)
        pen = Pen(view, scene.light, canvas)
        self._ids[:] = 0
        drawn: dict[int, tuple[Actor, np.ndarray]] = {}
        lamps: list[tuple[int, LampSeen]] = []
        for thing in ordered(view, list(bodies), self._standing()):
            if isinstance(thing, Sprite):
                thing.stamp(canvas)
                self._mark_sprite(thing)
                continue
            pixels, depth = bodies[thing]
            ident = thing.track % (STANDING_ID - 1) + 1
            if isinstance(thing.look, Solid):
                seen = pen.solid(thing.look, pixels, depth, (thing.x, thing.y), thing.heading, thing.braking)
                lamps += [(ident, lamp) for lamp in seen]
            else:
                pixels = pen.figure(thing.look, thing.figure, pixels, depth)
            hull = cv2.convexHull(pixels.astype(np.float32))[:, 0]
            cv2.fillConvexPoly(self._ids, (hull * (8 / OVERSAMPLING)).astype(np.int32), ident, 8, 3)
            drawn[ident] = (thing, hull)
        shift = self.sensor.shake()
        x, y = shift
        window = canvas[y : y + view.height * OVERSAMPLING, x : x + view.width * OVERSAMPLING]
        frame = cv2.resize(window, (view.width, view.height), interpolation=cv2.INTER_AREA)
        if scene.light.night:
            shown = [lamp for ident, lamp in lamps if self._shows(ident, lamp)]
            frame = add_lamps(
                frame, scene, shown, [_nose(actor) for actor in bodies if isinstance(actor.look, Solid)], shift
            )
        return self.sensor.develop(frame), self._truths(drawn, shift)

    def _place(self, actors: list[Actor]) -> dict[Actor, tuple[np.ndarray, np.ndarray]]:
        """Canvas pixels and depths of the actors in view; their shadows are put on the shadow mask."""
        light, view = self.scene.light, self.scene.view
        self._shadow[:] = 0
        near = [actor for actor, shown in zip(actors, self._in_view(actors)) if shown]
        if not near:
            return {}
        points = np.concatenate([actor.body for actor in near])
        push = np.zeros(2) if light.night else np.asarray(light.direction[:2]) / light.direction[2]
        flat = points.copy()
        flat[:, :2] -= points[:, 2:] * push
        flat[:, 2] = 0.0
        pixels, depth = view.project(points)
        fallen, fallen_depth = view.project(flat)
        fallen = (fallen * 8).astype(np.int32)
        placed: dict[Actor, tuple[np.ndarray, np.ndarray]] = {}
        end = 0
        for actor in near:
            start, end = end, end + len(actor.body)
            if fallen_depth[start:end].min() > NEAR_M:
                cv2.fillConvexPoly(self._shadow, cv2.convexHull(fallen[start:end]), 255, 8, 3)
            if depth[start:end].min() > NEAR_M:
                placed[actor] = (pixels[start:end], depth[start:end])
        return placed

    def _in_view(self, actors: list[Actor]) -> np.ndarray:
        """Which actors can be in the picture and are not too far to be made out."""
        view = self.scene.view
        if not actors:
            return np.zeros(0, bool)
        at, depth = view.project(np.array([(actor.x, actor.y, 1.0) for actor in actors]))
        reach = (
            np.array([max(actor.half_size) + 2.0 for actor in actors]) * view.intrinsics[0, 0] / np.maximum(depth, 0.1)
        )
        size = view.canvas_size
        return (
            (depth > 0)
            & (depth < FARTHEST_M)
            & (at[:, 0] > -reach)
            & (at[:, 0] < size[0] + reach)
            & (at[:, 1] < size[1] + reach)
        )

    def _standing(self) -> list[Sprite]:
        signals = self.world.signals
        if signals is None:
            return list(self.scene.standing)
        chosen = [
            sprite
            for (name, state), sprite in self.scene.signals.items()
            if state == signals.state(name.rstrip("0123456789"), self.world.now)
        ]
        return [*self.scene.standing, *chosen]

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
            truths.append(
                Truth(actor.track, actor.kind, box, round(visible, 3), (round(actor.x, 2), round(actor.y, 2)))
            )
        return truths


def _nose(actor: Actor) -> tuple[float, float, float]:
    half = actor.half_size[0]
    return actor.x + half * np.cos(actor.heading), actor.y + half * np.sin(actor.heading), actor.heading
