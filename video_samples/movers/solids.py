"""Rigid bodies: vertices, faces, colours and lamps in the body's own axes (x ahead, y left, z up)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

Colour = tuple[float, float, float]

GLASS: Colour = (52, 66, 82)
TYRE: Colour = (26, 26, 28)
RIM: Colour = (150, 152, 156)

MATTE, HEAD, TAIL, GLOW = 0, 1, 2, 3  # what a face does at night: nothing, shine white, shine red, glow from inside


@dataclass(frozen=True)
class Solid:
    """A rigid body.

    vertices (V, 3) metres, ground contact at z = 0; `faces` index lists; normals and centres (F, 3); colours (F, 3)
    RGB 0..255; lamps (F,) one of MATTE, HEAD, TAIL, GLOW. Later faces lie on
    earlier ones.
    """

    length: float
    width: float
    height: float
    vertices: np.ndarray
    faces: tuple[np.ndarray, ...]
    normals: np.ndarray
    centres: np.ndarray
    colours: np.ndarray
    lamps: np.ndarray


@dataclass
class SolidBuilder:
    """Collects faces; outward normals come from the corner order or point away from `centre`."""

    centre: tuple[float, float, float]
    vertices: list[tuple[float, float, float]] = field(default_factory=list)
    faces: list[np.ndarray] = field(default_factory=list)
    colours: list[Colour] = field(default_factory=list)
    lamps: list[int] = field(default_factory=list)

    def face(self, corners, colour: Colour, lamp: int = MATTE) -> None:
        start = len(self.vertices)
        self.vertices.extend((float(x), float(y), float(z)) for x, y, z in corners)
        self.faces.append(np.arange(start, len(self.vertices)))
        self.colours.append(colour)
        self.lamps.append(lamp)

    def prism(self, profile, half_width: float, colour: Colour, under: bool = False) -> None:
        """A side profile [(x, z), ...] spread over -half_width..half_width; its last edge is the underside."""
        edges = len(profile) if under else len(profile) - 1
        for i in range(edges):
            (xa, za), (xb, zb) = profile[i], profile[(i + 1) % len(profile)]
            self.face(
                [(xa, half_width, za), (xb, half_width, zb), (xb, -half_width, zb), (xa, -half_width, za)], colour
            )
        for side in (-1, 1):
            self.face([(x, side * half_width, z) for x, z in profile], colour)

    def box(self, x0: float, x1: float, half_width: float, z0: float, z1: float, colour: Colour) -> None:
        self.prism([(x0, z0), (x0, z1), (x1, z1), (x1, z0)], half_width, colour)

    def side(self, x0: float, x1: float, z0: float, z1: float, at: float, colour: Colour, lamp: int = MATTE) -> None:
        """The same rectangle on the left and right flank, `at` metres from the middle."""
        for sign in (-1, 1):
            corners = [(x0, z0), (x1, z0), (x1, z1), (x0, z1)]
            self.face([(x, sign * at, z) for x, z in corners], colour, lamp)

    def end(self, y0: float, y1: float, z0: float, z1: float, x: float, colour: Colour, lamp: int = MATTE) -> None:
        """A rectangle across the vehicle at `x`: its front or its back."""
        self.face([(x, y0, z0), (x, y1, z0), (x, y1, z1), (x, y0, z1)], colour, lamp)

    def wheels(self, at_x: tuple[float, ...], radius: float, at: float) -> None:
        angles = np.linspace(0, 2 * np.pi, 14, endpoint=False)
        for x in at_x:
            for sign in (-1, 1):
                for scale, colour in ((1.16, (18, 18, 20)), (1.0, TYRE), (0.56, RIM)):
                    ring = [
                        (x + radius * scale * np.cos(a), sign * (at + 0.01), radius + radius * scale * np.sin(a))
                        for a in angles
                    ]
                    self.face([(px, py, max(pz, 0.0)) for px, py, pz in ring], colour)

    def build(self, length: float, width: float, height: float) -> Solid:
        vertices = np.asarray(self.vertices, np.float64)
        centres = np.stack([vertices[f].mean(axis=0) for f in self.faces])
        normals = []
        for face, centre in zip(self.faces, centres):
            a, b, c = vertices[face[0]], vertices[face[1]], vertices[face[2]]
            normal = np.cross(b - a, c - a)
            normal /= max(float(np.linalg.norm(normal)), 1e-9)
            normals.append(normal if normal @ (centre - np.asarray(self.centre)) >= 0 else -normal)
        return Solid(
            length,
            width,
            height,
            vertices,
            tuple(self.faces),
            np.stack(normals),
            centres,
            np.asarray(self.colours, np.float64),
            np.asarray(self.lamps),
        )
