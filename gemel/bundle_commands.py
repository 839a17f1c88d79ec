"""The commands that look at, check, export, ship and sign bundles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from gemel.commands import (
    BundlePath,
    Factories,
    OutFile,
    bundle_group,
    exit_code_of,
    file_option,
)
from gemel.invocation import CommandResult, command
from gemel.models.errors import BundleError, InputError, one_line
from gemel.text import size

if TYPE_CHECKING:
    from gemel.models.export.onnx_file import ExportedModel


def _parse_batch(text: Any) -> int | str:
    if text != "dynamic" and not (str(text).isdecimal() and 1 <= int(text) <= 4096):
        raise typer.BadParameter(f"'{text}' is not a whole number from 1 to 4096, or dynamic")
    return text if text == "dynamic" else int(text)


@command(bundle_group, "show", uses_torch=False)
def show_bundle(
    bundle: BundlePath, sets: Annotated[bool, Option("--sets", help="One line for every set of layers.")] = False
) -> CommandResult:
    """What a bundle holds, and what became of each set of layers."""
    from gemel.bundle_summary import summarize_bundle
    from gemel.models.bundle import open_bundle

    found = summarize_bundle(open_bundle(bundle))
    return CommandResult(found.to_json(), found.to_text(sets))


@command(bundle_group, "verify", uses_torch=False)
def verify_bundle(
    bundle: BundlePath,
    factory: Factories = [],  # noqa: B006
    config: Annotated[
        str | None, file_option("--config", "A box config: use its `factories` and `public_key`.")
    ] = None,
    public_key: Annotated[str | None, file_option("--public-key", "Require a signature by this Ed25519 key.")] = None,
) -> CommandResult:
    """Rehash every tensor and check the manifest. Also what is prepared; exit code 1 when the bundle is refused."""
    from gemel.edge_runtime.engines.prepare import find_prepared
    from gemel.edge_runtime.engines.prepared import verify_contents
    from gemel.models.bundle import open_bundle
    from gemel.models.bundle.confined_bundle import verify_confined
    from gemel.models.bundle.signing import check_signature

    folder, keys, factories = Path.cwd(), [public_key] if public_key else [], list(factory)
    if config is not None:
        from gemel.edge_runtime.life.config import load_config

        box = load_config(config)
        factories, folder = [*factories, *box.factories], box.path.resolve().parent
        keys += [str(box.public_key)] if box.public_key else []
    problems, skipped = verify_confined(bundle, factories, folder)
    if not problems:
        opened = open_bundle(bundle)
        for key in keys:
            try:
                check_signature(opened, key)
            except BundleError as error:
                problems.append(error.problem)
        prepared = find_prepared(opened)
        problems += verify_contents(prepared) if prepared is not None else []
    lines = [one_line(f"{bundle}: {line}") for line in (*(problems or ["sound"]), *skipped)]
    data = {"ok": not problems, "problems": problems, "unchecked": skipped}
    return CommandResult(data, "\n".join(lines), exit_code_of(not problems))


@command(bundle_group, "export", uses_torch=False)
def export_queries(
    bundle: BundlePath,
    out: Annotated[str, file_option("-o --out", "The folder to write; with --query, the file.")],
    query: Annotated[str | None, Option("--query", metavar="ID", help="Export this query alone, as one file.")] = None,
    batch: Annotated[
        Any, Option("--batch", parser=_parse_batch, metavar="N|dynamic", show_default=False,
                    help="Frames at once (default dynamic; 1 for two-stage detectors).")
    ] = None,
    layout: Annotated[
        Literal["flat", "triton"],
        Option("--layout", metavar="flat|triton", help="ID.onnx each, or the model repository of a Triton server."),
    ] = "flat",
    factory: Factories = [],  # noqa: B006
) -> CommandResult:  # fmt: skip
    """Write the queries' models as ONNX files. ID.onnx each, beside one weights.bin that they share."""
    from gemel import api

    if query is not None and layout != "flat":
        raise InputError("--layout", "a model repository holds all queries", "leave --query out")
    if query is not None:
        written = api.export(bundle, query, out, batch, factory)
        return CommandResult({"query": query, **written.to_json()}, _exported_text(written))
    folder = api.export_folder(bundle, out, batch, factory, layout)
    weights = f"{folder.path / 'weights.bin'}: {size(folder.weights_bytes)}"
    return CommandResult(folder.to_json(), "\n".join([*map(_exported_text, folder.files.values()), weights]))


def _exported_text(written: ExportedModel) -> str:
    inputs, outputs = (
        ", ".join(f"{name} ({', '.join(map(str, shape))})" for name, shape in values.items())
        for values in (written.inputs, written.outputs)
    )
    return one_line(f"{written.path}: {size(written.nbytes)}, opset {written.opset}; {inputs} -> {outputs}")


@command(bundle_group, "diff", uses_torch=False)
def write_delta(
    old: Annotated[str, Argument(metavar="OLD", help="The bundle on the box.")],
    new: Annotated[str, Argument(metavar="NEW", help="The bundle to ship.")],
    out: Annotated[str | None, file_option("-o --out", "The update; without it, only sizes.")] = None,
) -> CommandResult:
    """Write the tensors of NEW that OLD lacks, as an update."""
    from gemel.models.bundle.delta import write_update

    update = write_update(old, new, out)
    counts = f"{size(update.bytes)} in place of {size(update.bundle_bytes)}, {update.tensors} of {update.of_tensors}"
    return CommandResult({"update": out, **update.to_json()}, one_line(f"{out or 'an update'}: {counts} tensors"))


@command(bundle_group, "apply", uses_torch=False)
def apply_delta(
    old: Annotated[str, Argument(metavar="OLD", help="The bundle on this machine.")],
    update: Annotated[str, Argument(metavar="UPDATE", help="A file that `gemel bundle diff` wrote.")],
    out: OutFile,
) -> CommandResult:
    """Make the new bundle from the old one and an update. Byte for byte, as it was made."""
    from gemel.models.bundle.delta import apply_update

    made = apply_update(old, update, out)
    return CommandResult({"bundle": out, **made}, one_line(f"{out}: {size(made['bytes'])}, SHA-256 {made['digest']}"))


@command(bundle_group, "sign", uses_torch=False)
def sign_bundle(
    bundle: BundlePath,
    key: Annotated[str, file_option("--key", "A private Ed25519 key.")],
    sequence: Annotated[
        int | None, Option("--sequence", metavar="N", show_default="seconds since 1970",
                           help="The number of this release; a box takes none from a server that is not higher.")
    ] = None,
    valid_until: Annotated[
        str | None, Option("--valid-until", metavar="DATE", help="The last day to serve, such as 2027-06-30 (UTC).")
    ] = None,
) -> CommandResult:  # fmt: skip
    """Sign a bundle in place."""
    from gemel.models.bundle import signing

    end = None if valid_until is None else signing.parse_end_date(valid_until)
    release = signing.sign_bundle(bundle, key, sequence, end)
    until = "" if release.valid_until is None else f", to serve until {release.end_text}"
    data = {"bundle": bundle, "signed": True, "sequence": release.sequence, "valid_until": release.valid_until}
    return CommandResult(data, one_line(f"{bundle}: signed as number {release.sequence}{until}"))
