"""The rivals' table, and plays that go on where they were stopped."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from benchmarks.schedule import playing
from benchmarks.schedule.playing import play
from benchmarks.schedule.rivals import HEADS, left_to_gain, ratio, table


def row(workload: str, swapped: int, streamed: int, merged: int) -> dict[str, Any]:
    arms = {"swapped": swapped, "streamed": streamed, "merged": merged}
    return {
        "workload": workload, "device": "d", "share": 0.1, "received": 100, "for_all": 90,
        "arms": {arm: {"in_time": count, "by_query": [count, 0], "moved": 10**6 * count, "age_p95_ms": 5.0}
                 for arm, count in arms.items()},
    }  # fmt: skip


def test_table_compares_merged_with_the_better_rival():
    assert ratio(row("high-1", 40, 20, 80)) == 2
    assert ratio(row("low-1", 40, 80, 40)) == 0.5
    assert ratio(row("low-1", 0, 0, 0)) == 1
    rows = table([row("high-1", 40, 20, 80), row("low-1", 40, 80, 40)])
    high, low, both = (dict(zip(HEADS, one, strict=True)) for one in rows)
    assert (high["merged / best rival"], low["merged / best rival"], both["merged / best rival"]) == (
        "2.00", "0.50", "1.00"
    )  # fmt: skip
    assert (both["cases with twice as many"], both["more"], both["fewer"]) == (1, 1, 1)
    assert (both["queries without a frame"], both["MB moved a frame"]) == ("2 / 2 / 2", "1.0 / 1.0 / 1.0")


def test_left_to_gain_counts_cases_with_enough():
    rows = [{**row("high-1", 40, 20, 80), "share": share} for share in (0.1, 0.25, 0.5)] + [row("low-1", 20, 89, 70)]
    assert left_to_gain(rows)[0] == ("10 %", "1 of 2", 40, 80, 90, "2.00 (high-1, d)")


class AtOnce:
    """Processes that are none."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.began: list[Any] = []

    def __enter__(self) -> AtOnce:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Any, *unit: str) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*unit))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def no_processes(monkeypatch):
    monkeypatch.setattr(playing, "ProcessPoolExecutor", AtOnce)


def test_play_interrupted_goes_on_without_repeats(tmp_path):
    file, begun = tmp_path / "played.json", []

    def work(name: str) -> list[dict[str, Any]]:
        begun.append(name)
        if name == "b" and begun.count("b") == 1:
            raise KeyboardInterrupt
        return [{"name": name}]

    units = [("a",), ("b",)]
    with pytest.raises(KeyboardInterrupt):
        play(units, work, {"code": "1"}, file, tell=lambda _: None)
    assert play(units, work, {"code": "1"}, file, tell=lambda _: None) == [{"name": "a"}, {"name": "b"}]
    assert begun == ["a", "b", "b"]
    play(units, work, {"code": "2"}, file, tell=lambda _: None)
    assert begun[3:] == ["a", "b"], "other code is played anew"
