"""One frame as its camera records it: occlusion order, shadows, lamps by night, noise, and its ground truth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np

from gemel.video_samples.draw import MARGIN_PX, NEAR_M, OVERSAMPLING, LampSeen, Pen, View
from gemel.video_samples.objects import SceneObject, Solid
from gemel.video_samples.scene import Scene, World

BEAM_COLOUR = (78.0, 72.0, 54.0)
BEAM_STEPS = (
    (12.0, 2.6, 0.34),
    (8.5, 1.9, 0.6),
    (5.0, 1.3, 1.0),
)  # reach and half width in metres, strength
HEAD_COLOUR, TAIL_COLOUR = (255, 244, 214), (230, 26, 18)


def add_lamps(
    frame: np.ndarray,
    view: View,
    lamps: list[LampSeen],
    noses: list[tuple[float, float, float]],
    shift: tuple[int, int],
) -> np.ndarray:
    """The frame with light added: vehicle lamps that show, and beams before vehicles.

    `noses` are x, y and heading of every vehicle's front.
    """
    beams = np.zeros_like(frame)
    glow = np.zeros_like(frame)
    for reach, half, strength in BEAM_STEPS:
        for x, y, heading in noses:
            c = np.cos(heading)
            s = np.sin(heading)
            wedge = ((0.2, 0.7), (reach, half), (reach, -half), (0.2, -0.7))
            ground = np.array(
                [
                    (x + c * ahead - s * aside, y + s * ahead + c * aside, 0.0)
                    for ahead, aside in wedge
                ]
            )
            at, depth = view.project(ground)
            if depth.min() > 2:
                corners = np.round(view.to_frame(at, shift)).astype(np.int32)
                cv2.fillConvexPoly(beams, corners, tuple(v * strength for v in BEAM_COLOUR))
    for lamp in lamps:
        at = np.round(view.to_frame(np.asarray(lamp.pixel), shift)).astype(int)
        radius = max(1, round((200 if lamp.is_head else 150) / lamp.depth))
        cv2.circle(
            glow, (int(at[0]), int(at[1])), radius, HEAD_COLOUR if lamp.is_head else TAIL_COLOUR, -1
        )
    light = cv2.add(
        cv2.blur(beams, (25, 17)),
        cv2.addWeighted(cv2.blur(glow, (17, 17)), 0.75, cv2.blur(glow, (61, 61)), 1.4, 0),
    )
    return cv2.add(frame, light)


REACH = 6  # how many places a thing may move ahead of its order by depth
LONG_M = (
    1.5  # half a length from which on the middle of a vehicle says too little about where it is
)


def sort_by_depth(view: View, actors: list[SceneObject]) -> list[SceneObject]:
    """Far to near, so that nearer things cover farther ones; a long vehicle is judged by its sides, not its middle."""
    eye = view.eye
    forward = view.axes[2]

    def depth(thing: SceneObject) -> float:
        return float((thing.x - eye[0]) * forward[0] + (thing.y - eye[1]) * forward[1])

    result: list[SceneObject] = []
    for thing in sorted(actors, key=depth, reverse=True):
        at = len(result)
        while at > 0 and at > len(result) - REACH and _behind(thing, result[at - 1], eye):
            at -= 1
        result.insert(at, thing)
    return result


def _behind(a: SceneObject, b: SceneObject, eye: np.ndarray) -> bool:
    """Whether b certainly covers a where they overlap: a lies on b's far side."""
    if max(b.half_size) < LONG_M:
        return max(a.half_size) >= LONG_M and _side_of(b, a, eye) > 0
    return _side_of(a, b, eye) < 0


def _side_of(thing: SceneObject, vehicle: SceneObject, eye: np.ndarray) -> int:
    """-1 if `thing` is beyond the vehicle as seen from the eye, 1 if before it, 0 if neither is sure."""
    c = np.cos(vehicle.heading)
    s = np.sin(vehicle.heading)
    half = vehicle.half_size

    def local(x: float, y: float) -> tuple[float, float]:
        dx = x - vehicle.x
        dy = y - vehicle.y
        return dx * c + dy * s, -dx * s + dy * c

    camera = local(float(eye[0]), float(eye[1]))
    place = local(thing.x, thing.y)
    verdicts = []
    for axis in (1, 0):
        if abs(camera[axis]) > half[axis]:
            towards = place[axis] * np.sign(camera[axis])
            if towards > half[axis]:
                return 1
            if towards < -half[axis]:
                verdicts.append(-1)
    return -1 if verdicts else 0


NOISE_DAY, NOISE_NIGHT = 1.6, 2.8  # standard deviation of the noise, in grey levels
SPARE_PX = 64  # noise is larger than the frame by this, so that a random cut of it is new each time


