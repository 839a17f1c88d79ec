"""`gemel bundle`: looks at, checks and exports bundles."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import DONE, FELL_SHORT, Outcome
from gemel.text import size
from models.errors import one_line


def register(commands: Any) -> None:
    """The grammar of its actions."""
    bundle = commands.add_parser("bundle", help="look at and check bundles", description="Look at and check bundles.")
    actions = bundle.add_subparsers(dest="action", metavar="ACTION", required=True)
    made = grammar.command(
        actions, "show", "what a bundle holds, and what became of each set of layers in the merge", show
    )
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--sets", action="store_true", help="every set of layers in a line of its own")

    made = grammar.command(actions, "verify", "rehash every tensor and check every promise of the manifest", verify)
    made.add_argument("bundle", metavar="BUNDLE")
    grammar.factories(made)
    made.add_argument("--config", metavar="FILE", help="a box config: allow the models of its `factories`")

    made = grammar.command(actions, "export", "write one query's model as an ONNX file", export)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--query", required=True, metavar="ID", help="which query")
    made.add_argument("-o", "--out", required=True, metavar="FILE", help="the ONNX file to write")
    frames = "frames at once (default dynamic; 1 for a two-stage detector, which needs a fixed number)"
    made.add_argument("--batch", type=_batch, metavar="N|dynamic", help=frames)
    grammar.factories(made)


def _batch(text: str) -> int | str:
    return text if text == "dynamic" else grammar.at_least_one(text)


def show(args: argparse.Namespace) -> Outcome:
    """What a bundle holds."""
    from gemel.looking.showing import shown
    from models.bundle import open_bundle

    found = shown(open_bundle(args.bundle))
    return Outcome(found.to_json(), found.to_text(args.sets))


def verify(args: argparse.Namespace) -> Outcome:
    """Falls short when the bundle is refused."""
    from models.bundle import unchecked, verify_bundle

    factories, folder = args.factory, Path.cwd()
    if args.config is not None:
        from edge_runtime.config import load_config

        config = load_config(args.config)
        factories, folder = [*factories, *config.factories], config.path.resolve().parent
    problems = verify_bundle(args.bundle, factories, folder)
    left = unchecked(args.bundle, factories)
    said = [one_line(f"{args.bundle}: {line}") for line in (*(problems or ["sound"]), *left)]
    result = {"ok": not problems, "problems": problems, "unchecked": left}
    return Outcome(result, "\n".join(said), FELL_SHORT if problems else DONE)


def export(args: argparse.Namespace) -> Outcome:
    """One query's model as ONNX."""
    from models.bundle import open_bundle
    from models.export import export_query

    written = export_query(open_bundle(args.bundle, args.factory, Path.cwd()), args.query, args.out, args.batch)
    frames, *outputs = (
        f"{name} ({', '.join(map(str, shape))})" for name, shape in (*written.inputs.items(), *written.outputs.items())
    )
    text = f"{written.path}: {size(written.nbytes)}, opset {written.opset}; {frames} -> {', '.join(outputs)}"
    return Outcome({"query": args.query, **written.to_json()}, text)
