"""People and cyclists as figures of thick limbs, in the postures of a stride or of the pedals' turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

Colour = tuple[float, float, float]

SKIN: tuple[Colour, ...] = ((233, 190, 160), (214, 164, 130), (172, 120, 88), (120, 80, 58), (92, 60, 46))
HAIR: tuple[Colour, ...] = ((36, 28, 24), (70, 46, 30), (120, 84, 48), (196, 160, 96), (150, 146, 142))
TOPS: tuple[Colour, ...] = (
    (196, 40, 44),
    (34, 76, 160),
    (236, 232, 222),
    (40, 44, 50),
    (226, 176, 40),
    (54, 128, 76),
    (134, 62, 136),
    (224, 116, 48),
    (90, 160, 196),
    (150, 120, 92),
    (220, 120, 150),
)
TROUSERS: tuple[Colour, ...] = ((40, 46, 66), (28, 28, 32), (92, 84, 70), (66, 84, 116), (150, 138, 116), (86, 60, 48))
BIKES: tuple[Colour, ...] = ((190, 36, 40), (30, 90, 170), (34, 34, 38), (40, 130, 90), (230, 160, 40))
STRIDE_M = 1.45  # ground covered in one full cycle of both legs
CRANK_M = 5.6  # ground covered in one turn of the pedals
POSTURES = 24  # moments a cycle is cut into


@dataclass(frozen=True)
class Outfit:
    """What one person looks like; `height` in metres."""

    skin: Colour
    hair: Colour
    top: Colour
    trousers: Colour
    height: float
    bag: Colour
    has_bag: bool
    coat: bool
    bike: Colour

    @cached_property
    def palette(self) -> np.ndarray:
        """Colours (13, 3) by role, in the order of the role constants."""
        skin, top, trousers = np.asarray(self.skin), np.asarray(self.top), np.asarray(self.trousers)
        fixed = [(34, 30, 30), np.asarray(self.bag) * 0.8, self.bike, (24, 24, 26), top * 0.9, (60, 60, 64)]
        return np.array([skin, skin * 0.85, self.hair, top, top * 0.86, trousers, trousers * 0.8, *fixed], np.float64)


(SKIN_, NECK_, HAIR_, TOP_, SLEEVE_, LEG_, FAR_LEG_, SHOE_, BAG_, FRAME_, TYRE_, COAT_, METAL_) = range(13)


def random_outfit(rng: np.random.Generator) -> Outfit:
    """An outfit drawn from the palettes above."""

    def pick(palette: tuple[Colour, ...]) -> Colour:
        return palette[int(rng.integers(len(palette)))]

    return Outfit(
        pick(SKIN),
        pick(HAIR),
        pick(TOPS),
        pick(TROUSERS),
        float(rng.uniform(1.58, 1.9)),
        pick(TOPS),
        bool(rng.random() < 0.35),
        bool(rng.random() < 0.25),
        pick(BIKES),
    )


@dataclass(frozen=True)
class Figure:
    """A posture as thick lines with round ends: starts and ends (N, 3) and widths (N,) in metres, colour roles (N,)."""

    starts: np.ndarray
    ends: np.ndarray
    widths: np.ndarray
    roles: np.ndarray


class _Limbs:
    def __init__(self) -> None:
        self.rows: list[tuple] = []

    def add(self, start, end, width: float, role: int) -> None:
        self.rows.append((*start, *end, width, role))

    def build(self) -> Figure:
        rows = np.asarray(self.rows, np.float64)
        return Figure(rows[:, :3], rows[:, 3:6], rows[:, 6], rows[:, 7].astype(int))


def _by(point: np.ndarray, x: float, y: float, z: float) -> np.ndarray:
    return point + np.array([x, y, z])


def posture(outfit: Outfit, kind: str, gone_m: float, standing: bool) -> Figure:
    """The posture of a person or a cyclist who has gone so far; x ahead, y left, z up, ground at z = 0."""
    cycle_m = STRIDE_M if kind == "person" else CRANK_M
    step = -1 if standing else int(gone_m / cycle_m * POSTURES) % POSTURES
    if kind == "person":
        return _walker(step, outfit.has_bag, outfit.coat)
    return _cyclist(step, outfit.has_bag)


@lru_cache(maxsize=256)
def _walker(step: int, bag: bool, coat: bool) -> Figure:
    """A person 1.75 m tall at one of `POSTURES` moments of the stride; -1 stands still."""
    limbs = _Limbs()
    phase, moving = 2 * np.pi * max(step, 0) / POSTURES, step >= 0
    bob = 0.025 * np.cos(2 * phase) if moving else 0.0
    hip_z, neck_z = 0.90 + bob, 1.44 + bob
    for side, offset in ((1, 0.0), (-1, np.pi)):
        swing = 0.42 * np.sin(phase + offset) if moving else 0.0
        lift = 0.10 * max(0.0, np.cos(phase + offset)) if moving else 0.0
        hip, foot = np.array([0, side * 0.09, hip_z]), np.array([swing, side * 0.09, 0.06 + lift])
        knee = (hip + foot) / 2 + np.array([0.05 + 0.8 * lift, 0, 0.02])
        role = LEG_ if side > 0 else FAR_LEG_
        limbs.add(hip, knee, 0.17, role)
        limbs.add(knee, foot, 0.13, role)
        limbs.add(foot, foot + np.array([0.15, 0, -0.02]), 0.09, SHOE_)
    if coat:
        limbs.add((0, 0, hip_z - 0.18), (0, 0, neck_z - 0.2), 0.40, COAT_)
    limbs.add((0, 0, hip_z + 0.02), (0.02, 0, neck_z - 0.14), 0.34, TOP_)
    limbs.add((0, 0.14, neck_z - 0.12), (0, -0.14, neck_z - 0.12), 0.17, TOP_)
    for side, offset in ((1, np.pi), (-1, 0.0)):
        swing = 0.30 * np.sin(phase + offset) if moving else 0.0
        shoulder, hand = np.array([0, side * 0.21, neck_z - 0.09]), np.array([swing + 0.05, side * 0.25, 0.86])
        elbow = (shoulder + hand) / 2 + np.array([-0.05, side * 0.02, 0])
        limbs.add(shoulder, elbow, 0.11, SLEEVE_)
        limbs.add(elbow, hand, 0.09, SLEEVE_)
        limbs.add(hand, hand, 0.10, SKIN_)
    if bag:
        limbs.add((-0.17, 0, 1.02), (-0.17, 0, 1.30), 0.24, BAG_)
    limbs.add((0.02, 0, neck_z), (0.02, 0, neck_z + 0.1), 0.12, NECK_)
    limbs.add((0.03, 0, neck_z + 0.17), (0.03, 0, neck_z + 0.20), 0.21, SKIN_)
    limbs.add((-0.02, 0, neck_z + 0.23), (0.0, 0, neck_z + 0.25), 0.21, HAIR_)
    return limbs.build()


@lru_cache(maxsize=64)
def _cyclist(step: int, bag: bool) -> Figure:
    """A rider on a bicycle at one of `POSTURES` moments of the pedals' turn."""
    limbs = _Limbs()
    crank = 2 * np.pi * max(step, 0) / POSTURES
    angles = np.linspace(0, 2 * np.pi, 15)
    hubs = (np.array([-0.52, 0, 0.34]), np.array([0.56, 0, 0.34]))
    for hub in hubs:
        rim = np.stack([hub[0] + 0.33 * np.cos(angles), np.zeros(15), 0.34 + 0.33 * np.sin(angles)], axis=1)
        for a, b in pairwise(rim):
            limbs.add(a, b, 0.055, TYRE_)
    pedal, seat, head = np.array([-0.04, 0, 0.30]), np.array([-0.20, 0, 0.92]), np.array([0.42, 0, 0.92])
    for a, b in ((hubs[0], pedal), (pedal, seat), (pedal, head), (seat, head), (hubs[0], seat), (head, hubs[1])):
        limbs.add(a, b, 0.06, FRAME_)
    limbs.add(_by(seat, -0.1, 0, 0.05), _by(seat, 0.1, 0, 0.05), 0.09, SHOE_)
    bar = head + np.array([0.02, 0, 0.12])
    limbs.add(_by(bar, 0, 0.26, 0), _by(bar, 0, -0.26, 0), 0.05, METAL_)
    hip = seat + np.array([-0.04, 0, 0.10])
    neck = hip + np.array([0.34, 0, 0.50])
    for side, offset in ((1, 0.0), (-1, np.pi)):
        foot = pedal + np.array([0.17 * np.cos(crank + offset), side * 0.12, 0.17 * np.sin(crank + offset)])
        knee = (hip + foot) / 2 + np.array([0.22, side * 0.03, 0.08])
        role = LEG_ if side > 0 else FAR_LEG_
        limbs.add(_by(hip, 0, side * 0.09, 0), knee, 0.17, role)
        limbs.add(knee, foot, 0.13, role)
        limbs.add(foot, _by(foot, 0.12, 0, 0), 0.09, SHOE_)
    limbs.add(hip, _by(neck, -0.05, 0, -0.06), 0.34, TOP_)
    for side in (1, -1):
        limbs.add(_by(neck, 0, side * 0.16, -0.05), _by(bar, 0, side * 0.22, 0.03), 0.11, SLEEVE_)
    if bag:
        limbs.add(_by(hip, -0.08, 0, 0.22), _by(neck, -0.2, 0, -0.05), 0.26, BAG_)
    limbs.add(_by(neck, 0.08, 0, 0.14), _by(neck, 0.09, 0, 0.18), 0.20, SKIN_)
    limbs.add(_by(neck, 0.05, 0, 0.22), _by(neck, 0.08, 0, 0.23), 0.22, FRAME_)
    return limbs.build()
