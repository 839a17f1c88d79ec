"""How fast a scene changes, and what a stale result of it costs."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.queues import MAX_URGENCY_RATIO, SceneChange


def test_the_faster_a_scene_changes_and_the_higher_its_priority_the_more_its_stale_results_cost():
    scene = SceneChange({"still": 1.0, "busy": 1.0, "dear": 3.0, "unseen": 2.0})
    rng = np.random.default_rng(0)
    picture = rng.integers(0, 200, (48, 64, 3), np.uint8)
    for index in range(5):
        scene.add("still", index / 10, picture + np.uint8(index))
        for query in ("busy", "dear"):
            scene.add(query, index / 10, rng.integers(0, 256, (48, 64, 3), np.uint8))
    urgency = scene.urgency()
    assert urgency["still"] == 1 / MAX_URGENCY_RATIO < 1 < urgency["busy"] < MAX_URGENCY_RATIO
    assert urgency["dear"] == pytest.approx(3 * urgency["busy"], rel=0.1)
    assert urgency["unseen"] == 2.0
    scene.add("busy", 1.0, picture[:10, :10])
    assert scene.urgency()["busy"] == urgency["busy"], "a picture of another size says nothing"
