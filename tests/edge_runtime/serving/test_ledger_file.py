"""The ledger's file: the newest of a run, and that of the run before."""

from __future__ import annotations

import json
from pathlib import Path

from edge_runtime.service import LedgerFile

TIMEOUT_S = 30.0


def test_ledger_file_keeps_the_previous_run(tmp_path: Path) -> None:
    for run in ("one", "two", "three"):
        file = LedgerFile(tmp_path)
        for fault in (None, "it hung"):
            file.write({"run": run, "fault": fault})
            assert file.join(TIMEOUT_S) and file.problem is None
    kept = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert kept == {
        "ledger.json": {"run": "three", "fault": "it hung"}, "ledger.json.1": {"run": "two", "fault": "it hung"}
    }  # fmt: skip
