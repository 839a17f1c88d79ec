"""`gemel simulate`: policies by name, recorded runs, and bad traces."""

from __future__ import annotations

import json

import pytest
import torch

from gemel.cli import main
from gemel.edge_runtime.life.daemon import run
from gemel.edge_runtime.policies import POLICIES
from tests.edge_runtime.tiny import tiny_bundle, write_clip, write_config, write_folder
from tests.gemel.test_planner import workload as workload


def test_simulate_policies_aware_of_sharing_move_less(workload, capsys):
    found = {}
    for policy in POLICIES:
        words = ["simulate", workload, "--policy", policy, "--device", "jetson-nano", "--shared", "--duration", "20"]
        assert main([*map(str, words), "--json"]) == 0
        found[policy] = json.loads(capsys.readouterr().out)
        assert found[policy]["policy"] == policy and found[policy]["clock"] == "virtual"
    moved = {policy: result["bytes_moved"] for policy, result in found.items()}
    assert max(moved["adaptive"], moved["gemel"]) < moved["time-sharing"]


def test_simulate_nothing_is_refused(capsys):
    assert main(["simulate"]) == 2
    assert "give a bundle, a workload or --replay TRACE" in capsys.readouterr().err


def test_simulate_replay_repeats_the_decisions(tmp_path, capsys):
    torch.set_num_threads(1)
    tiny_bundle(tmp_path / "tiny.safetensors")
    write_clip(tmp_path / "left.mp4", 12)
    write_folder(tmp_path / "right", 10)
    run(write_config(tmp_path, trace="box.trace"))
    assert main(["simulate", "--replay", str(tmp_path / "box.trace"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["agreement"] >= 0.99 and found["decisions"] >= 10 and 0 <= found["error"] <= 1
    assert {row["id"] for row in found["queries"]} == {"gate", "yard", "road"}
    assert main(["simulate", "--replay", str(tmp_path / "box.trace")]) == 0
    assert "decisions are equal" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["absent.trace", "workload.yaml"])
def test_simulate_bad_trace_is_one_line(workload, capsys, name):
    assert main(["simulate", "--replay", str(workload.parent / name)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
