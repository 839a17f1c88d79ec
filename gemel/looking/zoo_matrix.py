"""The zoo against itself: for every pair of architectures, the share of bytes that they have in common."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from typing import Any

from gemel.text import size, table
from models.sharing.layers import Signature, describe
from models.zoo.registry import ENTRIES, ZooEntry

CELL = 11
LABEL_WIDTH = 190
COLOURS = ((1.0, "#08306b"), (0.9, "#08519c"), (0.7, "#2171b5"), (0.5, "#4292c6"), (0.3, "#6baed6"), (0.1, "#9ecae1"),
           (0.0, "#c6dbef"))  # fmt: skip
MIN_SHOWN = 0.01


@dataclass(frozen=True)
class ZooModel:
    """One architecture at the class count it was published with: parameters, and bytes of its whole state."""

    name: str
    task: str
    input_size: int
    classes: int
    parameters: int
    bytes: int
    layers: int


@dataclass(frozen=True)
class ZooMatrix:
    """`common[i][j]` = bytes of weights that models i and j could share, heads left out; i = j: two of the same."""

    signature: str
    models: tuple[ZooModel, ...]
    common: tuple[tuple[int, ...], ...]

    def share(self, row: int, column: int) -> float:
        """The part of the row model's bytes that the column model has, too."""
        return self.common[row][column] / self.models[row].bytes

    def to_json(self) -> dict[str, Any]:
        """`models` and `pairs`; `saved_fraction` = what sharing saves of the bytes of both."""
        pairs = [
            {
                "a": a.name, "b": b.name, "common_bytes": self.common[i][j],
                "share_of_a": self.share(i, j), "share_of_b": self.share(j, i),
                "saved_fraction": self.common[i][j] / (a.bytes + b.bytes),
            }
            for i, a in enumerate(self.models) for j, b in enumerate(self.models) if i <= j
        ]  # fmt: skip
        return {"signature": self.signature, "models": [model.__dict__ for model in self.models], "pairs": pairs}

    def to_text(self) -> str:
        """Models and the matrix: per cent of the row's bytes that the column has; a dot for less than one."""
        rows = []
        for row, model in enumerate(self.models):
            cells = (f"{100 * self.share(row, column):.0f}" for column in range(len(self.models)))
            rows.append((row + 1, model.name, f"{model.parameters:,}", size(model.bytes),
                         *("." if cell == "0" else cell for cell in cells)))  # fmt: skip
        numbers = (str(column + 1) for column in range(len(self.models)))
        legend = f"per cent of the row's bytes that the column has, too ({self.signature} signatures, heads left out)"
        return "\n".join([table(("#", "model", "parameters", "bytes", *numbers), rows), legend])

    def to_svg(self) -> str:
        """The matrix as a picture, darker for more in common."""
        count = len(self.models)
        parts = []
        for row, model in enumerate(self.models):
            y = LABEL_WIDTH + row * CELL
            label = f'font-size="9" y="{y + CELL - 3}" x="{LABEL_WIDTH - 4}" text-anchor="end"'
            parts.append(f"<text {label}>{escape(model.name)}</text>")
            turn = f"rotate(-90 {y + CELL - 3} {LABEL_WIDTH - 4})"
            parts.append(
                f'<text font-size="9" x="{y + CELL - 3}" y="{LABEL_WIDTH - 4}" transform="{turn}">'
                f"{escape(model.name)}</text>"
            )
            for column, other in enumerate(self.models):
                share = self.share(row, column)
                if share < MIN_SHOWN:
                    continue
                title = f"{model.name} has {100 * share:.0f} % of its bytes in common with {other.name}"
                x = LABEL_WIDTH + column * CELL
                parts.append(
                    f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{_colour(share)}">'
                    f"<title>{escape(title)}</title></rect>"
                )
        width = count * CELL
        grid = f'<rect x="{LABEL_WIDTH}" y="{LABEL_WIDTH}" width="{width}" height="{width}" fill="#f4f6f8"/>'
        side = LABEL_WIDTH + width + 8
        caption = "Share of the row's bytes that the column's architecture has, too: blank under 1 %, darker for more"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side + 16}" '
            f'viewBox="0 0 {side} {side + 16}" font-family="sans-serif"><rect width="100%" height="100%" fill="white"/>'
            + grid
            + "".join(parts)
            + f'<text font-size="10" x="8" y="{side + 8}">{caption}</text></svg>\n'
        )


def zoo_matrix(signature: Signature = "wide") -> ZooMatrix:
    """Describe every model of the zoo on the meta device and count what each pair has in common."""
    models, counts, size_of = [], [], {}
    for entry in sorted(ENTRIES.values(), key=lambda entry: (entry.task, entry.name)):
        found = describe(entry.name, entry.width, entry.input_size, entry.task)
        models.append(_model(entry, found.parameters, found.bytes, len(found.layers)))
        names = [(wide if signature == "wide" else strict, nbytes) for _, wide, strict, nbytes, head, _ in found.layers
                 if not head]  # fmt: skip
        size_of.update(names)
        counts.append(Counter(name for name, _ in names))
    common = tuple(tuple(sum(size_of[name] * n for name, n in (a & b).items()) for b in counts) for a in counts)
    return ZooMatrix(signature, tuple(models), common)


def _model(entry: ZooEntry, parameters: int, nbytes: int, layers: int) -> ZooModel:
    return ZooModel(entry.name, entry.task, entry.input_size, entry.width, parameters, nbytes, layers)


def _colour(share: float) -> str:
    return next(colour for least, colour in COLOURS if share >= least)
