"""The tutorials: each notebook's code runs from top to bottom, as a kernel would, in a fresh namespace."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.docs.pages import REPOSITORY

NOTEBOOKS = sorted((REPOSITORY / "docs").glob("*.ipynb"))


def execute(path: Path) -> dict[int, Any]:
    """Run all cells of code in order; the value of each whose last line is an expression, by the cell's place."""
    names: dict[str, Any] = {"__name__": "__main__"}
    values = {}
    for place, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            tree = ast.parse("".join(cell["source"]))
            last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, f"{path.name}[{place}]", "exec"), names)
            if isinstance(last, ast.Expr):
                values[place] = eval(compile(ast.Expression(last.value), f"{path.name}[{place}]", "eval"), names)
    return values


@pytest.fixture(autouse=True)
def _use_one_thread() -> None:
    torch.set_num_threads(1)


def test_notebooks_are_kept_without_outputs() -> None:
    assert len(NOTEBOOKS) == 2
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells), path


@pytest.mark.exhaustive
def test_packing_tutorial_stores_one_backbone_and_keeps_answers() -> None:
    values = list(execute(REPOSITORY / "docs" / "tutorial-pack.ipynb").values())
    report, text, difference = values
    assert report.bytes_after < 0.5 * report.bytes_before and "became" in text and difference < 1e-4


@pytest.mark.exhaustive
def test_merging_tutorial_saves_bytes_and_answers() -> None:
    inspection, _, report, prediction, bundle = execute(REPOSITORY / "docs" / "tutorial-merge.ipynb").values()
    assert inspection.ceiling_fraction > 0.4
    assert (
        report.bytes_after < report.bytes_before and prediction.label in ("open", "closed") and "door" in repr(bundle)
    )
