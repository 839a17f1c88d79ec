"""What each command does once its words are parsed: call one public function, and say how it came out."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemel.evaluation.summary import evaluation_text
from gemel.looking.box import box_text
from gemel.looking.scores import scores_text
from gemel.progress import shown_on
from gemel.text import duration, number, percent, size, table

FELL_SHORT, INTERRUPTED = 1, 130


@dataclass(frozen=True)
class Outcome:
    """A command's result as JSON, as text for people (`aside`: on stderr), and its exit code."""

    result: dict[str, Any]
    text: str
    exit_code: int = 0
    aside: bool = False


def inspect(args: argparse.Namespace) -> Outcome:
    """`gemel inspect`."""
    from gemel.looking.inspect import inspect_workload
    from gemel.looking.zoo_matrix import zoo_matrix
    from models.errors import InputError
    from models.files.atomic import check_output, writing

    if (args.workload is None) != args.zoo:
        raise InputError("gemel inspect", "wants a workload file or --zoo", "give one of the two", "WORKLOAD")
    if args.picture and not args.zoo:
        raise InputError("--picture", "shows the zoo's matrix", "give --zoo with it")
    if not args.zoo:
        inspection = inspect_workload(args.workload, args.signature, args.weights)
        return Outcome(inspection.to_json(), inspection.to_text())
    picture = check_output(args.picture, overwrite=True) if args.picture else None
    matrix = zoo_matrix(args.signature)
    if picture is not None:
        with writing(picture, overwrite=True) as file:
            file.write(matrix.to_svg().encode())
    return Outcome(matrix.to_json(), matrix.to_text())


def train(args: argparse.Namespace) -> Outcome:
    """`gemel train`."""
    from merger import TrainOptions, train_originals
    from models.workload import load_workload

    options = TrainOptions(**_given(passes=args.passes, rate=args.rate, max_cycles=args.cycles))
    with shown_on() as progress:
        results = train_originals(load_workload(args.workload), args.query, args.seed, progress, options)
    rows = [(one.id, one.metric, number(one.val), number(one.test), duration(one.seconds)) for one in results]
    text = table(("query", "metric", "val", "test", "time"), rows) if rows else "every query has its weights already"
    return Outcome({"queries": [asdict(one) for one in results]}, text)


def merge(args: argparse.Namespace) -> Outcome:
    """`gemel merge`; falls short when a query misses its target on test."""
    from merger import MergeOptions, Recipe, Resources
    from merger import merge as merge_workload
    from models.workload import load_workload

    words = ("epochs", "frames_per_epoch", "rate", "batch", "distill", "features")
    recipe = Recipe(**_given(**{word: getattr(args, word) for word in words}))
    names = ("margin", "min_saving", "max_minutes", "max_work", "precision", "weights")
    bounds = _given(**{word: getattr(args, word) for word in names})
    options = MergeOptions(recipe, choose_rate=args.rate is None, beyond=args.beyond, **bounds)
    with shown_on() as progress:
        report = merge_workload(
            load_workload(args.workload), args.out, args.method, args.resume, args.seed, progress, options,
            Resources(args.workers, args.threads, args.ray),
        )  # fmt: skip
    result = report.to_json()
    text = "\n".join([
        scores_text(result["queries"]),
        "",
        f"{report.bundle}: {size(report.bytes_before)} became {size(report.bytes_after)}, "
        f"{percent(report.saved_fraction)} saved (ceiling {percent(report.ceiling_fraction)}), "
        f"in {duration(report.seconds)}",
    ])  # fmt: skip
    return Outcome(result, text, 0 if report.met else FELL_SHORT)


