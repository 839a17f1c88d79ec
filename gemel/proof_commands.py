"""The commands that prove a merge, and ask a person for what footage leaves open."""

from __future__ import annotations

import sys
from typing import Annotated

from gemel.commands import (
    BundlePath,
    Seed,
    Workload,
    app,
    file_option,
    number_option,
    result_of,
)
from gemel.invocation import CommandResult, command


@command(app, "prove")
def prove_bundle(
    bundle: BundlePath,
    workload: Workload,
    answers: Annotated[
        str | None, file_option("--answers", "Answers of `gemel review` (default: beside BUNDLE).")
    ] = None,
) -> CommandResult:
    """What footage, answers and labels prove. Exit code 1 where a query is neither proven nor unchanged."""
    from gemel import api
    from gemel.progress import show_progress

    with show_progress() as progress:
        proven = api.prove(bundle, workload, answers, progress)
    return result_of(proven, proven.met)


@command(app, "review")
def review_bundle(
    bundle: BundlePath,
    workload: Workload,
    folder: Annotated[str | None, file_option("--folder", "Write pictures and a table to fill in here.", "DIR")] = None,
    table: Annotated[str | None, file_option("--table", "Take the answers of that table, filled in.")] = None,
    answers: Annotated[
        str | None, file_option("--answers", "Answers about another bundle, for equal questions.")
    ] = None,
    port: Annotated[int, number_option("--port", 0, 65535, "Port of the page on this machine (0: any).")] = 0,
    seed: Seed = 0,
) -> CommandResult:
    """Ask which is right where merged model and original differ. On a page on this machine."""
    from gemel import review

    asked = review.open_review(bundle, workload, answers, seed)
    if folder is not None:
        path = review.write_folder(asked, folder)
        return CommandResult(asked.to_json(), f"{path}: fill in the column `answer`, then give it as --table")
    if table is not None:
        asked = review.read_table(asked, table)
    elif asked.sheet.questions:
        asked = review.serve_review(asked, port, _show_address)
    return result_of(asked)


def _show_address(address: str) -> None:
    print(f"open {address}", file=sys.stderr, flush=True)
