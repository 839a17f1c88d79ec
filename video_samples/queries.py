"""The questions of the sample workload, and what the truth answers to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemel.video_samples.objects import VEHICLES
from gemel.video_samples.renderer import MIN_VISIBLE, FrameTruth

Rect = tuple[float, float, float, float]

MIN_INSIDE = 0.4  # a detector's object counts where at least this much of its box lies in the region it looks at


@dataclass(frozen=True)
class Zone:
    """A place on the ground, x0, y0, x1, y1 in metres: `inside` it means yes, outside the wider `around` means no."""

    inside: Rect
    around: Rect

    def answer(self, truths: Sequence[FrameTruth], kinds: Sequence[str]) -> bool | None:
        """Whether one of these kinds is there; None when that is a matter of opinion."""
        near = [t for t in truths if t.kind in kinds and _within(t.ground, self.around)]
        if any(_within(t.ground, self.inside) and t.visible >= MIN_VISIBLE for t in near):
            return True
        return None if near else False


def _within(point: tuple[float, float], rect: Rect) -> bool:
    return rect[0] <= point[0] <= rect[2] and rect[1] <= point[1] <= rect[3]


@dataclass(frozen=True)
class Question:
    """One query of the sample workload; `roi` in frame pixels. With `zone`, classes are (no, yes)."""

    id: str
    camera: str
    model: str
    input_size: int
    classes: tuple[str, ...]
    kinds: tuple[str, ...]
    roi: tuple[int, int, int, int]
    sla_ms: int
    zone: Zone | None = None
    model_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return "detection" if self.zone is None else "classification"

    def label(self, truths: Sequence[FrameTruth]) -> str | None:
        """The class of a frame, None when it is neither."""
        assert self.zone is not None
        answer = self.zone.answer(truths, self.kinds)
        return None if answer is None else self.classes[int(answer)]

    def boxes(self, truths: Sequence[FrameTruth]) -> list[Rect]:
        """Boxes in pixels of the cropped frame."""
        rects = []
        for truth in truths:
            if truth.kind in self.kinds and truth.counts:
                x0, y0, x1, y1 = truth.box
                cut = (
                    max(x0, self.roi[0]),
                    max(y0, self.roi[1]),
                    min(x1, self.roi[2]),
                    min(y1, self.roi[3]),
                )
                width = cut[2] - cut[0]
                height = cut[3] - cut[1]
                if (
                    width > 0
                    and height > 0
                    and width * height >= MIN_INSIDE * (x1 - x0) * (y1 - y0)
                ):
                    rects.append(
                        (
                            cut[0] - self.roi[0],
                            cut[1] - self.roi[1],
                            cut[2] - self.roi[0],
                            cut[3] - self.roi[1],
                        )
                    )
        return rects


SAMPLE_QUERIES = (
    Question(
        "day-vehicles",
        "junction-day",
        "ssd_resnet18",
        96,
        ("vehicle",),
        VEHICLES,
        (0, 136, 330, 266),
        200,
        # Vehicles take 0.2 to 0.35 of this region's side, and in a square made of it they are about square.
        model_args={"scales": [0.15, 0.45], "aspect_ratios": []},
    ),
    Question(
        "day-bus-stop",
        "junction-day",
        "resnet34",
        48,
        ("empty", "bus"),
        ("bus",),
        (8, 98, 184, 186),
        150,
        Zone((-27.0, 14.2, -17.0, 17.2), (-36.0, 12.9, -9.0, 17.2)),
    ),
    Question(
        "night-lane",
        "junction-night",
        "resnet18",
        64,
        ("clear", "busy"),
        VEHICLES,
        (0, 150, 160, 246),
        100,
        Zone((-18.5, 0.0, -11.0, 7.0), (-24.0, -0.5, -7.0, 7.4)),
    ),
    Question(
        "square-gate",
        "square",
        "resnet18",
        64,
        ("empty", "people"),
        ("person",),
        (404, 110, 600, 222),
        150,
        Zone((6.2, 8.2, 12.4, 16.0), (5.0, 7.2, 13.6, 19.0)),
    ),
)
