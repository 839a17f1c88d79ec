"""Everything in a view that never moves: procedural textures, sky, ground, buildings and foreground sprites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cv2
import numpy as np

from gemel.video_samples.draw import NEAR_M, Light, Pen, View
from gemel.video_samples.objects import Colour

PIXELS_PER_M = 16  # resolution of the ground map
LIGHT_PIXELS_PER_M = 4  # lamplight is soft
ASPHALT, PAVING, GRASS, PAINT, SETTS = 1, 2, 3, 4, 5  # materials: what noise a place of the ground map gets
FACADE_PIXELS_PER_M = 24


def mottle(rng: np.random.Generator, shape: tuple[int, int], cell: int) -> np.ndarray:
    """Smooth random float32 field of unit deviation; `cell` is its grain in pixels."""
    small = rng.standard_normal((shape[0] // cell + 3, shape[1] // cell + 3)).astype(np.float32)
    field = cv2.resize(small, ((small.shape[1]) * cell, small.shape[0] * cell), interpolation=cv2.INTER_CUBIC)
    return np.ascontiguousarray(field[: shape[0], : shape[1]])


class GroundMap:
    """A plan of the ground, painted in metres; row 0 is the far edge."""

    def __init__(self, x0: float, y0: float, x1: float, y1: float, colour: Colour, material: int) -> None:
        self.x0, self.y0, self.x1, self.y1 = x0, y0, x1, y1
        shape = (round((y1 - y0) * PIXELS_PER_M), round((x1 - x0) * PIXELS_PER_M))
        self.colours = np.full((*shape, 3), colour, np.uint8)
        self.materials = np.full(shape, material, np.uint8)
        self.shade = np.zeros(shape, np.uint8)  # 255 where a static shadow lies
        k = LIGHT_PIXELS_PER_M
        self.light = np.zeros((round((y1 - y0) * k), round((x1 - x0) * k), 3), np.float32)  # of lamps, by night

    def pixel(self, points) -> np.ndarray:
        """Map pixels, in sixteenths, of ground points (N, 2)."""
        points = np.asarray(points, np.float64)
        scaled = np.stack([(points[:, 0] - self.x0), (self.y1 - points[:, 1])], axis=1) * PIXELS_PER_M
        return np.round(scaled * 16).astype(np.int32)

    def poly(self, points, colour: Colour, material: int) -> None:
        pixels = self.pixel(points)
        cv2.fillPoly(self.colours, [pixels], colour, cv2.LINE_AA, 4)
        cv2.fillPoly(self.materials, [pixels], material, 8, 4)

    def rect(self, x0: float, y0: float, x1: float, y1: float, colour: Colour, material: int) -> None:
        self.poly([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], colour, material)

    def disc(self, x: float, y: float, radius: float, colour: Colour, material: int) -> None:
        angles = np.linspace(0, 2 * np.pi, 72, endpoint=False)
        self.poly(np.stack([x + radius * np.cos(angles), y + radius * np.sin(angles)], axis=1), colour, material)

    def stroke(self, points, width: float, colour: Colour, material: int) -> None:
        thickness = max(1, round(width * PIXELS_PER_M))
        cv2.polylines(self.colours, [self.pixel(points)], False, colour, thickness, cv2.LINE_AA, 4)
        cv2.polylines(self.materials, [self.pixel(points)], False, material, thickness, 8, 4)

    def dashes(self, start, end, dash: float, gap: float, width: float, colour: Colour) -> None:
        start, end = np.asarray(start, np.float64), np.asarray(end, np.float64)
        length = float(np.linalg.norm(end - start))
        for at in np.arange(0, length, dash + gap):
            piece = [start + (end - start) * s / length for s in (at, min(at + dash, length))]
            self.stroke(piece, width, colour, PAINT)

    def shadow(self, points) -> None:
        cv2.fillPoly(self.shade, [self.pixel(points)], 255, cv2.LINE_AA, 4)

    def pool(self, x: float, y: float, radius: float, colour: Colour) -> None:
        """The light of a lamp: falls off as a bell of that radius."""
        k, (rows, columns) = LIGHT_PIXELS_PER_M, self.light.shape[:2]
        dx = (np.arange(columns, dtype=np.float32) / k + self.x0 - x) / radius
        dy = (self.y1 - np.arange(rows, dtype=np.float32) / k - y) / radius
        bell = np.exp(-0.5 * dy**2)[:, None] * np.exp(-0.5 * dx**2)[None, :]
        self.light += bell[..., None] * np.asarray(colour, np.float32)

    def tiles(self, x0: float, y0: float, x1: float, y1: float, size: float, colour: Colour) -> None:
        """Joints between paving stones, wherever the rectangle is paved."""
        joints = np.zeros_like(self.materials)
        lines = [[(x, y0), (x, y1)] for x in np.arange(x0, x1, size)] + [
            [(x0, y), (x1, y)] for y in np.arange(y0, y1, size)
        ]
        cv2.polylines(joints, [self.pixel(line) for line in lines], False, 1, 1, 8, 4)
        self.colours[(joints > 0) & np.isin(self.materials, (PAVING, SETTS))] = colour

    def paint_texture(self, rng: np.random.Generator) -> np.ndarray:
        """The map with grain and stains by material, uint8."""
        shape = self.materials.shape
        grain, blotch = mottle(rng, shape, 2), mottle(rng, shape, 60)
        patch = mottle(rng, shape, 14)
        strength = np.zeros((6, 3), np.float32)
        strength[ASPHALT], strength[PAVING], strength[GRASS] = (4, 4.5, 1.5), (3, 4, 2), (9, 6, 8)
        strength[PAINT], strength[SETTS] = (7, 4, 5), (7, 4, 3)
        noise = cv2.LUT(self.materials, _table(strength[:, 0])) * grain
        noise += cv2.LUT(self.materials, _table(strength[:, 1])) * blotch
        noise += cv2.LUT(self.materials, _table(strength[:, 2])) * patch
        more, less = (cv2.merge([cv2.convertScaleAbs(np.maximum(sign * noise, 0))] * 3) for sign in (1.0, -1.0))
        return cv2.subtract(cv2.add(self.colours, more), less)


def _table(values: np.ndarray) -> np.ndarray:
    table = np.zeros(256, np.float32)
    table[: len(values)] = values
    return table


@dataclass(frozen=True)
class Facade:
    """A painted house front: colours by day, light given off by night; uint8 (H, W, 3), row 0 is the top."""

    day: np.ndarray
    glow: np.ndarray


@dataclass(frozen=True)
class FacadeStyle:
    """What a house front looks like; sizes in metres."""

    wall: Colour
    floors: int
    floor_height: float = 3.2
    bay: float = 2.6
    window: tuple[float, float] = (1.2, 1.7)
    brick: bool = False
    shops: bool = True
    lit: float = 0.45


AWNINGS: tuple[Colour, ...] = ((176, 44, 44), (40, 96, 72), (36, 70, 124), (190, 140, 50), (120, 56, 96))


def paint_facade(rng: np.random.Generator, width_m: float, style: FacadeStyle) -> Facade:
    """A house front of that width with windows, a ground floor with shops or doors, and a cornice."""
    k = FACADE_PIXELS_PER_M
    ground = 4.0
    height_m = ground + style.floors * style.floor_height + 0.6
    rows, columns = round(height_m * k), max(8, round(width_m * k))
    day = np.full((rows, columns, 3), style.wall, np.float32)
    day += (mottle(rng, (rows, columns), 3) * 3 + mottle(rng, (rows, columns), 40) * 5)[..., None]
    if style.brick:
        day[:: k // 6] *= 0.90
    glow = np.zeros((rows, columns, 3), np.float32)

    def block(x0: float, x1: float, z0: float, z1: float, colour, light=None) -> None:
        top, bottom = rows - round(z1 * k), rows - round(z0 * k)
        left, right = max(0, round(x0 * k)), min(columns, round(x1 * k))
        top, bottom = max(0, top), min(rows, bottom)
        day[top:bottom, left:right] = colour
        if light is not None:
            glow[top:bottom, left:right] = light

    bays = max(1, int(width_m // style.bay))
    pitch = width_m / bays
    sill, dark = tuple(min(255.0, c * 1.16 + 8) for c in style.wall), tuple(c * 0.72 for c in style.wall)
    for floor in range(style.floors):
        z = ground + floor * style.floor_height + 0.75
        block(0, width_m, z - 0.75, z - 0.6, sill)
        for i in range(bays):
            x = (i + 0.5) * pitch - style.window[0] / 2
            w, h = style.window
            block(x - 0.12, x + w + 0.12, z - 0.12, z + h + 0.14, sill)
            pane = 46 + 26 * rng.random()
            lit = rng.random() < style.lit
            warm = np.array([1.0, 0.78, 0.46]) if rng.random() < 0.8 else np.array([0.82, 0.9, 1.0])
            light = warm * rng.uniform(120, 235) if lit else np.array([8.0, 10.0, 16.0])
            block(x, x + w, z, z + h, (pane, pane * 1.16, pane * 1.38), light)
            block(x, x + w * 0.45, z + h * 0.5, z + h, (pane * 1.5, pane * 1.65, pane * 1.8), light * 0.9)
            if rng.random() < 0.4:  # curtains or a blind
                drop = rng.uniform(0.2, 0.7) * h
                block(x, x + w, z + h - drop, z + h, (206, 198, 184), light * 0.7)
            block(x + w / 2 - 0.04, x + w / 2 + 0.04, z, z + h, sill, light * 0.1)
            block(x, x + w, z + h * 0.62, z + h * 0.62 + 0.08, sill, light * 0.1)
    block(0, width_m, height_m - 0.6, height_m, sill)
    block(0, width_m, height_m - 0.72, height_m - 0.6, dark)
    if style.shops:
        shops = max(1, round(width_m / 6.5))
        for i in range(shops):
            x0, x1 = i * width_m / shops + 0.35, (i + 1) * width_m / shops - 0.35
            awning = np.asarray(AWNINGS[int(rng.integers(len(AWNINGS)))], np.float32)
            light = np.array([255, 214, 150]) * rng.uniform(0.5, 0.95)
            block(x0, x1, 0.45, 2.9, (58, 70, 80), light)
            for x in np.arange(x0 + 1.4, x1 - 0.3, 1.5):
                block(x, x + 0.1, 0.0, 2.9, (44, 44, 46), light * 0.1)
            block(x0 + 0.3, x1 - 0.6, 0.55, 1.2, (120, 96, 84), light * 0.6)
            block(x0 - 0.1, x1 + 0.1, 2.9, 3.6, awning, awning * 0.75)
            block(x0 + 0.8, x1 - 0.8, 3.1, 3.4, np.minimum(awning * 1.5 + 70, 255), np.minimum(awning + 90, 255))
    else:
        for i in range(bays):
            x = (i + 0.5) * pitch
            if i % 3 == 1:
                block(x - 0.6, x + 0.6, 0, 2.4, (74, 52, 40), (26, 20, 12))
                block(x - 0.8, x + 0.8, 2.4, 2.6, sill)
            else:
                block(x - 0.6, x + 0.6, 1.0, 2.7, (58, 68, 80), (60, 46, 26))
    return Facade(np.clip(day, 0, 255).astype(np.uint8), np.clip(glow, 0, 255).astype(np.uint8))


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

    def project(plan: np.ndarray, per_metre: int, smooth: bool = False) -> np.ndarray:
        to_plane = np.array([[1 / per_metre, 0, ground.x0], [0, -1 / per_metre, ground.y1], [0, 0, 1.0]])
        if smooth:
            return _warp_smooth(plan, plane @ to_plane, (width, height))
        return cv2.warpPerspective(plan, plane @ to_plane, (width, height), flags=cv2.INTER_LINEAR)

    inside = project(np.full(ground.materials.shape, 255, np.uint8), PIXELS_PER_M)
    inside[: int(np.clip(height / 2 + view.intrinsics[0, 0] * np.tan(np.radians(view.pitch)), 0, height)) + 4] = 0
    plain = project(ground.paint_texture(rng), PIXELS_PER_M, smooth=True).astype(np.float32)
    if light.night:
        bright = plain * (
            0.5 * np.asarray(light.ambient, np.float32)
            + 0.85 * np.minimum(project(ground.light, LIGHT_PIXELS_PER_M), 1.6)
        )
        dark = bright * 0.6
    else:
        bright = plain * light.factors(np.array([[0, 0, 1.0]]))[0].astype(np.float32)
        dark = bright * np.asarray(SHADOW_FACTOR, np.float32)
        soft = cv2.merge(
            [project(cv2.GaussianBlur(ground.shade, (7, 7), 0), PIXELS_PER_M).astype(np.float32) / 255] * 3
        )
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
