"""Jobs beside each other: the same results, work and order whoever does them, and what is not done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import merger.jobs as jobs_module
from merger.checkpoint import Checkpoint, StepCache
from merger.jobs import Done, Job, Order, run_jobs
from tests.merger.workers import hard_times


@pytest.fixture(autouse=True)
def everything_is_worth_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "WORTH_SENDING", 0.0)


class Backwards:
    """Workers that do the jobs from the last to the first, and leave some to the main process."""

    does_all = False

    def __init__(self, leaving: Sequence[str] = ()) -> None:
        self._leaving, self.given = leaving, list[str]()

    def do(self, jobs: Sequence[Job], order: Order, arrived: Callable[[Job, Done], None]) -> None:
        self.given += [job.name for job in jobs]
        for job in reversed(jobs):
            if job.name not in self._leaving:
                desk = hard_times.Bench("worker")
                value = job.do(desk, StepCache(), **job.given)
                arrived(job, Done(value, desk.flops.total))

    def close(self) -> None:
        """Nobody to end."""


def _squares(*numbers: int) -> list[Job]:
    return [Job(f"square of {number}", hard_times.squared, {"number": number}) for number in numbers]


def test_results_come_in_order_with_their_work_whoever_found_them() -> None:
    ctx = hard_times.Bench()
    ctx.workers = Backwards(["square of 1"])
    found = run_jobs(ctx, StepCache(), "squares", _squares(5, 1, 4, 2))
    assert [one["square"] for one in found] == [25, 1, 16, 4]
    assert [one["where"] for one in found] == ["worker", "main", "worker", "worker"]
    assert ctx.flops.total == 12


@pytest.mark.parametrize(("jobs", "worth"), [(1, 0.0), (3, 1.0)], ids=["a single one", "little to do"])
def test_what_is_not_worth_it_is_not_sent(jobs: int, worth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs_module, "WORTH_SENDING", worth)
    ctx = hard_times.Bench()
    ctx.workers = Backwards()
    found = run_jobs(ctx, StepCache(), "squares", _squares(*range(jobs)))
    assert {one["where"] for one in found} == {"main"} and ctx.workers.given == []


def test_a_resumed_merge_goes_on_with_what_had_arrived_and_sends_no_more_than_is_left(tmp_path: Path) -> None:
    """The third result arrived before the first, and then the main process was killed at its second job."""
    jobs, first, ctx = _squares(1, 2, 3, 4), Checkpoint(tmp_path / "flops", {}, resume=False), hard_times.Bench()
    ctx.flops.total, first.meter = 1000.0, ctx.flops
    ctx.workers = Backwards(["square of 1", "square of 2"])

    def killed(ctx: hard_times.Bench, journal: StepCache, number: int) -> None:
        ctx.flops.total += 500
        first.write()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(ctx, first, "squares", [jobs[0], Job("square of 2", killed, {"number": 2}), *jobs[2:]])
    again, ctx = Checkpoint(tmp_path / "flops", {}, resume=True), hard_times.Bench()
    again.meter, ctx.workers = ctx.flops, Backwards()
    found = run_jobs(ctx, again, "squares", jobs)
    assert [one["square"] for one in found] == [1, 4, 9, 16] and ctx.flops.total == 1010
    assert ctx.workers.given == ["square of 2"]
