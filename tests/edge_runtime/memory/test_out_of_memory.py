"""What counts as out of memory: in every form in which torch, ONNX Runtime and compiled code say it."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gemel.models.out_of_memory import is_out_of_memory


def graph(operator: str) -> bytes:
    """One node that makes a tensor of the asked-for shape, or fails."""
    made = helper.make_graph(
        [helper.make_node(operator, ["shape"], ["out"])],
        "one",
        [helper.make_tensor_value_info("shape", TensorProto.INT64, [1])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)],
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    return helper.make_model(made, opset_imports=opset, ir_version=8).SerializeToString()


@pytest.mark.parametrize("pool", [True, False])
def test_out_of_memory_of_onnx_runtime_is_recognised(pool):
    options = onnxruntime.SessionOptions()
    options.enable_cpu_mem_arena, options.log_severity_level = pool, 4
    session = onnxruntime.InferenceSession(graph("ConstantOfShape"), options, ["CPUExecutionProvider"])
    with pytest.raises(Exception) as raised:
        session.run(None, {"shape": np.array([2**46])})
    assert not isinstance(raised.value, RuntimeError) and is_out_of_memory(raised.value)
    with pytest.raises(Exception) as raised:
        session.run(None, {"shape": np.array([-1])})
    assert not is_out_of_memory(raised.value), "it is not every fault"


def test_out_of_memory_needs_more_than_the_word():
    assert is_out_of_memory(RuntimeError("CUDA driver error: out of memory"))
    assert not is_out_of_memory(ValueError("std::bad_alloc")) and not is_out_of_memory(RuntimeError("no camera"))
