"""A still frame is one that equals the frame answered last; noise and light are no motion."""

from __future__ import annotations

import numpy as np

from gemel.edge_runtime.events.motion import MAX_IN_FLIGHT, MotionConfig, MotionGate
from gemel.models.preprocess import Region


def noisy(seed: int, brightness: int = 60, size: tuple[int, int] = (180, 320)) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(brightness, 6, (*size, 3))
    return noise.clip(0, 255).astype(np.uint8)


def with_object(frame: np.ndarray, x: int, y: int = 60, brightness: int = 200) -> np.ndarray:
    frame[y : y + 20, x : x + 30] = brightness
    return frame


def pass_first(gate: MotionGate, frame: np.ndarray) -> None:
    assert not gate.is_still(0, 0.0, frame)
    gate.confirm(0)


def test_gate_skips_noise_and_passes_an_object_that_moves() -> None:
    gate = MotionGate()
    pass_first(gate, with_object(noisy(1), 100))
    assert gate.is_still(1, 0.1, with_object(noisy(2), 100))
    assert not gate.is_still(2, 0.2, with_object(noisy(3), 110))


def test_gate_takes_a_change_of_brightness_for_still() -> None:
    gate = MotionGate()
    pass_first(gate, noisy(1, brightness=60))
    assert gate.is_still(1, 0.1, noisy(2, brightness=90))


def test_gate_passes_frames_until_one_is_answered() -> None:
    gate = MotionGate()
    assert not gate.is_still(0, 0.0, noisy(1)) and not gate.is_still(1, 0.1, noisy(1))
    gate.confirm(1)
    assert gate.is_still(2, 0.2, noisy(1))


def test_gate_sees_motion_too_slow_for_one_frame() -> None:
    gate = MotionGate(config=MotionConfig(max_still_s=1e9))
    pass_first(gate, with_object(noisy(1), 100, brightness=100))
    frames = [with_object(noisy(1), 100 + step, brightness=100) for step in range(1, 30)]
    still = [gate.is_still(step, 0.1 * step, frame) for step, frame in enumerate(frames, 1)]
    assert still[0] and not still[-1]


def test_gate_lets_a_frame_pass_after_its_longest_pause() -> None:
    gate = MotionGate(config=MotionConfig(max_still_s=5.0))
    pass_first(gate, noisy(1))
    assert gate.is_still(1, 4.9, noisy(1)) and not gate.is_still(2, 5.0, noisy(1))


def test_gate_looks_at_the_region_without_ignored_zones() -> None:
    left = ((0.0, 0.0), (0.5, 0.0), (0.5, 1.0), (0.0, 1.0))
    for gate in (MotionGate(ignored=[left]), MotionGate(Region((0.5, 0.0, 1.0, 1.0)))):
        pass_first(gate, noisy(1))
        assert gate.is_still(1, 0.1, with_object(noisy(1), 60))
        assert not gate.is_still(2, 0.2, with_object(noisy(1), 220))


def test_gate_remembers_a_bounded_number_of_frames() -> None:
    gate = MotionGate()
    for index in range(3 * MAX_IN_FLIGHT):
        gate.is_still(index, 0.1 * index, noisy(1))
    gate.confirm(0)
    assert not gate.is_still(1000, 10.0, noisy(1))
