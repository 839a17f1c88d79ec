"""The commands of `gemel`: each parses its options, calls one function of the public API, and formats the result.

Heavy imports are inside the commands, so that `gemel --help` answers at once.
"""

from __future__ import annotations

import inspect as introspection
import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from gemel.conditions import (
    DEFAULT_DEVICE,
    DEFAULT_PLACEMENT,
    DEMO_DEVICE,
    EVERY_DEVICE,
    MEASURED,
    Conditions,
    Objective,
    PlacementOptions,
    Shared,
)
from gemel.edge_runtime.life.summary import empty_summary
from gemel.invocation import CommandResult, command, group, parameter
from gemel.models.errors import GemelError, InputError, join_names, one_line
from gemel.process import ExitCode, LogHandler, SignalHandlers, configure_log, exit_at_once
from gemel.text import duration, key_text, number, percent, size, table

MAX_SEED = 2**32 - 1
MAX_SIMULATED_S = 7 * 24 * 3600.0
LOG_TIMEOUT_S = 0.3
INSTALLED_SCRIPTS = ("gemel", "gemel/__main__.py")
"""The main file of a process that was started for a command: the installed script, or `python -m gemel`."""


app = group("Run more vision models on one edge box by sharing their weights.")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib import metadata

        typer.echo(f"gemel {metadata.version('gemel')}")
        raise typer.Exit


