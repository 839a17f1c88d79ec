"""Jobs beside each other: the same results, work and order whoever does them, and whoever dies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import merger.journal.checkpoint as checkpoint_module
import merger.workers.jobs as workers_module
import merger.workers.local as local_module
from merger import MergeOptions, Resources, merge
from merger.bench.bounds import Bounds
from merger.bench.ondemand import OnDemand
from merger.bench.workbench import Merged, Workbench, snapshot
from merger.journal.checkpoint import Checkpoint
from merger.journal.steps import Journal
from merger.mending.several import combined, repair_all
from merger.methods.wide import whole_plan
from merger.workers.choice import employ
from merger.workers.desk import Setup
from merger.workers.jobs import Done, Job, Nobody, Threads, run
from merger.workers.local import Process, Processes
from merger.workers.pool import Pool
from models.bundle import open_bundle
from models.errors import InputError
from models.sharing.plan import SharingPlan
from models.workload import Workload, load_workload
from tests.merger.options import QUICK
from tests.merger.workers import hard_times

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def everything_is_worth_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "WORTH_SENDING", 0.0)


@pytest.fixture(scope="module")
def crowd(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A workbench with two processes as workers, which store what they have done of a job at every chance."""
    bench = Workbench(load_workload(trained_folder / "workload.yaml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_module, "PROGRAM", EAGER + local_module.PROGRAM)
        crew = Processes(lambda: Setup.of(bench), tmp_path_factory.mktemp("work") / "jobs")
        bench.workers = pool = Pool(crew, 2, partial(_tell, bench))
        yield bench
    processes = [hand._process for hand in pool.hands if isinstance(hand, Process)]
    pool.close()
    assert processes and all(process.returncode is not None for process in processes)


def _tell(bench: Workbench, event: str, **fields: Any) -> None:
    bench.progress(event, **fields)


EAGER = "import merger.journal.checkpoint as c; c.INTERVAL_S, c.WRITING_SHARE = 0.0, float('inf'); "


@pytest.fixture
def bench(crowd: Workbench, told: list) -> Workbench:
    """That workbench, with no work done yet and its progress told."""
    crowd.work.total = 0
    crowd.progress = lambda event, **fields: told.append((event, fields))
    return crowd


@pytest.fixture
def told() -> list[tuple[str, dict[str, Any]]]:
    return []


def _squares(numbers: Sequence[int]) -> list[Job]:
    return [Job(f"square of {number}", hard_times.squared, {"number": number}) for number in numbers]


def test_results_come_in_order_with_their_work_from_two_processes(bench: Workbench, told: list) -> None:
    found = run(bench, Journal(), "squares", _squares([5, 1, 4, 2]))
    assert [one["square"] for one in found] == [25, 1, 16, 4]
    assert len({one["process"] for one in found} - {os.getpid()}) == 2
    assert bench.work.total == 12 * bench.work.of(bench.queries["q0"])
    assert sorted(fields["number"] for event, fields in told if event == "squared") == [1, 2, 4, 5]


def test_what_comes_after_the_first_good_enough_counts_for_nothing(bench: Workbench) -> None:
    found = run(bench, Journal(), "squares", _squares([1, 3, 5, 7]), until=lambda one: one["square"] > 4)
    assert [one["square"] for one in found] == [1, 9]
    assert bench.work.total == 4 * bench.work.of(bench.queries["q0"])


def test_a_killed_workers_job_is_done_by_another(bench: Workbench, told: list, tmp_path: Path) -> None:
    found = _with_deaths(bench, tmp_path, 1)
    assert os.getpid() not in {one["process"] for one in found}
    warnings = [fields["text"] for event, fields in told if event == "warning"]
    assert len(warnings) == 1 and "was killed (out of memory?) at 'dying': another worker does it" in warnings[0]


def test_a_job_that_two_workers_died_of_is_done_here(bench: Workbench, told: list, tmp_path: Path) -> None:
    found = _with_deaths(bench, tmp_path, 9)
    assert found[1]["process"] == os.getpid()
    warnings = [fields["text"] for event, fields in told if event == "warning"]
    assert len(warnings) == 2 and warnings[1].endswith("the main process does it")


def _with_deaths(bench: Workbench, tmp_path: Path, deaths: int) -> list[dict[str, Any]]:
    marks = tmp_path / "marks"
    marks.mkdir()
    given = {"number": 2, "marks": str(marks), "deaths": deaths, "main": os.getpid()}
    jobs = [*_squares([1]), Job("dying", hard_times.dying, given), *_squares([3])]
    found = run(bench, Journal(), "squares", jobs)
    assert [one["square"] for one in found] == [1, 4, 9]
    return found


def test_a_job_that_fails_in_workers_is_done_here_and_bad_input_is_refused(bench: Workbench, told: list) -> None:
    jobs = [Job("failing", hard_times.failing, {"number": 2, "main": os.getpid()}), *_squares([3])]
    found = run(bench, Journal(), "squares", jobs)
    assert [one["square"] for one in found] == [4, 9] and found[0]["process"] == os.getpid()
    assert "failed (MemoryError: no room)" in next(fields["text"] for event, fields in told if event == "warning")
    with pytest.raises(InputError, match=r"frame.png: number 7: does not decode; replace it") as refused:
        run(bench, Journal(), "refused", [*_squares([1]), Job("bad", hard_times.refusing, {"number": 7})])
    assert refused.value.key == "number 7"


def test_what_a_killed_worker_had_done_of_a_job_is_not_done_again(bench: Workbench, tmp_path: Path) -> None:
    jobs = [Job("long", hard_times.killed_on_the_way, {"marks": str(tmp_path / "mark")}), *_squares([1])]
    processes, _ = run(bench, Journal(), "jobs", jobs)
    assert len(set(processes[:6])) == 1 and len(set(processes[6:])) == 1 and processes[5] != processes[6]
    assert bench.work.total == 11 * bench.work.of(bench.queries["q0"])


def test_a_resumed_merge_goes_on_with_what_had_arrived(bench: Workbench, tmp_path: Path) -> None:
    """The second result arrived before the first, and then the main process was killed."""
    jobs, first = _squares([1, 2, 3]), Checkpoint(tmp_path / "work", {}, resume=False)

    class OutOfOrder(Nobody):
        def map(self, jobs, order, arrived):
            arrived(jobs[1].name, Done({"square": 4, "process": -1}, 20))
            first.write()
            raise KeyboardInterrupt
            yield

    bench.work.total, first.meter, by_processes = 1000, bench.work, bench.workers
    bench.workers = OutOfOrder()
    with pytest.raises(KeyboardInterrupt):
        run(bench, first, "squares", jobs)
    for workers in (Nobody(), by_processes):
        again = Checkpoint(tmp_path / "work", {}, resume=True)
        bench.work.total, again.meter, bench.workers = 0, bench.work, workers
        found = run(bench, again, "squares", jobs)
        assert [one["square"] for one in found] == [1, 4, 9] and found[1]["process"] == -1
        assert bench.work.total == 1020 + 4 * bench.work.of(bench.queries["q0"])


def test_a_workers_workbench_loads_what_is_asked_for_and_judges_alike(workload: Workload) -> None:
    bench = Workbench(workload)
    lazy = Setup.of(bench).workbench(lambda event, **fields: None)
    assert lazy.ratio("q1", lazy.models(["q1"])["q1"]) == bench.ratio("q1", bench.models(["q1"])["q1"]) == 1.0
    parts = (lazy.originals, lazy.val, lazy.train)
    assert [sorted(part._made) for part in parts if isinstance(part, OnDemand)] == [["q1"], ["q1"], []]


@pytest.mark.parametrize(
    ("threads", "jobs", "each"),
    [(Threads(16), 4, 16), (Threads(16, None, 8), 3, 5), (Threads(2, None, 4), 4, 1), (Threads(16, 3, 8), 3, 3)],
    ids=["alone", "fewer jobs than workers", "fewer threads", "by hand"],
)
def test_threads_are_divided_among_jobs(threads: Threads, jobs: int, each: int) -> None:
    assert threads.of(jobs) == each


def test_threads_stay_those_that_a_merge_began_with(workload: Workload, tmp_path: Path) -> None:
    bench, checkpoint = Workbench(workload), Checkpoint(tmp_path / "work", {}, resume=False)
    employ(bench, Resources(workers=4, threads=3), checkpoint)
    assert bench.threads == Threads(3, 3, 4)
    employ(bench, Resources(workers=1), checkpoint)
    assert bench.threads == Threads(3, 3, 4)
    with pytest.raises(InputError, match="this merge began with --threads 3"):
        employ(bench, Resources(threads=2), checkpoint)


def test_repairs_beside_each_other_are_those_one_after_the_other(crowd: Workbench, workload: Workload) -> None:
    """Two queries of which too much is asked go through every step."""
    alone, outcomes = Workbench(workload), []
    for bench in (alone, crowd):
        plan = whole_plan(bench, QUICK)
        models = bench.tied(plan, bench.queries)
        merged = Merged(plan, {query: snapshot(model) for query, model in models.items()})
        required, bench.work.total = {"q0": 1.5, "q1": 0.0, "q2": 1.5}, 1000
        ratios = {"q0": 0.5, "q1": 1.0, "q2": 0.4}
        recipe = replace(QUICK.recipe, epochs=1, frames_per_epoch=32)
        after, rows = repair_all(bench, merged, ratios, recipe, required, Journal(), Bounds(bench.work))
        names = {query: _names(after.states[query]) for query in after.states}
        outcomes.append((after.plan, names, rows, bench.work.total))
    assert outcomes[0] == outcomes[1]
    _, _, rows, work = outcomes[0]
    assert len(rows) > 3 and list(dict.fromkeys(row["query"] for row in rows)) == ["q2", "q0"]
    assert rows[0]["work"] > 1000 and [row["work"] for row in rows] == sorted(row["work"] for row in rows)
    assert rows[-1]["work"] <= work


def test_what_queries_change_of_a_plan_is_put_together() -> None:
    first, second = (("a", "x"), ("b", "x"), ("c", "x")), (("a", "y"), ("b", "y"), ("c", "y"))
    plan = SharingPlan((first, second))
    after = {"a": plan.with_private("a", ["y"]), "b": plan.with_private("b", ["x"])}
    assert set(combined(plan, after).shared) == {(first[0], first[2]), second[1:]}
    assert combined(plan, {"a": plan.without("a"), "b": plan.without("b")}).shared == ()


def _names(state: dict[str, torch.Tensor]) -> list[str]:
    """What tells states apart bit by bit."""
    return [f"{name} {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()}" for name, tensor in state.items()]


TRIED = MergeOptions(replace(QUICK.recipe, epochs=2, frames_per_epoch=32), precision="fp32", max_work=None)


def test_a_bundle_does_not_depend_on_the_number_of_workers(workload: Workload, tmp_path: Path, told: list) -> None:
    options = replace(TRIED, margin=0.9)
    reports = [
        merge(
            workload, tmp_path / f"{count}.safetensors", "wide", options=options, resources=Resources(count, 1),
            progress=lambda event, **fields: told.append((event, fields)),
        )
        for count in (1, 2)
    ]  # fmt: skip
    contents = [open_bundle(report.bundle).manifest.to_json() for report in reports]
    assert contents[0] == contents[1] and reports[0].work == reports[1].work
    assert [fields for event, fields in told if event == "warning" and "worker" in fields["text"]] == []
    assert torch.get_num_threads() == 1


def test_a_merge_is_interrupted_and_resumed_with_workers(
    workload: Workload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = merge(workload, tmp_path / "a.safetensors", "gemel", options=TRIED, resources=Resources(1, 1))
    write, writes, out = Checkpoint.write, [0], tmp_path / "b.safetensors"

    def dying(self: Checkpoint) -> None:
        write(self)
        writes[0] += 1
        if writes[0] == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "write", dying)
    monkeypatch.setattr(checkpoint_module, "INTERVAL_S", 0.0)
    monkeypatch.setattr(checkpoint_module, "WRITING_SHARE", float("inf"))
    with pytest.raises(KeyboardInterrupt):
        merge(workload, out, "gemel", options=TRIED, resources=Resources(1, 1))
    resumed = merge(workload, out, "gemel", resume=True, options=TRIED, resources=Resources(2, 1))
    assert resumed.work == straight.work
    assert open_bundle(out).manifest.to_json() == open_bundle(straight.bundle).manifest.to_json()
