"""The tables of a box at work say what was recorded, and what did not hold."""

from __future__ import annotations

from typing import Any

from benchmarks.serving.tables import (
    cost_rows,
    event_rows,
    fault_rows,
    gating_rows,
    held_out_rows,
    soak_picture,
    tracking_rows,
)


def record(name: str, **keys: Any) -> dict[str, Any]:
    return {"name": name, "fault": f"the {name}", "must": "hold", "times": 1000, "unit": "times", "said": "it did",
            "broken": [], "slow": [], **keys}  # fmt: skip


def test_faults_stand_in_the_order_of_the_table_and_what_did_not_hold_is_said() -> None:
    found = [record("other"), record("kills", slow=["it served\nonly | after 12 s"]), record("drops", broken=["lost"])]
    assert fault_rows(found) == [
        ("the drops", "1,000 times", "hold", "it did", "no; lost"),
        ("the kills", "1,000 times", "hold", "it did", "no; it served only / after 12 s"),
        ("the other", "1,000 times", "hold", "it did", "yes"),
    ]


SOAK = {
    "minutes": 30.0, "cameras": 8, "warm_s": 600.0, "slope_bytes_per_hour": 500_000, "slope_error": 1e5,
    "threads_more": 0, "descriptors_more": -1,
    "samples": [[60.0 * minute, 4e8 + 8e3 * minute, 20, 30] for minute in range(31)],
}  # fmt: skip


def test_costs_are_set_against_what_is_to_hold() -> None:
    frames = [
        {"watched": watched, "processed_share": 1.003, "own_ms_per_frame": 0.5, "capture_ms_per_frame": 2.0,
         "inference_ms_per_frame": 0.7, "http_core_share": 0.031}
        for watched in (False, True)
    ]  # fmt: skip
    start = [{"bare_s": bare, "box_s": 4.0, "bare_cpu_s": 3.0, "box_cpu_s": 3.3} for bare in (3.0, 4.0, 9.0)]
    rows = {row[0].split()[0]: row[2] for row in cost_rows(frames, start, SOAK)}
    assert (
        rows["frames"] == "100.0 %" and rows["HTTP"] == "3.1 %" and rows["start"].startswith("1.00 (4.0 / 4.0 s); 1.10")
    )
    assert rows["memory,"] == "+0.5 ± 0.1 MB an hour; threads +0, descriptors -1"


def test_a_soaks_picture_says_its_slope_and_draws_every_sample() -> None:
    drawn = soak_picture(SOAK)
    assert "8 looped cameras, 30 minutes" in drawn and "+0.5 MB an hour" in drawn
    path = drawn.split('<path d="M')[1].split('"')[0]
    assert path.count("L") == len(SOAK["samples"]) - 1


def test_tracking_and_events_have_a_row_for_each_measurement() -> None:
    one = {"tracker": "ByteTrack", "fps": 5.0, "idf1": 0.7269, "switches": 8, "mota": 0.5, "ms_median": 0.87}
    assert tracking_rows([one]) == [("ByteTrack", "5", "0.727", "8", "0.87")]
    row = {"boxes": "person", "zone": "near", "fps": 25.0, "events": 9, "precision": 1.0, "recall": 0.9,
           "clips": [[1.0, 0.8], [1.0, 1.0]]}  # fmt: skip
    assert event_rows([row]) == [
        ("person", "near", "25", "9", ">= 0.9", "1.00", "0.90", "1.00 / 0.80, 1.00 / 1.00")
    ]  # fmt: skip


def test_clips_held_out_have_no_tracker_where_numbers_are_a_persons() -> None:
    row = {"clip": "square", "boxes": "person", "fps": 5.0, "events": 17, "precision": 0.8125, "recall": 0.765}
    whole = {**row, "idf1": 0.8591, "switches": 2, "ms": 0.123}
    assert held_out_rows([whole, row]) == [
        ("square", "person", "5", "0.859", "2", "0.12", "17", "0.81", "0.77"),
        ("square", "person", "5", "-", "-", "-", "17", "0.81", "0.77"),
    ]


def test_gating_adds_up_the_clips_of_one_kind_of_footage() -> None:
    def clip(light: str, run: int, f1: float) -> dict[str, Any]:
        return {"light": light, "threshold": 10.0, "frames": 50, "run": run, "f1_own": f1}

    assert gating_rows([clip("night", 50, 1.0), clip("quiet", 10, 0.98), clip("quiet", 40, 1.0)]) == [
        ("night", "10", "50 of 50", "0 %", "1.000"),
        ("quiet", "10", "50 of 100", "50 %", "0.980"),
    ]
