"""How deep the code is: what benchmarks/call_depth.py measures stays within its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.call_depth import (
    MAX_CONFIG_FILES,
    MAX_MERGE_FILES,
    MAX_MERGE_FRAMES,
    config_files,
    merge_stack,
    write_tiny_workload,
)


@pytest.mark.exhaustive
def test_call_depth_stays_within_its_limits(tmp_path: Path) -> None:
    workload = write_tiny_workload(tmp_path)
    stack = merge_stack(workload, tmp_path)
    assert stack[-1] == ("merger/training/loop.py", "epoch")
    assert len(stack) <= MAX_MERGE_FRAMES and len({file for file, _ in stack}) <= MAX_MERGE_FILES
    called, files = config_files(workload, tmp_path)
    assert "edge_runtime/life/config.py" in files <= called and len(files) <= MAX_CONFIG_FILES
