"""What the camera adds: shake, exposure, noise, rain before the lens, and the caption."""

from __future__ import annotations

from functools import lru_cache

import cv2
import numpy as np

from video_samples.drawing.view import MARGIN_PX
from video_samples.scenes.scene import Scene

NOISE_DAY, NOISE_NIGHT = 1.6, 2.8  # standard deviation of the noise, in grey levels
SPARE_PX = 64  # noise and rain sheets are larger than the frame by this, so that a random cut of them is new each time


@lru_cache(maxsize=4)
def _noise(height: int, width: int, deviation: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    field = rng.standard_normal((height + SPARE_PX, width + SPARE_PX, 3)).astype(np.float32) * deviation
    return np.clip(field, 0, 255).astype(np.uint8), np.clip(-field, 0, 255).astype(np.uint8)


@lru_cache(maxsize=2)
def _rain(height: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(6)
    sheet = np.zeros((height + SPARE_PX, width + SPARE_PX, 3), np.uint8)
    for length, count, bright in ((9, 420, 26), (16, 190, 40), (30, 46, 50)):
        for _ in range(count):
            x, y = rng.uniform(0, sheet.shape[1]), rng.uniform(-20, sheet.shape[0])
            level = bright * rng.uniform(0.5, 1.1)
            end = (round((x - length * 0.16) * 16), round((y + length) * 16))
            cv2.line(sheet, (round(x * 16), round(y * 16)), end, (level * 0.95, level, level * 1.08), 1, cv2.LINE_AA, 4)
    return sheet


class Sensor:
    """The camera of one clip; everything random comes from its seed."""

    def __init__(self, scene: Scene, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 99])
        self.night, self.title, self.name = scene.light.night, scene.title, scene.name
        self.size = (scene.view.height, scene.view.width)
        self.offset = np.zeros(2)
        self.clock_s = int(self.rng.integers(0, 3600)) + (22 if self.night else 13) * 3600
        gain = float(self.rng.uniform(0.93, 1.07))
        self.curve = np.clip(np.arange(256) * gain, 0, 255).astype(np.uint8)
        self.frames = 0

    def shake(self) -> tuple[int, int]:
        """Corner of the frame on the canvas: a slow tremble of a pixel or two."""
        self.offset = 0.8 * self.offset + self.rng.normal(0, 0.55, 2)
        x, y = np.clip(np.round(self.offset), -MARGIN_PX, MARGIN_PX).astype(int) + MARGIN_PX
        return int(x), int(y)

    def develop(self, frame: np.ndarray) -> np.ndarray:
        """The frame as recorded."""
        if self.night:
            frame = cv2.add(frame, self._cut(_rain(*self.size)))
        frame = cv2.LUT(frame, self.curve)
        plus, minus = _noise(*self.size, NOISE_NIGHT if self.night else NOISE_DAY)
        at = self.rng.integers(0, SPARE_PX, 2)
        window = np.s_[at[0] : at[0] + self.size[0], at[1] : at[1] + self.size[1]]
        return cv2.subtract(cv2.add(frame, plus[window]), minus[window])

    def _cut(self, sheet: np.ndarray) -> np.ndarray:
        at = self.rng.integers(0, SPARE_PX, 2)
        return sheet[at[0] : at[0] + self.size[0], at[1] : at[1] + self.size[1]]