@lru_cache(maxsize=4)
def _noise(height: int, width: int, deviation: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    field = (
        rng.standard_normal((height + SPARE_PX, width + SPARE_PX, 3)).astype(np.float32) * deviation
    )
    return np.clip(field, 0, 255).astype(np.uint8), np.clip(-field, 0, 255).astype(np.uint8)


class Sensor:
    """The camera of one clip; everything random comes from its seed."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 99])
        self.deviation = NOISE_NIGHT if scene.light.night else NOISE_DAY
        self.size = (scene.view.height, scene.view.width)
        self.offset = np.zeros(2)
        gain = float(self.rng.uniform(0.93, 1.07))
        self.curve = np.clip(np.arange(256) * gain, 0, 255).astype(np.uint8)

    def shake(self) -> tuple[int, int]:
        """Corner of the frame on the canvas: a slow tremble of a pixel or two."""
        self.offset = 0.8 * self.offset + self.rng.normal(0, 0.55, 2)
        x, y = np.clip(np.round(self.offset), -MARGIN_PX, MARGIN_PX).astype(int) + MARGIN_PX
        return int(x), int(y)

    def develop(self, frame: np.ndarray) -> np.ndarray:
        """The frame as recorded."""
        frame = cv2.LUT(frame, self.curve)
        plus, minus = _noise(*self.size, self.deviation)
        at = self.rng.integers(0, SPARE_PX, 2)
        window = np.s_[at[0] : at[0] + self.size[0], at[1] : at[1] + self.size[1]]
        return cv2.subtract(cv2.add(frame, plus[window]), minus[window])


MIN_VISIBLE, MIN_SIDE_PX = (
    0.40,
    8.0,
)  # objects more hidden or smaller than that are not part of the truth
MAX_ID = 254  # of the objects in the map of who is seen where
FARTHEST_M = 75.0  # a person beyond that is a few pixels


@dataclass(frozen=True)
class FrameTruth:
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
        width = self.box[2] - self.box[0]
        height = self.box[3] - self.box[1]
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
        self._ids = np.empty(
            (view.canvas_size[1] // OVERSAMPLING, view.canvas_size[0] // OVERSAMPLING), np.uint8
        )

    def frame(self) -> tuple[np.ndarray, list[FrameTruth]]:
        """The present moment: RGB uint8 (H, W, 3) and what is in it."""
        scene = self.scene
        view = self.scene.view
        canvas = self._canvas
        np.copyto(canvas, scene.backdrop.lit)
        bodies = self._place(self.world.actors())
        cv2.copyTo(scene.backdrop.shaded, self._shadow, canvas)
        pen = Pen(view, scene.light, canvas)
        self._ids[:] = 0
        drawn: dict[int, tuple[SceneObject, np.ndarray]] = {}
        lamps: list[tuple[int, LampSeen]] = []
        for thing in sort_by_depth(view, list(bodies)):
            pixels, depth = bodies[thing]
            ident = thing.track % MAX_ID + 1
            if isinstance(thing.look, Solid):
                seen = pen.solid(
                    thing.look, pixels, depth, (thing.x, thing.y), thing.heading, thing.braking
                )
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
                frame,
                view,
                shown,
                [_nose(actor) for actor in bodies if isinstance(actor.look, Solid)],
                shift,
            )
        return self.sensor.develop(frame), self._truths(drawn, shift)

    def _place(self, actors: list[SceneObject]) -> dict[SceneObject, tuple[np.ndarray, np.ndarray]]:
        """Canvas pixels and depths of the actors in view; their shadows are put on the shadow mask."""
        light = self.scene.light
        view = self.scene.view
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
        placed: dict[SceneObject, tuple[np.ndarray, np.ndarray]] = {}
        end = 0
        for actor in near:
            start = end
            end = end + len(actor.body)
            if fallen_depth[start:end].min() > NEAR_M:
                cv2.fillConvexPoly(self._shadow, cv2.convexHull(fallen[start:end]), 255, 8, 3)
            if depth[start:end].min() > NEAR_M:
                placed[actor] = (pixels[start:end], depth[start:end])
        return placed

    def _in_view(self, actors: list[SceneObject]) -> np.ndarray:
        """Which actors can be in the picture and are not too far to be made out."""
        view = self.scene.view
        if not actors:
            return np.zeros(0, bool)
        at, depth = view.project(np.array([(actor.x, actor.y, 1.0) for actor in actors]))
        reach = (
            np.array([max(actor.half_size) + 2.0 for actor in actors])
            * view.intrinsics[0, 0]
            / np.maximum(depth, 0.1)
        )
        size = view.canvas_size
        return (
            (depth > 0)
            & (depth < FARTHEST_M)
            & (at[:, 0] > -reach)
            & (at[:, 0] < size[0] + reach)
            & (at[:, 1] < size[1] + reach)
        )

    def _shows(self, ident: int, lamp: LampSeen) -> bool:
        x = int(lamp.pixel[0] / OVERSAMPLING)
        y = int(lamp.pixel[1] / OVERSAMPLING)
        inside = 0 <= y < self._ids.shape[0] and 0 <= x < self._ids.shape[1]
        return not inside or int(self._ids[y, x]) == ident

    def _truths(
        self, drawn: dict[int, tuple[SceneObject, np.ndarray]], shift: tuple[int, int]
    ) -> list[FrameTruth]:
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
                FrameTruth(
                    actor.track,
                    actor.kind,
                    box,
                    round(visible, 3),
                    (round(actor.x, 2), round(actor.y, 2)),
                )
            )
        return truths


def _nose(actor: SceneObject) -> tuple[float, float, float]:
    half = actor.half_size[0]
    return (
        actor.x + half * np.cos(actor.heading),
        actor.y + half * np.sin(actor.heading),
        actor.heading,
    )
