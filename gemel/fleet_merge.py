"""`gemel merge FLEET`: the workloads of several boxes, those with equal queries merged once; one bundle for each.

Each merge runs here, one after the other, or as a task of a Ray cluster. `OUT/NAME.merge.json` holds a finished merge's
report, from which `--resume` goes on; an interrupted one goes on from its own checkpoint, on another node too.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gemel.merger import MergeOptions, Resources, merge
from gemel.merger.checkpoint import WORK_SUFFIX
from gemel.merger.looks import LookFile
from gemel.merger.merge import BUDGET_OPTIONS, digest_workload
from gemel.models.bundle import open_bundle, write_substituted
from gemel.models.errors import GemelError, InputError, message_of
from gemel.models.files.io import (
    Exact,
    Name,
    PathText,
    check_output,
    open_atomic,
    read_json,
    read_mapping,
    read_yaml,
    validate,
)
from gemel.models.files.weights import fingerprint
from gemel.models.stages import Progress, Stages
from gemel.models.workload import Workload, load_workload
from gemel.text import duration, number, percent, size, table

KIND, START = "fleet file", "`name:` and `workloads:`"
BUNDLE_SUFFIX, REPORT_SUFFIX = ".safetensors", ".merge.json"
CONNECT_TIMEOUT_S = 10.0
MAX_RETRIES = 5
"""Of a merge whose node is lost."""


class _FleetMergeKeys(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Name
    workloads: Annotated[list[PathText], Field(min_length=1, max_length=1000)]


class _Finished(Exact):
    """A finished merge; `identity` changes with its workload, weights, method, seed and options."""

    identity: str
    report: dict[str, Any]


@dataclass(frozen=True)
class MergeJob:
    """One merge of a fleet, and the workloads that take its bundle: the first is merged."""

    workloads: tuple[Workload, ...]
    folder: Path
    method: str
    seed: int
    options: MergeOptions

    @property
    def identity(self) -> str:
        """What a finished merge must have been made of."""
        options = {key: value for key, value in self.options.to_json().items() if key not in BUDGET_OPTIONS}
        plain = json.dumps([self.method, self.seed, options], sort_keys=True)
        return f"{digest_workload(self.workloads[0])} {plain}"

    def bundle(self, workload: Workload) -> Path:
        """Where a workload's bundle is written."""
        return self.folder / f"{workload.name}{BUNDLE_SUFFIX}"

    @property
    def report_path(self) -> Path:
        """Where the report of the merge is written."""
        return self.folder / f"{self.workloads[0].name}{REPORT_SUFFIX}"

    def check(self, resume: bool) -> None:
        """Refuse outputs that are there; with `resume` only those of another merge."""
        for workload in self.workloads:
            work = self.bundle(workload).with_name(f"{self.bundle(workload).name}{WORK_SUFFIX}")
            for path in () if resume else (self.bundle(workload), work):
                check_output(path)
        if resume and self.report_path.exists() and self._read().identity != self.identity:
            raise InputError(self.report_path, "belongs to another merge", "repeat the command as before, or remove it")

    def run(self, progress: Progress) -> dict[str, Any]:
        """Merge, unless that is done, and write all bundles; the report, or its `error`."""
        first, *others = self.workloads
        try:
            if not self.report_path.exists():
                report = merge(first, self.bundle(first), self.method, True, self.seed, progress, self.options)
                with open_atomic(self.report_path) as file:
                    file.write(json.dumps({"identity": self.identity, "report": report.to_json()}).encode())
            for workload in others:
                write_substituted(self.bundle(workload), open_bundle(self.bundle(first)), {}, True, workload.name)
                _copy_looks(first, workload)
            return self._read().report
        except (GemelError, OSError) as error:
            return {"error": message_of(error)}

    def _read(self) -> _Finished:
        hint = "remove it, and its bundle"
        return validate(self.report_path, read_json(self.report_path, hint), _Finished, hint=hint)


@dataclass(frozen=True)
class FleetMerge:
    """What became of each merge of a fleet: reports under `gemel merge --json`'s keys, or an `error`."""

    name: str
    jobs: tuple[MergeJob, ...]
    reports: tuple[dict[str, Any], ...]

    @property
    def met(self) -> bool:
        """Whether every merge was done, and met all targets."""
        return all("error" not in one and all(query["met"] for query in one["queries"]) for one in self.reports)

    def to_json(self) -> dict[str, Any]:
        """A row for each box, and sums over the merges."""
        boxes = [
            {**report, "id": workload.name, "bundle": str(job.bundle(workload)), "merged_as": job.workloads[0].name}
            for job, report in zip(self.jobs, self.reports, strict=True)
            for workload in job.workloads
        ]
        done = [report for report in self.reports if "error" not in report]
        costs = [report["cost"]["money"] for report in done if report["cost"]]
        sums = {key: sum(report[key] for report in done) for key in ("seconds", "flops")}
        money = sum(costs) if costs and None not in costs else None
        return {"fleet": self.name, "merges": len(self.jobs), "boxes": boxes, **sums, "money": money}

    def to_text(self) -> str:
        """The table of all boxes."""
        data, rows = self.to_json(), []
        for row in data["boxes"]:
            cells = row["id"], row["merged_as"]
            if "error" in row:
                rows.append((*cells, "-", "-", "-", "-", row["error"]))
                continue
            missed = ", ".join(query["id"] for query in row["queries"] if not query["met"])
            money, share = (row["cost"] or {}).get("money"), percent(row["saved_fraction"])
            cells = *cells, size(row["bytes_after"]), share, duration(row["seconds"]), number(money)
            rows.append((*cells, f"missed: {missed}" if missed else "met"))
        total = f"{len(data['boxes'])} boxes, {data['merges']} merges: {duration(data['seconds'])}"
        currencies = [report["cost"]["currency"] for report in self.reports if report.get("cost")]
        total += f", {data['flops']:.3g} FLOPs, {number(data['money'])} {''.join(currencies[:1])}"
        return f"{table(('box', 'merged as', 'bytes', 'saved', 'time', 'money', 'targets'), rows)}\n\n{total}"


