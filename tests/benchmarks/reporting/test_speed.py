"""The report benchmark runs at a small size and names its settings in its table."""

from __future__ import annotations

from benchmarks.reporting.speed import MAX_OBJECTS, draw_predictions, rows


def test_frames_are_drawn_with_errors_of_every_kind() -> None:
    from gemel.models.measures.metrics import error_types, overlaps_of

    split, sides = draw_predictions(400, seed=1)
    assert split.labels is not None and max(len(one.boxes) for one in split.labels) == MAX_OBJECTS  # type: ignore[union-attr]
    assert len(set(split.units)) == 20 and len(split.times_s) == 400
    for answers in sides.values():
        found = error_types(overlaps_of(answers, split.labels), 0.3)  # type: ignore[arg-type]
        assert all(one.count > 0 for one in found.values()), found


def test_the_table_sets_the_median_beside_what_is_asked() -> None:
    seconds = {"scoring": [1.0, 9.0, 2.0], "streams": [5.0], "report": [3.0, 4.0, 50.0]}
    found = {"frames": 10_000, "seconds": seconds, "page_bytes": 900_000, "frames_played": 180_000}
    assert [row[1:] for row in rows(found)] == [("<= 5 s", "2.0 s"), ("", "5.0 s"), ("<= 20 s", "4.0 s")]
    assert "180,000 in all" in rows(found)[1][0]
