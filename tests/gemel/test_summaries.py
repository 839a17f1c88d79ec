"""Tables of results say what figures are worth: nothing shown, agreement with itself, reasons that fit a column."""

from __future__ import annotations

from typing import Any

import pytest

from gemel.summaries import MAX_REASON, scores_text
from gemel.text import saved_text

ROW: dict[str, Any] = {
    "id": "gate", "metric": "f1", "original": 1.0, "merged": 1.0, "ratio": 1.0, "met": True,
    "worth": True, "reason": "", "state": "proven", "lower_end": 0.96, "from": "agreement", "needs": "",
    "evidence": "labels", "agreement": 1.0, "bits": "fp32", "in_integers": False, "why_bits": "",
}  # fmt: skip


def test_scores_text_says_where_a_query_is_compared_with_itself() -> None:
    assert "against its own answers" not in scores_text([ROW])
    assert "met, against its own answers" in scores_text([{**ROW, "evidence": "original"}])


def test_scores_text_names_bits_and_why_there_are_no_fewer() -> None:
    why = "int4 is not proven: needs 20 answers"
    text = scores_text([{**ROW, "bits": "int8", "in_integers": True, "why_bits": why}])
    assert "int8, in integers" in text and text.splitlines()[-1] == f"gate: int8, since {why}"


def test_scores_text_calls_nothing_proven_without_evidence() -> None:
    assert "proven: at least 96.0 %" in scores_text([ROW])
    text = scores_text([{**ROW, "met": False, "reason": "its original reaches only 0.50 f1 on test"}])
    assert "proven" not in text and "of no worth" in text


def test_scores_text_names_weak_originals() -> None:
    weak = {**ROW, "original": 0.44, "merged": 0.59, "ratio": 1.34}
    assert scores_text([weak]).splitlines()[-1].startswith("gate: a weak original (0.44 F1)")
    for strong in (ROW, {**weak, "worth": False}, {**weak, "reason": "val holds no objects"}):
        assert "weak original" not in scores_text([strong])


@pytest.mark.parametrize(
    ("saved", "shown"), [(0.2, "20.0 % saved (layer-sharing bound 32.1 %)"), (0.613, "layers alone")]
)
def test_saved_text_never_calls_less_than_the_result_a_bound(saved: float, shown: str) -> None:
    text = saved_text(saved, 0.321)
    assert shown in text and ("bound" in text) is (saved < 0.321)


def test_scores_text_shows_no_figures_where_nothing_was_there() -> None:
    text = scores_text(
        [{**ROW, "met": False, "evidence": "none", "reason": "val holds no objects (car); 20 are needed"}]
    )
    assert "1.000" not in text and "no evidence: val holds no objects" in text


def test_scores_text_bounds_the_reason_of_a_row() -> None:
    reason = f"val holds 3 objects ({', '.join(f'class number {n}' for n in range(40))}); 20 are needed"
    line = scores_text([{**ROW, "met": False, "evidence": "none", "reason": reason}]).splitlines()[-1]
    assert len(line) < MAX_REASON + 150 and "[...]" in line
