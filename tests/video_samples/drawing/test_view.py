"""The camera: where points of the world appear."""

from __future__ import annotations

import numpy as np
import pytest

from gemel.video_samples.draw import MARGIN_PX, OVERSAMPLING, View

VIEW = View(640, 360, (0.0, 0.0, 8.0), 0.0, -10.0, 500.0)


def test_a_point_on_the_axis_appears_in_the_middle():
    ahead = VIEW.eye + 20 * VIEW.axes[2]
    pixels, depth = VIEW.project(ahead[None])
    frame = VIEW.to_frame(pixels, (MARGIN_PX, MARGIN_PX))
    assert frame[0] == pytest.approx((320, 180))
    assert depth[0] == pytest.approx(20)


def test_the_same_thing_is_smaller_farther_away():
    def height(y: float) -> float:
        pixels, _ = VIEW.project(np.array([[0, y, 0], [0, y, 1.75]]))
        return float(pixels[0, 1] - pixels[1, 1])

    assert height(40.0) < 0.6 * height(20.0)


def test_right_is_right_and_up_is_up():
    pixels, _ = VIEW.project(np.array([[0, 20.0, 1], [2, 20.0, 1], [0, 20.0, 3]]))
    assert pixels[1, 0] > pixels[0, 0]
    assert pixels[2, 1] < pixels[0, 1]


def test_a_plane_homography_agrees_with_projection():
    matrix = VIEW.plane_homography(np.zeros(3), np.array([1.0, 0, 0]), np.array([0, 1.0, 0]))
    mapped = matrix @ np.array([3.0, 25.0, 1.0])
    pixels, _ = VIEW.project(np.array([[3.0, 25.0, 0.0]]))
    assert mapped[:2] / mapped[2] == pytest.approx(pixels[0])


def test_shake_moves_the_frame_by_fractions_of_a_pixel():
    moved = VIEW.to_frame(np.array([[100.0, 100.0]]), (MARGIN_PX + 1, MARGIN_PX))
    still = VIEW.to_frame(np.array([[100.0, 100.0]]), (MARGIN_PX, MARGIN_PX))
    assert still[0] - moved[0] == pytest.approx((1 / OVERSAMPLING, 0))
