"""How often a merge accepts a model of a known true ratio, by simulation of the answers on val.

Usage: python -m benchmarks.merging.acceptance [--rounds 400] [--json FILE]

Each row is a val split. In each round a search looks at so many models of one true ratio, on the part of val that is
searched on, and takes the first that passes there, or the best; then the part that accepts is looked at once, as
`gemel merge` does it (merger.acceptance). The original answers 0.9 of the frames right; a model changes some of its
answers, as many of them to the worse that its ratio is the true one. Answers of one clip are alike: each clip has a
ratio of its own around the true one. Where val cannot tell, nothing is accepted; the table then says how many frames
it takes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.real.tables import table
from merger.acceptance import accepted_by_holm, cut_val, find_doubt, search_ratio
from models.data import Frames, Split, units_without_names
from models.intervals import p_value_below
from models.tasks import task_of

TARGET, ORIGINAL, DISAGREEMENT, CLIP_SPREAD = 0.95, 0.9, 0.03, 0.02
LOOKS, RATIOS = (1, 10, 25), (0.93, 0.95, 0.98, 1.0)
CLASSIFICATION = task_of("classification")


@dataclass(frozen=True)
class Row:
    """A val split: frames, classes and clips; `clips` 0: frames of no named clip."""

    name: str
    frames: int
    classes: int
    clips: int = 0


ROWS = (
    Row("170 frames, 34 classes", 170, 34),
    Row("100 frames, 2 classes", 100, 2),
    Row("40 frames", 40, 2),
    Row("300 frames of 3 clips", 300, 2, 3),
    Row("400 frames, 2 classes", 400, 2),
    Row("1,000 frames of 20 clips", 1000, 2, 20),
    Row("2,000 frames", 2000, 2),
)


@dataclass(frozen=True)
class Question:
    """What a cut of val needs of a query."""

    classes: tuple[str, ...]
    task: str = "classification"
    multi_label: bool = False


def split_of(row: Row) -> tuple[Split, list[str]]:
    """The split and its labels: classes follow each other."""
    labels = [str(frame % row.classes) for frame in range(row.frames)]
    units = units_without_names(row.frames)
    if row.clips:
        units = tuple(f"clip{frame * row.clips // row.frames}" for frame in range(row.frames))
    return Split(
        "val", Frames([_no_frame] * row.frames), tuple(labels), units, tuple(map(float, range(row.frames)))
    ), labels


def _no_frame() -> np.ndarray:
    return np.zeros((1, 1, 3), np.uint8)


def is_accepted(row: Row, ratio: float, looks: int, random: np.random.Generator) -> bool:
    """Whether one merge accepts a model of this true ratio after so many looks at what is searched on."""
    split, labels = split_of(row)
    searched, kept = cut_val(Question(tuple(sorted(set(labels)))), split, labels)  # type: ignore[arg-type]
    one_errors = [_one_error(labels, part) for part in (searched, kept)]
    if find_doubt(row.frames, one_errors[1], TARGET, 1):
        return False
    right = random.random(row.frames) < ORIGINAL
    units = np.unique(np.array(split.units), return_inverse=True)[1]
    best, chosen = -1.0, right
    for _ in range(looks):
        own = _draw_answers(right, units, ratio, random)
        before, after = (_counts(labels, answers, searched) for answers in (right, own))
        found = CLASSIFICATION.metric_of(after.sum(0)) / CLASSIFICATION.metric_of(before.sum(0))
        found = search_ratio(CLASSIFICATION, found, before, after, one_errors[0])
        if found > best:
            best, chosen = found, own
        if best >= TARGET:
            break
    before, after = (_by_unit(_counts(labels, answers, kept), units[kept]) for answers in (right, chosen))
    return bool(accepted_by_holm({"q": p_value_below(CLASSIFICATION, before, after, one_errors[1], TARGET)}))


def simulate(rows: Sequence[Row], rounds: int) -> list[dict[str, object]]:
    """How often each row accepts each ratio after each number of looks."""
    found = []
    for row in rows:
        split, labels = split_of(row)
        _, kept = cut_val(Question(tuple(sorted(set(labels)))), split, labels)  # type: ignore[arg-type]
        doubt = find_doubt(row.frames, _one_error(labels, kept), TARGET, 1)
        for ratio in RATIOS:
            for looks in LOOKS:
                random = np.random.default_rng([row.frames, row.classes, int(1000 * ratio), looks])
                count = 0 if doubt else sum(is_accepted(row, ratio, looks, random) for _ in range(rounds))
                found.append(
                    {"val": row.name, "ratio": ratio, "looks": looks, "accepted": count / rounds, "doubt": doubt}
                )
    return found


def summary(cells: Sequence[dict[str, object]]) -> str:
    """Markdown: a row for each split, a column for each true ratio, the looks side by side."""
    rows = []
    for name in dict.fromkeys(cell["val"] for cell in cells):
        own = [cell for cell in cells if cell["val"] == name]
        columns = [" / ".join(f"{cell['accepted']:.2f}" for cell in own if cell["ratio"] == ratio) for ratio in RATIOS]
        rows.append((name, *columns, own[0]["doubt"] or "-"))
    heads = ("val", *(f"true {ratio:g}" for ratio in RATIOS), "before any training")
    looks = ", ".join(map(str, LOOKS))
    return table(f"Accepted at a target of {TARGET:g} after {looks} looks", heads, rows)


def _draw_answers(right: np.ndarray, units: np.ndarray, ratio: float, random: np.random.Generator) -> np.ndarray:
    """Which frames a model of this true ratio gets right, changed from the original's within each clip."""
    own = np.clip(ratio + CLIP_SPREAD * (ratio < 1) * random.standard_normal(units.max() + 1), 0, None)
    own += ratio - own.mean()
    lost = np.clip(1 - own[units] + DISAGREEMENT / 2, 0, 1)  # of those that the original gets right
    gained = DISAGREEMENT / 2 * ORIGINAL / (1 - ORIGINAL)
    draws = random.random(len(right))
    return np.where(right, draws >= lost, draws < gained)


def _counts(labels: Sequence[str], right: np.ndarray, places: Sequence[int]) -> np.ndarray:
    """Counts as `Classification.tallies` gives them."""
    names = sorted(set(labels))
    counts = np.zeros((len(places), 2, len(names)), np.int64)
    index = [names.index(labels[place]) for place in places]
    rows = np.arange(len(places))
    counts[rows, 0, index], counts[rows, 1, index] = right[list(places)], 1
    return counts


def _by_unit(counts: np.ndarray, units: np.ndarray) -> np.ndarray:
    return np.stack([counts[units == unit].sum(axis=0) for unit in np.unique(units)])


def _one_error(labels: Sequence[str], places: Sequence[int]) -> float:
    return CLASSIFICATION.one_error([labels[place] for place in places], sorted(set(labels))) / ORIGINAL


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path, help="write the cells here")
    given = parser.parse_args(arguments)
    cells = simulate(ROWS, given.rounds)
    if given.json is not None:
        given.json.write_text(json.dumps(cells, indent=1) + "\n", encoding="utf-8")
    print(summary(cells))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
