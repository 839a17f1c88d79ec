"""Labels on frames: none covers another, and none leaves the picture."""

from __future__ import annotations

import cv2
import numpy as np

from gemel.edge_runtime.frames import drawing


def test_labels_do_not_cover_each_other() -> None:
    image, taken = np.zeros((240, 320, 3), np.uint8), list[drawing.Rectangle]()
    for left, top in ((100, 100), (103, 102), (98, 97), (310, 12), (315, 238)):
        drawing._write(image, "truck 0.93", (left, top), 0.5, (255, 255, 255), taken)
    assert len(taken) == 5
    for index, one in enumerate(taken):
        assert one[0] >= 0 and one[1] >= 0 and one[2] <= 320 + 4 and one[3] <= 240
        assert not any(drawing._overlap(one, other) for other in taken[:index])


def test_thumbnail_is_small_and_shows_the_object() -> None:
    image = np.zeros((480, 640, 3), np.uint8)
    shown = drawing.draw_thumbnail(image, {"after": {"snapshot": {"box": [320.0, 240.0, 640.0, 480.0]}}})
    small = cv2.imdecode(np.frombuffer(shown, np.uint8), cv2.IMREAD_COLOR)
    assert small is not None and small.shape == (180, 240, 3)
    assert small[:80, :110].max() < 30 and small[120, 118:124].max() > 100


def test_crowded_picture_is_drawn() -> None:
    found = [{"class": "car", "score": 0.9, "box": [5.0, 5.0, 20.0, 20.0]}] * 40
    image = np.zeros((48, 64, 3), np.uint8)
    assert drawing.draw_on(image, [{"query": "q", "detections": found}]).shape == image.shape
