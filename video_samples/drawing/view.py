"""The pinhole camera of a clip: world metres to pixels of an oversampled canvas."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

OVERSAMPLING = 2  # the canvas has this many pixels per output pixel and side; the reduction smooths every edge
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
        return (self.width * OVERSAMPLING + 2 * MARGIN_PX, self.height * OVERSAMPLING + 2 * MARGIN_PX)

    @cached_property
    def eye(self) -> np.ndarray:
        return np.asarray(self.position, np.float64)

    @cached_property
    def axes(self) -> np.ndarray:
        """Rows: the camera's right, down and forward directions in world axes."""
        yaw, pitch = np.radians(self.yaw), np.radians(self.pitch)
        forward = np.array([np.sin(yaw) * np.cos(pitch), np.cos(yaw) * np.cos(pitch), np.sin(pitch)])
        right = np.array([np.cos(yaw), -np.sin(yaw), 0.0])
        return np.stack([right, np.cross(forward, right), forward])

    @cached_property
    def intrinsics(self) -> np.ndarray:
        """The 3 x 3 matrix from camera axes to homogeneous canvas pixels."""
        focal, (width, height) = self.focal * OVERSAMPLING, self.canvas_size
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
        columns = np.stack([np.append(along, 0.0), np.append(up, 0.0), np.append(origin, 1.0)], axis=1)
        return self.matrix @ columns

    def to_frame(self, canvas_points: np.ndarray, shift: tuple[int, int]) -> np.ndarray:
        """Output pixels of canvas points when shake has moved the frame's corner to `shift` on the canvas."""
        return (np.asarray(canvas_points) - np.asarray(shift)) / OVERSAMPLING
