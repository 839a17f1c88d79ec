"""The pictures of a workload's merges: bytes saved over work, and at each target, one line per arm, as small SVGs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import mean

from benchmarks.merging.cells import Cell, Step
from benchmarks.merging.tables import grouped
from gemel.report.geometry import Axis

ACCEPT_NOTHING = ("none", "ceiling", "joint")  # what they ship passed no test on val, so they have no line
COLOURS = ("#1f6feb", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#0e7490", "#be185d", "#4b5563")
LEFT, TOP, WIDTH, HEIGHT = 64, 40, 440, 240
LEGEND_WIDTH, LEGEND_LINE = 150, 18
BOTTOM = 52
SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


def picture(cells: Sequence[Cell]) -> str | None:
    """Steps of what each arm had accepted (per cent of the ceiling) over its work, a line for every seed.

    None where no arm accepts anything. The cells are those of one workload at one target.
    """
    arms = grouped((cell for cell in cells if cell.arm not in ACCEPT_NOTHING), lambda cell: cell.arm)
    most = max((cell.result["flops"] for own in arms.values() for cell in own), default=0.0)
    if most <= 0:
        return None
    unit = 10.0 ** math.floor(math.log10(most))
    shares = [saved / cell.ceiling_bytes for own in arms.values() for cell in own if cell.ceiling_bytes
              for _, saved in cell.accepted()]  # fmt: skip
    across, up = Axis([0.0, most / unit], _tick(most / unit)), Axis([0.0, max(1.0, *shares)], step=0.2)
    power = str(round(math.log10(unit))).translate(SUPERSCRIPTS)
    parts = [*_grid(across, up, f"work: image passes × FLOPs, in 10{power}")]
    for place, (arm, own) in enumerate(arms.items()):
        colour = COLOURS[place % len(COLOURS)]
        parts += [line for cell in own for line in _line(cell, across, up, unit, colour)]
        parts.append(_legend(place, arm, own, colour))
    return _svg(f"{cells[0].name}: bytes saved over work, target {cells[0].target:g}", parts)


def curves(cells: Sequence[Cell]) -> str | None:
    """What each arm saves (per cent of the ceiling, mean of its seeds) at each target; hollow where a query missed it.

    None where there are fewer than two targets. The cells are those of one workload.
    """
    cells = [cell for cell in cells if cell.arm not in ACCEPT_NOTHING and cell.ceiling_bytes]
    targets = sorted({cell.target for cell in cells})
    if len(targets) < 2:
        return None
    arms = grouped(cells, lambda cell: cell.label)
    across = Axis(targets, 0.02)
    up = Axis([0.0, max(1.0, *(cell.share for cell in cells))], step=0.2)
    parts = [*_grid(across, up, "accuracy target, of the originals")]
    for place, (arm, own) in enumerate(arms.items()):
        colour = COLOURS[place % len(COLOURS)]
        points = []
        for target, same in sorted(grouped(own, lambda cell: cell.target).items()):
            share = mean(cell.share for cell in same)
            missed = any(cell.met < len(cell.queries) for cell in same)
            points.append((_x(across, target), _y(up, share)))
            title = f"{arm}, target {target:g}: {100 * share:.1f} % of the ceiling" + (", missed on test" * missed)
            fill = "white" if missed else colour
            parts.append(
                f'<circle cx="{points[-1][0]}" cy="{points[-1][1]}" r="3.5" fill="{fill}" stroke="{colour}">'
                f"<title>{escape(title)}</title></circle>"
            )
        path = "M" + "L".join(f"{x} {y}" for x, y in points)
        parts.insert(0, f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-opacity="0.8"/>')
        parts.append(_legend(place, arm, [], colour))
    return _svg(f"{cells[0].workload}: bytes saved at each accuracy target", parts)


def _svg(title: str, parts: Sequence[str]) -> str:
    width, height = LEFT + WIDTH + LEGEND_WIDTH, TOP + HEIGHT + BOTTOM
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{LEFT}" y="22" font-size="13">{escape(title)}</text>' + "".join(parts) + "</svg>\n"
    )


def _tick(most: float) -> float:
    """The step of an axis up to a number from 1 to 10."""
    return 0.5 if most <= 3 else 1.0 if most <= 6 else 2.0


def _x(axis: Axis, value: float) -> float:
    return round(LEFT + axis.at(value) / 100 * WIDTH, 1)


def _y(axis: Axis, value: float) -> float:
    return round(TOP + HEIGHT - axis.at(value) / 100 * HEIGHT, 1)


def _grid(across: Axis, up: Axis, label: str) -> list[str]:
    bottom, parts = TOP + HEIGHT, []
    for value, _ in up.ticks():
        y, whole = _y(up, value), abs(value - 1) < 1e-9
        style = 'stroke="#6b7280" stroke-dasharray="4 3"' if whole else 'stroke="#e5e7eb"'
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y}" y2="{y}" {style}/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{100 * value:.0f} %</text>')
    for value, _ in across.ticks():
        x = _x(across, value)
        parts.append(f'<line x1="{x}" x2="{x}" y1="{bottom}" y2="{bottom + 4}" stroke="#6b7280"/>')
        parts.append(f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{bottom}" y2="{bottom}" stroke="#6b7280"/>')
    parts.append(f'<text x="{LEFT + WIDTH / 2}" y="{bottom + 38}" text-anchor="middle">{label}</text>')
    middle = TOP + HEIGHT / 2
    turned = f'transform="rotate(-90 16 {middle})" text-anchor="middle"'
    parts.append(f'<text x="16" y="{middle}" {turned}>bytes saved, of the ceiling</text>')
    return parts


def _line(cell: Cell, across: Axis, up: Axis, unit: float, colour: str) -> list[str]:
    """Steps up at each acceptance, then level to the merge's end, where a dot stands."""
    ceiling = cell.ceiling_bytes or 1.0
    steps: list[Step] = [(_x(across, work / unit), _y(up, saved / ceiling)) for work, saved in cell.accepted()]
    end = (_x(across, cell.result["flops"] / unit), steps[-1][1])
    path = f"M{steps[0][0]} {steps[0][1]}" + "".join(f"H{x}V{y}" for x, y in steps[1:]) + f"H{end[0]}"
    title = f"{cell.arm}, seed {cell.seed}: {100 * cell.share:.1f} % of the ceiling after {cell.result['flops']:.3g}"
    return [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-opacity="0.8"/>',
        f'<circle cx="{end[0]}" cy="{end[1]}" r="3.5" fill="{colour}"><title>{escape(title)}</title></circle>',
    ]


def _legend(place: int, arm: str, cells: Sequence[Cell], colour: str) -> str:
    x, y = LEFT + WIDTH + 16, TOP + 10 + place * LEGEND_LINE
    named = f"{arm} ({len(cells)} seeds)" if len(cells) > 1 else arm
    return (
        f'<line x1="{x}" x2="{x + 16}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>'
        f'<text x="{x + 22}" y="{y}">{escape(named)}</text>'
    )