def _given(**options: Any) -> dict[str, Any]:
    """The options that stand on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def bundle_show(args: argparse.Namespace) -> Outcome:
    """`gemel bundle show`."""
    from gemel.looking.showing import shown
    from models.bundle import open_bundle

    found = shown(open_bundle(args.bundle))
    return Outcome(found.to_json(), found.to_text(args.sets))


def bundle_verify(args: argparse.Namespace) -> Outcome:
    """`gemel bundle verify`; falls short when the bundle is refused."""
    from models.bundle import verify_bundle

    problems = verify_bundle(args.bundle)
    text = "\n".join(f"{args.bundle}: {problem}" for problem in problems) or f"{args.bundle}: sound"
    return Outcome({"ok": not problems, "problems": problems}, text, FELL_SHORT if problems else 0)


def bundle_export(args: argparse.Namespace) -> Outcome:
    """`gemel bundle export`."""
    from models.bundle import open_bundle
    from models.export import export_query

    written = export_query(open_bundle(args.bundle, args.factory, Path.cwd()), args.query, args.out, args.batch)
    shapes = [
        f"{name} ({', '.join(map(str, shape))})" for name, shape in (*written.inputs.items(), *written.outputs.items())
    ]
    frames, *outputs = shapes
    text = f"{written.path}: {size(written.nbytes)}, opset {written.opset}; {frames} -> {', '.join(outputs)}"
    return Outcome({"query": args.query, **written.to_json()}, text)


def run(args: argparse.Namespace) -> Outcome:
    """`gemel run`; what it did goes to stderr, since a sink may write its results to stdout."""
    import logging

    from edge_runtime.daemon import run as run_box

    shown = logging.StreamHandler()
    shown.addFilter(lambda record: not record.getMessage().startswith("ledger: "))  # it is printed as a table
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S", level=logging.INFO, handlers=[shown])
    summary = run_box(args.config, check=args.check)
    if args.check:
        fits = "everything stays resident" if summary["fits"] else "queries take turns in memory"
        needs = f"{size(summary['weights_bytes'])} of weights, {size(summary['workspace_bytes'])} of workspace"
        streams = "".join(
            f"; {query} streams {size(nbytes)} in every run" for query, nbytes in summary["streamed_bytes"].items()
        )
        text = f"{args.config}: sound; {needs}, budget {size(summary['budget_bytes'])}: {fits}{streams}"
        return Outcome(summary, text, aside=True)
    interrupted = summary["stopped_by"] == "SIGINT"
    return Outcome(summary, box_text(summary), INTERRUPTED if interrupted else 0, aside=True)


def eval(args: argparse.Namespace) -> Outcome:
    """`gemel eval`; falls short when a query misses its target on test."""
    from gemel.evaluation.evaluating import REPORT_HTML, evaluate

    with shown_on() as progress:
        document = evaluate(args.bundle, args.workload, args.out, args.device, args.seeds, progress)
    text = f"{evaluation_text(document)}\n\nreport: {args.out.rstrip('/')}/{REPORT_HTML}"
    met = all(row["met"] for row in document["offline"])
    return Outcome(document, text, 0 if met else FELL_SHORT)


def simulate(args: argparse.Namespace) -> Outcome:
    """`gemel simulate`."""
    from gemel.planning.simulation import replay_run, replayed_text, simulate_box

    if args.replay is not None:
        replayed = replay_run(args.replay)
        return Outcome(replayed.to_json(), replayed_text(replayed))
    if args.bundle is None:
        from models.errors import InputError

        raise InputError("gemel simulate", "nothing to simulate", "give a bundle, a workload or --replay TRACE")
    found = simulate_box(
        args.bundle, args.device, args.memory, args.duration, args.seed, args.policy, args.shared, args.factory,
        args.stream,
    )  # fmt: skip
    return Outcome(found.to_json(), found.to_text())


def doctor(args: argparse.Namespace) -> Outcome:
    """`gemel doctor`."""
    from gemel.doctor import diagnose

    found = diagnose(args.folder)
    return Outcome(found.to_json(), found.to_text())


def profile(args: argparse.Namespace) -> Outcome:
    """`gemel profile`."""
    from gemel.planning.profiling import profile_bundle

    with shown_on() as progress:
        found = profile_bundle(args.bundle, args.device, args.factory or (), progress=progress, engine=args.engine)
    return Outcome(found.to_json(), found.to_text())


def plan(args: argparse.Namespace) -> Outcome:
    """`gemel plan`."""
    from gemel.planning.planning import EVERY_DEVICE, plan_box, plan_everywhere

    given = (args.policy, args.shared, args.seed, args.factory, args.stream)
    everywhere = args.device == EVERY_DEVICE
    found = (
        plan_everywhere(args.bundle, args.memory, *given)
        if everywhere
        else plan_box(args.bundle, args.memory, args.device, *given)
    )
    return Outcome(found.to_json(), found.to_text())


def demo(args: argparse.Namespace) -> Outcome:
    """`gemel demo`; falls short when a query misses its target on test."""
    from gemel.demo import run_demo

    with shown_on() as progress:
        result = run_demo(args.out, args.device, args.seed, progress)
    text = f"{result.to_text()}\n\nreport: {result.report}"
    return Outcome(result.to_json(), text, 0 if result.met else FELL_SHORT)
