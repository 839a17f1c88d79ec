"""Everything in a view that never moves: sky, ground, houses, and sprites that may stand in front of the actors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from video_samples.drawing.pen import Light, Pen
from video_samples.drawing.textures import (
    FACADE_PIXELS_PER_M,
    LIGHT_PIXELS_PER_M,
    PIXELS_PER_M,
    FacadeStyle,
    GroundMap,
    mottle,
    paint_facade,
)
from video_samples.drawing.view import NEAR_M, View

SHADOW_FACTOR = (0.50, 0.53, 0.60)  # what skylight alone leaves of a sunlit surface
WET_BLUR = (9, 91)  # canvas pixels over which a wet road smears what it mirrors


@dataclass(frozen=True)
class House:
    """A building on the rectangle x0..x1, y0..y1; `roof` is the height of its ridge above the eaves, 0 = flat."""

    x0: float
    y0: float
    x1: float
    y1: float
    style: FacadeStyle
    roof: float = 0.0

    @property
    def height(self) -> float:
        return 4.0 + self.style.floors * self.style.floor_height + 0.6


@dataclass(frozen=True)
class Sprite:
    """A cut-out that stands at (x, y): canvas corner, colours and a 0/255 mask."""

    x: float
    y: float
    left: int
    top: int
    colours: np.ndarray
    mask: np.ndarray

    def stamp(self, canvas: np.ndarray) -> None:
        """Copies the cut-out onto a canvas."""
        height, width = self.mask.shape
        cv2.copyTo(self.colours, self.mask, canvas[self.top : self.top + height, self.left : self.left + width])


@dataclass(frozen=True)
class Backdrop:
    """The empty scene on the canvas, in light and in an actor's shadow."""

    lit: np.ndarray
    shaded: np.ndarray


def make_sprite(view: View, light: Light, x: float, y: float, draw: Callable[[Pen], None]) -> Sprite:
    """What `draw` draws, cut out; it stands at (x, y) for the order of drawing."""
    width, height = view.canvas_size
    canvas, mask = np.zeros((height, width, 3), np.uint8), np.zeros((height, width), np.uint8)
    draw(Pen(view, light, canvas, mask))
    left, top, wide, high = cv2.boundingRect(mask)
    window = np.s_[top : top + high, left : left + wide]
    return Sprite(x, y, left, top, canvas[window].copy(), mask[window].copy())


