"""The pinhole view of a clip, and a pen that draws lit blocks, vehicles and people given in world metres."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import cv2
import numpy as np

from gemel.video_samples.objects import HEAD, MATTE, Colour, Figure, Outfit, Solid

OVERSAMPLING = (
    2  # the canvas has this many pixels per output pixel and side; the reduction smooths every edge
)
MARGIN_PX = 8  # canvas pixels around the frame that camera shake may reveal
NEAR_M = 1.0  # nothing nearer to the camera than this is drawn


@dataclass(frozen=True)
class View:
    """A fixed camera.

    World axes: x right, y ahead, z up, metres, the ground is z = 0. `yaw` turns to the right, `pitch` up, in degrees.
    `focal` is in output pixels. Canvas pixels are `OVERSAMPLING` times finer and begin `MARGIN_PX` outside the frame.
    """

    width: int
    height: int
    position: tuple[float, float, float]
    yaw: float
    pitch: float
    focal: float

    @property
    def canvas_size(self) -> tuple[int, int]:
        """Width and height of the canvas in canvas pixels."""
        return (
            self.width * OVERSAMPLING + 2 * MARGIN_PX,
            self.height * OVERSAMPLING + 2 * MARGIN_PX,
        )

    @cached_property
    def eye(self) -> np.ndarray:
        return np.asarray(self.position, np.float64)

    @cached_property
    def axes(self) -> np.ndarray:
        """Rows: the camera's right, down and forward directions in world axes."""
        yaw = np.radians(self.yaw)
        pitch = np.radians(self.pitch)
        forward = np.array(
            [np.sin(yaw) * np.cos(pitch), np.cos(yaw) * np.cos(pitch), np.sin(pitch)]
        )
        right = np.array([np.cos(yaw), -np.sin(yaw), 0.0])
        return np.stack([right, np.cross(forward, right), forward])

    @cached_property
    def intrinsics(self) -> np.ndarray:
        """The 3 x 3 matrix from camera axes to homogeneous canvas pixels."""
        focal = self.focal * OVERSAMPLING
        width, height = self.canvas_size
        return np.array([[focal, 0, width / 2], [0, focal, height / 2], [0, 0, 1.0]])

    @cached_property
    def matrix(self) -> np.ndarray:
        """The 3 x 4 matrix from homogeneous world points to homogeneous canvas pixels."""
        rotated = self.intrinsics @ self.axes
        return np.hstack([rotated, -(rotated @ self.eye)[:, None]])

    def project(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Canvas pixels (N, 2) and depths in metres (N,) of world points (N, 3)."""
        homogeneous = np.asarray(points, np.float64) @ self.matrix[:, :3].T + self.matrix[:, 3]
        depth = homogeneous[:, 2]
        return homogeneous[:, :2] / np.maximum(depth, 1e-6)[:, None], depth

    def pixels_per_metre(self, depth: float) -> float:
        """Canvas pixels that one metre across the line of sight takes at this depth."""
        return self.focal * OVERSAMPLING / max(depth, NEAR_M)

    def plane_homography(self, origin: np.ndarray, along: np.ndarray, up: np.ndarray) -> np.ndarray:
        """The 3 x 3 matrix from plane coordinates (a, b) to canvas pixels, for points origin + a * along + b * up."""
        columns = np.stack(
            [np.append(along, 0.0), np.append(up, 0.0), np.append(origin, 1.0)], axis=1
        )
        return self.matrix @ columns

    def to_frame(self, canvas_points: np.ndarray, shift: tuple[int, int]) -> np.ndarray:
        """Output pixels of canvas points when shake has moved the frame's corner to `shift` on the canvas."""
        return (np.asarray(canvas_points) - np.asarray(shift)) / OVERSAMPLING


HEAD_LIT, TAIL_LIT, BRAKE_LIT = (255.0, 252.0, 232.0), (214.0, 22.0, 18.0), (255.0, 60.0, 40.0)
SUBPIXEL_BITS = 3
SUBPIXEL = 1 << SUBPIXEL_BITS


@dataclass(frozen=True)
class Light:
    """Light on matt surfaces: ambient + directed * max(0, normal . direction), each RGB factor 0..1."""

    direction: tuple[float, float, float]
    directed: tuple[float, float, float]
    ambient: tuple[float, float, float]
    night: bool = False

    def factors(self, normals: np.ndarray) -> np.ndarray:
        """RGB factors (N, 3) of surfaces with unit normals (N, 3)."""
        facing = np.maximum(np.asarray(normals) @ np.asarray(self.direction), 0.0)
        return np.asarray(self.ambient) + facing[:, None] * np.asarray(self.directed)

    def on(self, colour, normal=(0.0, 0.0, 1.0)) -> Colour:
        """A colour as seen on a surface with that normal."""
        lit = np.minimum(
            np.asarray(colour) * self.factors(np.asarray([normal], np.float64))[0], 255
        )
        return (float(lit[0]), float(lit[1]), float(lit[2]))


@dataclass(frozen=True)
class LampSeen:
    """A lamp of a vehicle in the picture: canvas pixel, depth in metres, and whether it is white."""

    pixel: tuple[float, float]
    depth: float
    is_head: bool


@dataclass
class Pen:
    """Draws on `canvas` (uint8 RGB)."""

    view: View
    light: Light
    canvas: np.ndarray

    def poly(self, points, colour, normal) -> None:
        """A convex polygon of world points, shaded by its normal."""
        pixels, depth = self.view.project(np.asarray(points, np.float64))
        if depth.min() > NEAR_M:
            fixed = np.round(pixels * SUBPIXEL).astype(np.int32)
            cv2.fillConvexPoly(self.canvas, fixed, self.light.on(colour, normal), 8, SUBPIXEL_BITS)

    def box(self, low, high, colour) -> None:
        """The three visible sides of a box with sides along the axes."""
        x0, y0, z0 = low
        x1, y1, z1 = high
        ex, ey, ez = self.view.eye
        if ey < y0 or ey > y1:
            y, n = (y0, -1.0) if ey < y0 else (y1, 1.0)
            self.poly([(x0, y, z0), (x1, y, z0), (x1, y, z1), (x0, y, z1)], colour, (0, n, 0))
        if ex < x0 or ex > x1:
            x, n = (x0, -1.0) if ex < x0 else (x1, 1.0)
            self.poly([(x, y0, z0), (x, y1, z0), (x, y1, z1), (x, y0, z1)], colour, (n, 0, 0))
        if ez > z1:
            self.poly([(x0, y0, z1), (x1, y0, z1), (x1, y1, z1), (x0, y1, z1)], colour, (0, 0, 1))

    def solid(
        self,
        solid: Solid,
        pixels: np.ndarray,
        depth: np.ndarray,
        place: tuple[float, float],
        heading: float,
        braking: bool,
    ) -> list[LampSeen]:
        """A vehicle at `place` whose vertices project to these pixels; returns the lamps that face the camera."""
        rotation = _rotation(heading)
        offset = np.array([*place, 0.0])
        normals = solid.normals @ rotation.T
        centres = solid.centres @ rotation.T + offset
        facing = np.einsum("ij,ij->i", self.view.eye - centres, normals) > 0
        colours = np.minimum(solid.colours * self.light.factors(normals), 255)
        fixed = np.round(pixels * SUBPIXEL).astype(np.int32)
        lamps: list[LampSeen] = []
        for i in np.flatnonzero(facing):
            colour = colours[i].tolist()
            kind = int(solid.lamps[i])
            if kind != MATTE:
                is_head = kind == HEAD
                if self.light.night or (braking and not is_head):
                    colour = list(HEAD_LIT if is_head else BRAKE_LIT if braking else TAIL_LIT)
                at = pixels[solid.faces[i]].mean(axis=0)
                depth_m = float(depth[solid.faces[i][0]])
                lamps.append(LampSeen((float(at[0]), float(at[1])), depth_m, is_head))
            cv2.fillConvexPoly(self.canvas, fixed[solid.faces[i]], colour, 8, SUBPIXEL_BITS)
        return lamps

    def figure(
        self, outfit: Outfit, figure: Figure, pixels: np.ndarray, depth: np.ndarray
    ) -> np.ndarray:
        """A person or cyclist whose limbs' starts, then ends, project to these pixels; returns the outline's points."""
        count = len(figure.widths)
        scale = self.view.pixels_per_metre(float(depth[0])) * outfit.height / 1.75
        thickness = np.maximum(figure.widths * scale + 0.5, 1).astype(int)
        lit = _lit_palette(outfit, self.light)
        ends = (pixels * SUBPIXEL + 0.5).astype(int).tolist()
        wide = thickness.tolist()
        roles = figure.roles.tolist()
        for i in np.argsort(-(depth[:count] + depth[count:])).tolist():
            cv2.line(
                self.canvas, ends[i], ends[count + i], lit[roles[i]], wide[i], 8, SUBPIXEL_BITS
            )
        half = np.concatenate([thickness, thickness])[:, None] / 2
        return np.concatenate([pixels - half, pixels + half])


@lru_cache(maxsize=4096)
def _lit_palette(outfit: Outfit, light: Light) -> list[list[float]]:
    return np.minimum(outfit.palette * light.factors(np.array([[0.0, -0.8, 0.6]]))[0], 255).tolist()


def _rotation(heading: float) -> np.ndarray:
    c = np.cos(heading)
    s = np.sin(heading)
    return np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
