"""Reports in, one page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gemel.report.comparing.comparison import compare
from gemel.report.comparing.page import render
from gemel.report.comparing.reading import read_report, report_path
from models.io import check_apart, check_output, open_atomic


def write_comparison(reports: Sequence[str | Path], out: str | Path) -> dict[str, Any]:
    """Compare these reports, write the page, and return what it shows; InputError, with nothing written, as they do."""
    paths = [report_path(one) for one in reports]
    check_apart([("--out", out)], [("one of the reports", path) for path in paths])
    check_output(out, overwrite=True)
    found = compare([(path, read_report(path)) for path in paths])
    with open_atomic(Path(out), overwrite=True) as file:
        file.write(render(found).encode("utf-8", "backslashreplace"))
    return found
