"""Everything in a view that never moves: the ground, houses as plain blocks, and the sky."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np

from gemel.video_samples.draw import Light, Pen, View
from gemel.video_samples.objects import Colour

PIXELS_PER_M = 16  # resolution of the ground map
LIGHT_PIXELS_PER_M = 4  # lamplight is soft
TEXTURE = (
    (2, 4.0),
    (14, 3.0),
    (60, 4.5),
)  # grain in map pixels and deviation in grey levels of what lies on the ground
SHADOW_FACTOR = (0.50, 0.53, 0.60)  # what skylight alone leaves of a sunlit surface
NIGHT_SHADOW = 0.6  # what is left of lamplight beside an object
SKY_DAY, SKY_NIGHT = (150, 186, 222), (22, 22, 32)


def mottle(rng: np.random.Generator, shape: tuple[int, int], cell: int) -> np.ndarray:
    """Smooth random float32 field of unit deviation; `cell` is its grain in pixels."""
    small = rng.standard_normal((shape[0] // cell + 3, shape[1] // cell + 3)).astype(np.float32)
    field = cv2.resize(
        small, ((small.shape[1]) * cell, small.shape[0] * cell), interpolation=cv2.INTER_CUBIC
    )
    return np.ascontiguousarray(field[: shape[0], : shape[1]])


class GroundMap:
    """A plan of the ground, painted in metres; row 0 is the far edge."""

    def __init__(self, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
        self.x0 = x0
        self.y0 = y0
        self.x1 = x1
        self.y1 = y1
        self.colours = np.full(
            (round((y1 - y0) * PIXELS_PER_M), round((x1 - x0) * PIXELS_PER_M), 3), colour, np.uint8
        )
        k = LIGHT_PIXELS_PER_M
        # Of lamps, by night.
        self.light = np.zeros((round((y1 - y0) * k), round((x1 - x0) * k), 3), np.float32)

    def pixel(self, points) -> np.ndarray:
        """Map pixels, in sixteenths, of ground points (N, 2)."""
        points = np.asarray(points, np.float64)
        scaled = (
            np.stack([(points[:, 0] - self.x0), (self.y1 - points[:, 1])], axis=1) * PIXELS_PER_M
        )
        return np.round(scaled * 16).astype(np.int32)

    def poly(self, points, colour: Colour) -> None:
        cv2.fillPoly(self.colours, [self.pixel(points)], colour, cv2.LINE_AA, 4)

    def rect(self, x0: float, y0: float, x1: float, y1: float, colour: Colour) -> None:
        self.poly([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], colour)

    def stroke(self, points, width: float, colour: Colour) -> None:
        thickness = max(1, round(width * PIXELS_PER_M))
        cv2.polylines(self.colours, [self.pixel(points)], False, colour, thickness, cv2.LINE_AA, 4)

    def pool(self, x: float, y: float, radius: float, colour: Colour) -> None:
        """The light of a lamp: falls off as a bell of that radius."""
        k = LIGHT_PIXELS_PER_M
        rows, columns = self.light.shape[:2]
        dx = (np.arange(columns, dtype=np.float32) / k + self.x0 - x) / radius
        dy = (self.y1 - np.arange(rows, dtype=np.float32) / k - y) / radius
        bell = np.exp(-0.5 * dy**2)[:, None] * np.exp(-0.5 * dx**2)[None, :]
        self.light += bell[..., None] * np.asarray(colour, np.float32)

    def paint_texture(self, rng: np.random.Generator) -> np.ndarray:
        """The map with grain and stains, float32."""
        noise = sum(
            mottle(rng, self.colours.shape[:2], cell) * deviation for cell, deviation in TEXTURE
        )
        return np.clip(self.colours + np.asarray(noise)[..., None], 0, 255).astype(np.float32)


@dataclass(frozen=True)
class House:
    """A block on the rectangle x0..x1, y0..y1, `height` metres high."""

    x0: float
    y0: float
    x1: float
    y1: float
    height: float
    colour: Colour


@dataclass(frozen=True)
class Backdrop:
    """The empty scene on the canvas, in light and in an actor's shadow."""

    lit: np.ndarray
    shaded: np.ndarray


def paint_backdrop(
    view: View, light: Light, ground: GroundMap, houses: list[House], seed: int
) -> Backdrop:
    """Sky, ground, and houses from far to near."""
    width, height = view.canvas_size
    plane = view.plane_homography(np.zeros(3), np.array([1.0, 0, 0]), np.array([0, 1.0, 0]))

    def project(plan: np.ndarray, per_metre: int) -> np.ndarray:
        """At twice the size and averaged, so that far detail does not flicker."""
        to_plane = np.array(
            [[1 / per_metre, 0, ground.x0], [0, -1 / per_metre, ground.y1], [0, 0, 1.0]]
        )
        matrix = np.diag([2.0, 2.0, 1.0]) @ plane @ to_plane
        large = cv2.warpPerspective(plan, matrix, (width * 2, height * 2), flags=cv2.INTER_LINEAR)
        return cv2.resize(large, (width, height), interpolation=cv2.INTER_AREA)

    inside = project(np.full(ground.colours.shape[:2], 255, np.uint8), PIXELS_PER_M)
    # Above the horizon the plane's homography shows the ground upside down.
    horizon = height / 2 + view.intrinsics[0, 0] * np.tan(np.radians(view.pitch))
    inside[: int(np.clip(horizon, 0, height)) + 4] = 0
    plain = project(ground.paint_texture(np.random.default_rng(seed)), PIXELS_PER_M)
    if light.night:
        lamps = np.minimum(project(ground.light, LIGHT_PIXELS_PER_M), 1.6)
        bright = plain * (0.5 * np.asarray(light.ambient, np.float32) + 0.85 * lamps)
        dark = bright * NIGHT_SHADOW
    else:
        bright = plain * light.factors(np.array([[0, 0, 1.0]]))[0].astype(np.float32)
        dark = bright * np.asarray(SHADOW_FACTOR, np.float32)
    canvases = []
    houses = sorted(
        houses, key=lambda house: -np.hypot(house.x0 - view.eye[0], house.y0 - view.eye[1])
    )
    for plan in (bright, dark):
        canvas = np.full((height, width, 3), SKY_NIGHT if light.night else SKY_DAY, np.uint8)
        cv2.copyTo(np.clip(plan, 0, 255).astype(np.uint8), inside, canvas)
        pen = Pen(view, light, canvas)
        for house in houses:
            pen.box((house.x0, house.y0, 0.0), (house.x1, house.y1, house.height), house.colour)
        canvases.append(canvas)
    return Backdrop(*canvases)
