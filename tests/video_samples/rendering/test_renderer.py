"""The picture and the truth agree: boxes lie on what was drawn, what is covered counts as hidden."""

from __future__ import annotations

import dataclasses

import cv2
import numpy as np
import pytest

from gemel.video_samples.draw import MARGIN_PX, OVERSAMPLING, Pen
from gemel.video_samples.junction import DAY, VIEW, junction
from gemel.video_samples.objects import SceneObject, bus, car, random_outfit, truck
from gemel.video_samples.renderer import Renderer, sort_by_depth
from gemel.video_samples.scene import Scene

RED, WHITE = (200.0, 30.0, 30.0), (240.0, 240.0, 240.0)


class Still:
    """A world in which nothing moves."""

    signals, now = None, 0.0

    def __init__(self, *actors: SceneObject) -> None:
        self._actors = list(actors)

    def actors(self) -> list[SceneObject]:
        return self._actors


@pytest.fixture(scope="module")
def scene() -> Scene:
    return junction(night=False)


def shot(scene: Scene, *actors: SceneObject):
    """The frame, and its truth by track."""
    frame, truths = Renderer(dataclasses.replace(scene, start_world=lambda seed: Still(*actors)), 1).frame()
    return frame, {truth.track: truth for truth in truths}


def vehicle(track: int, kind: str, x: float, y: float, heading: float = 0.0) -> SceneObject:
    look = {"car": car(RED), "bus": bus(RED, WHITE), "truck": truck(RED, WHITE)}[kind]
    return SceneObject(track, kind, x, y, heading, 0.0, look)


def person(track: int, x: float, y: float, kind: str = "person") -> SceneObject:
    return SceneObject(track, kind, x, y, 0.4, 3.3, random_outfit(np.random.default_rng(track)))


@pytest.mark.parametrize(
    "actor",
    [
        vehicle(1, "car", 2.0, 1.75),
        vehicle(2, "bus", -2.0, 8.75, np.pi),
        vehicle(3, "truck", 0.0, 5.25, 0.7),
        person(4, 0.0, -3.0),
        person(5, 3.0, 3.0, "bicycle"),
    ],
    ids=lambda actor: actor.kind,
)
def test_a_box_frames_exactly_what_was_drawn(actor: SceneObject):
    width, height = VIEW.canvas_size
    canvas = np.full((height, width, 3), (255, 0, 255), np.uint8)
    pen = Pen(VIEW, DAY, canvas)
    pixels, depth = VIEW.project(actor.body)
    if actor.kind in ("person", "bicycle"):
        outline = pen.figure(actor.look, actor.figure, pixels, depth)  # type: ignore[arg-type]
    else:
        pen.solid(actor.look, pixels, depth, (actor.x, actor.y), actor.heading, False)  # type: ignore[arg-type]
        outline = pixels
    drawn = (canvas != (255, 0, 255)).any(axis=2).astype(np.uint8)
    x, y, w, h = cv2.boundingRect(drawn)
    assert w > 20 and h > 20
    expected = np.concatenate([outline.min(axis=0), outline.max(axis=0)])
    assert np.array([x, y, x + w, y + h]) == pytest.approx(expected, abs=4 * OVERSAMPLING)


def test_only_the_box_and_its_shadow_change_the_picture(scene: Scene):
    empty, _ = shot(scene)
    frame, truths = shot(scene, vehicle(1, "car", 2.0, 3.0))
    x0, y0, x1, y1 = (round(v) for v in truths[1].box)
    changed = cv2.absdiff(frame, empty).max(axis=2) > 40
    assert changed[y0:y1, x0:x1].mean() > 0.35
    changed[max(0, y0 - 2) : y1 + 25, max(0, x0 - 2) : x1 + 60] = False
    assert changed.mean() < 1e-3


def test_what_stands_free_is_fully_visible_and_what_is_covered_is_not(scene: Scene):
    before, behind, free = vehicle(1, "bus", 2.0, 3.0), person(2, 2.0, 5.6), person(3, -4.0, -2.5)
    _, truths = shot(scene, before, behind, free)
    assert truths[1].visible > 0.9
    assert truths[2].visible < 0.2 and not truths[2].counts
    assert truths[3].visible > 0.9 and truths[3].counts


def test_nearer_things_are_drawn_over_farther_ones(scene: Scene):
    near, far = vehicle(1, "truck", 2.0, 1.75), vehicle(2, "truck", 2.0, 8.75)
    for actors in ([near, far], [far, near]):
        assert sort_by_depth(VIEW, list(actors)) == [far, near]
    frame_a, _ = shot(scene, near, far)
    frame_b, _ = shot(scene, far, near)
    assert np.array_equal(frame_a, frame_b)


def test_a_person_behind_a_long_bus_is_drawn_first_even_at_its_near_end():
    long_bus = vehicle(1, "bus", -20.0, 15.7, np.pi)
    walker = person(2, -15.6, 17.6)
    assert sort_by_depth(VIEW, [long_bus, walker]) == [walker, long_bus]
    assert sort_by_depth(VIEW, [walker, long_bus]) == [walker, long_bus]


def test_things_partly_out_of_the_picture_keep_a_box_inside_it(scene: Scene):
    _, truths = shot(scene, vehicle(1, "bus", 21.0, 1.75))
    x0, y0, x1, y1 = truths[1].box
    assert 0 <= x0 < x1 <= 640 and 0 <= y0 < y1 <= 360
    assert truths[1].visible < 0.9


def test_a_moving_scene_keeps_boxes_inside_and_the_published_truth_visible(scene: Scene):
    renderer = Renderer(scene, 6)
    kinds = set()
    for _ in range(12):
        frame, truths = renderer.frame()
        assert frame.shape == (360, 640, 3) and frame.dtype == np.uint8
        for truth in truths:
            x0, y0, x1, y1 = truth.box
            assert 0 <= x0 <= x1 <= 640 and 0 <= y0 <= y1 <= 360
            if truth.counts:
                kinds.add(truth.kind)
                assert truth.visible >= 0.4 and min(x1 - x0, y1 - y0) >= 8
        for _ in range(5):
            renderer.world.step()
    assert {"car", "bus", "truck", "person"} <= kinds


def test_the_camera_trembles_but_stays_within_the_painted_margin(scene: Scene):
    sensor = Renderer(scene, 5).sensor
    shifts = np.array([sensor.shake() for _ in range(300)])
    assert shifts.min() >= 0 and shifts.max() <= 2 * MARGIN_PX
    assert 0 < shifts.std() < 3
