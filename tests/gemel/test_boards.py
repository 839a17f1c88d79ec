"""`gemel profile --share` prints a row of what was measured."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gemel import pack
from gemel.boards import HEAD
from gemel.cli import main
from gemel.conditions import Conditions
from gemel.planner import plan_box, planned_base_bytes


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle of one convolution, packed without frames."""
    folder = tmp_path_factory.mktemp("board")
    weights = numpy_helper.from_array(np.full((4, 3, 3, 3), 0.1, np.float32), "w")
    nodes = [helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])]
    sizes = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, 32, 32])
             for name, channels in (("x", 3), ("y", 4))]  # fmt: skip
    graph = helper.make_graph(nodes, "one", sizes[:1], sizes[1:], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), folder / "gate.onnx")
    pack([folder / "gate.onnx"], folder / "box.safetensors")
    return folder / "box.safetensors"


def test_shared_row_has_the_columns_of_the_boards_page(bundle, capsys):
    assert main(["profile", str(bundle), "--device", "cpu", "--share", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["row"]
    assert row["cores"] == os.cpu_count() and row["queries"] == "1 tensor of 32 x 32 at 10 a second"
    assert row["box_bytes"] > 2**20 and row["in_time"] == 1.0
    assert main(["profile", str(bundle), "--device", "cpu", "--share"]) == 0
    head, line = capsys.readouterr().out.strip().splitlines()[-2:]
    assert head == HEAD and line.count("|") == head.count("|") and "100 %" in line


def test_plan_of_a_profiled_bundle_in_pages_says_what_does_not_fit(bundle):
    assert main(["profile", str(bundle), "--device", "cpu"]) == 0
    plan = plan_box(bundle, Conditions(str(planned_base_bytes(1) + 4096), "measured"))
    assert plan.in_time == 0.0