def is_fleet(path: str | Path) -> bool:
    """Whether a YAML file lists workloads in place of queries."""
    keys = read_mapping(Path(path), "workload or fleet file", START)
    return "workloads" in keys and "queries" not in keys


def load_merge_fleet(path: str | Path) -> tuple[str, tuple[Workload, ...]]:
    """The name and the workloads of a fleet file.

    Raises InputError for a file that is missing or named twice, and for two workloads of one name.
    """
    path = Path(path)
    keys = read_yaml(path, _FleetMergeKeys, KIND, START)
    paths, workloads = list[Path](), dict[str, Workload]()
    for at, name in enumerate(keys.workloads):
        file, key = (path.resolve().parent / name).resolve(), f"workloads[{at}]"
        if not file.is_file():
            raise InputError(path, f"there is no file '{name}'", "correct its path, from the folder of this file", key)
        if file in paths:
            raise InputError(path, f"'{name}' is named twice", "name each workload once", key)
        paths.append(file)
        workload = load_workload(file)
        other = workloads.setdefault(workload.name, workload)
        if other is not workload:
            problem = f"'{name}' is called '{workload.name}', as {other.path.name} is"
            raise InputError(path, problem, "give each workload its own `name`, that of its bundle", key)
    return keys.name, tuple(workloads.values())


def group_alike(workloads: Sequence[Workload]) -> list[tuple[Workload, ...]]:
    """The workloads with equal queries together: ids, models, weights by content, targets, data and footage."""
    groups = list[tuple[list[Any], list[Workload]]]()
    for workload in workloads:
        key = [
            (fingerprint(query.weights), query.file and ":" in query.model and query.file.parent,
             replace(query, weights=None, file=None))
            for query in workload.queries
        ]  # fmt: skip
        group = next((group for own, group in groups if own == key), None)
        if group is None:
            groups.append((key, [workload]))
        else:
            group.append(workload)
    return [tuple(group) for _, group in groups]


def merge_fleet(
    path: str | Path,
    out: str | Path,
    method: str,
    resume: bool,
    seed: int,
    progress: Progress,
    options: MergeOptions,
) -> FleetMerge:
    """Merge the workloads of a fleet file into a folder; with `options.resources.ray` on that cluster.

    One merge that fails keeps none of the others. Raises InputError before any of them for bad files and outputs.
    """
    name, workloads = load_merge_fleet(path)
    folder, address = Path(out).absolute(), options.resources.ray
    folder.mkdir(parents=True, exist_ok=True)
    groups, stages = group_alike(workloads), Stages(progress)
    options = replace(options, resources=Resources(options.resources.threads))
    if options.spending and options.spending.budget is not None:
        share = replace(options.spending, budget=options.spending.budget / len(groups))
        options = replace(options, spending=share)
    jobs = [MergeJob(group, folder, method, seed, options) for group in groups]
    for job in jobs:
        job.check(resume)
    reports = dict[int, dict[str, Any]]()
    if address is None:
        stages.announce([job.workloads[0].name for job in jobs])
        for index, job in enumerate(jobs):
            stages.begin(job.workloads[0].name)
            reports[index] = job.run(progress)
    else:
        stages.begin("merging on the cluster", len(jobs))
        for index, report in run_tasks(address, [partial(job.run, _ignore) for job in jobs]):
            reports[index] = report
            stages.add()
    return FleetMerge(name, tuple(jobs), tuple(reports[index] for index in range(len(jobs))))


def run_tasks(address: str, calls: Sequence[Callable[[], dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The results of functions that run as tasks of a Ray cluster, as they end; a GPU each where there are any.

    A task whose node is lost runs again elsewhere, so the files must be at the same path on every node.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError as error:
        raise InputError("--ray", "Ray is not installed", "pip install 'gemel[ray]'") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    try:
        if colon and port.isdigit():  # Ray itself retries for minutes
            socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(address, log_to_driver=False, ignore_reinit_error=True)
    except Exception as error:  # Ray raises it bare where its processes start too slowly
        problem = f"no cluster at '{address}': {' '.join(str(error).split())[:120]}"
        raise InputError("--ray", problem, "give local, auto, HOST:PORT or ray://HOST:PORT") from error
    try:
        gpus = 1 if ray.cluster_resources().get("GPU", 0) else 0
        run = ray.remote(num_cpus=1, num_gpus=gpus, max_retries=MAX_RETRIES)(_call)
        running = {run.remote(call): index for index, call in enumerate(calls)}
        while running:
            (done, *_), _ = ray.wait(list(running))
            index = running.pop(done)
            try:
                yield index, ray.get(done)
            except RayError as error:
                yield index, {"error": message_of(error)}
    finally:
        ray.shutdown()


def _call(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return function()


def _ignore(event: str, **fields: Any) -> None:
    """Progress of a task that no terminal shows."""


def _copy_looks(first: Workload, other: Workload) -> None:
    """Record a merge's looks at the data beside another workload of the same data."""
    looks = LookFile(other.path)
    for look in LookFile(first.path).looks:
        looks.record(look.query, look.data, look.model)
    looks.save()
