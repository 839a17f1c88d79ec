"""`gemel prepare`: prints where the graphs are and what they take, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gemel.cli import main
from tests.edge_runtime.tiny import tiny_bundle

ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from gemel.cli import main
sys.exit(main(["prepare", sys.argv[1], "--json"]))
"""


def test_prepare_prints_path_and_bytes_and_takes_no_torch(tmp_path):
    tiny_bundle(tmp_path / "tiny.gemel", documents=True)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path / "tiny.gemel")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    printed = json.loads(done.stdout)
    folder = Path(printed["path"])
    assert printed["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert folder.is_relative_to(tmp_path / "cache") and printed["queries"] == ["gate", "yard", "road"]
    assert printed["failed"] == {} and 0 < printed["peak_bytes"] < 250 << 20


def test_prepare_refuses_a_bundle_without_networks_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_bundle(tmp_path / "old.gemel")
    assert main(["prepare", str(tmp_path / "old.gemel")]) == 2
    err = capsys.readouterr().err
    assert "holds no networks; merge it again" in err and err.count("\n") == 1
