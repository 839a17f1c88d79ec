"""The command line: parses, calls one public function, prints.

Exit codes: 0 done, 1 ran but the result falls short, 2 bad input, 130 interrupted. Everything heavy is
imported by the command that needs it (`gemel.commands`), so that `gemel --help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from gemel.text import finite
from models.errors import GemelError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
METHODS = (
    "wide", "gemel", "earliest", "latest", "random", "one-model", "mainstream", "ceiling", "joint", "none",
)  # fmt: skip


class _Parser(argparse.ArgumentParser):
    """Argparse, but a usage error is one line, as every other error here."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_BAD_INPUT, f"{self.prog}: {message}; see '{self.prog} --help'\n")


def _at_least_one(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def _batch(text: str) -> int | str:
    return text if text == "dynamic" else _at_least_one(text)


def _positive(text: str) -> float:
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return float(text)


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(prog="gemel", description="Run more vision models on one edge box by sharing their weights.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, summary: str, into: Any = commands) -> argparse.ArgumentParser:
        made = into.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        made.add_argument("--json", action="store_true", help="one JSON object on stdout, logs on stderr")
        return made

    def seed(made: argparse.ArgumentParser) -> None:
        made.add_argument("--seed", type=int, default=0, help="seed of everything random (default 0)")

    def number(made: argparse.ArgumentParser, name: str, kind: Callable[[str], Any], help: str) -> None:
        made.add_argument(name, type=kind, metavar="N", help=help)

    def device(made: argparse.ArgumentParser, default: str = "orin-nano-8gb", or_all: str = "") -> None:
        made.add_argument(
            "--device",
            default=default,
            metavar="PROFILE",
            help=f"device profile of the virtual clock (default {default}){or_all}",
        )

    made = command("demo", "the whole road on rendered camera clips: train, merge, run, report")
    made.add_argument("--out", default="gemel-demo", metavar="DIR", help="where everything goes (default gemel-demo)")
    device(made, "jetson-nano")  # four small models do not press anything larger
    seed(made)

    made = command("inspect", "models, bytes, groups of shareable layers and the ceiling of a workload")
    made.add_argument("workload", metavar="WORKLOAD", nargs="?")
    made.add_argument("--zoo", action="store_true", help="the zoo instead: what every pair of architectures shares")
    made.add_argument("--picture", metavar="FILE", help="with --zoo, the matrix as an SVG picture")
    made.add_argument("--weights", action="store_true", help="read the weights, and pair repeated layers by likeness")
    made.add_argument(
        "--signature",
        choices=("wide", "strict"),
        default="wide",
        help="what lets two layers share: weight shape alone, or every setting equal (the paper's)",
    )

    made = command("train", "train the originals that have no weights yet")
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("--query", action="append", metavar="ID", help="only this query, trained again (may be repeated)")
    number(made, "--passes", int, "frames shown in the first cycle (default 4000)")
    number(made, "--rate", float, "AdamW's peak learning rate (default 0.001)")
    number(made, "--cycles", int, "cycles of training at most (default 3)")
    seed(made)

    made = command("merge", "share weights between the queries' models and write a bundle")
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("-o", "--out", required=True, metavar="FILE", help="the bundle to write")
    shown = f"{METHODS[0]} (default), {', '.join(METHODS[1:])}"
    made.add_argument("--method", default=METHODS[0], metavar="M", help=shown)
    made.add_argument("--resume", action="store_true", help="go on where a merge to the same file was interrupted")
    number(made, "--epochs", int, "epochs of one attempt at most (default 4)")
    number(made, "--frames-per-epoch", int, "frames of a query in one epoch at most (default 512)")
    number(made, "--batch", int, "frames of a query in one step (default 16)")
    number(made, "--rate", float, "AdamW's peak learning rate (default: chosen on val)")
    number(made, "--distill", float, "weight of the originals' outputs against the labels, 0 to 1 (default 0.5)")
    number(made, "--features", float, "weight of the features before the heads (default: the method's own)")
    made.add_argument("--precision", choices=("auto", "fp32", "bf16"), help="of the training (default: measured)")
    number(made, "--margin", float, "how far above its target a query must come on val, 0 to 1 (default 0.5)")
    made.add_argument(
        "--beyond", action="store_true", help="past the ceiling: sharing within models, layers of low rank"
    )
    made.add_argument(
        "--weights",
        choices=("fp32", "fp16", "int8"),
        help="how narrow weights are stored and resident at most, as far as every query bears it (default fp32)",
    )
    number(made, "--min-saving", float, "leave out groups that save less than this part of all bytes (default 0)")
    number(made, "--max-minutes", float, "begin nothing more after this time (default: no limit)")
    number(made, "--max-work", float, "begin nothing more after this work, image passes x FLOPs (default: no limit)")
    number(made, "--workers", _at_least_one, "jobs at once (default: as cores and memory allow; 1 on a GPU)")
    number(made, "--threads", _at_least_one, "of each training: then the bundle is the same with any number of workers")
    made.add_argument("--ray", metavar="ADDRESS", help="workers in a Ray cluster: local, auto, HOST:PORT or ray://...")
    seed(made)

    bundle = commands.add_parser("bundle", help="look at and check bundles", description="Look at and check bundles.")
    actions = bundle.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = command("show", "what a bundle holds, and what became of each set of layers in the merge", actions)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--sets", action="store_true", help="every set of layers in a line of its own")
    made = command("verify", "rehash every tensor and check every promise of the manifest", actions)
    made.add_argument("bundle", metavar="BUNDLE")
    made = command("export", "write one query's model as an ONNX file", actions)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--query", required=True, metavar="ID", help="which query")
    made.add_argument("-o", "--out", required=True, metavar="FILE", help="the ONNX file to write")
    made.add_argument(
        "--batch",
        type=_batch,
        metavar="N|dynamic",
        help="frames at once (default dynamic; 1 for a two-stage detector, which needs a fixed number)",
    )
    made.add_argument(
        "--factory",
        action="append",
        default=[],
        metavar="NAME",
        help="a model package.module:factory that may be imported for it (may be repeated)",
    )

    made = command("run", "the edge daemon: cameras in, results out, under a memory budget")
    made.add_argument("config", metavar="CONFIG")
    made.add_argument("--check", action="store_true", help="check config, bundle and cameras, then stop")

    made = command("eval", "offline and streaming accuracy of a bundle, with report.html and report.json")
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("workload", metavar="WORKLOAD")
    made.add_argument("-o", "--out", required=True, metavar="DIR", help="folder of the report")
    device(made)
    made.add_argument(
        "--seeds", type=_at_least_one, default=3, metavar="N", help="streams drawn and averaged (default 3)"
    )

    def boxed(made: argparse.ArgumentParser, or_all: str = "") -> None:
        device(made, or_all=or_all)
        made.add_argument(
            "--memory",
            default="min",
            metavar="M",
            help="min, 50%%, 75%%, all (of what the originals need), or a size such as 512MiB (default min)",
        )
        made.add_argument(
            "--policy", default="ours", metavar="P", help="schedule: ours, gemel or time-sharing (default ours)"
        )
        made.add_argument("--shared", action="store_true", help="a workload's models share all that they could")
        made.add_argument(
            "--stream",
            action="store_true",
            help="a query too large for the memory runs all the same: what cannot stay is copied in every run",
        )
        made.add_argument(
            "--factory",
            action="append",
            default=[],
            metavar="MODULE:NAME",
            help="a model of your own in the bundle, from here or Python's path, to allow (may be repeated)",
        )
        seed(made)

    made = command("simulate", "the box's own schedule on a virtual clock")
    made.add_argument("bundle", metavar="BUNDLE|WORKLOAD", nargs="?")
    boxed(made)
    made.add_argument("--duration", type=_positive, default=60.0, metavar="S", help="simulated seconds (default 60)")
    made.add_argument("--replay", metavar="TRACE", help="replay what a box recorded (`trace:` in its config) instead")

    made = command("plan", "what fits, what swaps and what rate each query will have, before anything is shipped")
    made.add_argument("bundle", metavar="BUNDLE|WORKLOAD")
    boxed(made, "; all: every one, to compare")

    made = command("profile", "measure what a bundle's queries cost on this machine; writes BUNDLE.profile.json")
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--device", choices=("cpu", "cuda"), help="where to measure (default: cuda where there is one)")
    made.add_argument("--engine", default="auto", metavar="NAME", help="an engine of docs/engines.md (default: auto)")
    made.add_argument(
        "--factory", action="append", metavar="MODULE:NAME", help="a model of your own to allow (may be repeated)"
    )

    made = command("doctor", "measure this machine: copy and storage bandwidth, engines available")
    made.add_argument("--folder", metavar="DIR", help="where storage is measured (default: the system's temporary one)")
    return parser


def _print(text: str, out: TextIO) -> None:
    try:
        print(text, file=out, flush=True)
    except BrokenPipeError:  # the reader (head, less) has seen enough: not an error of ours
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is returned, usage errors and --help leave through SystemExit."""
    out = sys.stdout
    try:
        args = build_parser().parse_args(argv)
        from gemel import commands

        handler = getattr(commands, "_".join(filter(None, [args.command, getattr(args, "action", None)])))
        # A library that prints must not spoil the one JSON object.
        aside = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with aside:
            outcome = handler(args)
        if args.json:
            _print(json.dumps(finite(outcome.result), allow_nan=False), out)
        else:
            _print(outcome.text, sys.stderr if outcome.aside else out)
        return outcome.exit_code
    except GemelError as error:
        return _complain(error, error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(f"{where}{error.strerror or error}", EXIT_BAD_INPUT)
    except KeyboardInterrupt:
        return _complain("interrupted", EXIT_INTERRUPTED)


def _complain(fault: object, exit_code: int) -> int:
    print("gemel: " + " ".join(str(fault).split()), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
