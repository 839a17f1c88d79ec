"""`gemel bundle`: looks at, checks, exports, ships and signs bundles."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gemel.commands import grammar
from gemel.commands.outcome import DONE, FELL_SHORT, Outcome
from gemel.text import size
from models.errors import BundleError, one_line


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
    config = "a box config: allow the models of its `factories`, ask for a signature if it has a `public_key`"
    made.add_argument("--config", metavar="FILE", help=config)
    signed = "ask for a signature by the owner of this key (PEM or OpenSSH, Ed25519)"
    made.add_argument("--public-key", metavar="FILE", help=signed)

    made = grammar.command(actions, "export", "write one query's model as an ONNX file", export)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--query", required=True, metavar="ID", help="which query")
    made.add_argument("-o", "--out", required=True, metavar="FILE", help="the ONNX file to write")
    frames = "frames at once (default dynamic; 1 for a two-stage detector, which needs a fixed number)"
    made.add_argument("--batch", type=_batch, metavar="N|dynamic", help=frames)
    grammar.factories(made)

    made = grammar.command(actions, "diff", "write what a box that has one bundle lacks of another", diff)
    made.add_argument("old", metavar="OLD", help="the bundle that the box has")
    made.add_argument("new", metavar="NEW", help="the bundle that it is to have")
    made.add_argument("-o", "--out", metavar="FILE", help="the update to write; left out, its bytes are counted")

    made = grammar.command(actions, "apply", "make the new bundle of the old one and an update, byte by byte", apply)
    made.add_argument("old", metavar="OLD", help="the bundle that is here")
    made.add_argument("update", metavar="UPDATE", help="what `gemel bundle diff` wrote")
    made.add_argument("-o", "--out", required=True, metavar="FILE", help="the bundle to write")

    made = grammar.command(actions, "sign", "sign a bundle, in place", sign)
    made.add_argument("bundle", metavar="BUNDLE")
    made.add_argument("--key", required=True, metavar="FILE", help="a private key (PEM or OpenSSH, Ed25519)")


def _batch(text: str) -> int | str:
    return text if text == "dynamic" else grammar.whole(1, 4096)(text)


def show(args: argparse.Namespace) -> Outcome:
    """What a bundle holds."""
    from gemel.bundle_summary import summarize_bundle
    from models.bundle import open_bundle

    found = summarize_bundle(open_bundle(args.bundle))
    return Outcome(found.to_json(), found.to_text(args.sets))


def verify(args: argparse.Namespace) -> Outcome:
    """Falls short when the bundle is refused."""
    from models.bundle import unchecked, verify_bundle

    factories, folder, keys = args.factory, Path.cwd(), [args.public_key] if args.public_key else []
    if args.config is not None:
        from edge_runtime.config import load_config

        config = load_config(args.config)
        factories, folder = [*factories, *config.factories], config.path.resolve().parent
        keys += [config.public_key] if config.public_key else []
    problems = verify_bundle(args.bundle, factories, folder) or _unsigned(args.bundle, keys)
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


def diff(args: argparse.Namespace) -> Outcome:
    """What to ship to a box."""
    from models.bundle.delta import write_update

    made = write_update(args.old, args.new, args.out)
    counts = f"{size(made.bytes)} in place of {size(made.bundle_bytes)}, {made.tensors} of {made.of_tensors} tensors"
    result = {"update": args.out, **made.to_json()}
    return Outcome(result, one_line(f"{args.out or 'an update'}: {counts}"))


def apply(args: argparse.Namespace) -> Outcome:
    """The new bundle."""
    from models.bundle.delta import apply_update

    made = apply_update(args.old, args.update, args.out)
    return Outcome(
        {"bundle": args.out, **made}, one_line(f"{args.out}: {size(made['bytes'])}, SHA-256 {made['digest']}")
    )


def sign(args: argparse.Namespace) -> Outcome:
    """The same bundle, signed."""
    from models.bundle.signing import sign_bundle

    sign_bundle(args.bundle, args.key)
    return Outcome({"bundle": args.bundle, "signed": True}, one_line(f"{args.bundle}: signed"))


def _unsigned(bundle: str, keys: Iterable[str | Path]) -> list[str]:
    """What is wrong with the signature of a sound bundle, where one is asked for."""
    from models.bundle import open_bundle
    from models.bundle.signing import check_signature

    problems = []
    for key in keys:
        try:
            check_signature(open_bundle(bundle), key)
        except BundleError as error:
            problems.append(error.problem)
    return problems