def paint_backdrop(
    view: View, light: Light, ground: GroundMap, houses: list[House], sprites: list[Sprite], seed: int
) -> Backdrop:
    """Sky, ground, houses from far to near, then the sprites that no actor ever stands behind."""
    rng = np.random.default_rng(seed)
    width, height = view.canvas_size
    sky = _sky(view, light, rng)
    plane = view.plane_homography(np.zeros(3), np.array([1.0, 0, 0]), np.array([0, 1.0, 0]))

    def seen(plan: np.ndarray, per_metre: int, smooth: bool = False) -> np.ndarray:
        to_plane = np.array([[1 / per_metre, 0, ground.x0], [0, -1 / per_metre, ground.y1], [0, 0, 1.0]])
        if smooth:
            return _warp_smooth(plan, plane @ to_plane, (width, height))
        return cv2.warpPerspective(plan, plane @ to_plane, (width, height), flags=cv2.INTER_LINEAR)

    inside = seen(np.full(ground.materials.shape, 255, np.uint8), PIXELS_PER_M)
    inside[: int(np.clip(height / 2 + view.intrinsics[0, 0] * np.tan(np.radians(view.pitch)), 0, height)) + 4] = 0
    plain = seen(ground.textured(rng), PIXELS_PER_M, smooth=True).astype(np.float32)
    if light.night:
        bright = plain * (
            0.5 * np.asarray(light.ambient, np.float32) + 0.85 * np.minimum(seen(ground.light, LIGHT_PIXELS_PER_M), 1.6)
        )
        dark = bright * 0.6
    else:
        bright = plain * light.factors(np.array([[0, 0, 1.0]]))[0].astype(np.float32)
        dark = bright * np.asarray(SHADOW_FACTOR, np.float32)
        soft = cv2.merge([seen(cv2.GaussianBlur(ground.shade, (7, 7), 0), PIXELS_PER_M).astype(np.float32) / 255] * 3)
        bright += (dark - bright) * soft
    lit, shaded = sky.copy(), sky
    for canvas, plan in ((lit, bright), (shaded, dark)):
        cv2.copyTo(np.clip(plan, 0, 255).astype(np.uint8), inside, canvas)
    bare = lit.copy()
    road = inside.copy()
    mirror = np.zeros_like(lit)
    for house in sorted(houses, key=lambda h: -_distance(view, (h.x0 + h.x1) / 2, (h.y0 + h.y1) / 2)):
        _draw_house(lit, mirror, road, house, view, light, rng)
    if light.night:
        smeared = cv2.GaussianBlur(mirror, WET_BLUR, 0)
        waves = cv2.resize(mottle(rng, (height, width // 5), 4), (width, height), interpolation=cv2.INTER_LINEAR)
        ripple = np.clip(0.30 + 0.10 * waves, 0, 1)[..., None]
        wet = np.where(road[..., None] > 0, smeared * ripple, 0)
        lit = np.clip(lit + wet, 0, 255).astype(np.uint8)
        shaded = np.clip(shaded + wet * 0.5, 0, 255).astype(np.uint8)
    for sprite in sprites:
        sprite.stamp(lit)
    standing = cv2.absdiff(lit, bare).max(axis=2) > 0 if not light.night else road == 0
    shaded[standing] = lit[standing]
    return Backdrop(lit, shaded)


def _warp_smooth(image: np.ndarray, matrix: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Warps at twice the size and averages, so that far detail does not flicker."""
    doubled = np.diag([2.0, 2.0, 1.0]) @ matrix
    large = cv2.warpPerspective(image, doubled, (size[0] * 2, size[1] * 2), flags=cv2.INTER_LINEAR)
    return cv2.resize(large, size, interpolation=cv2.INTER_AREA)


def _distance(view: View, x: float, y: float) -> float:
    return float(np.hypot(x - view.eye[0], y - view.eye[1]))


def _sky(view: View, light: Light, rng: np.random.Generator) -> np.ndarray:
    width, height = view.canvas_size
    ramp = np.linspace(0, 1, height // 2, dtype=np.float32)[:, None, None] ** 0.8
    if light.night:
        low, high = np.array([58, 46, 52], np.float32), np.array([12, 14, 26], np.float32)
    else:
        low, high = np.array([226, 234, 240], np.float32), np.array([104, 158, 214], np.float32)
    sky = high + (low - high) * np.minimum(ramp * 3.2, 1)
    shape = (height // 2, width // 2)
    clouds = mottle(rng, shape, 75) + 0.6 * mottle(rng, shape, 30) + 0.3 * mottle(rng, shape, 12)
    cover = np.clip(clouds * 0.45 + 0.1, 0, 1)[..., None]
    cloud = np.array([246, 246, 248], np.float32) if not light.night else np.array([44, 38, 44], np.float32)
    painted = np.clip(sky * (1 - cover) + cloud * cover, 0, 255).astype(np.uint8)
    return cv2.resize(painted, (width, height), interpolation=cv2.INTER_CUBIC)


def _draw_house(lit, mirror, road, house: House, view: View, light: Light, rng: np.random.Generator) -> None:
    x0, y0, x1, y1 = house.x0, house.y0, house.x1, house.y1
    walls = [  # left end, right end (seen from outside), outward normal
        ((x0, y0), (x1, y0), (0, -1, 0)),
        ((x1, y0), (x1, y1), (1, 0, 0)),
        ((x0, y1), (x0, y0), (-1, 0, 0)),
    ]
    seen = [w for w in walls if (view.eye[0] - w[0][0]) * w[2][0] + (view.eye[1] - w[0][1]) * w[2][1] > 0]
    for start, end, normal in sorted(
        seen, key=lambda w: -_distance(view, (w[0][0] + w[1][0]) / 2, (w[0][1] + w[1][1]) / 2)
    ):
        width_m = float(np.hypot(end[0] - start[0], end[1] - start[1]))
        facade = paint_facade(rng, width_m, house.style)
        factor = light.factors(np.array([normal], np.float64))[0].astype(np.float32)
        if light.night:
            lift = np.linspace(0.10, 0.42, facade.day.shape[0], dtype=np.float32)[:, None, None] ** 1.2
            texture = facade.day * lift * np.array([1.0, 0.80, 0.58], np.float32) + facade.glow
        else:
            texture = facade.day * factor
        texture = np.clip(texture, 0, 255).astype(np.uint8)
        origin = np.array([start[0], start[1], 0.0])
        along = np.array([end[0] - start[0], end[1] - start[1], 0.0]) / width_m
        _hang(lit, texture, origin, along, np.array([0, 0, 1.0]), view, road)
        if light.night:
            _hang(mirror, texture, origin, along, np.array([0, 0, -1.0]), view, None)
    if house.roof > 0:
        z, ridge = house.height, house.height + house.roof
        middle = (y0 + y1) / 2
        pen = Pen(view, light, lit)
        slate = (104, 74, 62) if not light.night else (40, 32, 34)
        tilt = np.array([0, -house.roof, (y1 - y0) / 2])
        pen.poly(
            [(x0 - 0.3, y0 - 0.3, z), (x1 + 0.3, y0 - 0.3, z), (x1 - 1.2, middle, ridge), (x0 + 1.2, middle, ridge)],
            slate,
            tuple(tilt / np.linalg.norm(tilt)),
        )
        for cx in np.linspace(x0 + 2.5, x1 - 2.5, max(2, int((x1 - x0) / 8))):
            pen.box((cx - 0.4, middle - 0.4, ridge - 1.0), (cx + 0.4, middle + 0.4, ridge + 1.0), (120, 84, 70))


def _hang(canvas, texture, origin, along, up, view: View, road) -> None:
    """Puts a painted wall in perspective; nothing is drawn of a wall that reaches behind the camera."""
    rows, columns = texture.shape[:2]
    k = FACADE_PIXELS_PER_M
    size = (columns / k, rows / k)
    corners = np.stack(
        [origin, origin + along * size[0], origin + along * size[0] + up * size[1], origin + up * size[1]]
    )
    pixels, depth = view.project(corners)
    if depth.min() <= NEAR_M:
        return
    width, height = view.canvas_size
    left, top = np.maximum(np.floor(pixels.min(axis=0)), 0).astype(int)
    right, bottom = np.minimum(np.ceil(pixels.max(axis=0)), (width, height)).astype(int)
    if left >= right or top >= bottom:
        return
    to_plane = np.array([[1 / k, 0, 0], [0, -1 / k, rows / k], [0, 0, 1.0]])
    matrix = view.plane_homography(origin, along, up) @ to_plane
    shift = np.array([[1, 0, -left], [0, 1, -top], [0, 0, 1.0]])
    size_px = (int(right - left), int(bottom - top))
    warped = _warp_smooth(texture, shift @ matrix, size_px)
    inside = np.zeros((size_px[1], size_px[0]), np.uint8)
    cv2.fillConvexPoly(inside, np.round(pixels - (left, top)).astype(np.int32), 255)
    cv2.copyTo(warped, inside, canvas[top:bottom, left:right])
    if road is not None:
        road[top:bottom, left:right][inside > 0] = 0
