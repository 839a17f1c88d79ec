"""Every operator against ONNX Runtime, on shapes and settings that are drawn."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from gemel.models.graph.node_calls import apply
from gemel.models.graph.operators import OPERATORS

UNARY = {
    "Abs", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Identity", "Neg", "Reciprocal", "Relu", "Round", "Sigmoid",
    "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Tan", "Tanh", "HardSwish", "Mish", "Dropout", "Atan", "IsNaN",
    "IsInf", "GlobalAveragePool", "GlobalMaxPool", "Shape", "Size",
}  # fmt: skip
BINARY = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "Equal", "Greater", "GreaterOrEqual", "Less",
          "LessOrEqual", "PRelu", "Pow"}  # fmt: skip
REDUCTIONS = {"ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2",
              "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp"}  # fmt: skip
NEVER_HERE = {"Upsample", "Swish"}
"""Of opsets that ONNX Runtime or the reader does not take."""


class Draw:
    """Arrays, shapes and settings of one example."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.random = np.random.default_rng(self.int(0, 10_000))

    def int(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def one_of(self, *values):
        return self.data.draw(st.sampled_from(values))

    def picture(self, channels: int | None = None) -> np.ndarray:
        return self.floats(self.int(1, 2), channels or self.int(1, 4), self.int(4, 9), self.int(4, 9))

    def floats(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(np.float32)

    def ints(self, high: int, *shape: int) -> np.ndarray:
        return self.random.integers(0, high, shape)


def whole(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def draw_window(d: Draw) -> dict:
    kernel = [d.int(1, 3), d.int(1, 3)]
    found = {"kernel_shape": kernel, "strides": [d.int(1, 2), d.int(1, 2)]}
    if d.int(0, 1):
        found["strides"] = [min(pair) for pair in zip(kernel, found["strides"])]
        return found | {"auto_pad": d.one_of("SAME_UPPER", "SAME_LOWER", "VALID")}
    return found | {"pads": [d.int(0, side - 1) for side in [*kernel, *kernel]]}


def draw_conv(d: Draw):
    group, each = d.int(1, 2), d.int(1, 2)
    options = draw_window(d) | {"group": group, "dilations": [1, d.int(1, 2)]}
    if options.get("auto_pad"):
        options["dilations"] = [1, 1]
    x = d.picture(group * each)
    return [x, d.floats(group * d.int(1, 2), each, *options["kernel_shape"])], options


def draw_transposed(d: Draw):
    group, options = d.int(1, 2), draw_window(d)
    options |= {"group": group}
    x = d.picture(group * 2)
    if d.int(0, 1):
        options.pop("pads", None)
        sizes = [(side - 1) * step + kernel for side, step, kernel
                 in zip(x.shape[2:], options["strides"], options["kernel_shape"])]  # fmt: skip
        options["output_shape"] = [size - d.int(0, min(3, size - 1)) for size in sizes]
    elif "pads" in options:
        options["output_padding"] = [d.int(0, stride - 1) for stride in options["strides"]]
    return [x, d.floats(group * 2, 2, *options["kernel_shape"]), d.floats(group * 2)], options


def draw_pool(d: Draw, average: bool = False):
    options = draw_window(d)
    if "pads" in options:
        options["ceil_mode"] = d.int(0, 1)
        options["pads"] = [min(pad, side // 2) for pad, side in zip(options["pads"], options["kernel_shape"] * 2)]
    return [d.picture()], options | ({"count_include_pad": d.int(0, 1)} if average else {})


def draw_resize(d: Draw):
    x = d.floats(1, 2, d.int(2, 6), d.int(2, 6))
    mode = d.one_of("nearest", "linear", "cubic")
    options = {
        "mode": mode,
        "coordinate_transformation_mode": d.one_of("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"),
    }
    if mode == "nearest":
        options["nearest_mode"] = d.one_of("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
        if options["coordinate_transformation_mode"] == "pytorch_half_pixel":
            options["coordinate_transformation_mode"] = "asymmetric"
    if d.int(0, 1):
        return [x, None, None, whole(1, 2, d.int(1, 12), d.int(1, 12))], options
    scales = np.array([1, 1, d.one_of(0.5, 1, 1.5, 2, 3), d.one_of(0.5, 1, 2)], np.float32)
    return [x, None, scales], options


def draw_pad(d: Draw):
    mode = d.one_of("constant", "reflect", "edge")
    pads = whole(
        0, 0, *[d.int(-1 if mode == "constant" else 0, 2) for _ in range(2)], 0, 0, *[d.int(0, 2) for _ in range(2)]
    )
    return [d.picture(), pads, *([np.float32(1.5)] if mode == "constant" else [])], {"mode": mode}


def draw_slice(d: Draw):
    x, step = d.picture(), d.one_of(1, 2, -1, -2)
    start, end = (0, 100) if step > 0 else (-1, -100)
    return [x, whole(start, d.int(0, 2)), whole(end, d.int(3, 4)), whole(2, 1), whole(step, 1)], {}


def draw_attention(d: Draw):
    heads, width = 2, d.int(1, 4)
    return [d.floats(2, 5, heads * width) for _ in range(3)], {"q_num_heads": heads, "kv_num_heads": heads}


def draw_recurrent(d: Draw, gates: int):
    ways, size, width, batch = d.int(1, 2), d.int(1, 3), d.int(1, 3), d.int(1, 2)
    options = {"hidden_size": size, "direction": "bidirectional" if ways == 2 else d.one_of("forward", "reverse")}
    if gates == 3:
        options["linear_before_reset"] = d.int(0, 1)
    inputs = [d.floats(d.int(1, 4), batch, width), d.floats(ways, gates * size, width)]
    inputs.append(d.floats(ways, gates * size, size))
    if d.int(0, 1):
        states = [d.floats(ways, batch, size) for _ in range(2 if gates == 4 else 1)]
        inputs += [d.floats(ways, 2 * gates * size), None, *states[: d.int(1, len(states))]]
    return inputs, options


def axis_of(d: Draw) -> dict:
    return {"axis": d.int(-4, 3)}


CASES = {
    "Acos": lambda d: ([d.random.uniform(-1, 1, (2, 3)).astype(np.float32)], {}),
    "Asin": lambda d: ([d.random.uniform(-1, 1, (2, 3)).astype(np.float32)], {}),
    "Log": lambda d: ([np.abs(d.picture()) + 0.1], {}),
    "Sqrt": lambda d: ([np.abs(d.picture())], {}),
    "And": lambda d: ([d.floats(3, 4) > 0, d.floats(4) > 0], {}),
    "Or": lambda d: ([d.floats(3, 4) > 0, d.floats(4) > 0], {}),
    "Xor": lambda d: ([d.floats(3, 4) > 0, d.floats(4) > 0], {}),
    "Not": lambda d: ([d.floats(3, 4) > 0], {}),
    "Mod": lambda d: ([d.ints(20, 3, 4) - 10, d.ints(5, 4) + 1], {"fmod": d.int(0, 1)}),
    "Where": lambda d: ([d.floats(3, 1) > 0, d.floats(3, 4), d.floats(4)], {}),
    "Clip": lambda d: ([d.picture(), np.float32(-0.5), *([np.float32(0.5)] if d.int(0, 1) else [])], {}),
    "LeakyRelu": lambda d: ([d.picture()], {"alpha": 0.1}),
    "ThresholdedRelu": lambda d: ([d.picture()], {"alpha": 0.5}),
    "Elu": lambda d: ([d.picture()], {"alpha": 0.5}),
    "Celu": lambda d: ([d.picture()], {"alpha": 0.5}),
    "Selu": lambda d: ([d.picture()], {}),
    "HardSigmoid": lambda d: ([d.picture()], {"alpha": 0.3}),
    "Gelu": lambda d: ([d.picture()], {"approximate": d.one_of("none", "tanh")}),
    "Softmax": lambda d: ([d.picture()], axis_of(d)),
    "LogSoftmax": lambda d: ([d.picture()], axis_of(d)),
    "Gemm": lambda d: (
        [d.floats(4, 3), d.floats(3, 5), d.floats(5)] if (t := d.int(0, 1)) == 0
        else [d.floats(3, 4), d.floats(5, 3), d.floats(1)],
        {"transA": t, "transB": t, "alpha": 0.5, "beta": 2.0},
    ),
    "MatMul": lambda d: ([d.floats(d.int(1, 2), 4, 3), d.floats(3, d.int(1, 5))], {}),
    "Einsum": lambda d: ([d.floats(2, 3, 4), d.floats(2, 4, 5)], {"equation": "bij, bjk -> bik"}),
    "ArgMax": lambda d: ([d.picture()], axis_of(d) | {"keepdims": d.int(0, 1)}),
    "ArgMin": lambda d: ([d.picture()], axis_of(d) | {"keepdims": d.int(0, 1)}),
    "TopK": lambda d: ([d.picture(4), whole(d.int(1, 4))], {"axis": d.int(1, 3), "largest": d.int(0, 1)}),
    "CumSum": lambda d: ([d.picture(), np.int64(d.int(-4, 3))], {"exclusive": d.int(0, 1), "reverse": d.int(0, 1)}),
    "Cast": lambda d: ([np.abs(d.picture())], {"to": d.one_of(TensorProto.INT32, TensorProto.BOOL, TensorProto.UINT8)}),
    "CastLike": lambda d: ([d.picture() * 3, whole(1)], {}),
    "Reshape": lambda d: ([d.floats(2, 6, 4), whole(*d.one_of([0, -1], [-1, 4, 3], [0, 0, 2, 2]))], {}),
    "Flatten": lambda d: ([d.picture()], {"axis": d.int(-3, 4)}),
    "Squeeze": lambda d: ([d.floats(1, 3, 1, 2), *([whole(0, 2)] if d.int(0, 1) else [])], {}),
    "Unsqueeze": lambda d: ([d.floats(3, 2), whole(0, d.one_of(-1, 2))], {}),
    "Transpose": lambda d: ([d.picture()], {"perm": d.data.draw(st.permutations(range(4)))}),
    "Concat": lambda d: ([d.floats(2, d.int(1, 3), 4) for _ in range(d.int(1, 3))], {"axis": d.one_of(1, -2)}),
    "Split": lambda d: (([d.floats(2, 6), whole(1, 2, 3)], {"axis": 1}) if d.int(0, 1) else
                        ([d.floats(2, 6)], {"axis": 1, "num_outputs": 3})),
    "Slice": draw_slice,
    "Gather": lambda d: ([d.picture(4), d.ints(4, 2, 2) - d.int(0, 4)], {"axis": 1}),
    "GatherElements": lambda d: ([d.floats(3, 4), d.ints(3, 2, 4) - d.int(0, 3)], {"axis": 0}),
    "GatherND": lambda d: ([d.floats(2, 3, 4), d.ints(2, 2, 3, d.int(1, 2))], {"batch_dims": d.int(0, 1)}),
    "ScatterElements": lambda d: ([d.floats(5, 4), d.random.permutation(5)[:3].reshape(3, 1), d.floats(3, 1)],
                                  {"axis": 0, "reduction": d.one_of("none", "add", "max")}),
    "ScatterND": lambda d: ([d.floats(5, 4), d.random.permutation(5)[:2].reshape(2, 1), d.floats(2, 4)],
                            {"reduction": d.one_of("none", "add")}),
    "Expand": lambda d: ([d.floats(3, 1), whole(*d.one_of([2, 1, 4], [3, 4], [1, 1]))], {}),
    "Tile": lambda d: ([d.floats(2, 3), whole(d.int(1, 2), d.int(1, 3))], {}),
    "ConstantOfShape": lambda d: ([whole(d.int(1, 3), 2)],
                                  {"value": helper.make_tensor("v", TensorProto.INT64, [1], [7])}),
    "Range": lambda d: ([np.int64(1), np.int64(d.int(1, 9)), np.int64(2)], {}),
    "OneHot": lambda d: ([d.ints(4, 2, 3), whole(4), d.floats(2)], {"axis": d.int(-1, 2)}),
    "Trilu": lambda d: ([d.floats(2, 4, 5), np.int64(d.int(-2, 2))], {"upper": d.int(0, 1)}),
    "EyeLike": lambda d: ([d.floats(4, 5)], {"k": d.int(-2, 2)}),
    "NonZero": lambda d: ([d.floats(3, 4) > 0], {}),
    "DepthToSpace": lambda d: ([d.picture(8)], {"blocksize": 2, "mode": d.one_of("DCR", "CRD")}),
    "SpaceToDepth": lambda d: ([d.floats(1, 2, 4, 6)], {"blocksize": 2}),
    "Pad": draw_pad,
    "Resize": draw_resize,
    "Conv": draw_conv,
    "ConvTranspose": draw_transposed,
    "DeformConv": lambda d: ([d.floats(1, 2, 5, 5), d.floats(4, 2, 3, 3), d.floats(1, 18, 5, 5), d.floats(4),
                              *([d.floats(1, 9, 5, 5)] if d.int(0, 1) else [])], {"pads": [1, 1, 1, 1]}),
    "MaxPool": draw_pool,
    "AveragePool": lambda d: draw_pool(d, average=True),
    "LpPool": lambda d: ([d.picture()], {"kernel_shape": [2, 2], "strides": [2, 2], "p": 2}),
    "BatchNormalization": lambda d: ([d.picture(3), *(d.floats(3) for _ in range(3)), np.abs(d.floats(3))],
                                     {"epsilon": 1e-3}),
    "InstanceNormalization": lambda d: ([d.picture(3), d.floats(3), d.floats(3)], {}),
    "LayerNormalization": lambda d: ([d.floats(2, 3, 4), d.floats(4), d.floats(4)], {"axis": -1}),
    "RMSNormalization": lambda d: ([d.floats(2, 3, 4), d.floats(4)], {"axis": -1}),
    "GroupNormalization": lambda d: ([d.picture(4), d.floats(4), d.floats(4)], {"num_groups": 2}),
    "LpNormalization": lambda d: ([d.floats(2, 3, 4)], {"axis": d.int(0, 2), "p": d.int(1, 2)}),
    "LRN": lambda d: ([d.picture(4)], {"size": 3}),
    "MeanVarianceNormalization": lambda d: ([d.picture(3)], {}),
    "Attention": draw_attention,
    "GridSample": lambda d: ([d.picture(2)[:1], d.random.uniform(-1.2, 1.2, (1, 3, 4, 2)).astype(np.float32)],
                             {"align_corners": d.int(0, 1), "padding_mode": d.one_of("zeros", "border")}),
    "RoiAlign": lambda d: ([d.picture(2)[:1], np.array([[0, 0, 3, 3], [1, 1, 3, 2]], np.float32), whole(0, 0)],
                           {"output_height": 2, "output_width": 2, "sampling_ratio": 2}),
    "LSTM": lambda d: draw_recurrent(d, 4),
    "GRU": lambda d: draw_recurrent(d, 3),
    "RNN": lambda d: draw_recurrent(d, 1),
    "DequantizeLinear": lambda d: ([d.ints(9, 3, 4).astype(np.int8), np.abs(d.floats(4)), d.ints(3, 4).astype(np.int8)],
                                   {"axis": 1}),
}  # fmt: skip
CASES |= {name: lambda d: ([d.picture()], {}) for name in UNARY}
CASES |= {name: lambda d: ([np.abs(d.picture(3)) + 0.5, d.floats(3, 1, 1)], {}) for name in BINARY}
CASES |= {
    name: lambda d: ([np.abs(d.picture()) + 0.5, whole(*d.one_of([1], [2, 3], [-1]))], {"keepdims": d.int(0, 1)})
    for name in REDUCTIONS
}
OUTPUTS = {"Split": 3, "TopK": 2, "LSTM": 3, "GRU": 2, "RNN": 2}
OPSETS = {"DeformConv": (19,),
          "Softmax": (11, 13, 18), "LogSoftmax": (11, 13), "Attention": (23,), "RMSNormalization": (23,), "Gelu": (20,),
          "GroupNormalization": (21,), "IsInf": (20,), "Resize": (13, 18), "RoiAlign": (16,)}  # fmt: skip


def run_onnx(name: str, inputs: list, attributes: dict, opset: int) -> tuple[ir.Node, list[np.ndarray]]:
    """A model of one node, and what ONNX Runtime answers."""
    names = [f"x{place}" if one is not None else "" for place, one in enumerate(inputs)]
    fed = {one: np.asarray(array) for one, array in zip(names, inputs) if array is not None}
    outputs = [f"y{place}" for place in range(OUTPUTS.get(name, 1))]
    node = helper.make_node(name, names, outputs, **attributes)
    declared = [
        helper.make_tensor_value_info(one, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for one, array in fed.items()
    ]
    graph = helper.make_graph([node], "one", declared, [onnx.ValueInfoProto(name=one) for one in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return ir.from_proto(model).graph[0], [np.asarray(one) for one in session.run(None, fed)]


@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))  # type: ignore[arg-type]
@given(data=st.data())
def test_operator_answers_as_onnx_runtime(name, data):
    draw = Draw(data)
    opset = draw.one_of(*OPSETS.get(name, (18,)))
    inputs, attributes = CASES[name](draw)
    node, expected = run_onnx(name, inputs, attributes, opset)
    tensors = [None if one is None else torch.from_numpy(np.asarray(one)) for one in inputs]
    outputs = apply(node, tensors, opset)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.shape == wanted.shape
        np.testing.assert_allclose(output.numpy(), wanted, rtol=1e-4, atol=1e-4)
        assert output.numpy().dtype == wanted.dtype


def test_every_operator_is_compared():
    assert set(OPERATORS) - NEVER_HERE == set(CASES)