@app.callback()
def print_version(
    version: Annotated[
        bool, Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run more vision models on one edge box by sharing their weights."""


def _check_finite(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise typer.BadParameter("'nan' is not a number")
    return value


def _check_factories(names: list[str]) -> list[str]:
    for name in names:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
            raise typer.BadParameter(f"'{name}' is not written as MODULE:NAME")
    return names


def number_option(flag: str, low: float, high: float, help: str, metavar: str = "N") -> Any:
    """A number from `low` to `high`."""
    return Option(flag, min=low, max=high, metavar=metavar, help=help, callback=_check_finite)


def _limit(name: str, kind: type, low: float, high: float, help: str, flag: str = "") -> introspection.Parameter:
    """An optional number from `low` to `high`, of a table of options."""
    option = number_option(flag or f"--{name.replace('_', '-')}", low, high, help)
    return parameter(name, Annotated[kind | None, option])  # type: ignore[valid-type]


def _text(name: str, metavar: str, help: str) -> introspection.Parameter:
    """An optional text, of a table of options."""
    option = Option(f"--{name}", metavar=metavar, help=help, show_default=False)
    return parameter(name, Annotated[str | None, option])


def file_option(flags: str, help: str, metavar: str = "FILE") -> Any:
    """A path."""
    return Option(*flags.split(), metavar=metavar, help=help)


Workload = Annotated[str, Argument(metavar="WORKLOAD", help="A workload file (YAML).")]
BundlePath = Annotated[str, Argument(metavar="BUNDLE", help="A bundle.")]
Source = Annotated[str, Argument(metavar="BUNDLE|WORKLOAD", help="A bundle, or a workload file for its originals.")]
Config = Annotated[str, Argument(metavar="CONFIG", help="A box config (YAML).")]
OutFile = Annotated[str, file_option("-o --out", "The file to write.")]
Seed = Annotated[int, number_option("--seed", 0, MAX_SEED, "Seed of everything random.")]
Factories = Annotated[
    list[str],
    Option("--factory", metavar="MODULE:NAME", callback=_check_factories,
           help="A model of your own in the bundle to allow, from here or Python's path; may be repeated."),
]  # fmt: skip
Memory = Annotated[
    str, Option("--memory", metavar="M", help="min, 50%, 75% or all of what the originals need, or a size: 512MiB.")
]
Device = Annotated[
    str | None,
    Option("--device", metavar="PROFILE", show_default=False,
           help=f"Device profile of the virtual clock (default {DEFAULT_DEVICE}), or {MEASURED}: BUNDLE.profile.json, "
           f"which is also the default where it exists. For plan also {EVERY_DEVICE}, to compare."),
]  # fmt: skip
Method = Annotated[str, Option("--method", metavar="M", help="A method of those below, NAME:key=value with options.")]
Policy = Annotated[str, Option("--policy", metavar="P", help="A policy of those below, NAME:key=value with options.")]
AllShared = Annotated[bool, Option("--shared", help="A workload's models share all layers that they can.")]
Overflow = Annotated[
    bool, Option("--overflow", help="Run a query too large for the memory: what does not fit is copied in every run.")
]
SpoolFolder = Annotated[str, Argument(metavar="SPOOL", help="The `spool` folder of the box's config, or a copy.")]
SpoolBundle = Annotated[str | None, file_option("--bundle", "The box's bundle (default: named in SPOOL's ledger).")]
AcceptUnproven = Annotated[
    bool | None, Option("--accept-unproven", help="Keep also what is not proven, by its plain ratio on val.")
]
SharePrefix = Annotated[
    bool | None, Option("--share-prefix", help="Run the first layers of one camera's queries once a frame.")
]
CONDITIONS = (
    parameter("device", Device),
    parameter("memory", Memory, "min"),
    parameter("policy", Policy, "adaptive"),
    parameter("shared", AllShared, False),
    parameter("overflow", Overflow, False),
    parameter("factories", Factories, []),
    parameter("seed", Seed, 0),
)
"""The fields of `Conditions`."""
RECIPE = (
    _limit("epochs", int, 1, 10**6, "Maximum epochs of one attempt (default 4)."),
    _limit("frames_per_epoch", int, 1, 10**9, "Maximum frames per query and epoch (default 512)."),
    _limit("batch", int, 1, 2**16, "Frames of a query in one step (default 16)."),
    _limit("rate", float, 0, 10, "AdamW's peak learning rate (default 0.0005)."),
    _limit("distill", float, 0, 1, "Weight of the originals' outputs against labels (default 0.5)."),
    _limit("features", float, 0, 10**6, "Weight of the feature loss (default: the method's own)."),
)
"""Fields of `merger.Recipe`."""
BOUNDS = (
    _limit("margin", float, 0, 1, "Margin above the target with which a search is content (default 0.5)."),
    parameter("accept_unproven", AcceptUnproven),
    parameter("share_prefix", SharePrefix),
    _limit("min_saving", float, 0, 1, "Skip groups that save a smaller fraction of all bytes."),
    _limit("effort", float, 0, 10**6, "Epochs of training that saving one percent of all bytes is worth (default 10)."),
    _limit("max_minutes", float, 0, 10**7, "Minutes in all, proofs and test included (default: no limit)."),
    _limit("max_flops", float, 0, 1e30, "Begin nothing new after these FLOPs (default: no limit)."),
)
"""Fields of `merger.MergeOptions`."""
SPENDING = (
    parameter("prices", Annotated[str | None, file_option("--prices", "Kinds of machines with their prices (YAML).")]),
    _text("machine", "KIND", "The kind that merges here (default: the first of --prices)."),
    _text("budget", "MONEY", "Refuse to begin what costs more, and end by then: 5usd."),
    _text("deadline", "TIME", "Refuse to begin what takes longer, and end by then: 90min, 2h."),
)
"""What `merger.prices.Spending.parse` takes."""
ADDITION = (
    parameter("onto", Annotated[str | None, file_option("--onto", "Add to this bundle; the rest stays.", "BUNDLE")]),
    parameter("public_key", Annotated[str | None, file_option("--public-key", "Require its signature by this key.")]),
)
"""The bundle that a merge adds to."""
REPLACING = (
    parameter("before", Annotated[str | None, file_option("--from", "The placement now; few bytes move.", "DIR")]),
    parameter(
        "lost", Annotated[list[str] | None, Option("--lost", metavar="BOX", help="A box of --from that is no more.")]
    ),
    _limit("max_moves", int, 0, 10**6, "Queries of --from's other boxes that may move."),
)
"""The placement that `gemel place` changes, and how far."""
TRAINING = (
    _limit("passes", int, 1, 10**12, "Frames shown in the first cycle (default 4000)."),
    _limit("rate", float, 0, 10, "AdamW's peak learning rate (default 0.001)."),
    _limit("max_cycles", int, 1, 1000, "Maximum cycles (default 3).", "--cycles"),
)
"""Fields of `merger.TrainOptions`."""


@command(app, "demo")
def run_demo(
    out: Annotated[str, file_option("--out", "Folder of the demo.", "DIR")] = "gemel-demo",
    device: Annotated[str, Option("--device", metavar="PROFILE", help="Device profile.")] = DEMO_DEVICE,
    seed: Seed = 0,
) -> CommandResult:
    """Train, merge, run and evaluate rendered camera clips. This takes about five minutes."""
    from gemel import demo
    from gemel.progress import show_progress

    with show_progress() as progress:
        result = demo.run_demo(out, device, seed, progress)
    return result_of(result, result.met)


@command(app, "inspect", entries=["gemel.tasks", "gemel.decoders"])
def inspect_workload(
    workload: Workload,
    weights: Annotated[bool, Option("--weights", help="Read the weights; pair repeated layers by similarity.")] = False,
    signature: Annotated[
        Literal["wide", "strict"],
        Option("--signature", metavar="wide|strict",
               help="What lets two layers share: equal weight shapes, or all settings (the paper's)."),
    ] = "wide",
    onto: Annotated[
        str | None, file_option("--onto", "Say what each query that is new for this bundle costs.", "BUNDLE")
    ] = None,
) -> CommandResult:  # fmt: skip
    """Models of a workload, their bytes, and what they could share."""
    from gemel import api

    found = api.inspect(workload, signature, weights, onto)
    for line in found.warnings:
        print(one_line(f"warning: {line}"), file=sys.stderr)
    return result_of(found)


@command(app, "train", TRAINING)
def train_originals(
    workload: Workload,
    query: Annotated[
        list[str] | None, Option("--query", metavar="ID", help="Train this one again; repeatable.")
    ] = None,
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted training.")] = False,
    seed: Seed = 0,
    **options: Any,
) -> CommandResult:
    """Train the originals that have no weights yet."""
    from gemel.merger import TrainOptions, train_originals
    from gemel.models.workload import load_workload
    from gemel.progress import show_progress

    with show_progress() as progress:
        given = TrainOptions(**_select(TRAINING, options))
        results = train_originals(load_workload(workload), query or None, seed, progress, given, resume)
    rows = [(one.id, key_text(one.metric), number(one.val), number(one.test), duration(one.seconds)) for one in results]
    text = table(("query", "metric", "val", "test", "time"), rows) if rows else "all queries have weights already"
    return CommandResult({"queries": [asdict(one) for one in results]}, text)


@command(app, "merge", (*RECIPE, *BOUNDS, *SPENDING, *ADDITION), entries=["gemel.methods"])
def merge_workload(
    workload: Annotated[str, Argument(metavar="WORKLOAD|FLEET", help="A workload file, or one that lists several.")],
    out: Annotated[str, file_option("-o --out", "The file to write, or the folder for a fleet.")],
    method: Method = "top-down",
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted merge to the same file.")] = False,
    precision: Annotated[
        Literal["auto", "fp32", "bf16"],
        Option("--precision", metavar="auto|fp32|bf16", help="Precision of the training; auto: bf16 where faster."),
    ] = "auto",
    weights: Annotated[
        Literal["auto", "fp32", "fp16", "int8", "int4"],
        Option("--weights", metavar="auto|fp32|fp16|int8|int4",
               help="Fewest bits tried for weights; auto: int8, then int4, as far as proven without training."),
    ] = "auto",
    threads: Annotated[int | None, number_option("--threads", 1, 4096, "Torch threads of each process.")] = None,
    ray: Annotated[
        str | None, Option("--ray", metavar="ADDRESS", help="Run on a Ray cluster: local, auto, HOST:PORT or ray://...")
    ] = None,
    seed: Seed = 0,
    **options: Any,
) -> CommandResult:  # fmt: skip
    """Share weights between the queries' models and write a bundle."""
    begun = time.monotonic()  # before torch is loaded, which takes seconds
    from gemel.bundle_summary import MergeOutcomes
    from gemel.fleet_merge import is_fleet, merge_fleet
    from gemel.merger import METHODS, MergeOptions, Recipe, Resources, merge
    from gemel.merger.distributed import process_group
    from gemel.merger.prices import Spending
    from gemel.models.bundle import open_bundle
    from gemel.models.workload import load_workload
    from gemel.progress import show_progress
    from gemel.summaries import merge_text

    recipe, bounds = Recipe(**_select(RECIPE, options)), _select(BOUNDS, options)
    addition = _select(ADDITION, options)
    spending = Spending.parse(**_select(SPENDING, options))
    public_key, resources = addition.get("public_key"), Resources(threads, ray)
    merge_options = MergeOptions(
        recipe, precision=precision, weights=weights, documents=True, public_key=public_key, resources=resources,
        spending=spending, **bounds,
    )  # fmt: skip
    if is_fleet(workload):
        if addition:
            raise InputError("--onto", "does not go together with a fleet", "merge one of its workloads")
        with show_progress() as progress:
            fleet = merge_fleet(workload, out, method, resume, seed, progress, merge_options)
        return result_of(fleet, fleet.met)
    load = load_workload(workload)
    limit_s = 60 * bounds["max_minutes"] if "max_minutes" in bounds else None
    with process_group() as ranks, show_progress(limit_s=limit_s) as progress:
        merge_options = replace(merge_options, resources=Resources(threads, ray, ranks))
        loaded_s = time.monotonic() - begun
        report = merge(load, out, method, resume, seed, progress, merge_options, addition.get("onto"))
        report = replace(report, seconds=report.seconds + loaded_s)
        if ranks.rank:
            return CommandResult({}, "", exit_code_of(report.met), silent=True)
    result = report.to_json()
    text = merge_text(result)
    judged = sum(not query.reason for query in report.queries)
    shares = METHODS[method].searches and judged > 1
    if shares and (why := MergeOutcomes.of(open_bundle(report.bundle)).why_nothing(report.untried)):
        text += f"\n{why}"
    return CommandResult(result, text, exit_code_of(report.met))


@command(app, "init")
def write_starting_files(
    folder: Annotated[str, Argument(metavar="DIR", help="Where both files go.")] = ".",
    camera: Annotated[
        list[str], Option("--camera", metavar="NAME=SOURCE", help="A camera: rtsp://..., a file, a number.")
    ] = [],  # noqa: B006
    model: Annotated[
        list[str], Option("--model", metavar="FILE[@CAMERA]", help="An .onnx or .pt2 file, and what it looks at.")
    ] = [],  # noqa: B006
) -> CommandResult:
    """Write a workload file and a box file, with comments. Asks on a terminal for what is not given."""
    from gemel import starting_files

    ask = partial(typer.prompt, default="", show_default=False, err=True) if sys.stdin.isatty() else lambda _: ""
    cameras = camera or _ask_several(ask, "a camera, NAME=SOURCE")
    models = model or _ask_several(ask, "a model, FILE.onnx or FILE.onnx@CAMERA")
    written = starting_files.write_starting_files(folder, cameras, models, ask)
    return result_of(written)


def _ask_several(ask: Callable[[str], str], what: str) -> list[str]:
    """Answers until an empty one."""
    answers = list[str]()
    while answer := ask(f"{what} ({'empty: no more' if answers else 'empty: none'})"):
        answers.append(answer)
    return answers


@command(app, "pack")
def pack_files(
    files: Annotated[list[str], Argument(metavar="FILE.onnx...", help="ONNX files, each a query of its own name.")],
    out: OutFile,
    frames: Annotated[
        str | None, file_option("--frames", "A video or folder of pictures: int8 where its frames prove it.")
    ] = None,
    accept_unproven: AcceptUnproven = None,
) -> CommandResult:
    """Put ONNX files into one bundle. Measures it beside plain sessions of ONNX Runtime."""
    from gemel.packing import pack
    from gemel.progress import show_progress

    with show_progress() as progress:
        report = pack(files, out, frames, progress, bool(accept_unproven))
    return result_of(report)


@command(app, "prepare", uses_torch=False)
def prepare_bundle(
    bundle: BundlePath,
    threads: Annotated[int, number_option("--threads", 1, 4096, "Threads of the process that prepares.")] = 1,
) -> CommandResult:
    """Prepare the graphs of a bundle for this processor. A box else does so at its first start."""
    from gemel.edge_runtime.engines.prepare import prepare_bundle
    from gemel.models.bundle import open_bundle

    prepared = prepare_bundle(open_bundle(bundle), threads)
    data = prepared.to_json()
    failed = [f"query {query}: not prepared: {reason}" for query, reason in prepared.index.failed.items()]
    line = f"{prepared.folder}: {size(data['bytes'])}, prepared in {duration(prepared.index.seconds)}"
    if prepared.index.peak_bytes:
        line += f" with at most {size(prepared.index.peak_bytes)} of memory"
    return CommandResult(data, "\n".join([line, *failed]), exit_code_of(not failed))


bundle_group = group("Look at, check, export, ship and sign bundles.", app, "bundle")


@command(app, "run", uses_torch=False, entries=["gemel.engines", "gemel.policies", "gemel.sinks"])
def run_box(
    config: Annotated[str, Argument(metavar="CONFIG|BUNDLE", help="A box config (YAML), or a bundle with --camera.")],
    camera: Annotated[
        list[str],
        Option("--camera", metavar="NAME=SOURCE", help="A camera of the bundle; the config is written and shown."),
    ] = [],  # noqa: B006
    check: Annotated[bool, Option("--check", help="Check config, bundle, cameras and sinks, then stop.")] = False,
    log_format: Annotated[Literal["text", "json"], Option("--log-format", help="Lines of the log.")] = "text",
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Option("--log-level", help="The lowest level that is logged.")
    ] = "info",
) -> CommandResult:
    """Run the box: cameras in, results out, under a memory budget."""
    from gemel.box_file import write_and_show
    from gemel.edge_runtime.life.daemon import run
    from gemel.summaries import box_exit_code, box_text, checked_text, log_summary

    _startup.restore()
    handler = LogHandler(as_json=log_format == "json")
    handler.addFilter(lambda record: not record.getMessage().startswith("ledger: "))  # printed below
    configure_log(handler, getattr(logging, log_level.upper()))
    try:
        if camera:
            config = write_and_show(config, camera, log_format == "json")
        summary = run(config, check=check)
        problems = [] if check else [*summary["unwritten"], *([summary["fault"]] if summary["fault"] else [])]
        if log_format == "json":
            log_summary(summary, problems)
            code = ExitCode.DONE if check else box_exit_code(summary)
            return CommandResult(summary, "", code, on_stderr=True, leave_threads=True)
    except GemelError as error:
        if log_format != "json":
            raise
        logging.getLogger("gemel.run").error(str(error))
        return CommandResult({}, "", ExitCode.BAD_INPUT, silent=True)
    finally:
        handler.drain(LOG_TIMEOUT_S)
    # The results may go to stdout, so the summary goes to stderr.
    shown = partial(CommandResult, summary, on_stderr=True, leave_threads=True)
    if check:
        return shown(checked_text(config, summary))
    text = "\n".join([box_text(summary), *(f"gemel: {line}" for line in problems)])
    return shown(text, exit_code=box_exit_code(summary))


_startup = SignalHandlers()


def prepare_process(words: Sequence[str]) -> None:
    """Settings of a process that runs `gemel run`: one heap, and an immediate end while its libraries are imported."""
    if words[:1] != ["run"]:
        return
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if any(script.match(name) for name in INSTALLED_SCRIPTS):
        from gemel.models.process import use_one_arena

        use_one_arena()
    if "--check" not in words:
        as_json = "--json" in words
        _startup.install(exit_at_once(lambda name: (
            f"{json.dumps(empty_summary(name))}\n" if as_json else "", f"{name} came before the box served\n"
        )))  # fmt: skip


@command(app, "reload", uses_torch=False)
def reload_box(config: Config) -> CommandResult:
    """Let a running box apply its config and bundle as they are now. A box that refuses serves on unchanged."""
    from gemel import service

    found = service.reload_box(config)
    outcome = "applied" if found["applied"] else f"not applied, the box serves on: {found['reason']}"
    if found["applied"] == "partly":
        outcome = f"applied, except that {join_names(found['held_back'])} keep their old weights (see the box's status)"
    return CommandResult(found, f"{config}: {outcome}", exit_code_of(found["applied"] is True))


config_group = group("Check workload, box and fleet files.", app, "config")


@command(config_group, "check", uses_torch=False)
def check_config(
    file: Annotated[str, Argument(metavar="FILE", help="A workload, box or fleet file (YAML), or a bundle.")],
) -> CommandResult:
    """Name all that this version does not read in a file. Exit code 2 where there is anything."""
    from gemel import config_check

    found = config_check.check_config(file)
    return result_of(found)


@command(app, "rollback", uses_torch=False)
def roll_back_box(config: Config) -> CommandResult:
    """Let the bundle before the last update serve again. At once, where the box runs."""
    from gemel import service

    found = service.roll_back(config)
    outcome = "the bundle before the last update serves" if found["applied"] else f"not done: {found['reason']}"
    return CommandResult(found, f"{config}: {outcome}", exit_code_of(found["applied"] is True))


service_group = group("Run a box as a systemd service.", app, "service")


@command(service_group, "install", uses_torch=False)
def install_service(
    config: Config,
    out: Annotated[str | None, file_option("-o --out", "The unit (default in /etc/systemd).")] = None,
    user: Annotated[
        str | None, Option("--user", metavar="NAME", help="User of the service (default the config's owner, not root).")
    ] = None,
    environment: Annotated[
        str | None, file_option("--environment", "Lines NAME=VALUE for each ${NAME} of the config.")
    ] = None,
) -> CommandResult:
    """Write the systemd unit that runs a box. The printed command starts it."""
    from gemel import service
    from gemel.edge_runtime.life.config import any_device, load_config

    path = Path(out) if out else service.UNIT_PATH
    variables_file = Path(environment) if environment else None
    variables = {} if variables_file is None else service.read_variables(variables_file)
    box = load_config(config, {**os.environ, **variables}, any_device)
    warnings = service.install_unit(box, path, user, variables_file)
    then = f"systemctl daemon-reload && systemctl enable --now {path.name}"
    lines = [*(f"warning: {line}" for line in warnings), f"{path}: written; start it with: {then}"]
    return CommandResult({"unit": str(path), "then": then, "warnings": warnings}, "\n".join(map(one_line, lines)))


@command(app, "eval")
def evaluate_bundle(
    bundle: BundlePath,
    workload: Workload,
    out: Annotated[str, file_option("-o --out", "Folder of report.html and report.json.", "DIR")],
    device: Device = None,
    memory: Memory = "50%",
    seeds: Annotated[int, number_option("--seeds", 1, 1000, "Streams that are drawn and averaged.")] = 3,
    motion_gating: Annotated[
        bool, Option("--motion-gating", help="Also what skipping still frames saves and costs.")
    ] = False,
) -> CommandResult:
    """Offline and streaming accuracy of a bundle, as a report. Exit code 1 when a query misses its target."""
    from gemel.evaluation import REPORT_HTML, EvalOptions, evaluate
    from gemel.progress import show_progress
    from gemel.summaries import conclusion_text, evaluation_text

    with show_progress() as progress:
        options = EvalOptions(device or DEFAULT_DEVICE, seeds, memory, motion_gating)
        report = evaluate(bundle, workload, out, options, progress)
    text = f"{evaluation_text(report)}\n\n{conclusion_text(report)}\nreport: {Path(out) / REPORT_HTML}"
    return CommandResult(report.to_json(), text, exit_code_of(all(row.met for row in report.offline)))


@command(app, "report", uses_torch=False)
def compare_reports(
    reports: Annotated[list[str], Argument(metavar="REPORT...", help="A report.json, or its folder.")],
    out: Annotated[str, file_option("-o --out", "The page (HTML); replaced if it exists.")],
) -> CommandResult:
    """Compare several evaluations of one workload on a page."""
    from gemel import api

    found = api.compare_reports(reports, out)
    rows = [
        (one.letter, one.report.bundle.file, one.report.method, size(one.report.bytes.after),
         f"{one.met} of {len(one.report.offline)}", percent(one.worst_ratio))
        for one in found.reports
    ]  # fmt: skip
    text = table(("", "bundle", "method", "bytes", "targets met", "worst query"), rows)
    lines = [text, "", found.answer, *found.differences, f"report: {out}"]
    return CommandResult(found.to_json(), "\n".join(lines))


drift_group = group("Check whether a box still answers as its originals do. Mend what does not.", app, "drift")


@command(drift_group, "check", uses_torch=False)
def check_drift(
    spool: SpoolFolder,
    workload: Workload,
    out: Annotated[str | None, file_option("-o --out", "Write a bundle with the failing queries reverted.")] = None,
    bundle: SpoolBundle = None,
) -> CommandResult:
    """Compare a box with its originals on sampled frames. Exit code 1 when a query is below target."""
    from gemel import drift
    from gemel.progress import show_progress

    with show_progress() as progress:
        found = drift.check_drift(spool, workload, out, bundle, progress)
    return result_of(found, found.met)


@command(drift_group, "mend")
def mend_drift(
    spool: SpoolFolder,
    workload: Workload,
    out: Annotated[str, file_option("-o --out", "The bundle in which the failing queries have learned again.")],
    bundle: SpoolBundle = None,
) -> CommandResult:
    """Train drifted queries' norms and heads on sampled frames. Exit code 1 when one cannot be mended."""
    from gemel.drift_mend import mend_drift
    from gemel.progress import show_progress

    with show_progress() as progress:
        found = mend_drift(spool, workload, out, bundle, progress)
    return result_of(found, found.met)


@command(app, "simulate", CONDITIONS, uses_torch=False, entries=["gemel.policies"])
def simulate_box(
    source: Annotated[str | None, Argument(metavar="BUNDLE|WORKLOAD", help="Left out with --replay.")] = None,
    duration_s: Annotated[float, number_option("--duration", 1e-3, MAX_SIMULATED_S, "Seconds.", "S")] = 60.0,
    replay: Annotated[
        str | None, file_option("--replay", "Replay what a box recorded (`trace:` in its config).", "TRACE")
    ] = None,
    **conditions: Any,
) -> CommandResult:
    """Run the box's schedule on a virtual clock."""
    from gemel import planner
    from gemel.edge_runtime.simulation.replay import replay as replay_trace

    if replay is not None:
        replayed = replay_trace(replay)
        return CommandResult(replayed.to_json(), planner.format_replay(replayed))
    if source is None:
        raise InputError("gemel simulate", "nothing to simulate", "give a bundle, a workload or --replay TRACE")
    found = planner.simulate_box(source, _conditions(conditions), duration_s)
    return result_of(found)


@command(app, "plan", CONDITIONS, uses_torch=False, entries=["gemel.policies"])
def plan_box(source: Source, **conditions: Any) -> CommandResult:
    """What fits, what swaps and which rate each query will have."""
    from gemel import planner

    plan = planner.plan_every_device if conditions["device"] == EVERY_DEVICE else planner.plan_box
    found = plan(source, _conditions(conditions))
    return result_of(found)


@command(app, "profile", uses_torch=False, entries=["gemel.engines"])
def profile_bundle(
    bundle: BundlePath,
    device: Annotated[
        Literal["cpu", "cuda"] | None,
        Option("--device", metavar="cpu|cuda", help="Where to measure (default: cuda if available)."),
    ] = None,
    engine: Annotated[str, Option("--engine", metavar="NAME", help="An engine of those below, or auto.")] = "auto",
    workload: Annotated[
        str | None, file_option("--workload", "Measure how accuracy falls with age on its val footage.")
    ] = None,
    factory: Factories = [],  # noqa: B006
    share: Annotated[bool, Option("--share", help="Also print a row for the table of docs/boards.md.")] = False,
) -> CommandResult:
    """Measure what a bundle's queries cost on this machine. Writes BUNDLE.profile.json."""
    from gemel import profiler
    from gemel.progress import show_progress

    with show_progress() as progress:
        found = profiler.profile_bundle(bundle, device, factory, progress=progress, engine=engine, workload=workload)
    if not share:
        return result_of(found)
    from gemel.boards import make_row
    from gemel.models.bundle import open_bundle

    row = make_row(open_bundle(bundle, factory, Path.cwd()), found, factory)
    return CommandResult({**found.to_json(), "row": asdict(row)}, f"{found.to_text()}\n\n{row.to_text()}")


@command(app, "place", REPLACING)
def place_fleet(
    fleet: Annotated[str, Argument(metavar="FLEET", help="A fleet file (YAML).")],
    out: Annotated[str, file_option("-o --out", "Folder of placement.json and one workload a box.", "DIR")],
    objective: Annotated[
        Objective,
        Option("--objective", metavar="boxes|watts|frames|fair",
               help="boxes: cheapest set of boxes; watts: least watts; frames: most frames in time; fair: best worst "
               "query."),
    ] = "boxes",
    shared: Annotated[
        Shared,
        Option("--shared", metavar="predicted|ceiling|none",
               help="What models on one box share: what merges keep, all they can, or nothing."),
    ] = "predicted",
    min_frames: Annotated[
        float, number_option("--min-frames", 0, 1, "Fraction of its frames that every box must have time for.")
    ] = 0.0,
    max_seconds: Annotated[
        float, number_option("--max-seconds", 1e-3, 86_400, "Time limit of the search.")
    ] = DEFAULT_PLACEMENT.seconds,
    seed: Seed = 0,
    **options: Any,
) -> CommandResult:  # fmt: skip
    """Decide which queries of a fleet run on which box. Exit code 1 when some have no box."""
    from gemel.fleet import load_fleet, lose_boxes
    from gemel.placement import find_placement, read_placement, reserve_folder
    from gemel.progress import show_progress

    load = load_fleet(fleet)
    reserve_folder(out, load)
    before, lost, max_moves = options["before"], options["lost"], options["max_moves"]
    if lost or max_moves is not None:
        if before is None:
            raise InputError("gemel place", "--lost and --max-moves change a placement", "give --from DIR")
        load = lose_boxes(load, lost or [])
    goal = PlacementOptions(objective, shared, min_frames, seed, max_seconds, max_moves)
    with show_progress() as progress:
        found = find_placement(load, goal, read_placement(before) if before else {}, progress)
    found.write(out)
    return result_of(found, not found.unplaced)


@command(app, "doctor", uses_torch=False)
def diagnose_machine(
    folder: Annotated[
        str | None, file_option("--folder", "Where storage is measured (default: temporary folder).", "DIR")
    ] = None,
) -> CommandResult:
    """Measure this machine: copies, storage, and the engines that run."""
    from gemel.doctor import diagnose

    found = diagnose(folder)
    return result_of(found)


def exit_code_of(met: bool) -> ExitCode:
    """The exit code of a command whose result is as wanted, or falls short."""
    return ExitCode.DONE if met else ExitCode.SHORT


def result_of(found: Any, met: bool = True) -> CommandResult:
    """A value of the API as a command's result."""
    return CommandResult(found.to_json(), found.to_text(), exit_code_of(met))


def _conditions(options: dict[str, Any]) -> Conditions:
    return Conditions(**{**options, "factories": tuple(options["factories"])})


def _select(options: Sequence[introspection.Parameter], given: dict[str, Any]) -> dict[str, Any]:
    """The options of a table that were given on the command line."""
    return {one.name: given[one.name] for one in options if given[one.name] is not None}
