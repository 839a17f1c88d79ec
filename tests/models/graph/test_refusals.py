"""What is refused, each in one line that says what to do, and before memory or time is spent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from gemel.models.errors import InputError
from gemel.models.graph import load_graph

WEIGHT = numpy_helper.from_array(np.ones((2, 3, 1, 1), np.float32), "w")


def make_model(
    *nodes: onnx.NodeProto,
    inputs: dict | None = None,
    weights=(WEIGHT,),
    opset: int = 18,
    domain: str = "",
    functions=(),
) -> onnx.ModelProto:
    """A model whose last node's result is its output."""
    inputs = {"x": [1, 3, 8, 8]} if inputs is None else inputs
    graph = helper.make_graph(
        nodes, "g", [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [onnx.ValueInfoProto(name=nodes[-1].output[0])], list(weights),
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    return helper.make_model(graph, opset_imports=opsets, ir_version=9, functions=functions)


def conv(source: str = "x", target: str = "y") -> onnx.NodeProto:
    return helper.make_node("Conv", [source, "w"], [target], name="conv1")


def branch(value: float) -> onnx.GraphProto:
    node = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array([value], np.float32)))
    return helper.make_graph([node], "branch", [], [onnx.ValueInfoProto(name="c")])


def external(location: str, length: int = 24) -> onnx.TensorProto:
    tensor = TensorProto(name="w", dims=[2, 3, 1, 1], data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    tensor.external_data.add(key="length", value=str(length))
    return tensor


def huge(*dims: int) -> onnx.TensorProto:
    return TensorProto(name="w", dims=dims, data_type=TensorProto.FLOAT, raw_data=b"\0" * 24)


def full_weight(value: float, name: str = "w", shape: tuple[int, ...] = (2, 3, 1, 1)) -> onnx.TensorProto:
    return numpy_helper.from_array(np.full(shape, value, np.float32), name)


def constant(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)


def doubling(depth: int) -> list[onnx.FunctionProto]:
    """Functions that call the one before twice: 2 ** depth nodes once they are inlined."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
    found = [helper.make_function("f", "f0", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], opsets)]
    for level in range(1, depth):
        calls = [helper.make_node(f"f{level - 1}", [one], [two], domain="f") for one, two in (("a", "m"), ("m", "b"))]
        found.append(helper.make_function("f", f"f{level}", ["a"], ["b"], calls, opsets))
    return found


make_node = helper.make_node
CASES: dict[str, tuple[Callable[[], onnx.ModelProto], str]] = {
    "branch on data": (lambda: make_model(
        make_node("ReduceMax", ["x"], ["m"], keepdims=0), make_node("Cast", ["m"], ["c"], to=TensorProto.BOOL),
        make_node("If", ["c"], ["y"], name="if1", then_branch=branch(1), else_branch=branch(2)),
    ), "If (node 'if1') decides by what the picture shows"),
    "shape from data": (lambda: make_model(
        make_node("NonZero", ["x"], ["n"]), make_node("Cast", ["n"], ["f"], to=1),
        make_node("MatMul", ["f", "f"], ["m"]), conv("m"),
    ), "NonZero"),
    "custom domain": (lambda: make_model(
        conv(), make_node("Fancy", ["y"], ["z"], domain="ai.acme", name="f1"), domain="ai.acme",
    ), "ai.acme.Fancy (node 'f1') is of the custom domain 'ai.acme'"),
    "unknown operator": (lambda: make_model(conv(), make_node("Det", ["y"], ["z"])), "Det is no operator"),
    "opset too new": (lambda: make_model(conv(), opset=24), "is of opset 24, and opsets 7 to 23 are read"),
    "opset too old": (lambda: make_model(conv(), opset=6), "is of opset 6"),
    "data outside": (lambda: make_model(conv(), weights=[external("../w.bin")]), "outside the folder"),
    "absolute data": (lambda: make_model(conv(), weights=[external("/etc/passwd")]), "outside the folder"),
    "linked data": (lambda: make_model(conv(), weights=[external("link.bin")]), "behind the link link.bin"),
    "missing data": (lambda: make_model(conv(), weights=[external("none.bin")]), "cannot be read: No such file"),
    "short data": (lambda: make_model(conv(), weights=[external("short.bin")]), "a file of 8 bytes does not hold"),
    "data of a wrong size": (lambda: make_model(conv(), weights=[external("w.bin", 20)]), "does not hold"),
    "NaN": (lambda: make_model(conv(), weights=[full_weight(np.nan)]), "the weight 'w.weight' holds NaN"),
    "infinite": (lambda: make_model(conv(), weights=[full_weight(np.inf)]), "holds infinite values"),
    "NaN constant": (lambda: make_model(
        conv(), make_node("Mul", ["y", "m"], ["z"]), weights=[WEIGHT, full_weight(np.nan, "m", (8, 8))],
    ), "the weight 'm' holds NaN"),
    "dims that overflow": (lambda: make_model(conv(), weights=[huge(2**40, 2**40)]), "impossible shape"),
    "negative dims": (lambda: make_model(conv(), weights=[huge(-2, 3)]), "impossible shape"),
    "dims beside the data": (lambda: make_model(conv(), weights=[huge(2, 3, 5, 5)]), "the weight 'w' is damaged"),
    "cycle": (lambda: make_model(make_node("Add", ["x", "b"], ["a"]), make_node("Relu", ["a"], ["b"])), "a cycle"),
    "value of no node": (lambda: make_model(make_node("Add", ["x", "lost"], ["y"])), "reads 'lost', which nothing"),
    "open size": (lambda: make_model(conv(), inputs={"x": ["n", 3, "h", "w"]}), "name it: input_size: [H, W]"),
    "two inputs": (lambda: make_model(
        make_node("Add", ["x", "z"], ["y"]), inputs={"x": [1, 3, 8, 8], "z": [1, 3, 8, 8]},
    ), "takes 2 inputs ('x', 'z')"),
    "regions by number": (lambda: make_model(
        make_node("NonZero", ["x"], ["n"]), make_node("Cast", ["n"], ["f"], to=1),
        make_node("MatMul", ["w", "f"], ["y"]),
        weights=(numpy_helper.from_array(np.ones((5, 4), np.float32), "w"),),
    ), "counts what the picture shows, as the regions of a two-stage detector; give its PyTorch weights"),
    "four channels": (lambda: make_model(conv(), inputs={"x": [1, 4, 8, 8]}), "takes pictures of 4 channels"),
    "no picture": (lambda: make_model(make_node("Relu", ["x"], ["y"]), inputs={"x": [1, 16]}), "has 2 axes"),
    "int8": (lambda: make_model(make_node("QuantizeLinear", ["x", "w"], ["y"])), "quantised to integers"),
    "memory of a constant": (lambda: make_model(
        make_node("ConstantOfShape", ["s"], ["c"]), make_node("Add", ["x", "c"], ["y"]),
        weights=[constant("s", 2**20, 2**20)],
    ), "more than"),
    "memory of a result": (lambda: make_model(
        make_node("Expand", ["x", "s"], ["y"]), weights=[constant("s", 2**23, 3, 8, 8)],
    ), "makes a tensor of"),
    "nodes of functions": (lambda: make_model(
        make_node("f29", ["x"], ["y"], domain="f"), domain="f", functions=doubling(30),
    ), "nodes and 100000 are read"),
    "two stages": (lambda: make_model(
        make_node("NonMaxSuppression", ["b", "s"], ["n"], name="nms1"), make_node("Cast", ["n"], ["x2"], to=1),
        make_node("Reshape", ["x2", "t"], ["r"]), conv("r"), weights=[WEIGHT, constant("t", 1, 3, -1, 1)],
        inputs={"b": [1, 9, 4], "s": [1, 2, 9]},
    ), "a two-stage detector"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_model_is_refused_in_one_line(name, tmp_path: Path):
    make, problem = CASES[name]
    path = tmp_path / "model.onnx"
    path.write_bytes(make().SerializeToString())
    (tmp_path / "w.bin").write_bytes(bytes(24))
    (tmp_path / "short.bin").write_bytes(bytes(8))
    (tmp_path / "link.bin").symlink_to("/etc/passwd")
    with pytest.raises(InputError) as refused:
        load_graph(path)
    text = str(refused.value)
    assert problem in text and text.startswith(str(tmp_path)) and "\n" not in text and len(text) < 1000


def test_truncated_file_is_refused(tmp_path: Path):
    path = tmp_path / "model.onnx"
    data = make_model(conv()).SerializeToString()
    for length in range(0, len(data), 7):
        path.write_bytes(data[:length])
        with pytest.raises(InputError):
            load_graph(path)


def test_million_nodes_are_refused_before_they_are_parsed(tmp_path: Path):
    path = tmp_path / "model.onnx"
    nodes = b"\x0a\x00" * 1_000_000
    length, varint = len(nodes), []
    while length:
        varint.append(length & 127 | 128)
        length >>= 7
    varint[-1] &= 127
    path.write_bytes(b"\x3a" + bytes(varint) + nodes)
    with pytest.raises(InputError, match="more than 100000 nodes"):
        load_graph(path)


def test_fixed_size_is_not_another(tmp_path: Path):
    path = tmp_path / "model.onnx"
    path.write_bytes(make_model(conv()).SerializeToString())
    with pytest.raises(InputError, match="fixed input of 8 x 8, and 16 x 16 is asked for"):
        load_graph(path, (16, 16))


def test_infinite_mask_is_no_weight(tmp_path: Path):
    path = tmp_path / "model.onnx"
    nodes = [conv(), make_node("Add", ["y", "causal"], ["z"])]
    path.write_bytes(make_model(*nodes, weights=[WEIGHT, full_weight(-np.inf, "causal", (8, 8))]).SerializeToString())
    assert load_graph(path).state["causal"].isinf().all()
